"""Plans of a proof of anyone's model: what their words leave open, and what is wrong with them."""

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.model_spec import DECODER, ModelSpec
from meshwright.spec.plan import Plan, Precision, even_stages
from meshwright.spec.problem import InputError
from meshwright.verify import prove
from meshwright.verify.prove_module import decided


def plan_of(words: str, rows: int = 8, layers: int = 4) -> Plan:
    ((name, plan),) = decided([words], rows, layers, DECODER)
    assert name == words
    return plan


@given(layers=st.integers(1, 40), stages=st.integers(1, 12))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_even_stages_hold_every_layer_and_differ_by_one_at_most(layers, stages):
    made = even_stages(layers, stages)
    assert len(made) == stages
    assert sum(made) == layers
    assert max(made) - min(made) <= 1


def test_words_leave_the_precision_and_the_microbatch_open():
    assert plan_of("shard=2,zero=3") == Plan(shard=2, zero=3, microbatch=4, precision="fp64")
    assert plan_of("replicate=2,grad_accum=2").microbatch == 2


def test_a_pipeline_has_twice_as_many_microbatches_as_ranks():
    assert plan_of("pp=2") == Plan(pp=2, stages=(2, 2), microbatch=2, grad_accum=4, precision="fp64")


def test_a_chunked_schedule_has_two_stages_a_rank():
    plan = plan_of("pp=2,schedule=zbv", layers=5)
    assert (plan.chunks, plan.stages) == (2, (2, 1, 1, 1))


def test_a_whole_plan_is_taken_as_it_is():
    plan = Plan(replicate=2, microbatch=4, precision="bf16")
    assert decided([plan], 8, 4, ModelSpec()) == [(str(plan), plan)]


BAD = [
    (["tp=0"], "plan.tp = 0 is not a count"),
    (["tp=two"], 'plan.tp = "two"'),
    (["tq=2"], "did you mean plan.tp?"),
    (["tp"], "is not field=value"),
    (["replicate=3"], "batches of 8 rows are not microbatch 2 × grad_accum 1 × 3 data ranks"),
    (["pp=2,schedule=zbv,grad_accum=2,chunks=4"], "plan.chunks"),
    (["pp=8,grad_accum=8"], "8 stages are more than the model's 4 blocks"),
    ([Plan(pp=2, stages=(3, 2), microbatch=2, grad_accum=4)], "is not 2 stages of 4 blocks in total"),
    (["tp=2", "tp=2,precision=bf16"], "different precisions"),
    (["cp=2"], "plan.cp = 2 puts another attention into the model"),
    (["replicate=2,ep=2"], "plan.ep = 2 shares out the experts"),
    ([Plan(replicate=2, microbatch=4, deterministic=True)], "plan.deterministic fixes the order"),
    ([], "no plan to prove"),
]


@pytest.mark.parametrize(("plans", "told"), BAD, ids=[told for _, told in BAD])
def test_what_is_wrong_is_said(plans, told):
    with pytest.raises(InputError) as error:
        decided(plans, 8, 4, DECODER)
    assert told in str(error.value)


def test_the_problems_of_all_plans_are_said_at_once():
    with pytest.raises(InputError) as error:
        decided(["replicate=3", "shard=2", "cp=2"], 8, 4, ModelSpec())
    assert len(error.value.problems) == 3


def test_every_precision_has_a_tolerance_with_its_reason():
    assert set(prove.TOLERANCES) == set(get_args(Precision))
    assert all(reason for _, reason in prove.TOLERANCES.values())
