import msgspec
import pytest

from meshwright.config import load
from meshwright.config.check import how_blocks_run
from meshwright.config.presets import preset
from meshwright.cost.job import Job
from meshwright.cost.memory import worst
from meshwright.cost.step_time import price
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.search import budget
from meshwright.spec.plan import Plan, balanced_stages
from meshwright.spec.problem import InputError
from meshwright.spec.units import GIB

PLANS = {
    "one": Plan(microbatch=2, precision="bf16", bf16_params=True),
    "shard": Plan(shard=8, zero=3, microbatch=2, precision="bf16"),
    "tp": Plan(tp=8, microbatch=4, precision="bf16"),
    "1f1b": Plan(pp=4, shard=2, zero=1, microbatch=1, grad_accum=8, precision="bf16"),
    "zb1p": Plan(pp=2, microbatch=1, grad_accum=8, precision="bf16", schedule="zb1p"),
    "fp32": Plan(replicate=2, microbatch=4),
}
JOBS = [("tiny", name) for name in PLANS if name != "tp"] + [("gpt2", "one"), ("gpt2", "shard"), ("llama3-8b", "shard")]
JOBS += [("llama3-8b", "tp"), ("llama3-8b", "1f1b"), ("mixtral-8x7b", "shard")]


def job(model: str, name: str, sequence: int = 1024) -> Job:
    arch, plan = preset(model), PLANS[name]
    if plan.pp > 1:
        plan = msgspec.structs.replace(plan, stages=balanced_stages(arch, plan.pp))
    machines = cluster("h100", gpus=plan.world)
    return Job(arch=arch, plan=plan, sequence=sequence, cluster=machines, stack=stack_of("meshwright"))


def every(asked: Job) -> list[tuple[str, int, float]]:
    """All policies that are legal, with their bytes and seconds, one by one."""
    policies = [
        "none",
        "selective",
        "sqrt",
        "full",
        *(f"{word}-{count + 1}" for word in ("first", "selective") for count in range(asked.arch.layers)),
    ]
    found = []
    for policy in policies:
        plan = msgspec.structs.replace(asked.plan, recompute=policy)
        if not any(how_blocks_run(plan)):
            under = msgspec.structs.replace(asked, plan=plan)
            found.append((policy, worst(under).shown, price(under).seconds))
    return found


@pytest.mark.parametrize(("model", "name"), JOBS)
def test_it_finds_what_trying_everything_finds(model, name):
    asked = job(model, name)
    everything = every(asked)
    for size in sorted({size for _, size, _ in everything}):
        best = min(seconds for _, held, seconds in everything if held <= size)
        found = budget.choose(asked, size)
        assert found.ledger.shown <= size
        assert found.seconds == best
        assert found.plan == budget.fitting(asked, size)
    with pytest.raises(InputError):
        budget.choose(asked, min(size for _, size, _ in everything) - 1)


@pytest.mark.parametrize(("model", "name"), JOBS)
def test_each_further_block_that_is_computed_anew_holds_no_more(model, name):
    first = [(held, seconds) for policy, held, seconds in every(job(model, name)) if policy.startswith("first-")]
    assert [held for held, _ in first] == sorted((held for held, _ in first), reverse=True)
    assert [seconds for _, seconds in first] == sorted(seconds for _, seconds in first)


def test_a_split_backward_leaves_nothing_to_choose():
    asked = job("tiny", "zb1p")
    assert budget.fitting(asked, 80 * GIB).recompute == "none"


@pytest.mark.parametrize("field", [{"activation_quant": "int8"}, {"activation_offload": True}])
def test_only_what_goes_with_the_rest_of_the_plan_is_chosen(field):
    asked = job("llama3-8b", "shard")
    asked = msgspec.structs.replace(asked, plan=msgspec.structs.replace(asked.plan, **field))
    everything = every(asked)
    assert not {"selective", "sqrt"} & {policy for policy, _, _ in everything}
    for size in sorted({size for _, size, _ in everything}):
        assert budget.choose(asked, size).plan.recompute not in ("selective", "sqrt")


def test_less_memory_is_never_faster():
    asked = job("llama3-8b", "shard", sequence=8192)
    sizes = [size for _, size, _ in every(asked)]
    seconds = [budget.choose(asked, size).seconds for size in sorted(sizes)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_when_nothing_fits_the_problem_says_the_least_and_what_would_help():
    asked = job("gpt2", "fp32")
    least = min(size for _, size, _ in every(asked))
    with pytest.raises(InputError) as raised:
        budget.choose(asked, least - 1)
    (problem,) = raised.value.problems
    assert problem.key == "goal.memory_gib"
    assert f"{least / GIB:.2f} GiB" in problem.text
    assert "plan.microbatch=1 plan.grad_accum=4" in problem.remedy
    assert "plan.replicate=1 plan.shard=2 plan.zero=3" in problem.remedy
    # What is predicted holds.
    changed = msgspec.structs.replace(asked.plan, microbatch=1, grad_accum=4)
    assert budget.choose(msgspec.structs.replace(asked, plan=changed), least - 1).ledger.shown < least


def test_when_nothing_helps_it_says_so():
    with pytest.raises(InputError, match="more ranks to shard the weights"):
        budget.choose(job("llama3-8b", "one"), 1 * GIB)


WORDS = ["arch.preset=gpt2", "sequence=1024", "batch=64", "plan.precision=bf16"]


def loaded(*words: str) -> load.LoadedRun:
    return load.load(None, [*WORDS, *words], ranks=1)


def test_a_run_without_the_goal_stays_as_it_is():
    run = loaded()
    assert budget.resolved(run) == (run, None)


def test_a_goal_becomes_a_plain_policy_with_its_origin():
    everything = {policy: size for policy, size, _ in every(budget.job_of(loaded().run))}
    between = (everything["first-6"] + everything["first-5"]) / 2 / GIB
    found, choice = budget.resolved(loaded(f"goal.memory_gib={between}"))
    assert choice is not None
    assert found.run.plan.recompute == choice.plan.recompute
    assert found.run.plan.recompute in everything
    assert found.run.plan.recompute != "none"
    assert found.origins["plan.recompute"] == "derived: goal.memory_gib"
    assert found.run.goal.memory_gib == between
    assert choice.ledger.shown <= between * GIB
    assert f"recompute = {choice.plan.recompute}" in str(choice)
    assert load.write(found.run).count(f'recompute = "{choice.plan.recompute}"') == 1


def test_room_for_everything_keeps_everything():
    found, choice = budget.resolved(loaded("goal.memory_gib=140"))
    assert found.run.plan.recompute == "none"
    assert choice is not None
    assert choice.slowdown == 1
    assert "no slowdown" in str(choice)


def test_a_stated_policy_is_kept_or_refused():
    found, choice = budget.resolved(loaded("goal.memory_gib=140", "plan.recompute=full"))
    assert found.run.plan.recompute == "full"
    assert choice is not None
    least = min(size for _, size, _ in every(budget.job_of(loaded().run))) / GIB
    with pytest.raises(InputError, match=r"leave plan\.recompute out; full would be chosen") as raised:
        budget.resolved(loaded(f"goal.memory_gib={least}", "plan.recompute=none"))
    assert raised.value.problems[0].where == "command line"
    with pytest.raises(InputError, match="is too little for this plan"):
        budget.resolved(loaded("goal.memory_gib=0.5", "plan.recompute=none"))
