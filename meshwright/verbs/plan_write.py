"""A plan that was found, as a run file."""

import msgspec

from meshwright.search.found import Found
from meshwright.spec import check
from meshwright.spec.problem import InputError
from meshwright.spec.run import Run
from meshwright.verbs.plan_question import Put


def run_of(put: Put, found: Found) -> Run:
    """The run that trains by a plan, with what was asked."""
    asked = put.asked.run
    same = found.job.cluster == put.question.cluster
    machines = put.machines if same else found.job.cluster.name
    goal = msgspec.structs.replace(asked.goal, cluster=machines, vary=put.question.vary)
    name = asked.name if "name" in put.asked.origins else f"{put.model}-{found.job.cluster.name}"
    optim = msgspec.structs.replace(asked.optim, rounding=found.job.rounding, states=found.job.states)
    chosen = {"sequence": found.job.sequence, "batch": found.plan.batch, "plan": found.plan, "optim": optim}
    run = msgspec.structs.replace(asked, name=name, goal=goal, **chosen)
    if problems := check.problems(run):
        raise InputError(problems)
    return run


def left_open(put: Put, run: Run) -> list[str]:
    """Of what decides a training, that which nobody has stated, with the values that stand for it."""
    values = {
        "steps": run.steps,
        "data.source": run.data.source,
        "optim.rate": run.optim.rate,
        "optim.warmup": run.optim.warmup,
    }
    return [f"{key} = {value}" for key, value in values.items() if key not in put.asked.origins]
