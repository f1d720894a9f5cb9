"""What lies outside the device, and what it costs in time."""

import msgspec
import pytest

from meshwright.cost.job import Job
from meshwright.cost.memory import fits, ledger
from meshwright.cost.memory_kept import block_kept, moved_bytes
from meshwright.cost.memory_work import work_of
from meshwright.cost.time import Price, price
from meshwright.cost.time_away import exposed_update, offload_seconds, rate
from meshwright.cost.time_bound import lower_bound, work_bound
from meshwright.cost.time_layer import bench, block
from meshwright.spec.cluster import cluster
from meshwright.spec.params import count
from meshwright.spec.plan import Plan
from meshwright.spec.stack import stacks
from meshwright.spec.zoo import preset

ARCH = preset("llama3-8b")
WHOLE = count(ARCH)
OFFLOADED = {"shadow": True, "offload": "host"}


def job(machines: str = "1xh100", **fields: object) -> Job:
    plan = msgspec.convert({"microbatch": 1, "precision": "bf16", **fields}, Plan)
    return Job(arch=ARCH, plan=plan, sequence=4096, cluster=cluster(machines), stack=stacks()["meshwright"])


def share(answer: Price, name: str) -> float:
    return sum(each.seconds for each in answer.waterfall if each.name == name)


def host(asked: Job) -> dict[str, int]:
    return {line.name: line.bytes for line in ledger(asked).away.host}


def test_offloaded_states_are_twelve_bytes_a_parameter_or_six():
    assert host(job(**OFFLOADED))["states"] == 12 * WHOLE
    assert host(msgspec.structs.replace(job(**OFFLOADED), states="bf16"))["states"] == 6 * WHOLE


def test_a_disk_has_what_host_memory_has_not():
    found = ledger(job(shadow=True, offload="disk", offload_host_bytes=10**10)).away
    near = {line.name: line.bytes for line in found.host}["states"]
    assert near == 10**10
    assert near + found.disk_bytes == 12 * WHOLE


@pytest.mark.parametrize(("room", "word"), [("host_bytes", "host memory"), ("disk_bytes", "disk")])
def test_a_place_that_is_too_small_is_named(room, word):
    asked = job(shadow=True, offload="disk")
    assert fits(asked).fits
    small = msgspec.structs.replace(asked.cluster, **{room: 1e9})
    found = fits(msgspec.structs.replace(asked, cluster=small))
    assert not found.fits
    assert found.headroom_bytes > 0, "the device itself has room"
    assert word in found.why


def test_a_host_of_which_nobody_knows_is_not_called_too_small():
    asked = job(**OFFLOADED)
    unknown = msgspec.structs.replace(asked.cluster, host_bytes=0.0)
    assert fits(msgspec.structs.replace(asked, cluster=unknown)).fits


def test_activations_travel_beyond_what_a_block_computes():
    kept, sent = job(), job(activations="host")
    one = block(bench(kept), False)
    travels = moved_bytes(work_of(sent), block_kept(work_of(sent), False), False) / rate(sent.cluster.host)
    forward, backward = one.forward.seconds, one.seconds - one.forward.seconds
    expected = ARCH.layers * (max(travels - forward, 0) + max(travels - backward, 0))
    assert expected > 0
    assert share(price(sent), "link") == pytest.approx(expected)
    assert price(sent).seconds == pytest.approx(price(kept).seconds + expected, rel=0.02)  # stragglers wait too


def test_a_slower_link_never_helps():
    asked = job(activations="host")
    slow = msgspec.structs.replace(asked.cluster, host=msgspec.structs.replace(asked.cluster.host, bandwidth=8e9))
    assert price(msgspec.structs.replace(asked, cluster=slow)).seconds > price(asked).seconds


@pytest.mark.parametrize("how", [{"activations": "host"}, {"compress": "int8"}, {"compress": "fp8"}])
@pytest.mark.parametrize("policy", ["none", "first-8", "full"])
def test_what_holds_less_is_never_faster(how, policy):
    plain, helped = (job(recompute=policy, microbatch=8, **more) for more in ({}, how))
    assert price(helped).seconds >= price(plain).seconds
    if policy != "full":  # inputs alone weigh less than reading a tensor from its codes takes
        assert ledger(helped).allocated < ledger(plain).allocated


def test_an_update_is_as_slow_as_its_slowest_part():
    machines = cluster("1xh200")
    by_device = Plan(microbatch=1, precision="bf16", shadow=True, offload="host", offload_update="device")
    seconds = offload_seconds(by_device, 1e9, machines, "fp32")
    assert seconds == pytest.approx(12e9 / (0.87 * 63e9))
    assert offload_seconds(by_device, 1e9, machines, "bf16") == pytest.approx(seconds / 2)
    by_disk = msgspec.structs.replace(by_device, offload="disk")
    assert offload_seconds(by_disk, 1e9, machines, "fp32") == pytest.approx(24e9 / machines.disk_bandwidth)
    half = msgspec.structs.replace(by_disk, offload_host_bytes=6 * 10**9)
    assert offload_seconds(half, 1e9, machines, "fp32") == pytest.approx(12e9 / machines.disk_bandwidth)


def test_the_next_forward_hides_all_of_an_update_but_a_block_of_it():
    assert exposed_update(1.0, 100.0, 32) == 1 / 32
    assert exposed_update(100.0, 32.0, 32) == 100 - 31


def test_a_step_waits_for_the_update_elsewhere_and_not_for_one_here():
    found = price(job(**OFFLOADED))
    assert share(found, "offload") > 0
    assert share(found, "optimizer") == 0
    assert sum(each.seconds for each in found.waterfall) == pytest.approx(found.seconds)


@pytest.mark.parametrize(
    "fields",
    [
        OFFLOADED,
        {**OFFLOADED, "offload_update": "device", "accumulate": 4},
        {"activations": "host", "recompute": "full"},
        {"activations": "host", "pp": 4, "stages": (9, 9, 8, 6), "accumulate": 8, "schedule": "zb1p"},
        {"activations": "host", "shard": 8, "zero": 3},
    ],
)
def test_the_bounds_hold_away_from_the_device_too(fields):
    asked = job("64xh100", **fields)
    seconds = price(asked).seconds * (1 + 1e-9)
    assert work_bound(asked) <= seconds
    assert lower_bound(asked) <= seconds


def test_rounding_saves_bytes_and_without_its_kernel_costs_passes():
    for kernels in ("auto", "plain"):
        master = job(shadow=True, kernels=kernels)
        rounded = msgspec.structs.replace(master, rounding="compensated")
        dearer = share(price(rounded), "optimizer") > share(price(master), "optimizer")
        assert dearer is (kernels == "plain")
        assert ledger(rounded).allocated < ledger(master).allocated
