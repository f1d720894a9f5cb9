"""The start of one machine's ranks, here a shell: what it passes on."""

import signal
import subprocess
import sys

import pytest

START = """
import os, signal, sys
from meshwright.launch import node
signal.signal(signal.SIGINT, signal.default_int_handler)
place = node.NodePlace(0, 1, 1, "127.0.0.1", 29500)
sys.exit(node.start(["sh", "-c", sys.argv[1]], place, dict(os.environ), 5.0))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 10), (signal.SIGUSR2, 10), (signal.SIGINT, 130)])
def test_every_request_to_end_reaches_the_ranks_as_sigterm(number, code):
    rank = f"trap 'exit 10' TERM; kill -{number.name[3:]} $PPID; while :; do sleep 0.05; done"
    assert subprocess.run([sys.executable, "-c", START, rank], check=False).returncode == code
