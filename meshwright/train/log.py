"""Results become records: JSON lines on disk are the truth, screens and trackers are their readers."""

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from meshwright.cost.flops import step_flops
from meshwright.parallel.mesh import Mesh
from meshwright.spec.cluster import peak_flops_per_second
from meshwright.spec.record import (
    AttemptRecord,
    EndRecord,
    EventRecord,
    HeldRecord,
    Record,
    StepRecord,
    line,
    read_line,
)
from meshwright.spec.run import Run
from meshwright.train.loop import HeldResult, StepResult
from meshwright.train.record_file import RecordFile
from meshwright.train.screen import Screen
from meshwright.train.writers import Writer

MOST_PENDING = 2  # steps whose numbers may still be on their way from the device


@dataclass(frozen=True, slots=True)
class Pending:
    """A step whose numbers are being copied to the host."""

    result: StepResult
    numbers: Tensor
    ready: torch.cuda.Event | None
    at: float

    def seconds_since(self, earlier: "Pending | None", began: float) -> float:
        """Between two steps: by the device's clock where the device works on its own."""
        if earlier is not None and self.ready is not None and earlier.ready is not None:
            return earlier.ready.elapsed_time(self.ready) / 1000
        return self.at - (earlier.at if earlier else began)


@dataclass
class Recorder:
    """Reads results one step late where a GPU is still working, so that recording never makes the host wait for it."""

    run: Run
    mesh: Mesh
    folder: Path
    screen: Screen
    writers: Sequence[Writer] = ()
    pending: deque[Pending] = field(default_factory=deque)
    records: list[StepRecord] = field(default_factory=list)
    added: int = 0  # the newest step that was handed in
    last_held: HeldRecord | None = None

    def __post_init__(self) -> None:
        file = self.folder / f"steps.rank{self.mesh.rank}.jsonl"
        self.past = read_records(file)  # of earlier attempts
        self.lines = RecordFile(file, self.screen.say)
        self.began = time.perf_counter()
        self.earlier: Pending | None = None
        self.flops = step_flops(self.run.arch, self.run.sequence, self.run.batch)
        self.peak = peak_of(self.mesh, self.run)

    def add(self, result: StepResult | HeldResult) -> None:
        """Take a result; write the steps that have arrived."""
        if isinstance(result, HeldResult):
            self._write_arrived(all_of_them=True)
            self._write_held(result)
        else:
            self.pending.append(_fetch(result))
            self.added = result.step
            self._write_arrived()

    def begin(self, attempt: AttemptRecord) -> None:
        """The ranks stand ready."""
        self._keep(attempt)
        self.began = time.perf_counter()

    def tell(self, event: EventRecord) -> None:
        """Something worth telling, on this rank's line and the screen."""
        self._keep(event)
        self.screen.say(f"warning: step {event.step}: {event.text}")

    def end(self, step: int) -> None:
        """The session is over. The accounts are closed here, before the files are."""
        self._keep(EndRecord(step=step, at=time.monotonic()))

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
        while self.pending and (all_of_them or self._has_arrived(self.pending[0])):
            self._write(self.pending.popleft())

    def _has_arrived(self, step: Pending) -> bool:
        return step.ready is None or step.ready.query() or len(self.pending) > MOST_PENDING

    def _write(self, step: Pending) -> None:
        if step.ready is not None:
            step.ready.synchronize()  # of that step only; later ones go on
        record = self._record(step)
        self.earlier = step
        self.records.append(record)
        self._keep(record)
        self.screen.step(record, self.run.steps, self.peak)

    def _write_held(self, result: HeldResult) -> None:
        loss = result.loss.item()
        self.last_held = HeldRecord(
            step=result.step, loss=loss, tokens=result.tokens, seconds=result.seconds, at=time.monotonic()
        )
        self._keep(self.last_held)
        self.screen.held(self.last_held)
        self.earlier = None  # the next step's clock starts after the held-out loss
        self.began = time.perf_counter()

    def _keep(self, record: Record) -> None:
        """On disk before anybody is told."""
        self.past.append(record)
        self.lines.write(line(record))
        if isinstance(record, StepRecord | HeldRecord):
            for writer in self.writers:
                writer.write(record)

    def _record(self, step: Pending) -> StepRecord:
        loss, norm, finite, loss_scale, balance = step.numbers.tolist()
        result = step.result
        return StepRecord(
            step=result.step,
            loss=loss,
            norm=norm,
            rate=result.rate,
            tokens=result.tokens,
            seconds=step.seconds_since(self.earlier, self.began),
            data_seconds=result.wait_seconds,
            memory_bytes=peak_bytes(self.mesh.device),
            flops=self.flops,
            skipped=finite == 0.0,
            loss_scale=loss_scale,
            balance=balance if result.balance is not None else None,
            save_seconds=result.save_seconds,
            at=time.monotonic(),
        )


def read_records(file: Path) -> list[Record]:
    """A rank's records so far. A last line that was cut short is cut off, so that the next begins on its own."""
    if not file.exists():
        return []
    whole = file.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        os.truncate(file, end)
    return [read_line(text) for text in whole[:end].splitlines()]


def _fetch(result: StepResult) -> Pending:
    """Start copying a step's numbers to the host, without waiting for them."""
    absent = torch.zeros_like(result.loss)
    balance = absent if result.balance is None else result.balance
    values = (result.loss, result.norm, result.finite, result.loss_scale, balance)
    numbers = torch.stack([value.double() for value in values])
    if not numbers.is_cuda:
        return Pending(result, numbers, None, time.perf_counter())
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event(enable_timing=True)
    ready.record()
    return Pending(result, host, ready, time.perf_counter())


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
    peak = peak_flops_per_second(torch.cuda.get_device_name(mesh.device), run.plan.precision)
    return peak * mesh.world if peak else None
