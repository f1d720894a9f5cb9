import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.primitives import (
    GroupSpan,
    axis_span,
    bus_bandwidth,
    call_seconds,
    collective_seconds,
    inside_seconds,
    span,
)
from meshwright.cost.traffic import Collective
from meshwright.hardware.cluster import Cluster, Gpu, Link
from meshwright.spec.plan import Plan

GPU = Gpu(name="x", match=(), memory_bytes=1e9, bandwidth=1e12, fp32=1e12)
NODE = Cluster(
    name="two nodes",
    gpu=GPU,
    gpus=16,
    domain=8,
    per_node=8,
    scale_up=Link(name="inside", bandwidth=200e9, latency=2e-6, efficiency=0.5),
    network=Link(name="outside", bandwidth=20e9, latency=10e-6, efficiency=0.5),
    host=Link(name="host", bandwidth=50e9, latency=1e-6),
)
some = settings(deadline=None, max_examples=60, derandomize=True)
powers = st.integers(0, 6).map(lambda exponent: 2**exponent)


@pytest.mark.parametrize(
    ("ranks", "stride", "local", "domains"),
    [
        *((8, 1, 8, 1), (16, 1, 8, 2), (4, 2, 4, 1), (8, 2, 4, 2), (2, 8, 1, 2), (4, 16, 1, 4)),
        *((3, 1, 1, 3), (12, 1, 4, 3), (24, 1, 8, 3)),
    ],
)
def test_ranks_fill_one_domain_after_the_other(ranks, stride, local, domains):
    assert span(ranks, stride, domain=8) == GroupSpan(local=local, domains=domains)


@given(ranks=powers, stride=powers)
@some
def test_a_span_has_all_its_ranks(ranks, stride):
    assert span(ranks, stride, domain=8).ranks == ranks


def test_axes_lie_from_pp_outside_to_tp_inside():
    plan = Plan(pp=2, replicate=2, shard=4, zero=3, tp=4, microbatch=1)
    assert axis_span("tp", plan, NODE) == GroupSpan(local=4, domains=1)
    assert axis_span("shard", plan, NODE) == GroupSpan(local=2, domains=2)  # every 4th rank: two of them in a node of 8
    assert axis_span("replicate", plan, NODE) == GroupSpan(local=1, domains=2)
    assert axis_span("pp", plan, NODE) == GroupSpan(local=1, domains=2)


def test_a_pipeline_across_nodes_is_as_slow_as_the_message_between_them():
    within = Plan(pp=4, cp=2, microbatch=1)
    assert axis_span("pp", within, NODE) == GroupSpan(local=2, domains=1)
    across = Plan(pp=4, cp=4, microbatch=1)  # two stages a node
    assert axis_span("pp", across, NODE) == GroupSpan(local=1, domains=2)


def test_groups_that_do_not_fill_a_node_lie_across_its_border():
    many = Plan(replicate=8, tp=3, microbatch=1)  # 24 ranks: 6, 7 and 8 are a group
    assert axis_span("tp", many, NODE).domains > 1
    few = Plan(replicate=2, tp=3, microbatch=1)  # all in one node
    assert axis_span("tp", few, NODE) == GroupSpan(local=3, domains=1)
    assert span(64, 1, domain=72) == GroupSpan(local=64, domains=1)


def test_copies_without_sharding_are_neighbours_but_for_tp():
    plan = Plan(replicate=8, tp=2, microbatch=1)
    assert axis_span("replicate", plan, NODE) == GroupSpan(local=4, domains=2)


def test_a_ring_in_a_node_by_hand():
    seconds = collective_seconds("all_gather", 800e6, GroupSpan(local=8, domains=1), NODE)
    assert seconds == pytest.approx(7 / 8 * 800e6 / 100e9 + 7 * 2e-6)


def test_an_all_reduce_is_two_passes():
    over = GroupSpan(local=8, domains=1)
    once = collective_seconds("reduce_scatter", 1e9, over, NODE)
    assert collective_seconds("all_reduce", 1e9, over, NODE) == pytest.approx(2 * once)


def test_across_nodes_every_local_rank_brings_its_own_network_card():
    assert bus_bandwidth(GroupSpan(local=1, domains=2), NODE) == 10e9
    assert bus_bandwidth(GroupSpan(local=8, domains=2), NODE) == 80e9
    fast = msgspec.structs.replace(NODE, network=NODE.scale_up)
    assert bus_bandwidth(GroupSpan(local=8, domains=2), fast) == 100e9  # the way inside the node binds


def test_a_message_between_nodes_uses_one_card():
    assert collective_seconds("send", 1e9, GroupSpan(local=1, domains=2), NODE) == pytest.approx(10e-6 + 1e9 / 10e9)


def test_an_exchange_leaves_the_node_through_each_ranks_own_card():
    seconds = collective_seconds("all_to_all", 16e6, GroupSpan(local=8, domains=2), NODE)
    assert seconds == pytest.approx(8e6 / 10e9 + 10e-6)


@given(kind=st.sampled_from(["all_gather", "all_reduce", "all_to_all", "send"]), size=st.floats(0, 1e10))
@some
def test_one_rank_sends_nothing(kind, size):
    assert collective_seconds(kind, size, GroupSpan(local=1, domains=1), NODE) == 0


@given(
    size=st.floats(1, 1e10),
    more=st.floats(1, 10),
    over=st.sampled_from([GroupSpan(local=8, domains=d) for d in (1, 4)]),
)
@some
def test_more_bytes_take_no_less_time(size, more, over):
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"):
        assert collective_seconds(kind, size * more, over, NODE) >= collective_seconds(kind, size, over, NODE)


def test_parts_pay_latency_only():
    call = Collective(kind="all_gather", axis="shard", count=3, bytes=10**9)
    plan = Plan(shard=16, zero=3, microbatch=1)
    whole, parted = call_seconds(call, plan, NODE), call_seconds(call, plan, NODE, parts=5)
    latency = 10e-6 + 7 * 2e-6  # one hop between the nodes, seven inside
    assert parted - whole == pytest.approx(3 * 4 * latency)


def test_small_sums_climb_a_tree_of_nodes():
    over = GroupSpan(local=1, domains=64)
    assert collective_seconds("all_reduce", 0, over, NODE) == pytest.approx(2 * math.log2(64) * 10e-6)
    assert collective_seconds("all_gather", 0, over, NODE) == pytest.approx(63 * 10e-6)


def test_bytes_inside_a_node_do_not_feel_the_network():
    call = Collective(kind="all_reduce", axis="replicate", count=2, bytes=10**9)
    plan = Plan(replicate=16, microbatch=1)
    assert inside_seconds(call, plan, NODE) == pytest.approx(2 * 2 * 10**9 * 15 / 16 / 100e9)
