"""The ranks of one machine of several, started and ended together, whose exit code is passed on.

torchrun ends with 1 whatever its ranks end with; a scheduler that is to start a job again after 10 or 11, and not after
2, needs the code itself.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from meshwright.runtime.failure import Exit
from meshwright.runtime.ranks import die_with_parent

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


def start(command: Sequence[str], place: NodePlace, environment: Mapping[str, str], grace_seconds: float) -> int:
    """Run the ranks of this machine to their end, pass signals on to them, and return the code that says most."""
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        _signal(ranks, signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    try:
        for local_rank in range(place.ranks):
            own = {**environment, **place.environment(local_rank)}
            # A session of its own: Ctrl-C in a terminal reaches this process, which passes it on once.
            ranks.append(subprocess.Popen(command, env=own, start_new_session=True, preexec_fn=die_with_parent))
        return verdict(_wait(ranks, grace_seconds))
    finally:
        _signal(ranks, signal.SIGKILL)
        for rank in ranks:
            rank.wait()


def verdict(codes: Sequence[int]) -> int:
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
