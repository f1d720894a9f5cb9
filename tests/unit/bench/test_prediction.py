import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from meshwright.bench import sweep
from meshwright.bench.probe import write_profile
from meshwright.bench.sweep import cached_probe, predicted
from meshwright.cost.calibrate import PredictionSource
from meshwright.hardware.profile import AttentionTime, CollectiveTime, MatmulTime, Profile
from meshwright.spec.problem import InputError

CPU = Profile(
    device="cpu",
    matmuls=tuple(
        MatmulTime(m=m, n=n, k=256, dtype="fp32", seconds=2 * m * n * 256 / 50e9)
        for m in (64, 256, 1024)
        for n in (64, 256, 1024)
    ),
    attention=tuple(
        AttentionTime(
            batch=1, heads=4, kv_heads=4, sequence=sequence, head_dim=64, forward_seconds=1e-8 * sequence**2,
            backward_seconds=3e-8 * sequence**2, backend="flash", dtype="fp32",
        )
        for sequence in (64, 256, 1024)
    ),
    collectives=tuple(
        CollectiveTime(kind="all_reduce", ranks=2, bytes=size, seconds=1e-4 + size / 1e9) for size in (1e3, 1e5, 1e7)
    ),
    copy_bandwidth=10e9,
    launch_seconds=2e-6,
    threads=1,
    ranks=2,
)  # fmt: skip


def run_of(plan: str, *words: str, say=print):
    overrides = ["sequence=32", "batch=4", *words]
    return sweep.runs("tiny", overrides, [("", plan)], 2, Path("somewhere"), say)[0][1]


def seen(device: str, mfu: float | None = None) -> dict:
    return {"device": device, "mfu": mfu, "hfu": mfu, "step_seconds": 0.1}


def nobody() -> Profile:
    raise AssertionError("nothing had to be measured")


def test_a_device_that_nobody_knows_is_predicted_by_its_probe():
    here = PredictionSource(given=None, probed=lambda: CPU)
    found = predicted(run_of("replicate=2"), seen("cpu"), here)
    assert found["predicted_seconds"] > 0
    assert found["predicted_bytes"] > 0
    assert found["predicted_from"] == "a quick probe of this machine"
    assert 0 < found["mfu"] < 1
    assert found["mfu_of"] == "the fastest matmul measured"


def test_nothing_is_predicted_where_nothing_is_known():
    found = predicted(run_of("replicate=2"), seen("cpu"), PredictionSource(given=None, probed=lambda: None))
    assert found["predicted_seconds"] is None
    assert found["mfu_of"] == ""


def test_a_card_of_the_catalogue_needs_no_probe():
    found = predicted(
        run_of("precision=bf16"), seen("NVIDIA H100 80GB HBM3", 0.4), PredictionSource(given=None, probed=nobody)
    )
    assert found["predicted_from"] == "the catalogue"
    assert found["mfu_of"] == "the data sheet's peak"
    assert "mfu" not in found, "what was measured stays"


def test_a_profile_that_was_given_goes_first():
    here = PredictionSource(given=CPU, probed=nobody)
    assert predicted(run_of("replicate=2"), seen("cpu"), here)["predicted_from"] == "the profile given"
    for other in ("NVIDIA H100 80GB HBM3", "a card that nobody knows"):
        with pytest.raises(InputError, match="measured on cpu"):
            predicted(run_of("replicate=2"), seen(other), here)


def test_messages_between_cpus_are_not_hidden():
    here = PredictionSource(given=CPU, probed=nobody)
    alone, both = (predicted(run_of(f"replicate={n}"), seen("cpu"), here)["predicted_seconds"] for n in (1, 2))
    half = predicted(run_of("replicate=1", "batch=2"), seen("cpu"), here)["predicted_seconds"]
    assert half < both < alone + half


def test_a_recompute_budget_becomes_a_policy_as_in_training():
    said: list[str] = []
    plenty = run_of("replicate=1", "goal.memory_gib=10.0", say=said.append)
    assert plenty.plan.recompute == "none"
    assert said[0].startswith("as given: goal.memory_gib = 10: recompute = none")
    with pytest.raises(InputError, match="too little"):
        run_of("replicate=1", "goal.memory_gib=0.001")


def test_ranks_are_obeyed_or_refused():
    def worlds(plan: str, ranks: int | None) -> int:
        words = ("tiny", ["batch=8"], [("", plan)], 2, Path("somewhere"), print)
        return sweep.runs(*words, ranks=ranks)[0][1].plan.world

    assert (worlds("", None), worlds("", 4), worlds("shard=2,zero=3", 4)) == (1, 4, 4)
    with pytest.raises(InputError, match="3 ranks are no multiple of shard 2"):
        worlds("shard=2,zero=3", 3)


def test_a_machine_that_was_measured_is_not_measured_again(tmp_path):
    write_profile(CPU, tmp_path / "profiles" / f"{platform.node()}-2-torch-{version('torch')}.json")
    said: list[str] = []
    assert cached_probe(tmp_path, 2, said.append) == CPU
    assert not said
