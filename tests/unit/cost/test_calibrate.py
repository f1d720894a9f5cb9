from pathlib import Path

import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.calibrate import (
    beyond_launch,
    calibrated,
    calibrated_cluster,
    fastest,
    least,
    matmul_errors,
    measured,
)
from meshwright.cost.job import Job
from meshwright.cost.primitives import GroupSpan, collective_seconds, flash_seconds, matmul_seconds, rates
from meshwright.cost.step_time import lower_bound, price
from meshwright.hardware.cluster import cluster
from meshwright.hardware.profile import AttentionTime, CollectiveTime, MatmulTime, Profile, read_profile
from meshwright.hardware.stacks import efficiency_of, stacks
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

HERE = Path(__file__).parents[3]
PROFILE = HERE / "results" / "profile-h200.json"
NODE = cluster("8xh100")
GPU = NODE.gpu
USUAL = efficiency_of(GPU)
OTHER = msgspec.structs.replace(
    USUAL, product=0.5, wave=1e6, depth=500.0, attention_forward=0.2, attention_backward=0.15, memory=0.6
)


def profile_of(efficiency) -> Profile:
    """What a machine of these efficiencies would show."""
    at = rates(GPU, efficiency, "bf16")
    sizes = [(m, n, k) for m in (2048, 8192) for n in (1024, 4096, 14336) for k in (1024, 8192)]
    matmuls = [MatmulTime(m=m, n=n, k=k, dtype="bf16", seconds=matmul_seconds(m, n, k, at)) for m, n, k in sizes]
    attention = []
    for sequence in (2048, 8192, 32768):
        forward, backward = flash_seconds(sequence, sequence, 32 * 128, at)
        attention.append(
            AttentionTime(
                batch=1,
                heads=32,
                kv_heads=8,
                sequence=sequence,
                head_dim=128,
                forward_seconds=forward,
                backward_seconds=backward,
                backend="flash",
            )
        )
    return Profile(
        device="a card",
        matmuls=tuple(matmuls),
        attention=tuple(attention),
        copy_bandwidth=GPU.bandwidth * efficiency.memory,
    )


def test_a_machines_own_efficiencies_are_found_from_its_times():
    found = calibrated(USUAL, GPU, profile_of(OTHER))
    assert found.memory == pytest.approx(OTHER.memory)
    # The search ends at steps of a fifth of a percent; wave and depth trade against each other, so times are compared.
    for name in ("product", "attention_forward", "attention_backward"):
        assert getattr(found, name) == pytest.approx(getattr(OTHER, name), rel=0.05)
    records = profile_of(OTHER).matmuls
    assert max(map(abs, matmul_errors(records, rates(GPU, found, "bf16")))) < 0.05


def test_what_was_not_measured_stays():
    assert calibrated(USUAL, GPU, Profile(device="a card")) == USUAL
    assert calibrated_cluster(NODE, Profile(device="a card")) == NODE


def test_times_of_the_host_say_nothing_of_the_device():
    records = [
        MatmulTime(m=m, n=512, k=512, dtype="bf16", seconds=s) for m, s in ((8, 3e-5), (64, 3.1e-5), (9999, 1e-3))
    ]
    assert [each.m for each in beyond_launch(records)] == [9999]


def test_links_are_found_from_collectives():
    slow = msgspec.structs.replace(NODE.scale_up, latency=20e-6, efficiency=0.3)
    machine = msgspec.structs.replace(NODE, scale_up=slow)
    over = GroupSpan(local=8, domains=1)
    records = [
        CollectiveTime(
            kind="all_gather", ranks=8, bytes=size, seconds=collective_seconds("all_gather", size, over, machine)
        )
        for size in (1e4, 1e6, 1e8, 1e9)
    ]
    found = calibrated_cluster(NODE, Profile(device="a card", collectives=tuple(records), host_bandwidth=40e9))
    assert found.scale_up.latency == pytest.approx(20e-6, rel=0.05)
    assert found.scale_up.efficiency == pytest.approx(0.3, rel=0.05)
    assert found.host.efficiency == pytest.approx(40e9 / NODE.host.bandwidth)
    assert found.network == NODE.network


def test_a_plan_is_priced_by_the_collectives_of_its_profile():
    arch, plan = preset("llama3-8b"), Plan(shard=8, zero=3, microbatch=1, precision="bf16")

    def seconds(bandwidth: float) -> float:
        records = [
            CollectiveTime(kind=kind, ranks=8, bytes=size, seconds=1e-5 + size * 7 / 8 / bandwidth)
            for kind in ("all_gather", "reduce_scatter")
            for size in (1e4, 1e6, 1e8)
        ]
        profile = Profile(device="NVIDIA H100 80GB HBM3", collectives=tuple(records))
        machines = measured(NODE, profile, stacks()["meshwright"])
        # The search's last steps are a fifth of a percent, and latency gives way to bandwidth a little.
        assert machines.scale_up.bandwidth * machines.scale_up.efficiency == pytest.approx(bandwidth, rel=0.05)
        assert machines.efficiency is None, "collectives say nothing of kernels"
        return price(Job(arch=arch, plan=plan, sequence=2048, cluster=machines, stack=stacks()["meshwright"])).seconds

    assert seconds(5e9) > 2 * seconds(300e9)


def test_products_of_a_cpu_are_judged_in_fp32():
    records = [
        MatmulTime(m=m, n=n, k=1024, dtype="fp32", seconds=2 * m * n * 1024 / (GPU.fp32 / 4))
        for m in (2048, 8192)
        for n in (1024, 4096, 14336)
    ]
    profile = Profile(device="a card", matmuls=tuple(records))
    assert calibrated(USUAL, GPU, profile) == USUAL, "a GPU is judged by its narrow matmuls"
    found = calibrated(USUAL, GPU, profile, precision="fp32")
    assert max(map(abs, matmul_errors(records, rates(GPU, found, "fp32")))) < 0.05


def test_the_search_finds_a_minimum_and_respects_bounds():
    def misfit(found):
        return abs(found["a"] - 3) + abs(found["b"] - 40)

    assert least(misfit, {"a": 1.0, "b": 1.0}) == pytest.approx({"a": 3, "b": 40}, rel=0.02)
    assert least(misfit, {"a": 1.0, "b": 1.0}, {"b": 10.0}) == pytest.approx({"a": 3, "b": 10}, rel=0.02)


def test_the_measured_h200_stands_behind_the_catalogues_entry():
    gpu = cluster("h200").gpu
    found = calibrated(efficiency_of(gpu), gpu, read_profile(PROFILE))
    # The entry is rounded, and its product allows for clocks that fall under longer load than a probe's.
    for name in ("product", "attention_forward", "attention_backward", "memory"):
        assert getattr(efficiency_of(gpu), name) == pytest.approx(getattr(found, name), rel=0.08)


def attention(backend: str, seconds: float, sequence: int) -> AttentionTime:
    shape = {"batch": 1, "heads": 32, "kv_heads": 8, "sequence": sequence, "head_dim": 128}
    return AttentionTime(**shape, forward_seconds=seconds, backward_seconds=3 * seconds, backend=backend)


def test_the_fastest_attention_is_judged_on_shapes_that_all_have():
    long = [attention("slow", 1.0, sequence) for sequence in (1024, 2048, 4096)]
    quick = [attention("quick", 0.5, sequence) for sequence in (1024, 2048, 4096, 1 << 20)]
    few = [attention("few", 0.1, 1024)]
    assert fastest([*long, *quick, *few]) == "quick", "one record is too few, and more shapes are no disadvantage"
    assert fastest([]) == ""


def test_a_measured_cluster_prices_attention_as_it_was_measured_whatever_the_stack():
    profile = read_profile(PROFILE)
    record = max((each for each in profile.attention if each.backend == "cudnn"), key=lambda each: each.sequence)
    for stack in ("meshwright", "torchtitan"):  # one has a factor of its own on attention, the other has none
        found = measured(cluster("h200"), profile, stacks()[stack])
        assert found.efficiency is not None
        at = rates(found.gpu, found.efficiency, "bf16")
        width = record.heads * record.head_dim
        forward, _ = flash_seconds(record.batch * record.sequence, record.sequence, width, at)
        # One constant for eight shapes, by the mean of their errors.
        assert forward / stacks()[stack].speed.attention == pytest.approx(record.forward_seconds, rel=0.15)


def test_the_price_uses_what_was_measured_on_the_cluster():
    usual = cluster("8xh200")
    slow = msgspec.structs.replace(efficiency_of(usual.gpu), product=0.1)
    plan = Plan(shard=8, zero=3, microbatch=1, precision="bf16")
    job = Job(arch=preset("llama3-8b"), plan=plan, sequence=8192, cluster=usual, stack=stacks()["meshwright"])
    other = msgspec.structs.replace(job, cluster=msgspec.structs.replace(usual, efficiency=slow))
    assert price(other) == price(other, slow)
    assert price(other).seconds == price(job, slow).seconds > 2 * price(job).seconds
    assert lower_bound(other) > 2 * lower_bound(job)


def test_a_step_on_the_measured_card_is_within_its_interval():
    # results/gpu.json: sixteen layers of Llama 3 8B's shape, one H200, compiled, selective: 0.397 s.
    arch = msgspec.structs.replace(preset("llama3-8b"), layers=16)
    plan = Plan(microbatch=1, precision="bf16", compile=True, bf16_params=True, recompute="selective")
    machines = measured(cluster("h200"), read_profile(PROFILE), stacks()["meshwright"])
    job = Job(arch=arch, plan=plan, sequence=8192, cluster=machines, stack=stacks()["meshwright"])
    assert price(job).seconds == pytest.approx(0.397, rel=0.06)


def test_times_of_another_card_are_refused():
    with pytest.raises(InputError, match="measured on NVIDIA H200"):
        measured(cluster("h100"), read_profile(PROFILE), stacks()["meshwright"])
    own = msgspec.structs.replace(NODE, gpu=msgspec.structs.replace(GPU, name="attic"))
    found = measured(own, msgspec.structs.replace(profile_of(OTHER), device="whatever"), stacks()["meshwright"])
    assert found.efficiency is not None
    assert found.efficiency.name == "whatever"


def test_a_profile_that_says_nothing_changes_nothing():
    found = measured(NODE, Profile(device="NVIDIA H100 80GB HBM3"), stacks()["meshwright"])
    assert found == NODE
    copied = Profile(device="NVIDIA H100 80GB HBM3", copy_bandwidth=GPU.bandwidth / 2)
    some = measured(NODE, copied, stacks()["meshwright"]).efficiency
    assert some == msgspec.structs.replace(USUAL, memory=0.5), "a copy says nothing of matmuls: the name stays"


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"device": 3}')
    with pytest.raises(InputError, match="not a machine profile"):
        read_profile(tmp_path / "p.json")
    with pytest.raises(InputError, match="no profile"):
        read_profile(tmp_path / "absent.json")
