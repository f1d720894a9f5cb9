import msgspec
import pytest
from folders import CPU, H100

from meshwright.config import load
from meshwright.config.run import Goal
from meshwright.cost.flops import step_flops
from meshwright.cost.memory import worst
from meshwright.cost.step_time import price
from meshwright.hardware.profile import MatmulTime, Profile
from meshwright.report.run_summary import FASTEST, SHEET, Given, Steps, device_of, machines, predict, utilized
from meshwright.search.budget import job_of
from meshwright.spec.problem import InputError

NVIDIA = "NVIDIA H100 80GB HBM3"
PROFILE = Profile(
    device="cpu",
    matmuls=tuple(
        MatmulTime(m=m, n=n, k=256, dtype="fp32", seconds=2 * m * n * 256 / 50e9)
        for m in (64, 256, 1024)
        for n in (64, 256, 1024)
    ),
    copy_bandwidth=10e9,
    threads=1,
    ranks=2,
)
RUN = load.load(None, ["arch.preset=tiny", "sequence=32", "batch=4", "plan.replicate=2", "plan.precision=bf16"]).run


def measured(seconds: float) -> Steps:
    flops = step_flops(RUN.arch, RUN.sequence, RUN.batch)
    return Steps(
        counted=5,
        left_out=5,
        seconds=seconds,
        quickest=seconds,
        slowest=seconds,
        tokens=128,
        tokens_per_second=128 / seconds,
        flops=flops,
        peak_bytes=1,
        peak_rank=0,
    )


def job(cluster):
    return msgspec.structs.replace(job_of(RUN), cluster=cluster)


def test_a_device_is_read_from_the_trainers_words():
    assert device_of({"device": H100}) == NVIDIA
    assert device_of({"device": CPU}) == "cpu"
    assert device_of({"device": "something else"}) == device_of({"device": 3}) == device_of({}) == ""


def test_a_card_of_the_catalogue_is_predicted_by_the_planner():
    found, source = machines(NVIDIA, Goal(), 2, Given())
    assert (found.gpu.name, found.gpus) == ("h100", 2)
    assert source == "the catalogue's h100"
    made = predict(job(found), NVIDIA, source)
    assert made.seconds == price(job(found)).seconds
    assert made.low_seconds < made.seconds < made.high_seconds
    assert made.peak_bytes == worst(job(found)).allocated
    assert made.tokens_per_second == pytest.approx(RUN.tokens / made.seconds)


def test_measured_as_predicted_the_utilization_is_the_same():
    found, source = machines(NVIDIA, Goal(), 2, Given())
    made = predict(job(found), NVIDIA, source)
    seen = utilized(job(found), NVIDIA, measured(made.seconds))
    assert seen.mfu == pytest.approx(made.mfu)
    assert seen.of == SHEET


def test_the_cluster_that_the_run_was_planned_for_is_taken_where_its_card_is_the_same():
    found, source = machines(NVIDIA, Goal(cluster="2x1xh100", network="ethernet"), 2, Given())
    assert (found.domain, found.network.name) == (1, "ethernet")
    assert "run file" in source
    other, source = machines(NVIDIA, Goal(cluster="8xa100-80g"), 2, Given())
    assert other.gpu.name == "h100"
    assert machines(NVIDIA, Goal(cluster="gone.toml"), 2, Given())[0].gpu.name == "h100"


def test_what_the_user_names_comes_first():
    found, source = machines("", Goal(cluster="8xh100"), 2, Given(cluster="8xa100-80g"))
    assert (found.gpu.name, found.gpus, source) == ("a100-80g", 2, "--cluster 8xa100-80g")


def test_a_cpu_needs_a_profile_and_has_no_memory_prediction():
    with pytest.raises(InputError, match="no prediction for CPUs; measure this machine with `meshwright bench --probe"):
        machines("cpu", Goal(), 2, Given())
    found, source = machines("cpu", Goal(), 2, Given(profile=PROFILE))
    made = predict(job(found), "cpu", source)
    assert (made.source, made.peak_bytes) == ("the profile given", None)
    assert utilized(job(found), "cpu", measured(1.0)) is None  # no product in bf16 was measured


def test_a_device_without_a_data_sheet_is_used_by_its_fastest_product():
    found, _ = machines("cpu", Goal(), 2, Given(profile=PROFILE))
    plain = msgspec.structs.replace(job(found), plan=msgspec.structs.replace(RUN.plan, precision="fp32"))
    assert utilized(plain, "cpu", measured(1.0)).of == FASTEST


def test_a_run_that_nobody_knows_the_machine_of_says_what_to_do():
    with pytest.raises(InputError, match=r"no prediction: env\.json does not name the device"):
        machines("", Goal(), 2, Given())
    with pytest.raises(InputError, match="no prediction: unknown card Riva 128"):
        machines("Riva 128", Goal(), 2, Given())


def test_a_profile_of_another_device_is_refused():
    with pytest.raises(InputError, match="the profile was measured on cpu"):
        machines(NVIDIA, Goal(), 2, Given(profile=PROFILE))
