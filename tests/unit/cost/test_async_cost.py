"""What asynchronous replicas and 1-bit optimizers cost on paper: bytes on the host, and what arithmetic hides."""

import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.job import Job
from meshwright.cost.memory import fits, ledger
from meshwright.cost.step_time import price
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.spec.params import count
from meshwright.spec.plan import Plan

PLAIN = Plan(microbatch=4, replicate=8, precision="bf16")


def job(optimizer="adamw", machines="8xh100", gigabits=0.0, **fields):
    plan, over = msgspec.structs.replace(PLAIN, **fields), cluster(machines)
    if gigabits:
        over = msgspec.structs.replace(
            over, network=msgspec.structs.replace(over.network, bandwidth=gigabits * 1e9 / 8)
        )
    stack = stack_of("meshwright")
    return Job(arch=preset("gpt2"), plan=plan, sequence=1024, cluster=over, stack=stack, optimizer=optimizer)


def waterfall(of):
    return {share.name: share.seconds for share in price(of).waterfall}


def test_a_servers_rows_are_on_the_host_and_nothing_of_the_optimizer_on_the_device():
    found = {bound: ledger(job(staleness=bound)) for bound in (0, 3)}
    parameters = count(preset("gpt2"))
    for bound, each in found.items():
        lines = {line.name: line.bytes for line in each.offloaded.host}
        assert lines["weights"] == pytest.approx(parameters * 4 / 8, rel=0.02)
        assert lines["moments"] == 2 * lines["weights"]
        assert lines["pieces"] == pytest.approx((2 * (bound + 1) + 2) * parameters * 4, rel=0.02)
        assert {line.name: line.bytes for line in each.lines}.get("moments", 0) == 0
    assert fits(job(staleness=0)).fits


def test_staleness_hides_the_way_to_the_servers_behind_arithmetic():
    waited, hidden = (waterfall(job(staleness=bound)).get("outer", 0.0) for bound in (0, 1))
    plain = waterfall(job())
    assert waited > hidden >= 0
    assert waited - hidden <= 1.01 * sum(
        plain[name] for name in ("ideal", "matmul", "attention", "elementwise", "launch")
    )
    assert "optimizer" not in waterfall(job(staleness=0))


def test_one_bit_is_worth_it_on_a_slow_network_alone():
    names = ("adamw", "onebit_adam")
    near = {name: price(job(name)).seconds for name in names}
    far = {name: price(job(name, "2x1xh100", 1.0, replicate=2)).seconds for name in names}
    assert near["onebit_adam"] > near["adamw"]  # packing bits takes longer than NVLink
    assert far["onebit_adam"] < far["adamw"]
    assert waterfall(job("onebit_adam", "2x1xh100", 1.0, replicate=2)).get("replicate", 0.0) == 0
    hybrid = {"replicate": 2, "shard": 8, "zero": 2}  # shards inside nodes, whose gradients are summed as ever
    exact, signs = (waterfall(job(name, "2x8xh100", 10.0, **hybrid)) for name in names)
    assert signs.get("replicate", 0.0) == 0
    assert signs.get("shard", 0.0) == pytest.approx(exact.get("shard", 0.0))
    assert signs["optimizer"] < exact["optimizer"] + exact["replicate"]
