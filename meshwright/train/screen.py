"""What a person sees while a run goes on: a live bar on a terminal, plain lines anywhere else."""

import sys
from collections.abc import Callable
from typing import Protocol, TextIO

from meshwright.cost.flops import utilization
from meshwright.spec.record import HeldRecord, StepRecord
from meshwright.spec.writing import forsake


class Screen(Protocol):
    """Somewhere to say things."""

    def say(self, text: str) -> None: ...
    def step(self, record: StepRecord, steps: int, peak_flops_per_second: float | None) -> None: ...
    def held(self, record: HeldRecord) -> None: ...
    def close(self) -> None: ...


def screen(stream: TextIO, every: int, quiet: bool = False) -> Screen:
    """The right screen for a stream."""
    if quiet:
        return Silent()
    return Bar(stream, every) if stream.isatty() else Lines(stream, every)


def step_line(record: StepRecord, steps: int, peak_flops_per_second: float | None) -> str:
    """One step in the field's usual order. Utilization only where the device's peak is known."""
    words = [
        f"step {record.step}/{steps}",
        f"loss {record.loss:.4f}",
        f"norm {record.norm:.3f}",
        f"rate {record.rate:.2e}",
        f"memory {record.memory_bytes / 2**30:.2f} GiB",
        f"tokens/s {record.tokens / record.seconds:,.0f}",
        humane_flops(record.flops / record.seconds),
    ]
    if peak_flops_per_second:
        words.append(f"MFU {utilization(record.flops, record.seconds, peak_flops_per_second):.1%}")
    if record.balance is not None:
        words.append(f"balance {record.balance:.3f}")
    if record.skipped:
        words.append(f"skipped: the gradient is not finite (loss scale {record.loss_scale:g})")
    return "  ".join(words)


def held_line(record: HeldRecord) -> str:
    """One held-out loss."""
    return f"held-out loss {record.loss:.4f} after step {record.step}"


def humane_flops(flops_per_second: float) -> str:
    """A rate in the unit that keeps it between 1 and 1000."""
    for unit, size in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12)):
        if flops_per_second >= size:
            return f"{flops_per_second / size:.2f} {unit}"
    return f"{flops_per_second / 1e9:.1f} GFLOP/s"


class Silent:
    """Ranks other than the first."""

    def say(self, text: str) -> None:
        pass

    def step(self, record: StepRecord, steps: int, peak_flops_per_second: float | None) -> None:
        pass

    def held(self, record: HeldRecord) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """One plain line now and then, for pipes and logs."""

    def __init__(self, stream: TextIO, every: int) -> None:
        self.stream = stream
        self.every = every
        self.unheard = False

    def say(self, text: str) -> None:
        self._tell(lambda: print(text, file=self.stream, flush=True))

    def step(self, record: StepRecord, steps: int, peak_flops_per_second: float | None) -> None:
        if record.step == 1 or record.step % self.every == 0 or record.step == steps or record.skipped:
            self.say(step_line(record, steps, peak_flops_per_second))

    def held(self, record: HeldRecord) -> None:
        self.say(held_line(record))

    def close(self) -> None:
        self._tell(self.stream.flush)

    def _tell(self, speak: Callable[[], None]) -> None:
        """A reader that has left, or a disk that is full, ends the telling and not the training."""
        if self.unheard:
            return
        try:
            speak()
        except OSError:
            self.unheard = True
            forsake(self.stream)


class Bar(Lines):
    """A bar that moves every step, above it the same lines as elsewhere."""

    def __init__(self, stream: TextIO, every: int) -> None:
        super().__init__(stream, every)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[latest]}"),
            console=Console(file=stream, highlight=False),
        )
        self.task = self.progress.add_task("training", total=None, latest="", start=True)
        self.started = False

    def say(self, text: str) -> None:
        self._tell(lambda: self.progress.console.print(text, markup=False, soft_wrap=True))

    def step(self, record: StepRecord, steps: int, peak_flops_per_second: float | None) -> None:
        if not self.started:
            self._tell(self.progress.start)
            self.started = True
        super().step(record, steps, peak_flops_per_second)
        latest = f"loss {record.loss:.3f}  {record.tokens / record.seconds:,.0f} tokens/s"
        self.progress.update(self.task, completed=record.step, total=steps, latest=latest)

    def close(self) -> None:
        if self.started:
            self._tell(self.progress.stop)
            self.started = False
        super().close()


def default_stream(machine: bool) -> TextIO:
    """Where people read: standard output, or standard error when a program reads standard output."""
    return sys.stderr if machine else sys.stdout
