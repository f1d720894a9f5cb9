"""One attempt of a machine's ranks, watched from outside: who failed, who hangs, and what people asked for."""

import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from meshwright.config.weights import CHECKPOINTS, present, step_name
from meshwright.runtime import failure, heartbeat, run_folder
from meshwright.runtime.failure import Exit, Failure
from meshwright.runtime.heartbeat import Hang, HeartbeatReader, RankStatus, crossed
from meshwright.runtime.ranks import Ranks

if TYPE_CHECKING:
    from meshwright.runtime.supervise import Supervisor

LOOK_SECONDS = 0.05
WORDS_SECONDS = 5.0  # that a survivor may take to say what it did
FALL_SECONDS = 0.2  # in which the victims of a failure say theirs
ENDED = (Exit.DONE, Exit.PREEMPTED)  # by themselves
INTERRUPTED = 2  # the second Ctrl-C does not wait for a save


@dataclass
class StopRequest:
    """What people asked of the launcher: SIGTERM saves and ends, so does Ctrl-C, a second Ctrl-C just ends."""

    stop: bool = False
    interrupts: int = 0

    def listen(self) -> "StopRequest":
        signal.signal(signal.SIGTERM, self._hear)
        signal.signal(signal.SIGINT, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        self.interrupts += number == signal.SIGINT


class Watch:
    """One attempt, looked at twenty times a second."""

    def __init__(self, ranks: Ranks, pulse: HeartbeatReader, supervisor: "Supervisor") -> None:
        self.ranks = ranks
        self.pulse = pulse
        self.supervisor = supervisor
        self.folder = supervisor.folder
        self.seen: Mapping[int, RankStatus] = {}
        self.stopping_since = 0.0  # when the ranks were asked to save and end
        self.rested = False

    def until_end(self) -> Failure | None:
        """Until all ranks have ended, or one has failed."""
        while True:
            codes = self.ranks.poll()
            if any(code not in (None, *ENDED) for code in codes.values()):
                verdict = self._failure()
                gone = {rank for rank, code in self.ranks.poll().items() if code not in (None, *ENDED)}
                if (verdict := self._survived(verdict, gone)) is not None:
                    return verdict
                continue
            if self._have_ended(codes):
                return self._ended(codes)
            if (verdict := self._look() or self._heed()) is not None:
                return verdict
            time.sleep(LOOK_SECONDS)

    def _is_done(self) -> bool:
        """Whether all that a run leaves is there; its last command may still run."""
        return (self.folder / run_folder.SUMMARY).exists()

    def _survived(self, verdict: Failure, gone: set[int]) -> Failure | None:
        """The verdict, unless others can do without these ranks."""
        return verdict

    def _have_ended(self, codes: Mapping[int, int | None]) -> bool:
        return None not in codes.values()

    def _ended(self, codes: Mapping[int, int | None]) -> Failure | None:
        """None; or what is missing though all ranks have ended by themselves."""
        return self._stopped() if Exit.PREEMPTED in codes.values() else None

    def _reports(self) -> list[Failure]:
        """The failure reports of ranks of this machine."""
        return [report for report in failure.read(self.folder) if report.rank in self.supervisor.here]

    def _look(self) -> Failure | None:
        seen = self.pulse.look()
        self.seen = {one.rank: one for one in seen}
        # Who has ended by itself is not waited for: rank 0 may be at the last eval.command.
        return self._judge([one for one in seen if one.state != "Z"])

    def _judge(self, seen: list[RankStatus]) -> Failure | None:
        """Whether somebody hangs."""
        if not self.rested and seen and min(one.beat.steps_here for one in seen) > 1:
            self.supervisor.server.rest()
            self.rested = True
        hang = self.supervisor.judge.look(seen, time.monotonic())
        if hang is None or not heartbeat.confirmed(self.pulse, seen, hang.ranks):
            return None
        return self._survived(self._hang(hang, heartbeat.capture(self.pulse, seen)), set(hang.ranks))

    def _hang(self, hang: Hang, words: Mapping[int, str]) -> Failure:
        details = self.folder / "faults" / f"hang-{self.supervisor.attempt_name}"
        return report_hang(hang, self.seen, words, self.pulse, details)

    def _failure(self) -> Failure:
        """The first rank that failed. One killed from outside leaves no words, and is nobody's victim."""
        if self.supervisor.home.is_taken():  # and with it what ranks said
            return run_folder.gone(self.folder)
        ended = {rank: code for rank, code in self.ranks.poll().items() if code}
        if min(ended.values()) > 0:  # a process with much to give back ends after its victims have heard of it
            time.sleep(FALL_SECONDS)
            ended = {rank: code for rank, code in self.ranks.poll().items() if code}
        killed = [rank for rank, code in ended.items() if code < 0]
        if killed and failure.is_mismatch(killed[0], self.folder):
            return self._mismatch(killed)
        if killed:
            return failure.of_exit(killed[0], ended[killed[0]], self.seen.get(killed[0]), self.folder)
        if reports := self._reports():
            return min(reports, key=lambda report: report.at)
        rank, code = next((rank, code) for rank, code in self.ranks.poll().items() if code)
        return failure.of_exit(rank, code, self.seen.get(rank), self.folder)

    def _mismatch(self, killed: list[int]) -> Failure:
        """A collective broke because somebody was in another one; who died of it need not be who was wrong.

        Each survivor knows whether its own collectives were those of its last step. If all were, it was the dead one.
        """
        deadline = time.monotonic() + WORDS_SECONDS
        while None in self.ranks.poll().values() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        reports = {report.rank: report for report in self._reports() if report.rank is not None}
        ranks = tuple(sorted(rank for rank, report in reports.items() if report.deviated)) or tuple(killed)
        if not reports:
            ranks, _ = crossed(list(self.seen.values()))
        why = "left out a collective, or is in another than the others"
        hang = Hang(ranks=ranks, reason=why, seconds=0.0, limit=0.0)
        return self._hang(hang, {rank: "".join(report.stack) for rank, report in reports.items()})

    def _heed(self) -> Failure | None:
        """Pass on what people asked; enforce it when the time they gave is over."""
        asked, grace = self.supervisor.asked, self.supervisor.run.faults.grace_seconds
        if not asked.stop:
            return None
        if not self.stopping_since:
            self.stopping_since = time.monotonic()
            if all(one.beat.restored < 0 for one in self.seen.values()):
                return self._stopped()  # no step was begun: there is nothing to save
            what = "all steps are done; ending eval.command" if self._is_done() else "saving a checkpoint"
            self.supervisor.say(f"interrupted: {what}, within {grace:g} s")
            self.ranks.signal(signal.SIGTERM)
        if asked.interrupts >= INTERRUPTED or time.monotonic() - self.stopping_since > grace:
            return self._stopped(saved=False)
        return None

    def _stopped(self, saved: bool = True) -> Failure:
        step = newest_step(self.folder)
        by_file = (self.folder / run_folder.STOP).exists()
        interrupted = self.supervisor.asked.interrupts > 0 or by_file
        how = "interrupted" if interrupted else "stopped by SIGTERM"
        what = f"checkpoint saved at step {step}" if saved and step >= 0 else "ended before a checkpoint was complete"
        remedy = failure.AGAIN
        if self._is_done():
            what = "all steps are done, and the last eval.command is not"
            remedy = "run the same command again: it runs eval.command on the model, and nothing else"
        return Failure(
            kind="stopped",
            code=Exit.INTERRUPTED if interrupted else Exit.PREEMPTED if saved else Exit.RESUMABLE,
            what=f"{f'stopped by the file {run_folder.STOP}' if by_file else how}, {what}",
            remedy=remedy,
            details=str(self.folder),
            step=step,
        )


def report_hang(
    hang: Hang, seen: Mapping[int, RankStatus], words: Mapping[int, str], pulse: HeartbeatReader, details: Path
) -> Failure:
    """The failure report, and the stacks it rests on, in the run folder."""
    verdict = failure.of_hang(hang, seen, words, pulse.phase_table(hang.ranks[0]), details)
    failure.keep(verdict, words, details)
    return verdict


def set_aside(folder: Path, good_until: int) -> None:
    """Rename checkpoints whose state is in doubt, so that no run resumes from them and nothing is lost."""
    for step in present(home := folder / CHECKPOINTS):
        if step > good_until:
            with contextlib.suppress(FileNotFoundError):  # another machine has done it
                (home / step_name(step)).rename(home / f"suspect-{step_name(step)}")


def newest_step(folder: Path) -> int:
    """The newest step that was saved, −1 if none. A step has its name only once it is complete."""
    return max(present(folder / CHECKPOINTS), default=-1)
