"""What lies outside the device, and what it costs in time."""

import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.activations import block_saved, microbatch_shape, moved_bytes
from meshwright.cost.job import Job
from meshwright.cost.layer_time import block, layer_model
from meshwright.cost.layout import layout_of
from meshwright.cost.memory import fits, ledger
from meshwright.cost.primitives import achieved
from meshwright.cost.step_time import Price, lower_bound, price, work_bound
from meshwright.cost.weight_time import HostTransfers, exposed_travels, exposed_update, offload_seconds, travels
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stacks
from meshwright.spec.params import count
from meshwright.spec.plan import Plan

ARCH = preset("llama3-8b")
WHOLE = count(ARCH)
HOSTED = {"zero": 3, "cpu_offload": True}
OFFLOADED = {"bf16_params": True, "optimizer_offload": "host"}


def job(machines: str = "1xh100", **fields: object) -> Job:
    plan = msgspec.convert({"microbatch": 1, "precision": "bf16", **fields}, Plan)
    return Job(arch=ARCH, plan=plan, sequence=4096, cluster=cluster(machines), stack=stacks()["meshwright"])


def share(answer: Price, name: str) -> float:
    return sum(each.seconds for each in answer.waterfall if each.name == name)


def host(asked: Job) -> dict[str, int]:
    return {line.name: line.bytes for line in ledger(asked).offloaded.host}


def test_offloaded_states_are_twelve_bytes_a_parameter_or_six():
    assert host(job(**OFFLOADED))["states"] == 12 * WHOLE
    assert host(msgspec.structs.replace(job(**OFFLOADED), state_dtype="bf16"))["states"] == 6 * WHOLE


def test_a_disk_has_what_host_memory_has_not():
    found = ledger(job(bf16_params=True, optimizer_offload="disk", optimizer_offload_host_bytes=10**10)).offloaded
    near = {line.name: line.bytes for line in found.host}["states"]
    assert near == 10**10
    assert near + found.disk_bytes == 12 * WHOLE


@pytest.mark.parametrize(("room", "word"), [("host_bytes", "host RAM"), ("disk_bytes", "disk")])
def test_a_place_that_is_too_small_is_named(room, word):
    asked = job(bf16_params=True, optimizer_offload="disk")
    assert fits(asked).fits
    small = msgspec.structs.replace(asked.cluster, **{room: 1e9})
    found = fits(msgspec.structs.replace(asked, cluster=small))
    assert not found.fits
    assert found.headroom_bytes > 0, "the device itself has room"
    assert word in found.why


def test_a_host_of_which_nobody_knows_is_not_called_too_small():
    asked = job(**OFFLOADED)
    unknown = msgspec.structs.replace(asked.cluster, host_bytes=0.0)
    found = fits(msgspec.structs.replace(asked, cluster=unknown))
    assert found.fits is None
    assert found.host_question is not None
    assert "goal.host_gib=" in found.host_question


def test_activations_travel_beyond_what_a_block_computes():
    kept, sent = job(), job(activation_offload=True)
    one = block(layer_model(kept), False)
    travels = moved_bytes(microbatch_shape(sent), block_saved(microbatch_shape(sent), False), False) / achieved(
        sent.cluster.host
    )
    forward, backward = one.forward.seconds, one.seconds - one.forward.seconds
    expected = ARCH.layers * (max(travels - forward, 0) + max(travels - backward, 0))
    assert expected > 0
    assert share(price(sent), "host_transfer") == pytest.approx(expected)
    assert price(sent).seconds == pytest.approx(price(kept).seconds + expected, rel=0.02)  # stragglers wait too


def test_a_slower_link_never_helps():
    asked = job(activation_offload=True)
    slow = msgspec.structs.replace(asked.cluster, host=msgspec.structs.replace(asked.cluster.host, bandwidth=8e9))
    assert price(msgspec.structs.replace(asked, cluster=slow)).seconds > price(asked).seconds


@pytest.mark.parametrize(
    "how", [{"activation_offload": True}, {"activation_quant": "int8"}, {"activation_quant": "fp8"}]
)
@pytest.mark.parametrize("policy", ["none", "first-8", "full"])
def test_what_holds_less_is_never_faster(how, policy):
    plain, helped = (job(recompute=policy, microbatch=8, **more) for more in ({}, how))
    assert price(helped).seconds >= price(plain).seconds
    if policy != "full":  # inputs alone weigh less than reading a tensor from its codes takes
        assert ledger(helped).allocated < ledger(plain).allocated


def test_an_update_is_as_slow_as_its_slowest_part():
    machines = cluster("1xh200")
    by_device = Plan(
        microbatch=1, precision="bf16", bf16_params=True, optimizer_offload="host", optimizer_offload_update="device"
    )
    seconds = offload_seconds(layout_of(by_device), 1e9, machines)
    assert seconds == pytest.approx(12e9 / (0.87 * 63e9))
    assert offload_seconds(layout_of(by_device, state_dtype="bf16"), 1e9, machines) == pytest.approx(seconds / 2)
    by_disk = msgspec.structs.replace(by_device, optimizer_offload="disk")
    assert offload_seconds(layout_of(by_disk), 1e9, machines) == pytest.approx(24e9 / machines.disk_bandwidth)
    half = msgspec.structs.replace(by_disk, optimizer_offload_host_bytes=6 * 10**9)
    assert offload_seconds(layout_of(half), 1e9, machines) == pytest.approx(12e9 / machines.disk_bandwidth)


def test_hosted_weights_take_sixteen_bytes_a_parameter_of_the_host_and_none_of_the_device():
    asked = job("8xh100", **HOSTED, shard=8)
    near = {line.name: line.bytes for line in ledger(asked).lines}
    assert near["weights"] == near["gradients"] == near["moments"] == 0
    # Vectors are the only ones that eight ranks could not share evenly, and here they can.
    assert host(asked) == {"weights": WHOLE // 2, "gradients": WHOLE // 2, "moments": WHOLE}
    plain = {line.name: line.bytes for line in ledger(job("8xh100", zero=3, shard=8)).lines}
    assert near["all_gathered_params"] == plain["all_gathered_params"]
    assert near["reduce_buffers"] > plain["reduce_buffers"], (
        "weights that arrive and gradients that leave pass through the device"
    )


def test_a_model_whose_weights_alone_are_too_large_fits_by_one_block():
    large = msgspec.structs.replace(job(**HOSTED, recompute="full"), arch=preset("llama3-70b"))
    assert 2 * count(large.arch) > large.cluster.gpu.memory_bytes
    roomy = msgspec.structs.replace(large.cluster, host_bytes=2e12)
    found = fits(msgspec.structs.replace(large, cluster=roomy))
    assert found.fits, found.why
    small = fits(msgspec.structs.replace(large, cluster=msgspec.structs.replace(roomy, host_bytes=1e12)))
    assert not small.fits
    assert "host RAM" in small.why


def test_hosted_weights_arrive_twice_and_their_gradients_leave_once_a_microbatch():
    machines, plan = cluster("8xh100"), msgspec.convert({"microbatch": 1, "precision": "bf16", **HOSTED}, Plan)
    once = travels(plan, layout_of(plan), 1e9, machines)
    assert once.arrive == pytest.approx(2 * once.leave) == pytest.approx(8e9 / achieved(machines.host))
    several = msgspec.structs.replace(plan, grad_accum=4)
    more = travels(several, layout_of(several), 1e9, machines)
    assert (more.arrive, more.leave, more.update) == (4 * once.arrive, 4 * once.leave, once.update)
    replicated = msgspec.structs.replace(several, replicate=2)
    copied = travels(replicated, layout_of(replicated), 1e9, machines)
    assert copied.leave == once.leave, "sums over copies are made on the device"


def test_ranks_that_share_weights_hide_their_arrival_and_a_lone_one_does_not():
    each = HostTransfers(arrive=2.0, leave=1.0, update=0.5)
    alone, shared = (Plan(microbatch=1, zero=3, shard=shard, cpu_offload=True) for shard in (1, 2))
    assert exposed_travels(each, alone, 100.0, 100.0) == 2.5
    assert exposed_travels(each, shared, 100.0, 100.0) == 0.5
    assert exposed_travels(each, shared, 0.25, 0.25) == 0.5 + 0.75 + 0.75
    twice = msgspec.structs.replace(shared, grad_accum=2)
    assert exposed_travels(each, twice, 100.0, 100.0) == 1.0, "the second gradient is added on the host"


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
        HOSTED,
        {**HOSTED, "shard": 8, "grad_accum": 4},
        {**HOSTED, "replicate": 2, "shard": 4, "grad_accum": 2},
        {**OFFLOADED, "optimizer_offload_update": "device", "grad_accum": 4},
        {"activation_offload": True, "recompute": "full"},
        {"activation_offload": True, "pp": 4, "stages": (9, 9, 8, 6), "grad_accum": 8, "schedule": "zb1p"},
        {"activation_offload": True, "shard": 8, "zero": 3},
    ],
)
def test_the_bounds_hold_away_from_the_device_too(fields):
    asked = job("64xh100", **fields)
    seconds = price(asked).seconds * (1 + 1e-9)
    assert work_bound(asked) <= seconds
    assert lower_bound(asked) <= seconds


def test_rounding_saves_bytes_and_without_its_kernel_costs_passes():
    for kernels in ("auto", "plain"):
        master = job(bf16_params=True, kernels=kernels)
        rounded = msgspec.structs.replace(master, master_weights="split")
        dearer = share(price(rounded), "optimizer") > share(price(master), "optimizer")
        assert dearer is (kernels == "plain")
        assert ledger(rounded).allocated < ledger(master).allocated
