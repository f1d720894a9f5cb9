"""Trackers: TensorBoard, W&B, Trackio. Each runs beside training and can never stop it."""

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from meshwright.spec import load
from meshwright.spec.record import HeldRecord, StepRecord
from meshwright.spec.run import Run

LONGEST_QUEUE = 10_000  # records a slow tracker may lag behind; later ones are dropped for it, never for the file
LAST_SECONDS = 10.0  # a tracker may take at the end

Measured = StepRecord | HeldRecord  # what has curves


class Tracker(Protocol):
    """What a tracker must be able to do."""

    def log(self, values: dict[str, float], step: int) -> None: ...
    def finish(self) -> None: ...


class Writer:
    """A tracker on a thread of its own. Its first error is said once, and ends it alone."""

    def __init__(self, name: str, run: Run, folder: Path, say: Callable[[str], None]) -> None:
        self.name = name
        self.say = say
        self.records: queue.Queue[Measured | None] = queue.Queue(LONGEST_QUEUE)
        self.thread = threading.Thread(target=self._serve, args=(run, folder), name=f"writer-{name}", daemon=True)
        self.thread.start()

    def write(self, record: Measured) -> None:
        """Hand over a record; never waits."""
        with contextlib.suppress(queue.Full):
            self.records.put_nowait(record)

    def close(self) -> None:
        """Give the tracker a moment to finish."""
        with contextlib.suppress(queue.Full):
            self.records.put(None, timeout=1.0)
        self.thread.join(LAST_SECONDS)

    def _serve(self, run: Run, folder: Path) -> None:
        try:
            tracker = TRACKERS[self.name](run, folder)
            while (record := self.records.get()) is not None:
                tracker.log(numbers(record), record.step)
            tracker.finish()
        except Exception as error:  # a tracker's trouble is not the run's
            self.say(f"{self.name} stopped: {type(error).__name__}: {error}. Training goes on; records are on disk.")


def numbers(record: Measured) -> dict[str, float]:
    """What of a record is worth a curve."""
    if isinstance(record, HeldRecord):
        return {"held_out_loss": record.loss}
    values = {key: float(value) for key, value in msgspec.to_builtins(record).items() if isinstance(value, int | float)}
    values.pop("step")
    return values | {"tokens_per_second": record.tokens / record.seconds}


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, run: Run, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.events: Any = SummaryWriter(str(folder / "tensorboard"))
        self.events.add_text("run", f"```toml\n{load.write(run)}```")

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.events.add_scalar(name, value, step)

    def finish(self) -> None:
        self.events.close()


class Wandb:
    """W&B, and Trackio, which speaks the same words."""

    def __init__(self, module: Any, run: Run) -> None:
        self.module = module
        self.module.init(project="meshwright", name=run.name, config=msgspec.to_builtins(run))

    def log(self, values: dict[str, float], step: int) -> None:
        self.module.log(values, step=step)

    def finish(self) -> None:
        self.module.finish()


def _wandb(run: Run, folder: Path) -> Tracker:
    import wandb  # pyright: ignore[reportMissingImports]

    return Wandb(wandb, run)


def _trackio(run: Run, folder: Path) -> Tracker:
    import trackio  # pyright: ignore[reportMissingImports]

    return Wandb(trackio, run)


TRACKERS: dict[str, Callable[[Run, Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}
