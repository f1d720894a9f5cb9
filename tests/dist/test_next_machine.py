"""A machine is lost, and its part of an in-memory checkpoint comes from the next one's memory; nothing is on a disk."""

import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from commands import SMALL, environment, free_port, script, with_reference
from waiting import HANG

from meshwright.config.weights import present
from meshwright.runtime.run_folder import HOST_MEMORY
from meshwright.verify.rehearse import model_digest

RUN = [
    *SMALL, "steps=60", "data.source=my/*.txt", "data.eval_fraction=0.0", "checkpoint.every=0", "plan.shard=2",
    "plan.zero=3", "plan.microbatch=1", "plan.deterministic=true", "faults.memory_every=4", "eval.sample_tokens=0",
]  # fmt: skip
two_nodes = script("two_nodes")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    return with_reference(tmp_path_factory.mktemp("user"), *RUN, "faults.memory_every=0", "--ranks", "2")


class Nodes:
    """Two machines with one rank each: in network namespaces of their own, or both on this one."""

    def __init__(self, folder, namespaces):
        self.folder, self.names = folder, namespaces
        address = two_nodes.ADDRESSES[0] if namespaces else "127.0.0.1"
        self.master = f"{address}:{free_port()}"
        self.before = set(HOST_MEMORY.glob("meshwright-*"))

    def start(self, number):
        command = [sys.executable, "-m", "meshwright", "launch", *RUN, "--folder", str(self.folder / "run")]
        command += ["--nodes", "2", "--ranks-per-node", "1", "--master", self.master, "--node-rank", str(number)]
        inside = ["ip", "netns", "exec", self.names[number]] if self.names else []
        (temporary := self.folder / f"tmp{number}").mkdir(exist_ok=True)
        own = environment(self.folder, TMPDIR=str(temporary), OMP_NUM_THREADS="1")
        own.pop("GLOO_SOCKET_IFNAME", None)  # of tests whose ranks are all on one machine
        return subprocess.Popen(
            [*inside, *command], cwd=self.folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def memory_of(self, process):
        """The folder in host memory of a machine, by the process that owns it."""
        return next(
            (each for each in HOST_MEMORY.glob(f"meshwright-*:{process.pid}:*") if each not in self.before), None
        )


def test_the_model_is_that_of_an_undisturbed_run(user, tmp_path):
    """In two network namespaces, or on this machine where there can be none."""
    (tmp_path / "my").symlink_to(user / "my")
    with ExitStack() as stack:
        names = () if two_nodes.lacking() else stack.enter_context(two_nodes.machines()).names
        nodes = Nodes(tmp_path, names)
        stays, goes = nodes.start(0), nodes.start(1)
        started = [stays, goes]
        stack.callback(lambda: [each.kill() for each in started if each.poll() is None])

        def has_copy():
            memory = nodes.memory_of(stays)
            return memory is not None and present(memory / "kept" / "checkpoints")

        until(has_copy, started)
        lost = nodes.memory_of(goes)
        goes.send_signal(signal.SIGKILL)  # its rank goes with it
        goes.wait()
        shutil.rmtree(lost)
        comes = nodes.start(1)
        started.append(comes)
        said = [each.communicate(timeout=HANG)[0] for each in (stays, comes)]
    assert (stays.returncode, comes.returncode) == (0, 0), said
    assert "starting them again" in said[0]
    assert "in host memory, saved under shard=2" in said[0]
    assert "machine 1's part of step-" in said[1]
    assert "is back from machine 0's memory" in said[1]
    assert not (tmp_path / "run" / "checkpoints").exists() or present(tmp_path / "run" / "checkpoints") == []
    assert model_digest(tmp_path / "run") == model_digest(user / "reference") != ""
    assert not list((tmp_path / "run").glob(".memory*")), "no key stays behind"
    assert not [memory for memory in map(nodes.memory_of, (stays, comes)) if memory]


def until(is_so, processes):
    deadline = time.monotonic() + HANG
    while not is_so():
        assert all(each.poll() is None for each in processes), [each.communicate()[0] for each in processes]
        assert time.monotonic() < deadline
        time.sleep(0.02)
