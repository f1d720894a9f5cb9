"""The workers of `data prepare`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from waiting import HANG, is_running, until

WORK = f"""
import os, sys, time
from pathlib import Path
from meshwright.data import prepare

class Piece:
    def make(self, say):
        Path(sys.argv[1], str(os.getpid())).touch()
        time.sleep({HANG})

if __name__ == "__main__":
    list(prepare._made([Piece()] * 2, [0, 1], 2))
"""


def test_workers_do_not_outlive_who_started_them(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "at").mkdir()
    started = subprocess.Popen([sys.executable, tmp_path / "work.py", tmp_path / "at"], cwd=Path.cwd())
    until(lambda: len(os.listdir(tmp_path / "at")) == 2, "no worker began")
    started.send_signal(signal.SIGTERM)
    assert started.wait(HANG) == -signal.SIGTERM
    until(lambda: not any(is_running(int(pid)) for pid in os.listdir(tmp_path / "at")), "a worker outlived it")
