"""Two machines in one: network namespaces with a cable between them, which can be pulled. Needs root and `ip`.

Each machine has one rank, started the way Slurm or torchrun start one, with a temporary folder of its own.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29577
SECONDS = 900.0  # until a hang is certain, however loaded the machine is


def lacking() -> str:
    """Why there can be no two machines here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` program"
    tried = subprocess.run(["ip", "netns", "add", f"mw{os.getpid()}t"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", f"mw{os.getpid()}t"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no network namespace can be made: {tried.stderr.strip()}"


def ip(*words: str) -> None:
    """Change the network."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True, slots=True)
class Machines:
    """Two of them."""

    names: tuple[str, str]  # of the namespaces, and of the ends of the cable

    def start(
        self, number: int, world: int, command: list[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """One rank on one machine; the shell between is its launcher."""
        place = {
            "RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": self.names[number],
            "TMPDIR": str(folder / f"tmp{number}"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        (folder / f"tmp{number}").mkdir(exist_ok=True)
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], "sh", "-c", '"$@"; exit $?', "launcher", *command],
            cwd=folder,
            env={**environment, **place},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def launch(
        self, number: int, command: list[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """A launcher of one machine, which starts its ranks itself; it is told nothing about interfaces."""
        (folder / f"tmp{number}").mkdir(exist_ok=True)
        where = ["--node-rank", str(number), "--nodes", "2", "--master", f"{ADDRESSES[0]}:{PORT}"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], *command, *where],
            cwd=folder,
            env={**environment, "TMPDIR": str(folder / f"tmp{number}"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def pull_cable(self) -> None:
        """No packet comes through any more, and nobody is told."""
        ip("-n", self.names[1], "link", "set", self.names[1], "down")

    def plug_in(self) -> None:
        """As before."""
        ip("-n", self.names[1], "link", "set", self.names[1], "up")


@contextmanager
def machines() -> Iterator[Machines]:
    """Two machines, gone afterwards with all that runs on them."""
    names = (f"mw{os.getpid()}a", f"mw{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield Machines(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@dataclass(frozen=True, slots=True)
class Loss:
    """What the machine that stayed did and said."""

    seconds: float  # from the loss to the end of its rank
    code: int
    said: str
    other_code: int  # of the machine that was lost
    other_said: str


def lose(here: Machines, how: str, words: list[str], folder: Path, environment: Mapping[str, str]) -> Loss:
    """Train on both until some steps are saved; then lose the second machine: `kill` all of it, or its `cable`."""
    command = [sys.executable, "-m", "meshwright", "train", *words, "--folder", "run"]
    ranks = [here.start(number, 2, command, folder, environment) for number in (0, 1)]
    try:
        wait_for(lambda: len(list(folder.glob("run/checkpoints/step-*"))) > 0, "a saved step")
        time.sleep(0.2)  # in the middle of the work
        lost_at = time.monotonic()
        if how == "kill":
            os.killpg(ranks[1].pid, signal.SIGKILL)
        else:
            here.pull_cable()
        _, said = ranks[0].communicate(timeout=SECONDS)
        seconds = time.monotonic() - lost_at
        _, other = ranks[1].communicate(timeout=SECONDS)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
        here.plug_in()
    return Loss(seconds, ranks[0].returncode, said, ranks[1].returncode, other)


def train(
    here: Machines, world: int, words: list[str], folder: Path, environment: Mapping[str, str]
) -> list[tuple[int, str]]:
    """The command on both machines, or on the first alone, to its end: each one's exit code and words."""
    command = [sys.executable, "-m", "meshwright", "train", *words, "--folder", "run"]
    ranks = [here.start(number, world, command, folder, environment) for number in range(world)]
    try:
        said = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
    return [(rank.returncode, words) for rank, words in zip(ranks, said, strict=True)]


def wait_for(is_there: Callable[[], bool], what: str) -> None:
    """Until something has happened."""
    deadline = time.monotonic() + SECONDS
    while not is_there():
        assert time.monotonic() < deadline, f"there was never {what}"
        time.sleep(0.05)
