"""The ledger against the textbook, and its own consistency; tests/dist/test_memory.py holds it to the trainer."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from meshwright.config.presets import preset
from meshwright.cost.layout import LedgerEntry, total
from meshwright.cost.resident import states
from meshwright.spec.params import count, params
from meshwright.spec.plan import Plan, balanced_stages

LLAMA = preset("llama3-8b")  # every dim divides by eight: nothing is filled up
TINY = preset("tiny")  # an odd vocabulary
MOE = preset("tiny-moe")


def plan_of(**fields: object) -> Plan:
    return msgspec.convert({"microbatch": 1, "precision": "bf16", **fields}, Plan)


def held(arch, plan: Plan, **place: int) -> dict[str, int]:
    return {line.name: line.bytes for line in states(arch, plan, place)}


def test_a_lone_rank_in_fp32_holds_sixteen_bytes_for_each_parameter():
    lines = states(LLAMA, plan_of(precision="fp32", grad_accum=8))
    assert total(lines) == 16 * count(LLAMA)
    assert held(LLAMA, plan_of(precision="fp32"))["all_gathered_params"] == 0


def test_replicas_hold_a_narrow_copy_beside_everything_in_fp32():
    parameters = count(LLAMA)
    assert held(LLAMA, plan_of(replicate=8, grad_accum=4)) == {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "moments": 8 * parameters,
        "all_gathered_params": 2 * parameters,
        "unreduced_grads": 0,
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_stage_of_zero_shares_out_sixteen_bytes(zero, ranks):
    lines = held(LLAMA, plan_of(shard=ranks, zero=zero))
    resting = lines["weights"] + lines["gradients"] + lines["moments"]
    assert resting == 16 * count(LLAMA) // ranks


def test_gradients_wait_whole_only_where_they_are_scattered_once():
    waiting = {zero: held(LLAMA, plan_of(shard=8, zero=zero, grad_accum=4))["unreduced_grads"] for zero in (1, 2, 3)}
    assert waiting == {1: 4 * count(LLAMA) * 7 // 8, 2: 0, 3: 0}
    assert held(LLAMA, plan_of(shard=8, zero=1))["unreduced_grads"] == 0


def test_zero_3_gathers_two_blocks_and_what_is_outside_them():
    block = sum(param.numel for param in params(LLAMA) if param.layer == 0)
    outside = sum(param.numel for param in params(LLAMA) if param.layer < 0)
    assert held(LLAMA, plan_of(shard=8, zero=3))["all_gathered_params"] == 2 * (outside + 2 * block)
    assert held(LLAMA, plan_of(shard=8, zero=2))["all_gathered_params"] == 2 * count(LLAMA)


def test_one_layer_has_no_next():
    arch = msgspec.structs.replace(LLAMA, layers=1)
    assert held(arch, plan_of(shard=8, zero=3))["all_gathered_params"] == 2 * count(arch)


def test_a_pipeline_keeps_gradients_whole_and_stages_gathered_whatever_zero_says():
    stages = balanced_stages(LLAMA, 4)
    plans = [plan_of(pp=4, stages=stages, shard=2, zero=zero, grad_accum=8) for zero in (1, 3)]
    assert held(LLAMA, plans[0]) == held(LLAMA, plans[1])
    lines = held(LLAMA, plans[1])
    assert lines["all_gathered_params"] == lines["weights"]  # two bytes of each number, of which half rest here in four
    assert lines["unreduced_grads"] == lines["gradients"]  # four bytes of each, beyond the half that remains


@pytest.mark.parametrize("schedule", ["interleaved", "looped", "zb1p"])
def test_with_many_chunks_zero_3_gathers_those_in_sight_and_the_others_all_of_them(schedule):
    stages = balanced_stages(LLAMA, 32)  # one layer each, but for the first and the last rank's
    shape = {"pp": 4, "chunks": 8, "stages": stages, "schedule": schedule, "shard": 2, "grad_accum": 8}
    gathered = [held(LLAMA, plan_of(zero=zero, **shape), pp=1)["all_gathered_params"] for zero in (1, 2, 3)]
    block = sum(param.numel for param in params(LLAMA) if param.layer == 0)
    assert gathered == [2 * 8 * block, 2 * 8 * block, 2 * 3 * block]


def test_looped_stages_never_wait_together():
    # All backwards of a later stage come before those of an earlier one, so one stage waits while others are summed.
    stages = balanced_stages(LLAMA, 8)
    shape = {"pp": 4, "chunks": 2, "stages": stages, "shard": 2, "zero": 1, "grad_accum": 8}
    looped, interleaved = (
        held(LLAMA, plan_of(schedule=schedule, **shape), pp=1)["unreduced_grads"]
        for schedule in ("looped", "interleaved")
    )
    assert looped < interleaved


def test_split_backwards_leave_narrow_gradients_beside_the_wide_sum():
    stages = balanced_stages(LLAMA, 8)
    shape = {"pp": 4, "chunks": 2, "stages": stages, "grad_accum": 8}
    whole, split = (held(LLAMA, plan_of(schedule=schedule, **shape), pp=1) for schedule in ("interleaved", "zb1p"))
    assert whole["unreduced_grads"] == 0  # nothing is sharded, so what waits is what remains
    assert 0 < split["unreduced_grads"] <= split["gradients"] // 2
    assert held(LLAMA, plan_of(schedule="zb1p", precision="fp32", **shape), pp=1)["unreduced_grads"] == 0


def test_experts_over_ranks_gather_less_and_rest_alike():
    without, with_ep = (held(MOE, plan_of(shard=4, zero=3, ep=ep)) for ep in (1, 2))
    assert with_ep["moments"] == without["moments"]
    assert with_ep["all_gathered_params"] < without["all_gathered_params"]


def test_every_line_says_why():
    for fields in ({}, {"replicate": 2}, {"shard": 2, "zero": 3}, {"pp": 2, "stages": (3, 3), "grad_accum": 4}):
        lines = states(TINY, plan_of(**fields))
        assert [line.name for line in lines] == [
            "weights",
            "gradients",
            "moments",
            "all_gathered_params",
            "unreduced_grads",
        ]
        assert all(line.why and line.bytes >= 0 for line in lines)


def test_a_total_is_of_all_lines():
    lines = [LedgerEntry(name="weights", bytes=3, why="a"), LedgerEntry(name="moments", bytes=4, why="b")]
    assert total(lines) == 7


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.sampled_from([TINY, MOE]),
    st.integers(1, 7),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
)
def test_ranks_hold_every_moment_once(arch, shard, tp, cp, zero):
    plan = plan_of(shard=shard, tp=tp, cp=cp, zero=zero, precision="fp32")
    places = [(s, c, t) for s in range(shard) for c in range(cp) for t in range(tp)]
    moments = sum(held(arch, plan, shard=s, cp=c, tp=t)["moments"] for s, c, t in places)
    copied = sum(param.numel for param in params(arch) if param.split.value == "none")
    assert moments == 8 * (count(arch) + (tp - 1) * copied)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 9), st.sampled_from([1, 2, 3]), st.integers(0, 8))
def test_what_is_stored_is_never_less_than_what_is_updated(shard, zero, rank):
    lines = held(TINY, plan_of(shard=shard, zero=zero), shard=rank % shard)
    assert lines["weights"] == lines["gradients"]
    assert 2 * lines["weights"] >= lines["moments"]
