"""Out of memory, where it really happens, is one report and exit code 3: of `train`, `bench` and `verify` alike."""

import pytest
import torch
from commands import SMALL, meshwright, write_text

from meshwright.bench import measure, sweep
from meshwright.cli.main import main
from meshwright.runtime.failure import Exit
from meshwright.verify import evidence, prove

WORDS = "CUDA out of memory. Tried to allocate 1.00 TiB."


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class OneStep:
    """A loop whose second step finds no memory."""

    def __init__(self, module):
        self.real = module.train

    def __call__(self, *args):
        results = self.real(*args)
        yield next(results)
        raise torch.OutOfMemoryError(WORDS + " Of the allocated memory nothing is free." * 10)


def measured(*args):
    measure.train = OneStep(measure)
    measure.measure(*args)


def recorded(place, run, *args):
    if run.plan.world > 1:  # the reference has room
        evidence.train = OneStep(evidence)
    evidence.record(place, run, *args)


def test_a_benchmark_says_so_and_exits_with_3(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "MEASURE", measured)
    code = main(["bench", "tiny", "sequence=32", "batch=4", "--folder", str(tmp_path / "bench"), "--steps", "2"])
    said = capsys.readouterr().out
    assert code == Exit.DOES_NOT_FIT
    assert "what:    out of memory: CUDA out of memory. Tried to allocate 1.00 TiB." in said
    assert "do:      use a smaller plan.microbatch" in said
    assert "Traceback" not in said
    assert "…" not in said


def test_a_proof_says_so_and_exits_with_3(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prove, "RECORD", recorded)
    code = main(["verify", "--plan", "replicate=2", "--folder", str(tmp_path / "proof"), "--steps", "2"])
    said = capsys.readouterr().out
    assert code == Exit.DOES_NOT_FIT
    assert "DOES NOT FIT" in said
    assert "do:      use a smaller plan.microbatch" in said


def test_a_launched_benchmark_says_so_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "train", OneStep(measure))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    code = main(["bench", "tiny", "sequence=32", "batch=4", "--folder", str(tmp_path / "bench"), "--steps", "2"])
    assert code == Exit.DOES_NOT_FIT
    assert "what:    out of memory" in capsys.readouterr().err


def test_a_run_says_so(tmp_path):
    write_text(tmp_path)
    words = (*SMALL, "data.source=my/*.txt", "--folder", "run", "--ranks", "1", "--inject", "memory:0:2")
    done = meshwright("train", *words, folder=tmp_path)
    assert done.returncode == Exit.DOES_NOT_FIT
    assert "out of memory: injected: tried to allocate 1 TiB" in done.stderr
    assert "use a smaller plan.microbatch" in done.stderr
