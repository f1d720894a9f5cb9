"""One machine of several, from its command to its end: under each of its jobs in turn it meets the others."""

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from meshwright.config.run import Run
from meshwright.runtime import run_folder
from meshwright.runtime.failure import Exit
from meshwright.runtime.machines import Machines, Say
from meshwright.spec.problem import InputError


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
