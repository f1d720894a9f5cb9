"""Lossy communication on paper: bytes a parameter as the papers have them, memory of errors, and time."""

import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.layout import layout_of
from meshwright.cost.primitives import axis_span, call_seconds, rates
from meshwright.cost.rank_view import RankView
from meshwright.cost.resident import states
from meshwright.cost.traffic import traffic
from meshwright.cost.weight_time import rounding_seconds
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import efficiency_of
from meshwright.spec.params import count
from meshwright.spec.plan import Plan

LLAMA = preset("llama3-8b")
REPLICAS = Plan(replicate=8, microbatch=1, precision="bf16")
SHARDS = Plan(shard=32, zero=3, microbatch=1, precision="bf16")


def bytes_a_parameter(plan: Plan, axis: str) -> float:
    listed = traffic(LLAMA, plan, 8192)
    return sum(each.total_bytes for each in listed if each.axis == axis) / count(LLAMA)


@pytest.mark.parametrize(
    ("form", "each"),
    # A scale of four bytes for at most 128 elements (fewer in rows of 14,336) beside codes of 8 or 4 bits.
    [("bf16", 2.0), ("int8", 1.0), ("int4", 0.5)],
)
def test_a_rounded_gradient_goes_there_and_back_in_its_own_width(form, each):
    scales = 0.04 if form.startswith("int") else 0.0
    plan = msgspec.structs.replace(REPLICAS, grad_reduce=form)
    assert 2 * each <= bytes_a_parameter(plan, "replicate") <= 2 * (each + scales) * 1.001
    sharded = msgspec.structs.replace(SHARDS, grad_reduce=form, zero=1)
    exact = bytes_a_parameter(msgspec.structs.replace(SHARDS, zero=1), "shard")
    assert exact - 4 + each <= bytes_a_parameter(sharded, "shard") <= exact - 4 + (each + scales) * 1.001


def test_zeropp_sends_a_quarter_of_what_zero_3_sends_between_nodes():
    """The paper's 4 ×: from 3 M to 0.75 M numbers of two bytes. With gradients in fp32 it is more: 8 to 1.6 bytes."""
    plain = bytes_a_parameter(SHARDS, "shard")
    all_three = msgspec.structs.replace(SHARDS, gather="int8", grad_reduce="int4", secondary_shard=8)
    assert plain == pytest.approx(2 + 2 + 4, rel=0.1)  # what is outside the blocks is gathered once
    assert bytes_a_parameter(all_three, "shard") == pytest.approx(1 + 0.5, rel=0.1)
    assert bytes_a_parameter(all_three, "secondary") == pytest.approx(2, rel=0.15)
    in_levels = msgspec.structs.replace(all_three, grad_reduce_node=8)
    assert bytes_a_parameter(in_levels, "shard") == pytest.approx(1, rel=0.1)
    assert bytes_a_parameter(in_levels, "node") == pytest.approx(0.5, rel=0.1)
    assert bytes_a_parameter(in_levels, "between_nodes") == pytest.approx(0.5 / 8, rel=0.1)


def test_a_node_that_sums_first_sends_a_shard_to_each_other_node_in_the_place_of_one_to_each_of_its_ranks():
    rounded = msgspec.structs.replace(SHARDS, grad_reduce="int8")
    nodes = msgspec.structs.replace(rounded, grad_reduce_node=8)
    once = bytes_a_parameter(rounded, "shard") - bytes_a_parameter(nodes, "shard")  # the rest are gathers
    assert bytes_a_parameter(nodes, "node") == pytest.approx(once)  # which goes through links inside the node alone
    assert bytes_a_parameter(nodes, "between_nodes") == pytest.approx(once / 8)
    machines = cluster("4x8xh100")
    spans = {axis: axis_span(axis, nodes, machines) for axis in ("shard", "node", "between_nodes")}
    assert {axis: (each.local, each.domains) for axis, each in spans.items()} == {
        "shard": (8, 4),
        "node": (8, 1),
        "between_nodes": (1, 4),
    }

    def seconds(plan: Plan) -> float:
        calls = [each for each in traffic(LLAMA, plan, 8192) if each.kind == "all_to_all"]
        return sum(call_seconds(each, plan, machines) for each in calls)

    assert seconds(nodes) < seconds(rounded) / 3


def test_powersgd_sends_rank_times_the_sides_of_a_matrix():
    found = bytes_a_parameter(msgspec.structs.replace(REPLICAS, powersgd=4), "replicate")
    assert found < 4 / 300


def test_of_powersgd_the_ranks_of_a_replica_send_a_share_of_the_factors_each():
    alone = msgspec.structs.replace(REPLICAS, powersgd=4)
    sharded = msgspec.structs.replace(alone, shard=8, zero=2)
    cut = msgspec.structs.replace(alone, tp=8)
    one, *shares = (bytes_a_parameter(plan, "replicate") for plan in (alone, sharded, cut))
    assert shares == pytest.approx([one / 8, one / 8], rel=1e-3)
    seconds = owed(alone) - 4  # the factors that a step begins with, whole on every rank
    assert [owed(plan) for plan in (sharded, cut)] == pytest.approx([4 / 8 + seconds] * 2, rel=1e-3)


def owed(plan: Plan) -> float:
    lines = states(LLAMA, plan, layout=layout_of(plan))
    return sum(line.bytes for line in lines if line.name == "error_feedback") / count(LLAMA)


def test_errors_take_a_gradient_of_what_a_rank_gives_and_its_part_of_the_sum():
    assert owed(REPLICAS) == 0
    assert owed(msgspec.structs.replace(REPLICAS, grad_reduce="int8")) == pytest.approx(4 + 4 / 8, rel=1e-3)
    assert owed(msgspec.structs.replace(SHARDS, grad_reduce="int8")) == pytest.approx(4, rel=1e-3)
    nodes = msgspec.structs.replace(SHARDS, grad_reduce="int8", grad_reduce_node=8)
    assert owed(nodes) == pytest.approx(4 + 4 / 8, rel=1e-3)  # of its node's sum, a shard for each of four nodes
    hybrid = msgspec.structs.replace(SHARDS, replicate=4, shard=8, grad_reduce="int8")
    assert owed(hybrid) == pytest.approx(4 + 4 / 8 * (1 + 1 / 4), rel=1e-3)
    assert owed(msgspec.structs.replace(hybrid, error_feedback=False)) == 0
    assert 4 < owed(msgspec.structs.replace(REPLICAS, powersgd=4)) < 4.02


def test_a_secondary_shard_is_held_between_forward_and_backward():
    def gathered(plan: Plan) -> int:
        return next(line.bytes for line in states(LLAMA, plan) if line.name == "all_gathered_params")

    more = gathered(msgspec.structs.replace(SHARDS, secondary_shard=8)) - gathered(SHARDS)
    assert more == pytest.approx(2 * count(LLAMA) / 8, rel=0.15)  # of the blocks


def test_rounding_takes_time_and_its_absence_none():
    gpu = cluster("1xh100").gpu
    at = rates(gpu, efficiency_of(gpu), "bf16")

    def seconds(plan: Plan) -> float:
        found = rounding_seconds(RankView(arch=LLAMA, plan=plan, sequence=1), at)
        return found.gather + found.reduce + found.copies

    assert seconds(REPLICAS) == 0.0
    one, fed = (
        seconds(msgspec.structs.replace(REPLICAS, grad_reduce="int8", error_feedback=each)) for each in (False, True)
    )
    assert 0 < one < fed
    assert fed == pytest.approx(count(LLAMA) * (44 + 57 + 37 + 101 / 8 + 25) / at.bandwidth, rel=1e-3)
    assert 0 < seconds(msgspec.structs.replace(REPLICAS, powersgd=4)) < fed
    once = msgspec.structs.replace(SHARDS, grad_reduce="int8")
    twice = msgspec.structs.replace(once, grad_reduce_node=8)
    assert seconds(twice) == pytest.approx(seconds(once) * (1 + 1 / 8), rel=1e-9)
