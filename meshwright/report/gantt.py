"""A plan's pipeline on the clock, with the seconds that its stages are priced at."""

from meshwright.cost.job import Job
from meshwright.cost.simulate import StageCost, play
from meshwright.cost.time_layer import bench
from meshwright.cost.time_stages import stages_of  # one arithmetic, drawn and summed
from meshwright.report.picture import Pipeline
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import actions, stage_ranks

ROUNDS = 2  # microbatches ÷ pp that are drawn at most: the rest is more of the same
LEAST = 8  # and not fewer than this


def pipeline(job: Job) -> Pipeline | None:
    """The Gantt chart of a job's pipeline; None where there is none."""
    plan = job.plan
    if plan.pp == 1:
        return None
    shown = min(plan.accumulate, max(ROUNDS * plan.pp, LEAST))
    orders = actions(plan.schedule, plan.pp, plan.chunks, shown)
    cost, send = stage_cost(job)
    timeline = play(orders, stage_ranks(plan.schedule, plan.pp, plan.chunks), cost, send)
    return Pipeline(title=_title(plan, shown), timeline=timeline, shown=shown, microbatches=plan.accumulate)


def stage_cost(job: Job) -> tuple[StageCost, float]:
    """What every stage takes for a microbatch, and a message between them."""
    stages = stages_of(bench(job), job)
    blocked, travel = (stages.send, 0.0) if job.stack.speed.blocking_sends else (0.0, stages.send)
    cost = StageCost(
        forward_seconds=tuple(each.forward.seconds + blocked for each in stages.passes),
        input_seconds=tuple(each.again.seconds + each.input.seconds + blocked for each in stages.passes),
        weight_seconds=tuple(each.weight.seconds for each in stages.passes),
        activation=(1 / job.plan.chunks,) * len(stages.passes),  # in units of one microbatch on one rank
    )
    return cost, travel


def _title(plan: Plan, shown: int) -> str:
    part = "" if shown == plan.accumulate else f", {shown} of {plan.accumulate} microbatches"
    chunks = f" × {plan.chunks} chunks" if plan.chunks > 1 else ""
    return f"The pipeline {plan.schedule}{chunks} over {plan.pp} ranks{part}"
