import msgspec
import pytest

from meshwright.search.best_first import priced, search
from meshwright.search.explain import beside, neighbours, ties, why
from meshwright.search.space import empty, plans, problems
from meshwright.spec.plan import Plan
from search.questions import question

ASKED = question("llama3-8b", "8xh100", sequence=4096, batch=32)
SHARDED = Plan(shard=8, zero=3, microbatch=2, grad_accum=2, precision="bf16")
PIPELINE = Plan(
    pp=4, tp=2, stages=(8, 8, 8, 8), microbatch=1, grad_accum=32, precision="bf16", recompute="full"
)  # fmt: skip


def test_why_names_the_largest_losses_and_the_memory():
    found = priced(ASKED.job(SHARDED))
    text = why(found)
    losses = sorted((share for share in found.price.waterfall if share.name != "ideal"), key=lambda each: -each.seconds)
    assert losses[0].label in text
    assert losses[0].why in text
    assert "GiB" in text
    assert found.ledger.moment in text


@pytest.mark.parametrize("plan", [SHARDED, PIPELINE], ids=str)
def test_every_neighbour_differs_and_is_legal_or_says_why_not(plan):
    found = list(neighbours(ASKED, plan))
    assert len({each.change for each in found}) == len(found)
    for each in found:
        assert (each.plan is None) == bool(each.problem)
        if each.plan is not None:
            assert each.plan != plan
            assert problems(ASKED, each.plan) == []
            assert (each.plan.world, each.plan.batch) == (plan.world, plan.batch)


def test_neighbours_go_both_ways_on_every_axis_that_is_used():
    changes = {each.change for each in neighbours(ASKED, PIPELINE)}
    assert {"tp 2 → 1", "tp 2 → 4", "pp 4 → 2", "pp 4 → 8", "recompute full → none", "schedule 1f1b → zbv"} <= changes


def test_what_changes_no_mathematics_is_said_with_how_to_turn_it_off():
    compiled = msgspec.structs.replace(SHARDED, compile=True)
    assert "plan.compile=false" in why(priced(ASKED.job(compiled)))
    assert "plan.compile" not in why(priced(ASKED.job(SHARDED)))
    alone = Plan(microbatch=1, precision="bf16", bf16_params=True)
    assert "plan.bf16_params=false" in why(priced(question("gpt2", "1xh100", sequence=1024, batch=1).job(alone)))


def test_a_schedule_that_cannot_be_compiled_is_beside_one_that_is():
    compiled = msgspec.structs.replace(PIPELINE, recompute="none", compile=True)
    found = {each.change: each for each in neighbours(ASKED, compiled)}
    assert found["schedule 1f1b → zbv"].plan is not None
    assert not found["schedule 1f1b → zbv"].plan.compile
    assert found["schedule 1f1b → interleaved"].plan.compile
    assert not found["compile true → false"].plan.compile
    fixed = msgspec.structs.replace(ASKED, fixed={"compile": True})
    zbv = next(each for each in neighbours(fixed, compiled) if each.change == "schedule 1f1b → zbv")
    assert "plan.compile" in zbv.problem


def test_a_neighbour_has_its_price_or_its_reason():
    for each in beside(ASKED, SHARDED):
        if each.fits:
            assert each.seconds > 0
            assert each.peak_bytes < ASKED.cluster.gpu.memory_bytes
        else:
            assert each.problem


def test_recomputing_everything_costs_time_and_saves_memory():
    base = priced(ASKED.job(SHARDED))
    full = next(each for each in beside(ASKED, SHARDED) if each.change == "recompute none → full")
    assert full.seconds > base.price.seconds
    assert full.peak_bytes < base.peak_bytes


def test_ties_are_the_plans_within_the_interval_of_the_first():
    answer = search(ASKED, top=8)
    first = answer.found[0].price
    assert ties(answer) == sum(found.price.seconds <= first.high_seconds for found in answer.found) >= 1


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"tp": 3}, "does not divide 8 GPUs"),
        ({"pp": 8, "schedule": "dualpipev", "microbatch": 32}, "to fill its V"),
        ({"microbatch": 5}, "multiple of 5"),
        ({"zero": 0, "shard": 8}, "plan.zero = 0"),
        ({"ep": 2}, "plan.ep"),
        ({"deterministic": True, "tp": 2}, "plan.deterministic"),
    ],
)
def test_an_empty_space_names_the_rule_that_empties_it(fixed, said):
    asked = question("llama3-8b", "8xh100", sequence=4096, batch=32, **fixed)
    assert next(plans(asked), None) is None
    assert any(said in problem.text or said in problem.remedy for problem in empty(asked))


def test_what_is_rounded_on_its_way_is_said_with_what_it_saves():
    slow = question("llama3-8b", "2x8xh100", sequence=4096, batch=32)
    plain = msgspec.structs.replace(SHARDED, shard=16, grad_accum=1)
    rounded = msgspec.structs.replace(plain, grad_reduce="int8", gather="int8", error_feedback=False)
    text = why(priced(slow.job(rounded)))
    assert "Numerics changed: gradients rounded to int8 on their way to a sum, without error feedback" in text
    assert "weights rounded to int8 where they are all-gathered" in text
    assert "no prediction of its loss is made" in text
    assert "Numerics changed" not in why(priced(slow.job(msgspec.structs.replace(plain, secondary_shard=8))))
