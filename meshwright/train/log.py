"""Results become records: JSON lines on disk are the truth, screens and trackers are their readers."""

import contextlib
import importlib
import os
import queue
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

import msgspec
import torch
from torch import Tensor

from meshwright.checkpoint.remote import Mirror
from meshwright.config import load
from meshwright.config.run import Run
from meshwright.cost.flops import causal_step_flops, step_flops, utilization
from meshwright.hardware.cluster import peak_flops_per_second
from meshwright.parallel.device import DeviceTimeline, Moment, moment
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.files import Speaker
from meshwright.runtime.records import (
    AttemptRecord,
    CommandRecord,
    EndRecord,
    EvalRecord,
    EventRecord,
    ExportRecord,
    Record,
    SaveRecord,
    StepRecord,
    TextRecord,
    line,
    read_lines,
    shifted,
)
from meshwright.runtime.terminal import columns, fitted
from meshwright.spec.units import gib, plural
from meshwright.train.loop import EvalResult, StepResult
from meshwright.train.noise_scale import GradientNoise, estimate, microbatches

LOADS = ("balance", "max_load", "min_load")  # what MoE layers say of their experts
MOST_PENDING = 2  # steps whose numbers may still be on their way from the device
LONGEST_QUEUE = 10_000  # records a slow tracker may lag behind; later ones are dropped for it, never for the file
LAST_SECONDS = 10.0  # a tracker may take at the end
LEAST_SECONDS = 1e-6  # of a save: one that no device noticed was made all the same
WIDTH = 80  # columns of a step's line
STEADIEST = ("memory", "lr", "balance", "mfu", "norm", "left", "tokens")  # what tells least first
NARROW = 60  # columns in which a bar and all that is beside it have no room
PACE = 0.1  # the weight of the newest step in the pace that the time left is reckoned by
Curve = StepRecord | EvalRecord  # what a tracker plots


class RecordFile:
    """Lines in the order they came. What a full disk refuses waits for the next time; that is said once."""

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        self.file = file
        self.say = say
        self.stream = open(file, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self.waiting = b""
        self.told = False

    def write(self, line: bytes) -> None:
        """Whoever kills this process does not take the line along."""
        self.waiting += line
        try:
            while self.waiting:
                written = self.stream.write(self.waiting) or 0  # a disk that is nearly full takes a part
                self.waiting = self.waiting[written:]
        except OSError as error:
            if not self.told:
                self.told = True
                self.say(
                    f"warning: {self.file} cannot be written: {error.strerror}. "
                    "Training continues; records wait in memory until they can be"
                )

    def close(self) -> None:
        """A last try for what waits."""
        self.write(b"")
        self.stream.close()


def screen(stream: TextIO, every: int, quiet: bool = False, plain: bool = False) -> "PlainLines":
    """The right screen for a stream; ranks other than the first are quiet, and what becomes a log is plain."""
    is_bar = stream.isatty() and not quiet and not plain
    return LiveBar(stream, every) if is_bar else PlainLines(stream, every, quiet)


def step_line(
    record: StepRecord, steps: int, peak: float | None, seconds_left: float | None = None, columns: int | None = None
) -> str:
    """One step in the field's usual order, in at most WIDTH columns. Utilization where the device's peak is known.

    On a terminal of fewer columns more is left out.
    """
    shown = record.loss if record.mean_loss is None else record.mean_loss  # of all replicas, where they have met
    begin = [f"step {record.step}/{steps}", f"loss {shown:.4f}"]
    if record.skipped:
        return "  ".join([*begin, f"skipped: gradient not finite (loss scale {record.loss_scale:.4g})"])
    words = {
        "norm": f"norm {record.norm:.3f}",
        "lr": f"lr {record.rate:.1e}",
        "balance": f"balance {record.balance:.2f}" if record.balance is not None else "",
        "memory": f"{gib(record.memory_bytes)} GiB",
        "tokens": f"{humane(record.tokens / record.seconds)} tok/s",
        "mfu": f"MFU {utilization(record.flops, record.seconds, peak):.1%}" if peak else "",
        "left": f"ETA {duration(seconds_left)}" if seconds_left else "",
    }
    text, width = "", min(columns or WIDTH, WIDTH)
    for name in ("", *STEADIEST[: None if width < WIDTH else 4]):  # what is too long is left out
        words[name] = ""
        text = "  ".join(filter(None, [*begin, *words.values()]))
        if len(text) <= width:
            break
    return text


def humane(number: float) -> str:
    """A count in three digits or so."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= max(0.9995 * size, 1e4):  # what would round up to the unit
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """A time in its two largest units."""
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{int(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


class PlainLines:
    """One plain line now and then, for pipes and logs."""

    def __init__(self, stream: TextIO, every: int, unheard: bool = False) -> None:
        self.stream = stream
        self.every = every
        self.speaker = Speaker(stream, unheard)
        self.pace: float | None = None  # seconds per step; the first one pays for warming up and does not count
        self.seen = 0

    def say(self, text: str) -> None:
        self._tell(lambda: print(fitted(text, self.stream), file=self.stream, flush=True))

    def step(self, record: StepRecord, steps: int, peak_flops_per_second: float | None) -> None:
        self.seen += 1
        if self.seen > 1:
            self.pace = record.seconds if self.pace is None else self.pace + PACE * (record.seconds - self.pace)
        if record.step == 1 or record.step % self.every == 0 or record.step == steps or record.skipped:
            left = None if self.pace is None else self.pace * (steps - record.step)
            self.say(step_line(record, steps, peak_flops_per_second, left, columns(self.stream)))

    def held(self, record: EvalRecord) -> None:
        self.say(f"validation loss {record.loss:.4f} after step {record.step}")

    def close(self) -> None:
        self._tell(self.stream.flush)
        self.speaker.close()

    def _tell(self, speak: Callable[[], None]) -> None:
        """A reader that has left or stands still, or a disk that is full, ends the telling and not the training."""
        self.speaker.say(speak)


class LiveBar(PlainLines):
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
        self._tell(lambda: self.progress.console.print(fitted(text, self.stream), markup=False, soft_wrap=True))

    def step(self, record: StepRecord, steps: int, peak_flops_per_second: float | None) -> None:
        if not self.started:
            self._tell(self.progress.start)
            self.started = True
        super().step(record, steps, peak_flops_per_second)
        latest = f"loss {record.loss:.3f}"
        if self.progress.console.width >= NARROW:
            latest += f"  {record.tokens / record.seconds:,.0f} tokens/s"
        self.progress.update(self.task, completed=record.step, total=steps, latest=latest)

    def close(self) -> None:
        if self.started:
            self._tell(self.progress.stop)
            self.started = False
        super().close()


def default_stream(machine: bool) -> TextIO:
    """Where people read: standard output, or standard error when a program reads standard output."""
    return sys.stderr if machine else sys.stdout


class Tracker(Protocol):
    """What a tracker must be able to do."""

    def log(self, values: dict[str, float], step: int) -> None: ...
    def finish(self) -> None: ...


class Writer:
    """A tracker on a thread of its own. Its first error is said once, and ends it alone."""

    def __init__(self, name: str, run: Run, folder: Path, say: Callable[[str], None]) -> None:
        self.name = name
        self.say = say
        self.records: queue.Queue[Curve | None] = queue.Queue(LONGEST_QUEUE)
        self.thread = threading.Thread(target=self._serve, args=(run, folder), name=f"writer-{name}", daemon=True)
        self.thread.start()

    def write(self, record: Curve) -> None:
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
            self.say(f"{self.name} stopped: {type(error).__name__}: {error}. Training continues; records are on disk.")


def numbers(record: Curve) -> dict[str, float]:
    """What of a record is worth a curve."""
    if isinstance(record, EvalRecord):
        return {"validation_loss": record.loss}
    values = {key: float(value) for key, value in msgspec.to_builtins(record).items() if isinstance(value, int | float)}
    for clock in ("step", "began", "ended", "at"):  # readings of the machine's clock, no quantities
        values.pop(clock)
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
    """W&B, and Trackio, which has the same functions."""

    def __init__(self, module: str, run: Run, folder: Path) -> None:
        self.module = importlib.import_module(module)
        self.module.init(project="meshwright", name=run.name, config=msgspec.to_builtins(run))

    def log(self, values: dict[str, float], step: int) -> None:
        self.module.log(values, step=step)

    def finish(self) -> None:
        self.module.finish()


TRACKERS: dict[str, Callable[[Run, Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": partial(Wandb, "wandb"),
    "trackio": partial(Wandb, "trackio"),
}


@dataclass(frozen=True, slots=True)
class Pending:
    """A step whose numbers are being copied to the host."""

    result: StepResult
    numbers: Tensor
    ready: torch.cuda.Event | None


@dataclass
class Recorder:
    """Reads results one step late where a GPU is still working, so that recording never makes the host wait for it."""

    run: Run
    mesh: Mesh
    folder: Path
    screen: PlainLines
    writers: Sequence[Writer] = ()
    pending: deque[Pending] = field(default_factory=deque)
    records: list[StepRecord] = field(default_factory=list)
    added: int = 0  # the newest step that was handed in
    last_eval: EvalRecord | None = None
    last_save_seconds: float = 0.0  # that the last save was waited for, behind the last step
    mirror: Mirror | None = None  # what copies saved steps elsewhere

    def __post_init__(self) -> None:
        file = self.folder / f"steps.rank{self.mesh.rank}.jsonl"
        self.past = read_records(file, self.screen.say)  # of earlier attempts
        self.lines = RecordFile(file, self.screen.say)
        self.timeline = DeviceTimeline(moment(self.mesh.device))
        self.peak = peak_of(self.mesh, self.run)

    def add(self, result: StepResult | EvalResult) -> None:
        """Take a result; write the steps that have arrived."""
        if isinstance(result, StepResult):
            self.pending.append(_fetch(result))
            self.added = result.step
            self._write_arrived(all_of_them=not self.records)  # the first loss is shown as soon as there is one
            return
        self._write_arrived(all_of_them=True)
        loss = result.loss.item()  # once it is there, the device has passed the end
        began, ended = self.timeline.reached(result.began), self.timeline.reached(result.ended)
        self.last_eval = EvalRecord(
            step=result.step,
            loss=loss,
            tokens=result.tokens,
            seconds=ended - began,
            began=began,
            ended=ended,
            at=time.monotonic(),
        )
        self._keep(self.last_eval)
        self.screen.held(self.last_eval)

    def wrote(self, step: int, prompts: tuple[str, ...], texts: tuple[str, ...], began: Moment, ended: Moment) -> None:
        """The model wrote after prompts."""
        self._keep(TextRecord(step=step, prompts=prompts, texts=texts, **self._aside(began, ended)))

    def exported(self, step: int, began: Moment, ended: Moment) -> None:
        """The model was written for a command."""
        self._keep(ExportRecord(step=step, **self._aside(began, ended)))

    def _aside(self, began: Moment, ended: Moment) -> dict[str, float]:
        """When training stood still between two steps."""
        self._write_arrived(all_of_them=True)
        if ended.event is not None:
            ended.event.synchronize()
        first, last = self.timeline.reached(began), self.timeline.reached(ended)
        return {"seconds": last - first, "began": first, "ended": last, "at": time.monotonic()}

    def commanded(self, record: CommandRecord) -> None:
        """A command on the model has ended; the last one may do so after everything else."""
        if self.lines.stream.closed:
            self.lines = RecordFile(self.lines.file, self.screen.say)
            self._keep(record)
            self.lines.close()
        else:
            self._keep(record)

    def begin(self, attempt: AttemptRecord) -> None:
        """The ranks stand ready."""
        self._keep(attempt)
        self.timeline = DeviceTimeline(moment(self.mesh.device))

    def tell(self, event: EventRecord) -> None:
        """Something worth telling, on this rank's line and the screen."""
        self._keep(event)
        self.screen.say(f"warning: step {event.step}: {event.text}")

    def adopt(self, rank: int, ahead: float) -> tuple[int, list[EventRecord]]:
        """Take over from another rank's records what this one missed while it was away or behind.

        The newest step of all, and what was worth telling: it is told here now, late, since nobody else may speak.

        `ahead`: what the monotonic clock of that rank's machine must be shifted by to be this one's.
        """
        whole = (self.folder / f"steps.rank{rank}.jsonl").read_bytes()
        theirs = [shifted(each, ahead) for each in read_lines(whole[: whole.rfind(b"\n") + 1].splitlines())[0]]
        # After a restart steps come again, so the largest need not be the last.
        last = next((mark for each in reversed(self.past) if (mark := _mark(each))), None)
        known = [place for place, each in enumerate(theirs) if last is not None and _mark(each) == last]
        told = {(each.what, each.step, each.rank) for each in self.past if isinstance(each, EventRecord)}
        missed = [
            each
            for each in theirs[known[-1] + 1 if known else 0 :]
            if not isinstance(each, EventRecord) or (each.what, each.step, each.rank) not in told
        ]
        for record in missed:
            self.tell(record) if isinstance(record, EventRecord) else self._keep(record)
        self.records += [record for record in missed if isinstance(record, StepRecord)]
        self.last_eval = next((each for each in reversed(missed) if isinstance(each, EvalRecord)), self.last_eval)
        self.added = max((record.step for record in self.records), default=self.added)
        self.timeline = DeviceTimeline(moment(self.mesh.device))
        return self.added, [record for record in missed if isinstance(record, EventRecord)]

    def saved(self, record: SaveRecord) -> None:
        """A checkpoint is on the disk, beside the steps; it is copied from there."""
        if self.mirror is not None:
            self.mirror.send(record.saved)
        self._keep(msgspec.structs.replace(record, step=max(self.added, record.saved), at=time.monotonic()))

    def end(self, step: int) -> None:
        """The session is over. The accounts are closed here, before the files are."""
        finished, waited = step == self.run.steps, self.last_save_seconds
        self._keep(EndRecord(step=step, at=time.monotonic(), finished=finished, save_seconds=waited))

    def settled(self) -> StepRecord | None:
        """The newest record that all ranks are sure to have by now."""
        late = MOST_PENDING if self.mesh.device.type == "cuda" else 0
        newest = self.added - late
        return next((record for record in reversed(self.records) if record.step == newest), None)

    def close(self) -> None:
        """Wait for what is still on its way, and write it."""
        self._write_arrived(all_of_them=True)
        self.lines.close()
        for writer in self.writers:
            writer.close()

    def _write_arrived(self, all_of_them: bool = False) -> None:
        while self.pending:
            ready = self.pending[0].ready
            if not (all_of_them or ready is None or ready.query() or len(self.pending) > MOST_PENDING):
                return
            record = self._record(self.pending.popleft())
            self.records.append(record)
            self._keep(record)
            self.screen.step(record, self.run.steps, self.peak)

    def _keep(self, record: Record) -> None:
        """On disk before anybody is told."""
        self.past.append(record)
        self.lines.write(line(record))
        if isinstance(record, StepRecord | EvalRecord):
            for writer in self.writers:
                writer.write(record)

    def _record(self, step: Pending) -> StepRecord:
        if step.ready is not None:
            step.ready.synchronize()  # of that step only; later ones continue
        loss, norm, finite, loss_scale, mean_loss, parts, whole, margin, ahead, *load = step.numbers.tolist()
        run, result, before = self.run, step.result, self.timeline.at
        variance = square = None
        if result.noise is not None:
            count = microbatches(run.plan)
            variance, square = (each / loss_scale**2 for each in estimate(parts, whole, count))
            variance *= result.tokens / count
        began, fed, updated, ended = map(
            self.timeline.reached, (result.began, result.fed, result.updated, result.ended)
        )
        return StepRecord(
            step=result.step,
            loss=loss,
            norm=norm,
            rate=result.rate,
            tokens=result.tokens,
            seconds=ended - before,
            data_seconds=fed - began,
            memory_bytes=peak_bytes(self.mesh.device),
            flops=step_flops(run.arch, run.sequence, run.batch, result.span),
            flops_causal=causal_step_flops(run.arch, run.sequence, run.batch, result.span),
            span=result.span,
            skipped=finite == 0.0,
            loss_scale=loss_scale,
            **dict(zip(LOADS, load, strict=True) if result.load is not None else ()),
            gradient_variance=variance,
            gradient_square=square,
            mean_loss=mean_loss if result.mean_loss is not None else None,
            reward_margin=margin if result.preference is not None else None,
            reward_accuracy=ahead if result.preference is not None else None,
            staleness=result.staleness,
            save_seconds=(max(ended - updated, LEAST_SECONDS) if result.pause.host else 0.0) + result.pause.on_device(),
            compile_seconds=result.compile_seconds,
            recovery_seconds=result.recovery_seconds,
            began=before,
            ended=ended,
            at=time.monotonic(),
        )


def read_records(file: Path, say: Callable[[str], None]) -> list[Record]:
    """A rank's records so far. A last line that was cut short is cut off, so that the next begins on its own."""
    if not file.exists():
        return []
    whole = file.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        os.truncate(file, end)
    records, damaged = read_lines(whole[:end].splitlines())
    if damaged:
        say(f"warning: {plural(damaged, 'line')} of {file} cannot be read: what was recorded there is left out")
    return records


def _mark(record: Record) -> tuple[str, int] | None:
    """What of a record another rank's has too, and so tells how far its file has come; None: nothing."""
    if isinstance(record, AttemptRecord):
        return record.session, record.number
    return (type(record).__name__, record.step) if isinstance(record, StepRecord | EvalRecord) else None


def _fetch(result: StepResult) -> Pending:
    """Start copying a step's numbers to the host, without waiting for them."""
    absent = torch.zeros_like(result.loss)
    mean_loss = absent if result.mean_loss is None else result.mean_loss
    noise = result.noise or GradientNoise(absent, absent)
    margin, ahead = (absent, absent) if result.preference is None else result.preference.unbind()
    numbers = (result.loss, result.norm, result.finite, result.loss_scale)
    load = (absent,) * len(LOADS) if result.load is None else result.load.unbind()
    values = (*numbers, mean_loss, noise.parts, noise.whole, margin, ahead, *load)
    numbers = torch.stack([value.double() for value in values])
    if not numbers.is_cuda:
        return Pending(result, numbers, None)
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event(enable_timing=True)
    ready.record()
    return Pending(result, host, ready)


def peak_bytes(device: torch.device) -> int:
    """The most memory held so far: the device's, or this process's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_of(mesh: Mesh, run: Run) -> float | None:
    """The arithmetic peak of all ranks together, None where it is not known."""
    if mesh.device.type != "cuda":
        return None
    peak = peak_flops_per_second(torch.cuda.get_device_name(mesh.device), run.plan.arithmetic)
    return peak * mesh.world if peak else None
