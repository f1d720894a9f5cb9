"""The arithmetic against the textbooks, and its own consistency; tests/dist/test_traffic.py holds it to the trainer."""

from collections.abc import Iterable
from itertools import pairwise

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import assume, given, settings

from meshwright.config.presets import preset
from meshwright.cost.traffic import Collective, bytes_by_axis, fp8_scales, merged, traffic
from meshwright.spec.arch import Arch
from meshwright.spec.params import count, params
from meshwright.spec.plan import Plan, balanced_stages
from meshwright.spec.schedule import stage_ranks

LLAMA = preset("llama3-8b")
SEQUENCE = 8192


def chosen(collectives: Iterable[Collective], **fields: str) -> list[Collective]:
    return [each for each in collectives if all(getattr(each, name) == value for name, value in fields.items())]


def total(collectives: Iterable[Collective], **fields: str) -> int:
    return sum(each.total_bytes for each in chosen(collectives, **fields))


def test_one_rank_sends_nothing():
    assert traffic(LLAMA, Plan(microbatch=1, grad_accum=4), SEQUENCE) == ()


def test_replicas_add_up_every_gradient_once_a_step_in_fp32():
    listed = traffic(LLAMA, Plan(replicate=8, microbatch=1, grad_accum=4, precision="bf16"), SEQUENCE)
    assert bytes_by_axis(listed) == {"replicate": 4 * count(LLAMA), "world": 24}
    assert sum(each.count for each in chosen(listed, axis="replicate")) == LLAMA.layers + 1


@pytest.mark.parametrize(("zero", "gathers", "root_gathers", "scatters"), [(1, 1, 1, 1), (2, 1, 1, 4), (3, 8, 4, 4)])
def test_each_stage_of_zero_gathers_and_scatters_its_share(zero, gathers, root_gathers, scatters):
    plan = Plan(shard=8, zero=zero, microbatch=1, grad_accum=4, precision="bf16")
    listed = traffic(LLAMA, plan, SEQUENCE)
    root = sum(param.numel for param in params(LLAMA) if param.layer < 0)
    blocks = count(LLAMA) - root
    assert total(listed, kind="all_gather") == 2 * (gathers * blocks + root_gathers * root)
    assert total(listed, kind="reduce_scatter") == scatters * 4 * count(LLAMA)
    assert all(each.overlappable for each in chosen(listed, axis="shard"))


def test_hybrid_shards_add_up_an_eighth_over_the_copies():
    listed = traffic(LLAMA, Plan(replicate=4, shard=8, zero=3, microbatch=1, precision="bf16"), SEQUENCE)
    assert total(listed, axis="replicate") == 4 * count(LLAMA) // 8


def test_an_odd_vocabulary_is_filled_up_to_equal_shards():
    arch = preset("tiny")  # 509 rows
    listed = traffic(arch, Plan(shard=4, zero=3, microbatch=1), 32)
    filled = 2 * (512 - 509) * arch.hidden  # of embedding and head
    assert total(listed, kind="reduce_scatter") == 4 * (count(arch) + filled)


def test_the_last_rank_of_tp_holds_the_short_end_of_an_odd_vocabulary():
    arch, plan = preset("tiny"), Plan(tp=4, replicate=2, microbatch=1)
    sums = [total(traffic(arch, plan, 32, place={"tp": rank}), axis="replicate") for rank in range(4)]
    assert sums[0] == sums[1] == sums[2]
    assert sums[0] - sums[3] == 2 * (128 - 125) * arch.hidden * 4


def test_tensor_parallelism_is_megatrons_four_pairs_a_layer():
    # Korthikanti et al. 2022: with the sequence split, two gathers and two scatters each way, of s · b · h numbers.
    arch, plan = preset("llama2-7b"), Plan(tp=8, microbatch=2, grad_accum=3, precision="bf16")
    listed = traffic(arch, plan, 4096)
    (gather,) = chosen(listed, kind="all_gather", axis="tp")
    assert gather.bytes == 2 * 4096 * arch.hidden * 2
    assert gather.count == 3 * (4 * arch.layers + 2)  # the two are embedding and projection
    assert chosen(listed, kind="reduce_scatter", axis="tp")[0].count == gather.count


def test_the_gradient_of_a_norm_is_narrow_unless_it_waited_for_other_microbatches():
    sizes = {}
    for accumulate in (1, 2):
        plan = Plan(tp=2, microbatch=1, grad_accum=accumulate, precision="bf16")
        norms = [each for each in traffic(LLAMA, plan, SEQUENCE) if each.bytes in (2 * 4096, 4 * 4096)]
        sizes[accumulate] = {(each.kind, each.count, each.bytes) for each in norms}
    assert sizes == {
        1: {("all_reduce", 2 * LLAMA.layers + 1, 2 * 4096)},
        2: {("all_reduce", 2 * LLAMA.layers + 1, 4 * 4096)},
    }


def test_keys_go_round_a_ring_three_times_and_only_the_last_gradient_is_waited_for():
    plan = Plan(cp=4, microbatch=1, precision="bf16")
    sends = chosen(traffic(LLAMA, plan, SEQUENCE), kind="send")
    numbers = 2 * (SEQUENCE // 4) * LLAMA.kv_width
    assert {(each.count // LLAMA.layers, each.bytes, each.overlappable) for each in sends} == {
        (6, 2 * numbers, True),
        (2, 4 * numbers, True),
        (1, 4 * numbers, False),
    }


def test_exchanged_heads_are_less_traffic_the_more_ranks_share_a_sequence():
    # DeepSpeed-Ulysses (2023): 4 · N · h ÷ P numbers forward without grouped heads, here and again backward.
    arch = preset("llama2-7b")
    for cp in (2, 4, 8):
        listed = traffic(arch, Plan(cp=cp, cp_kind="ulysses", microbatch=1, precision="bf16"), 4096)
        assert total(listed, kind="all_to_all") == arch.layers * 2 * 4 * 4096 * arch.hidden // cp * 2


def test_cp_is_a_data_axis_of_the_weights():
    sharded = traffic(LLAMA, Plan(cp=2, shard=4, zero=3, microbatch=1), SEQUENCE)
    plain = traffic(LLAMA, Plan(shard=8, zero=3, microbatch=1), SEQUENCE)
    assert chosen(sharded, axis="shard") == chosen(plain, axis="shard")
    copied = traffic(LLAMA, Plan(cp=2, replicate=4, microbatch=1), SEQUENCE)
    assert total(copied, axis="replicate") == 4 * count(LLAMA)


def test_experts_send_their_tokens_there_and_back_twice():
    arch, plan = preset("mixtral-8x7b"), Plan(shard=8, zero=3, ep=8, microbatch=1, precision="bf16")
    listed = traffic(arch, plan, 4096)
    assert {(each.count, each.bytes) for each in chosen(listed, axis="ep")} == {
        (arch.layers, 8 * arch.experts),
        (4 * arch.layers, 4096 * arch.top_k * arch.hidden * 2),
    }
    assert not chosen(listed, axis="expert_shard")  # one rank has each expert, and needs nobody
    routed = arch.layers * arch.experts * 3 * arch.hidden * arch.expert_ffn
    assert total(listed, kind="reduce_scatter") == 4 * (count(arch) - routed)


def test_a_capacity_bounds_what_is_exchanged():
    arch = msgspec.structs.replace(preset("tiny-moe"), capacity=0.5)
    listed = traffic(arch, Plan(replicate=2, ep=2, microbatch=2), 32)
    rows = 2 * arch.experts * 8  # half of the 16 that are a fair share of 32 tokens' two choices
    assert max(each.bytes for each in chosen(listed, axis="ep")) == rows * arch.hidden * 4


def test_slots_are_sent_filled_or_not_and_half_hides_behind_shared_experts():
    arch = msgspec.structs.replace(preset("tiny-moe"), capacity=2.0)
    for shared in (1, 0):
        arch = msgspec.structs.replace(arch, shared_experts=shared)
        listed = chosen(traffic(arch, Plan(replicate=2, ep=2, microbatch=2), 32), axis="ep")
        slots = 2 * arch.experts * 32  # twice a fair share is more than the 32 tokens that an expert may get
        assert {each.bytes for each in listed} == {slots * arch.hidden * 4}  # and no counts
        hidden = sum(each.count for each in listed if each.overlappable)
        assert (hidden, sum(each.count for each in listed)) == (2 * arch.layers * shared, 4 * arch.layers)


def pipeline(arch: Arch, **fields) -> Plan:
    chunks = fields.get("chunks", 1)
    return Plan(**fields, stages=balanced_stages(arch, fields["pp"] * chunks))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipev", 2)])
def test_every_boundary_between_ranks_is_crossed_once_each_way(schedule, chunks):
    plan = pipeline(LLAMA, pp=4, schedule=schedule, chunks=chunks, microbatch=1, grad_accum=8, precision="bf16")
    ranks = stage_ranks(schedule, 4, chunks)
    boundaries = sum(here != there for here, there in pairwise(ranks))
    sends = [
        each for rank in range(4) for each in chosen(traffic(LLAMA, plan, SEQUENCE, place={"pp": rank}), axis="pp")
    ]
    assert sum(each.count for each in sends) == 2 * boundaries * 8
    assert {each.bytes for each in sends} == {SEQUENCE * LLAMA.hidden * 2}


def test_the_stages_of_a_pipeline_gather_the_whole_model_once_whatever_zero_says():
    for zero in (1, 2, 3):
        plan = pipeline(LLAMA, pp=4, shard=2, zero=zero, microbatch=1, grad_accum=8)
        listed = [each for rank in range(4) for each in traffic(LLAMA, plan, SEQUENCE, place={"pp": rank})]
        assert total(listed, kind="all_gather") == total(listed, kind="reduce_scatter") == 4 * count(LLAMA)


@pytest.mark.parametrize("schedule", ["interleaved", "looped", "zb1p"])
@pytest.mark.parametrize("chunks", [3, 4, 8])
@pytest.mark.parametrize("zero", [1, 2])
def test_short_of_zero_3_they_do_in_however_many_chunks(zero, chunks, schedule):
    plan = pipeline(LLAMA, pp=4, chunks=chunks, schedule=schedule, shard=2, zero=zero, microbatch=1, grad_accum=8)
    listed = [each for rank in range(4) for each in traffic(LLAMA, plan, SEQUENCE, place={"pp": rank})]
    assert total(listed, kind="all_gather") == total(listed, kind="reduce_scatter") == 4 * count(LLAMA)


def test_under_zero_3_more_stages_than_are_held_gathered_are_gathered_again():
    held = pipeline(LLAMA, pp=2, chunks=3, schedule="interleaved", shard=2, zero=3, microbatch=1, grad_accum=8)
    more = pipeline(LLAMA, pp=2, chunks=4, schedule="interleaved", shard=2, zero=3, microbatch=1, grad_accum=8)
    once, often = (total(traffic(LLAMA, plan, SEQUENCE), kind="all_gather") for plan in (held, more))
    assert often > 2 * once


def test_a_tied_embedding_on_two_ranks_adds_up_its_gradients():
    arch = preset("gpt2")
    listed = [
        chosen(traffic(arch, pipeline(arch, pp=3, microbatch=1, grad_accum=4), 1024, place={"pp": rank}), axis="tied")
        for rank in range(3)
    ]
    assert [[each.bytes for each in ones] for ones in listed] == [
        [arch.vocab * arch.hidden * 4],
        [],
        [arch.vocab * arch.hidden * 4],
    ]
    folded = pipeline(arch, pp=3, schedule="zbv", chunks=2, microbatch=1, grad_accum=4)
    assert not chosen(traffic(arch, folded, 1024), axis="tied")  # both ends are on one rank


DEGREES = st.sampled_from([1, 2, 4])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    plan = Plan(
        replicate=draw(DEGREES),
        shard=draw(DEGREES) if zero else 1,
        zero=zero,
        tp=draw(st.sampled_from([1, 2])),
        cp=draw(DEGREES),
        cp_kind=draw(st.sampled_from(["ring", "ulysses"])),
        ep=draw(st.sampled_from([1, 2])),
        microbatch=draw(st.integers(1, 3)),
        grad_accum=draw(st.integers(1, 3)),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp64"])),
    )
    assume((plan.shards if zero else plan.copies) % plan.ep == 0)
    return plan


@given(plan=plans())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_list_names_no_axis_of_one_rank_and_nothing_twice(plan):
    listed = traffic(preset("tiny-moe"), plan, 64)
    sizes = {
        "world": plan.world,
        "shard": plan.shards,
        "replicate": plan.copies,
        "expert_shard": plan.shards // plan.ep if plan.zero else 1,
        "expert_replicate": plan.copies if plan.zero else plan.copies // plan.ep,
        **{axis: getattr(plan, axis) for axis in ("tp", "cp", "ep", "pp")},
    }
    assert all(sizes[each.axis] > 1 and each.count > 0 and each.bytes > 0 for each in listed)
    assert {each.axis for each in listed} >= {axis for axis in ("tp", "cp", "world") if sizes[axis] > 1}
    assert merged(listed) == listed


def test_a_deterministic_replica_sends_what_an_all_reduce_would():
    plan = Plan(replicate=8, microbatch=1, grad_accum=4, deterministic=True)
    listed = traffic(LLAMA, plan, SEQUENCE)
    gradients = [each for each in listed if each.axis == "replicate"]
    assert {each.kind for each in gradients} == {"all_to_all", "all_gather"}  # the two halves of an all-reduce
    assert total(listed, axis="replicate") == 2 * 4 * count(LLAMA)
    assert total(listed, axis="world") == 8 * 16


def test_deterministic_shards_give_away_each_gradient_once_and_gather_a_number_a_row():
    plan = Plan(shard=8, zero=3, microbatch=1, grad_accum=4, deterministic=True)
    listed = traffic(LLAMA, plan, SEQUENCE)
    usual = traffic(LLAMA, msgspec.structs.replace(plan, deterministic=False), SEQUENCE)
    assert total(listed, kind="all_to_all", axis="shard") == 4 * count(LLAMA)
    rows = 8 * sum(param.shape[0] for param in params(LLAMA))
    assert total(listed, kind="all_gather", axis="shard") == total(usual, kind="all_gather", axis="shard") + rows


def test_computing_anew_repeats_forwards_up_to_the_last_sum():
    arch = preset("tiny")  # six layers
    counts = {}
    for policy in ("none", "full", "every-4", "first-1", "selective"):
        found = traffic(arch, Plan(tp=2, microbatch=1, grad_accum=3, recompute=policy), 32)
        both = [each for each in found if each.axis == "tp" and each.bytes == 32 * arch.hidden * 4]
        counts[policy] = {each.kind: each.count // 3 for each in both}
    assert counts["none"] == counts["selective"] == {"all_gather": 26, "reduce_scatter": 26}
    assert counts["full"] == {"all_gather": 26 + 12, "reduce_scatter": 26 + 12 - 6}
    assert counts["every-4"] == {"all_gather": 26 + 12, "reduce_scatter": 26 + 12 - 2}
    assert counts["first-1"] == {"all_gather": 26 + 2, "reduce_scatter": 26 + 1}


def test_experts_in_the_block_of_multi_token_prediction_alone_share_scales_like_any():
    plan, every = Plan(microbatch=1, tp=2, precision="fp8"), preset("tiny-moe")
    alone = msgspec.structs.replace(every, layers=1, dense_layers=1, mtp_layers=1)
    assert fp8_scales(alone, plan, 64, True) == fp8_scales(every, plan, 64, True) != ()
