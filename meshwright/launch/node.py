"""The ranks of one machine of several, started and ended together, whose exit code is passed on.

torchrun ends with 1 whatever its ranks end with; a scheduler that is to start a job again after 10 or 11, and not after
2, needs the code itself. A `MachineSession` is one machine from its command to its end: under each of its jobs in turn
it meets the others.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshwright.config.run import Run
from meshwright.config.weights import CHECKPOINTS, present
from meshwright.runtime import meeting, run_folder
from meshwright.runtime.failure import ASKS, Exit
from meshwright.runtime.machines import Machines, Say
from meshwright.runtime.neighbour import PartKeeper
from meshwright.runtime.ranks import die_with_parent
from meshwright.spec.problem import InputError, mistake
from meshwright.spec.units import plural

LOOK_SECONDS = 0.05
FALL_SECONDS = 60.0  # in which the others leave after one has failed: watchers and collectives tell them
# Of several codes, the one that says most: what would only happen again, what somebody asked for, what can be resumed.
ORDER = (
    Exit.INPUT, Exit.DOES_NOT_FIT, Exit.CORRUPT, Exit.NOT_FINITE, Exit.HARDWARE, Exit.FAILED,
    Exit.INTERRUPTED, Exit.RESUMABLE, Exit.PREEMPTED,
)  # fmt: skip


class NodePlace:
    """One machine of a job: which it is, its ranks, and where rank 0 listens."""

    def __init__(self, node: int, nodes: int, ranks: int, address: str, port: int) -> None:
        self.node, self.nodes, self.ranks = node, nodes, ranks
        self.address, self.port = address, port

    def environment(self, local_rank: int) -> dict[str, str]:
        """What torchrun would tell a rank."""
        return {
            "RANK": str(self.node * self.ranks + local_rank),
            "WORLD_SIZE": str(self.nodes * self.ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@dataclass
class NodeRestarts:
    """Whether this machine's ranks are started again: where its memory has what they saved, they lose less that way.

    Of `homes`, one is on the disk and one in host memory. Only an attempt that left no newer checkpoint is charged.
    """

    limit: int
    homes: Sequence[Path]
    say: Callable[[str], None]
    wasted: int = 0
    starts: int = 1

    def __post_init__(self) -> None:
        self.saved = self.newest()

    def newest(self) -> int:
        return max((step for home in self.homes for step in present(home / CHECKPOINTS)), default=-1)

    def after(self, code: int) -> bool:
        """Whether they are, after such an end. Who missed another machine at a restart may meet it at the next."""
        if code != Exit.RESUMABLE and not (code == Exit.INPUT and self.starts > 1):
            return False
        before, self.saved = self.saved, self.newest()
        self.wasted = 0 if self.saved > before else self.wasted + 1
        if self.wasted > self.limit:
            return False
        self.starts += 1
        charged = (
            f"; {self.wasted} of {plural(self.limit, 'attempt')} brought no newer checkpoint" if self.wasted else ""
        )
        self.say(f"the ranks of this machine have ended with exit code {code}: starting them again{charged}")
        return True

    def meaning(self, code: int) -> int:
        """What was right at the first start cannot be a mistake at a later one: a machine has not come back."""
        return Exit.RESUMABLE if code == Exit.INPUT and self.starts > 1 else code


@contextmanager
def keeping(run: Run, place: NodePlace, folder: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """This machine's memory for what its ranks save, and whoever speaks of it with the machines beside it."""
    run_folder.sweep(run_folder.HOST_MEMORY)
    with run_folder.in_host_memory() as name:
        if place.nodes == 1:
            yield Path(name)
            return
        meeting.resolved(place.address, place.port, run.faults.meet_seconds)  # a pod's name may take a while
        try:
            keeper = PartKeeper(Path(name), folder, place.node, place.nodes, (place.address, place.port), say)
        except OSError as error:
            what = f"this machine cannot listen on its network towards {place.address}: {error.strerror or error}"
            raise mistake(what, "set --master to a name of the first machine that all others reach") from None
        keeper.start()
        try:
            yield Path(name)
        finally:
            keeper.close()


def start(
    command: Sequence[str],
    place: NodePlace,
    environment: Mapping[str, str],
    grace_seconds: float,
    restarts: NodeRestarts | None = None,
) -> int:
    """Run the ranks of this machine to their end, pass signals on to them, and return the code that says most."""
    ranks, asked = list[subprocess.Popen[bytes]](), list[int]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        _signal(ranks, _request(asked))

    for number in (*ASKS, signal.SIGINT):
        signal.signal(number, pass_on)
    while True:
        code = as_asked(_attempt(command, place, environment, grace_seconds, ranks, asked), asked)
        if restarts is None:
            return code
        if asked or not restarts.after(code):
            return restarts.meaning(code)


def _attempt(
    command: Sequence[str],
    place: NodePlace,
    environment: Mapping[str, str],
    grace_seconds: float,
    ranks: list["subprocess.Popen[bytes]"],
    asked: Sequence[int],
) -> int:
    """One start of them all; whoever is asked to end meanwhile starts no more of them."""
    ranks.clear()
    try:
        for local_rank in range(place.ranks):
            if asked:
                break
            own = {**environment, **place.environment(local_rank)}
            # A session of its own: Ctrl-C in a terminal reaches this process, which passes it on once.
            ranks.append(subprocess.Popen(command, env=own, start_new_session=True, preexec_fn=die_with_parent))
            if asked:  # as this one was made: whoever passed it on did not know of it
                _signal(ranks[-1:], _request(asked))
        if not ranks:
            return Exit.PREEMPTED
        return exit_code(_wait(ranks, grace_seconds))
    finally:
        _signal(ranks, signal.SIGKILL)
        for rank in ranks:
            rank.wait()


def as_asked(code: int, asked: Sequence[int]) -> int:
    """The exit code of who was asked to end: a person is no scheduler, and nobody is to start the run again."""
    ended = code in (Exit.PREEMPTED, Exit.RESUMABLE)
    return Exit.INTERRUPTED if ended and signal.SIGINT in asked else code


def _request(asked: Sequence[int]) -> signal.Signals:
    """What ranks are sent, who may ignore interrupts as their parents did; a second one does not wait for a save."""
    return signal.SIGKILL if asked.count(signal.SIGINT) > 1 else signal.SIGTERM


def exit_code(codes: Sequence[int]) -> int:
    """The one code of several; a rank that a signal has ended can be started again."""
    plain = {Exit.RESUMABLE if code < 0 or (code > 128 and code != Exit.INTERRUPTED) else code for code in codes}
    return next((int(code) for code in ORDER if code in plain), Exit.FAILED if plain - {0} else Exit.DONE)


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], grace_seconds: float) -> list[int]:
    """Until all have ended; those that stay after another has failed are asked to end, then made to."""
    failed_at, asked = 0.0, False
    while True:
        codes = [rank.poll() for rank in ranks]
        if None not in codes:
            return [code for code in codes if code is not None]
        if any(codes) and not failed_at:
            failed_at = time.monotonic()
        late = time.monotonic() - failed_at if failed_at else 0.0
        if late > FALL_SECONDS and not asked:
            asked = True
            _signal(ranks, signal.SIGTERM)
        if late > FALL_SECONDS + grace_seconds:
            _signal(ranks, signal.SIGKILL)
        time.sleep(LOOK_SECONDS)


def _signal(ranks: Sequence["subprocess.Popen[bytes]"], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)


class MachineSession:
    """Which machine has the run folder changes: whoever decides for all tries to hold it.

    `be` makes this machine one of a job to come, without replicas that are known to be faulty.
    """

    def __init__(self, run: Run, folder: Path, be: Callable[[Collection[int]], Machines], say: Say) -> None:
        self.run, self.folder, self.be, self.say = run, folder, be, say
        self.lives = list[Machines]()
        self.held = list[Callable[[], None]]()

    def meet(
        self, condemned: Collection[int] = (), after: str = "", is_over: Callable[[], bool] = lambda: False
    ) -> tuple[Machines, bool]:
        """Begin or join a job; whether it begins here. `after`: one that is over. `is_over`: somebody asks to end."""
        self._release()  # another machine may have to begin
        self.lives.append(self.be(condemned))
        return self.lives[-1], self.lives[-1].meet(self.run.faults.meet_seconds, self._claim, self.say, after, is_over)

    def hold(self) -> None:
        """Have the run folder, where it is free."""
        if not self.held:
            with suppress(InputError):
                self.held.append(run_folder.locked(self.folder).close)

    def refuse(self, error: InputError) -> None:
        """What is wrong with the run, to those who wait for it to begin."""
        for machines in self.lives[-1:]:
            machines.refuse(error)

    def close(self) -> None:
        """This machine has ended, if it has not said so before."""
        for machines in self.lives:
            machines.close(Exit.FAILED)
        self._release()

    def _claim(self) -> None:
        self.held.append(run_folder.Claim(self.folder, self.run).release)
        (self.folder / run_folder.STOP).unlink(missing_ok=True)  # it was for those who have stopped

    def _release(self) -> None:
        while self.held:
            self.held.pop()()
