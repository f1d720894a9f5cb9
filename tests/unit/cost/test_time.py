from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.presets import preset
from meshwright.cost.activations import activation_policy
from meshwright.cost.flops import step_flops
from meshwright.cost.job import Job
from meshwright.cost.layer_time import block, ends, exposed, layer_model
from meshwright.cost.primitives import call_seconds, flash_seconds, matmul_seconds, peak_of, rates, slowest
from meshwright.cost.rank_view import stage_lengths
from meshwright.cost.simulate import StageCost, makespan, play
from meshwright.cost.step_time import (
    Price,
    kinds_of,
    lower_bound,
    price,
    price_in,
    seconds_in,
    stage_passes,
    step_timeline,
    work_bound,
)
from meshwright.cost.traffic import bytes_by_axis, traffic
from meshwright.cost.weight_time import held
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import StackSpeed, efficiencies, efficiency_of, stacks
from meshwright.spec.params import count, params
from meshwright.spec.plan import Plan, balanced_stages
from meshwright.spec.schedule import actions, legal, stage_ranks
from meshwright.spec.tuning import Adapter, Tuning

ARCH = preset("llama3-8b")
MIXTURE = preset("mixtral-8x7b")
some = settings(deadline=None, max_examples=60, derandomize=True)
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "looped", "zb1p", "zbv", "dualpipev")


def job(stack: str = "meshwright", machines: str = "64xh100", sequence: int = 4096, arch=ARCH, **plan) -> Job:
    given_plan = {"microbatch": 1, "precision": "bf16", **plan}
    if given_plan.get("pp", 1) > 1:
        stages = balanced_stages(arch, given_plan["pp"] * given_plan.get("chunks", 1))
        given_plan.setdefault("stages", stages)
    return Job(arch=arch, plan=Plan(**given_plan), sequence=sequence, cluster=cluster(machines), stack=stacks()[stack])


def share(answer: Price, name: str) -> float:
    return sum(each.seconds for each in answer.waterfall if each.name == name)


@st.composite
def jobs(draw) -> Job:
    arch = draw(st.sampled_from([ARCH, MIXTURE]))
    pp, tp, cp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2]))
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    shard = draw(st.sampled_from([1, 4])) if zero else 1
    chunks, accumulate, schedule = 1, draw(st.sampled_from([1, 4, 8, 24])), "1f1b"
    if pp > 1:
        schedule, chunks = draw(st.sampled_from(SCHEDULES)), draw(st.sampled_from([1, 2, 4, 8]))
        if legal(schedule, pp, chunks, accumulate):
            schedule, chunks = "1f1b", 1
    plan = {"pp": pp, "tp": tp, "cp": cp, "zero": zero, "shard": shard, "replicate": draw(st.sampled_from([1, 2]))}
    return job(
        stack=draw(st.sampled_from(sorted(stacks()))),
        machines=f"1024x{draw(st.sampled_from(['h100', 'a100-80g', 'b200', 'v100']))}",
        arch=arch,
        schedule=schedule,
        chunks=chunks,
        grad_accum=accumulate,
        microbatch=draw(st.sampled_from([1, 4])),
        recompute=draw(st.sampled_from(["none", "full", "selective", "first-3"])),
        compile=draw(st.booleans()),
        **plan,
    )


@given(jobs())
@some
def test_plans_that_differ_in_the_data_axes_alone_have_one_course(found):
    plan = found.plan
    other = msgspec.structs.replace(plan, replicate=plan.data, shard=1, zero=0)
    split = msgspec.structs.replace(found, plan=other)
    assert price_in(split, step_timeline(found)) == price(split)
    assert seconds_in(split, step_timeline(found)) == price(split).seconds


@given(jobs())
@some
def test_the_waterfall_adds_up_and_the_bound_holds(found):
    answer = price(found)
    # Sums of some twenty floats in another order.
    assert sum(each.seconds for each in answer.waterfall) == pytest.approx(answer.seconds, rel=1e-9)
    assert 0 < work_bound(found) <= lower_bound(found) <= answer.seconds * (1 + 1e-9)
    assert answer.low_seconds < answer.seconds < answer.high_seconds
    assert 0 < answer.mfu <= answer.hfu < 1
    assert share(answer, "bubble") >= -1e-9
    named = [each.name for each in answer.waterfall]
    assert len(set(named)) == len(named)


def test_short_of_zero_3_weights_cost_the_same_however_often_a_pipeline_returns_to_them():
    shape = {"pp": 4, "chunks": 8, "schedule": "interleaved", "shard": 8, "machines": "8x4xh100"}
    shards = {
        (zero, accumulate): share(price(job(zero=zero, grad_accum=accumulate, **shape)), "shard")
        for zero in (1, 2, 3)
        for accumulate in (8, 64)
    }
    assert shards[1, 8] == shards[1, 64] == shards[2, 8] == shards[2, 64]
    assert shards[3, 64] > shards[3, 8] > shards[1, 8]


def test_the_ideal_share_is_the_utilization():
    answer = price(job(shard=64, zero=3))
    assert share(answer, "ideal") / answer.seconds == pytest.approx(answer.mfu)


def test_tokens_per_second_are_those_of_the_batch():
    found = job(shard=8, zero=3, machines="8xh100", grad_accum=2)
    answer = price(found)
    assert answer.tokens_per_second_per_gpu == pytest.approx(16 * 4096 / answer.seconds / 8)


def test_what_is_not_used_costs_nothing():
    names = {each.name for each in price(job(machines="1xh100")).waterfall}
    assert not names & {"tp", "cp", "ep", "pp", "bubble", "shard", "replicate", "tied", "recompute", "stragglers"}


def test_a_sync_is_paid_in_shares_and_few_bits_cost_less_of_it():
    def outer(**plan) -> float:
        return share(price(job(replicate=2, shard=32, zero=3, **plan)), "outer")

    assert share(price(job(replicate=2, shard=32, zero=3)), "outer") == 0
    assert outer(sync_every=100, outer="diloco") == pytest.approx(outer(sync_every=10, outer="diloco") / 10)
    assert outer(sync_every=10, outer="diloco", outer_quant="int4") < outer(sync_every=10, outer="diloco")
    rare = price(job(replicate=2, shard=32, zero=3, sync_every=50))
    assert share(rare, "replicate") == 0
    assert rare.seconds < price(job(replicate=2, shard=32, zero=3)).seconds


def test_recomputation_costs_time_and_counts_as_hardware_work_only():
    plain, again = (price(job(shard=8, zero=3, machines="8xh100", recompute=word)) for word in ("none", "full"))
    assert again.seconds > plain.seconds * 1.1
    assert again.hfu > again.mfu
    assert plain.hfu == pytest.approx(plain.mfu)


def test_a_slower_network_never_helps():
    fast = job(shard=64, zero=3)
    slow = msgspec.structs.replace(fast, cluster=cluster("64xh100", network="10gbe"))
    assert price(slow).seconds > price(fast).seconds
    assert share(price(slow), "shard") > share(price(fast), "shard")


def test_tensor_parallelism_beyond_the_domain_is_dear():
    inside, across = (price(job(tp=tp, shard=32 // tp, zero=1, machines="32xh100")) for tp in (8, 16))
    assert share(across, "tp") > share(inside, "tp")


def test_more_microbatches_shrink_the_bubble():
    few, many = (price(job(pp=4, grad_accum=m, machines="4xh100")) for m in (4, 32))
    assert share(few, "bubble") / few.seconds > 3 * share(many, "bubble") / many.seconds


def test_a_step_of_small_kernels_waits_for_the_host():
    small = job(machines="1xh100", arch=preset("gpt2-124m"), sequence=128)
    answer = price(small)
    speed = small.stack.speed
    assert share(answer, "launch") > 0
    assert answer.seconds >= 2 * speed.layer_seconds * small.arch.layers


def test_layers_send_what_the_traffic_of_a_step_says():
    """Bytes over tp of the priced layers are those of the trainer's own list, the loss's and the norms' sums apart."""
    found = job(tp=4, machines="4xh100", grad_accum=3)
    listed = [each for each in traffic(ARCH, found.plan, 4096) if each.axis == "tp" and each.kind != "all_reduce"]
    stream = 4096 * ARCH.hidden * 2
    in_layers = ARCH.layers * 8 * stream  # two gathers and two scatters, forward and backward
    at_the_ends = 4 * stream  # the embedding's scatter and the projection's gather, and back
    assert bytes_by_axis(listed)["tp"] == 3 * (in_layers + at_the_ends)


def test_a_rank_updates_its_part_of_the_weights():
    assert held(ARCH, Plan(microbatch=1), 0) == count(ARCH)
    assert held(ARCH, Plan(microbatch=1, shard=8, zero=1), 0) == pytest.approx(count(ARCH) / 8)
    stages = balanced_stages(ARCH, 4)
    parts = [held(ARCH, Plan(microbatch=1, pp=4, stages=stages), rank) for rank in range(4)]
    assert sum(parts) == count(ARCH)


def test_pieces_of_a_layer_grow_with_its_tokens():
    one, four = (block(layer_model(job(microbatch=m), efficiency_of(cluster("h100").gpu)), False) for m in (1, 4))
    for name in ("matmuls", "attention", "elementwise"):
        assert getattr(four.forward, name) > 3 * getattr(one.forward, name)


MIXTURE = preset("mixtral-8x7b")


def mixture_block(arch=MIXTURE, **plan):
    return block(layer_model(job(arch=arch, **plan), efficiency_of(cluster("h100").gpu)), True)


def test_the_way_to_the_experts_hides_behind_shared_ones():
    plan = {"shard": 8, "zero": 3, "ep": 8}
    alone = mixture_block(**plan).forward.ep
    beside = mixture_block(msgspec.structs.replace(MIXTURE, shared_experts=8), **plan).forward.ep
    assert beside == pytest.approx(alone / 2)  # the way back is waited for
    one = mixture_block(msgspec.structs.replace(MIXTURE, shared_experts=1, expert_ffn=8), **plan).forward.ep
    assert alone / 2 < one < alone  # what is too short to hide it hides a part


def with_speed(found: Job, **habits) -> Job:
    speed = msgspec.structs.replace(found.stack.speed, **habits)
    return msgspec.structs.replace(found, stack=msgspec.structs.replace(found.stack, speed=speed))


def nemo_block(**habits):
    found = job(stack="nvidia-nemo", arch=MIXTURE, shard=16, zero=1, ep=8, tp=2, precision="fp8")
    return block(layer_model(with_speed(found, **habits), efficiency_of(cluster("h100").gpu)), True)


def test_rows_that_enter_a_node_once_take_less_of_the_network():
    often, once = nemo_block(once_a_node=False, overlap_ep=0.0), nemo_block(once_a_node=True, overlap_ep=0.0)
    # Experts on two nodes, two of eight chosen: a token goes to 1.5 nodes on average instead of to two experts.
    assert once.forward.ep == pytest.approx(0.75 * often.forward.ep, rel=1e-2)  # latency apart


def test_operands_that_other_kernels_write_cost_no_pass_of_their_own():
    apart, fused = nemo_block(casts=1.0), nemo_block(casts=0.0)
    in_bf16 = job(stack="nvidia-nemo", arch=MIXTURE, shard=16, zero=1, ep=8, tp=2)
    plain = block(layer_model(in_bf16, efficiency_of(cluster("h100").gpu)), True)
    assert fused.forward.elementwise == pytest.approx(plain.forward.elementwise)
    assert apart.forward.elementwise > 1.1 * fused.forward.elementwise


def test_a_layer_of_experts_waits_longer_for_its_host():
    slow = nemo_block(moe_seconds=1.0)
    assert slow.forward.seconds == pytest.approx(1.0, rel=1e-3)  # the layer's own launches more
    assert nemo_block(moe_seconds=0.0).forward.seconds < 0.1


def test_slots_cost_what_they_hold():
    fair, doubled = (msgspec.structs.replace(MIXTURE, capacity=capacity) for capacity in (1.0, 2.0))
    one, two = (mixture_block(arch, shard=8, zero=3, ep=8).forward.ep for arch in (fair, doubled))
    assert two == pytest.approx(2 * one, rel=0.05)


def test_experts_in_fp8_keep_their_weights_gradient_in_bf16():
    low, wide = (mixture_block(precision=precision) for precision in ("fp8", "bf16"))
    dense, wide_dense = (
        block(layer_model(job(arch=MIXTURE, precision=precision), efficiency_of(cluster("h100").gpu)), False)
        for precision in ("fp8", "bf16")
    )
    assert low.forward.matmuls < 0.8 * wide.forward.matmuls
    assert low.weight.matmuls > 0.9 * wide.weight.matmuls
    assert dense.weight.matmuls < 0.8 * wide_dense.weight.matmuls


def test_experts_that_tp_cuts_are_in_bf16_beside_fp8():
    low, wide = (mixture_block(precision=precision, tp=2, shard=4, zero=3) for precision in ("fp8", "bf16"))
    alone, wide_alone = (mixture_block(precision=precision, shard=8, zero=3) for precision in ("fp8", "bf16"))
    assert 0.8 * wide.forward.matmuls < low.forward.matmuls < wide.forward.matmuls  # attention alone is quicker
    assert alone.forward.matmuls < 0.8 * wide_alone.forward.matmuls


def test_only_the_ends_embed_and_predict():
    at = layer_model(job(), efficiency_of(cluster("h100").gpu))
    assert ends(at, first=False, last=False).seconds == 0
    assert ends(at, first=False, last=True).forward.matmuls > 0


@pytest.mark.parametrize(("overlap", "left"), [(0.0, 10.0), (0.5, 5.0), (1.0, 4.0)])
def test_arithmetic_hides_communication_as_far_as_it_goes(overlap, left):
    assert exposed(10.0, hidden_by=6.0, overlap=overlap) == left


def test_products_approach_their_rate_and_small_ones_do_not():
    at = rates(cluster("h100").gpu, efficiency_of(cluster("h100").gpu), "bf16")

    def reached(size):
        return 2 * size**3 / matmul_seconds(size, size, size, at)

    assert reached(16384) > 0.95 * at.matmul > reached(4096) > reached(1024)


def test_causal_attention_is_quadratic_in_the_sequence():
    at = rates(cluster("h100").gpu, efficiency_of(cluster("h100").gpu), "bf16")
    short, long = (flash_seconds(s, s, 4096, at)[0] for s in (32768, 65536))
    assert long / short == pytest.approx(4, rel=0.05)  # the part that is linear has nearly gone


def test_a_card_without_a_precision_uses_the_next():
    v100 = cluster("v100").gpu
    assert peak_of(v100, "bf16") > 0
    assert peak_of(cluster("a100-80g").gpu, "fp8") == cluster("a100-80g").gpu.bf16


def test_exact_sums_of_fp8_lengthen_the_matmuls_of_gradients_alone():
    fast, exact, bf16 = (
        block(layer_model(job(machines="1xh200", **how)), moe=False)
        for how in ({"precision": "fp8"}, {"precision": "fp8", "fp8_accumulate": "exact"}, {"precision": "bf16"})
    )
    slower = 1 / efficiency_of(cluster("h200").gpu).fp8_exact
    assert exact.forward == fast.forward
    assert exact.input.matmuls == pytest.approx(slower * fast.input.matmuls)
    assert exact.weight.matmuls == pytest.approx(slower * fast.weight.matmuls)
    assert exact.weight.matmuls < bf16.weight.matmuls


def test_ranks_of_tp_wait_for_the_scales_of_fp8():
    bf16, tensors, rows = (
        block(layer_model(job(machines="8xh200", tp=2, **how)), moe=False)
        for how in ({"precision": "bf16"}, {"precision": "fp8"}, {"precision": "fp8", "fp8_scaling": "rowwise"})
    )
    assert bf16.forward.tp < rows.forward.tp < tensors.forward.tp  # two calls, or seven
    assert bf16.input.tp < tensors.input.tp < rows.input.tp  # five, of a number or of thousands


def test_a_base_that_is_multiplied_as_it_is_held_is_not_decoded():
    adapter = Adapter(kind="lora", base="fp8")
    tuned = msgspec.structs.replace(ARCH, tuning=Tuning(adapter=adapter))
    wide = msgspec.structs.replace(ARCH, tuning=Tuning(adapter=Adapter(kind="lora")))
    codes, decoded, plain, bf16 = (
        block(layer_model(job(machines="1xh200", arch=arch, precision=precision)), moe=False)
        for arch, precision in ((tuned, "fp8"), (tuned, "bf16"), (ARCH, "fp8"), (wide, "bf16"))
    )
    assert codes.forward.seconds < bf16.forward.seconds < decoded.forward.seconds
    assert codes.input.elementwise < decoded.input.elementwise
    # Beside the block's own products those of adapters, in bf16, which take the same time beside either.
    adapters = bf16.forward.matmuls - block(layer_model(job(machines="1xh200")), moe=False).forward.matmuls
    assert codes.forward.matmuls == pytest.approx(plain.forward.matmuls + adapters)
    assert codes.weight.matmuls == bf16.weight.matmuls  # of adapters alone


def test_the_slowest_of_many_is_slower():
    at = rates(cluster("h100").gpu, efficiency_of(cluster("h100").gpu), "bf16")
    assert slowest(1, at) == 0
    assert 0 < slowest(8, at) < slowest(4096, at) < 0.1


def test_every_card_finds_an_efficiency_and_the_longest_name_wins():
    assert {each.name for each in efficiencies()} >= {"a100", "h100", "b200", "v100", "generic"}
    assert efficiency_of(cluster("h200").gpu).name == "h100"
    assert efficiency_of(cluster("gb200").gpu).name == "b200"
    assert efficiency_of(cluster("gb300").gpu).name == "b300"
    assert efficiency_of(cluster("l40s").gpu).name == "generic"


def test_our_own_stack_is_as_the_h200_showed_it():
    mine = msgspec.to_builtins(stacks()["meshwright"].speed)
    others = msgspec.to_builtins(StackSpeed())
    measured = {"attention": 1.75, "logit_passes": 1.5, "compiled": 0.37, "step_seconds": 0.5e-3, "spread": 0.25}
    assert mine == others | measured | {"torch_ring": True}


shapes = [shape for shape in product(SCHEDULES, (2, 3, 4), (1, 2), (3, 8, 13, 24, 40)) if legal(*shape) is None]


@given(st.sampled_from(shapes), st.lists(st.floats(0.5, 2), min_size=24, max_size=24), st.floats(0, 0.3))
@some
def test_the_quick_player_ends_when_the_careful_one_does(shape, seconds, send):
    schedule, pp, chunks, microbatches = shape
    stages = pp * chunks
    cost = StageCost(
        forward_seconds=tuple(seconds[:stages]),
        input_seconds=tuple(seconds[8 : 8 + stages]),
        weight_seconds=tuple(seconds[16 : 16 + stages]),
        activation=(0.0,) * stages,
    )
    placement = stage_ranks(schedule, pp, chunks)
    careful = play(actions(schedule, pp, chunks, microbatches), placement, cost, send).seconds
    quick = makespan(schedule, pp, microbatches, cost, send)
    if microbatches <= 4 * pp:
        assert quick == pytest.approx(careful, rel=1e-12)
    else:  # rounds of stages as uneven as 1 to 4 settle only gradually; continued from the fourth they are this close
        assert quick == pytest.approx(careful, rel=0.06)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_a_short_pipeline_stands_for_a_deep_one(schedule):
    pp, microbatches = 24, 96
    chunks = 2 if schedule in ("interleaved", "looped", "zbv", "dualpipev") else 1
    stages = pp * chunks
    forward = tuple(1.0 + 0.1 * (stage % 2) for stage in range(stages))
    cost = StageCost(forward_seconds=forward, input_seconds=forward, weight_seconds=forward, activation=(0.0,) * stages)
    orders, placement = actions(schedule, pp, chunks, microbatches), stage_ranks(schedule, pp, chunks)
    careful = play(orders, placement, cost, 0.05).seconds
    assert makespan(schedule, pp, microbatches, cost, 0.05) == pytest.approx(careful, rel=0.08)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("dualpipev", 2)]
)
def test_a_long_step_gathers_its_weights_as_its_traffic_says(schedule, chunks):
    """Seconds over shard are those of the whole step's list, though of it only the beginning is followed."""
    found = job(pp=4, chunks=chunks, schedule=schedule, grad_accum=24, shard=2, zero=1, machines="8xh100")
    silent = msgspec.structs.replace(found.stack.speed, overlap_shard=0.0)
    found = msgspec.structs.replace(found, stack=msgspec.structs.replace(found.stack, speed=silent))
    rank = max((0, 3), key=lambda pp: spent_on_shard(found, pp))
    assert share(price(found), "shard") == pytest.approx(spent_on_shard(found, rank))


def spent_on_shard(found: Job, rank: int) -> float:
    calls = traffic(found.arch, found.plan, found.sequence, place={"pp": rank})
    return sum(call_seconds(call, found.plan, found.cluster) for call in calls if call.axis == "shard")


def test_the_interval_is_wider_on_accelerators_of_which_nothing_is_known():
    def width(machines: str) -> float:
        answer = price(job(machines=machines, shard=8, zero=3))
        return answer.high_seconds / answer.seconds - 1

    assert width("8xl40s") > 1.3 * width("8xh100")
    assert width("8xb200") > 1.3 * width("8xh100")
    card = cluster("8xl40s")
    mine = msgspec.structs.replace(efficiency_of(card.gpu), name="mine")
    measured = msgspec.structs.replace(card, efficiency=mine)
    known = msgspec.structs.replace(job(machines="8xl40s", shard=8, zero=3), cluster=measured)
    assert price(known).high_seconds / price(known).seconds - 1 == pytest.approx(width("8xl40s") / 1.5)


def test_a_ring_costs_what_it_sends_though_attention_hides_it():
    """Sequences over eight ranks or samples over eight: the same work, and many GiB more on the links."""
    spread = job(machines="8xh100", sequence=8192, shard=8, zero=3, grad_accum=8)
    ring = job(machines="8xh100", sequence=8192, cp=8, zero=3, microbatch=8, grad_accum=8)
    sent = [sum(bytes_by_axis(traffic(ARCH, each.plan, each.sequence)).values()) for each in (spread, ring)]
    assert sent[1] - sent[0] > 100 * 2**30
    assert price(ring).seconds > 1.02 * price(spread).seconds  # more than two runs of the same differ
    assert share(price(ring), "cp") > 0


def test_a_block_whose_attention_is_frozen_goes_back_through_the_rest_of_it():
    """Above frozen embeddings nothing of its attention has a gradient; other blocks go back through all of theirs."""

    def passes(*freeze: str, machines: str = "8xh100", **plan):
        frozen = msgspec.structs.replace(ARCH, tuning=Tuning(freeze=("embed", *freeze)))
        found = job(machines=machines, arch=frozen, **plan)
        kinds, places = kinds_of(frozen, stage_lengths(frozen, found.plan))
        of_model = [stage_passes(layer_model(found), kinds[place], activation_policy(found)) for place in places]
        assert lower_bound(found) <= price(found).seconds * (1 + 1e-9)
        return of_model[0].input, price(found).seconds, step_flops(frozen, found.sequence, found.plan.batch)

    attention = ("blocks.0.attn_norm", "blocks.0.attn")
    (every, all_seconds, all_flops), (some_of, seconds, flops) = passes(), passes(*attention)
    _, less_seconds, less_flops = passes("blocks.0")
    assert some_of.attention == pytest.approx(every.attention * (ARCH.layers - 1) / ARCH.layers)
    matrices = [param for param in params(ARCH) if param.layer == 0 and param.is_matrix]
    share = sum(param.numel for param in matrices if ".attn." in param.name) / sum(param.numel for param in matrices)
    read = {"matmuls": 1 - share / ARCH.layers, "elementwise": 1 - share / ARCH.layers}
    for name, left in read.items():
        assert getattr(some_of, name) == pytest.approx(getattr(every, name) * left)
    assert less_seconds < seconds < all_seconds
    # Of what freezing the whole block saves, as much as of FLOPs, but for the gradient of its matrices.
    assert (all_seconds - seconds) / (all_seconds - less_seconds) == pytest.approx(
        (all_flops - flops) / (all_flops - less_flops), rel=0.25
    )
    tp, tp_every = (passes(*freeze, tp=8)[0].tp for freeze in (attention, ()))
    assert tp == pytest.approx(tp_every * (1 - 2 / 4 / ARCH.layers))  # of four collectives of its backward two are left


@some
@given(jobs(), st.sampled_from([1, 2, 4, 8]))
def test_layers_of_plans_that_differ_in_data_ranks_alone_share_their_times(found, ep):
    """Fewer ranks than the plan's stand for them, as far as experts and the scale-up domain let them."""
    if found.arch.experts and found.plan.shard * found.plan.cp % ep == 0:
        found = msgspec.structs.replace(found, plan=msgspec.structs.replace(found.plan, ep=ep))
    at = layer_model(found)
    whole = msgspec.structs.replace(at.plan, shard=found.plan.data)
    as_it_is = msgspec.structs.replace(at, job=msgspec.structs.replace(at.job, plan=whole))
    for mixture in {found.arch.is_moe(layer) for layer in range(found.arch.layers)}:
        assert block(at, mixture) == block(as_it_is, mixture)
    assert ends(at, first=True, last=True) == ends(as_it_is, first=True, last=True)
