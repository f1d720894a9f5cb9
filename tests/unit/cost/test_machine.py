import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.calibrate import machine
from meshwright.cost.job import Job
from meshwright.cost.primitives import GroupSpan, collective_seconds
from meshwright.cost.step_time import price
from meshwright.hardware.profile import AttentionTime, CollectiveTime, MatmulTime, Profile
from meshwright.hardware.stacks import stacks
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

OURS = stacks()["meshwright"]
RATE, LAUNCH = 60e9, 2e-6


def product(m: int, n: int, k: int) -> MatmulTime:
    return MatmulTime(m=m, n=n, k=k, dtype="fp32", seconds=max(2 * m * n * k / RATE, LAUNCH))


def attention(sequence: int) -> AttentionTime:
    forward = 2 * 4 * 64 * sequence**2 / (RATE / 2)
    shape = {"batch": 1, "heads": 4, "kv_heads": 4, "sequence": sequence, "head_dim": 64}
    times = {"forward_seconds": forward, "backward_seconds": 3 * forward}
    return AttentionTime(**shape, **times, backend="flash", dtype="fp32")


def profile(*collectives: CollectiveTime, ranks: int = 2) -> Profile:
    return Profile(
        device="cpu",
        matmuls=tuple(product(m, n, k) for m in (64, 256, 1024) for n in (64, 1024) for k in (64, 1024)),
        attention=tuple(map(attention, (64, 256, 1024))),
        collectives=collectives,
        copy_bandwidth=20e9,
        launch_seconds=LAUNCH,
        threads=1,
        ranks=ranks,
    )


def sums(latency: float, bandwidth: float, domains: int = 1) -> list[CollectiveTime]:
    return [
        CollectiveTime(kind="all_reduce", ranks=2, bytes=size, seconds=2 * latency + size / bandwidth, domains=domains)
        for size in (1e3, 1e5, 1e6, 1e7)
    ]


def job(found: Profile, **plan: int) -> Job:
    fields = Plan(microbatch=1, precision="fp32", **plan)
    return Job(arch=preset("tiny"), plan=fields, sequence=64, cluster=machine(found, fields.world, OURS), stack=OURS)


def test_a_cpus_peak_is_its_fastest_product():
    found = machine(profile(), 1, OURS)
    assert found.gpu.fp32 == pytest.approx(RATE)
    assert found.gpu.peak("bf16") == 0, "none was measured"
    assert found.efficiency is not None
    assert found.efficiency.product == pytest.approx(1.0, rel=0.05)


def test_a_step_on_it_takes_at_least_its_operations():
    priced = price(job(profile()))
    assert 0 < priced.mfu < 1


def test_a_slower_device_takes_longer_in_proportion():
    slow = [msgspec.structs.replace(each, seconds=10 * each.seconds) for each in profile().matmuls]
    slower = msgspec.structs.replace(profile(), matmuls=tuple(slow), copy_bandwidth=2e9)
    assert price(job(slower)).seconds > 4 * price(job(profile())).seconds


def test_its_collectives_are_its_links():
    found = machine(profile(*sums(1e-4, 1e9)), 2, OURS)
    for size in (1e3, 1e7):
        expected = 2e-4 + size / 1e9
        seconds = collective_seconds("all_reduce", size, GroupSpan(local=2, domains=1), found)
        assert seconds == pytest.approx(expected, rel=0.05)  # the search's last steps are a fifth of a percent
    quick, slow = (price(job(profile(*sums(1e-4, rate)), replicate=2)).seconds for rate in (1e10, 1e7))
    assert slow > 1.5 * quick


def test_ranks_on_two_nodes_speak_over_the_network():
    found = machine(profile(*sums(1e-4, 1e8, domains=2)), 2, OURS)
    assert (found.domain, found.nodes) == (1, 2)
    assert found.network.bandwidth * found.network.efficiency == pytest.approx(1e8, rel=0.05)


def test_a_profile_without_products_is_refused():
    with pytest.raises(InputError, match="no matmuls"):
        machine(Profile(device="cpu"), 1, OURS)
