"""The fork server: what is said of one that is gone before it answered."""

import os
import sys
from pathlib import Path

import pytest

from meshwright.runtime import ranks
from meshwright.runtime.ranks import ForkServer, ForkServerError


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "was ended by SIGKILL, from outside",
        ),
        ("raise SystemExit(3)", "ended with exit code 3 and said nothing"),
        ("raise ImportError('torch is broken')", "ImportError: torch is broken"),
    ],
)
def test_how_it_ended_is_said(tmp_path, body, said):
    (tmp_path / "dying.py").write_text(body)
    server = ForkServer(
        "dying", dict(os.environ) | {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}, tmp_path / "log", 1
    )
    try:
        with pytest.raises(ForkServerError) as caught:
            server._answer(0)
        assert said in str(caught.value)
    finally:
        server.close()


def test_one_that_is_silent_is_not_said_to_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "START_SECONDS", 0.1)
    monkeypatch.setattr(ranks, "REAP_SECONDS", 0.1)
    (tmp_path / "silent.py").write_text("import time; time.sleep(600)")
    server = ForkServer(
        "silent", dict(os.environ) | {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}, tmp_path / "log", 1
    )
    try:
        with pytest.raises(ForkServerError, match="has not answered in"):
            server._answer(0)
    finally:
        server.close()


def server_of(module: str, folder: Path) -> ForkServer:
    path = ":".join([str(folder), *sys.path])
    return ForkServer(module, dict(os.environ) | {"PYTHONPATH": path}, folder / "log", 1)
