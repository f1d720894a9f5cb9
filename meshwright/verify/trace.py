"""The dry run: one rank of any world takes a real step on tensors without memory, beside what was planned for it."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from meshwright.config.run import Run
from meshwright.cost.job import Job
from meshwright.cost.layout import LABELS, hosted, state_layout, states, total
from meshwright.cost.memory import Ledger, ledger, worst
from meshwright.cost.traffic import Kind, traffic
from meshwright.spec.plan import Plan
from meshwright.verify.dry_run import DryRunStep, trace_step, traceable

# The ledger knows a few moments of a step, the trace every operator in between: single buffers of one block, which
# weigh little in a model of some size.
PEAK_TOLERANCE = 0.10
NOTES = {  # of a field that is used
    "compile": "traced without the compiler, which cannot work on fake tensors: compiled blocks save less",
    "activation_quant": "traced with saved activations as they are: quantized ones are not followed",
    "activation_offload": "traced with saved activations on the device: copies on the host are not followed",
    "optimizer_offload": "traced with all states on the device, and compared with the ledger of that",
    "pp": "one rank of the pipeline was traced: its neighbours' messages arrive at once",
    "cpu_offload": "a CPU's memory is the host's: the peak is that of the device with what lives in host memory",
}


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind and size among the same ranks."""

    kind: Kind
    axis: str
    bytes: int  # of one call
    planned: int  # calls in a step
    traced: int

    @property
    def agrees(self) -> bool:
        return self.planned == self.traced


class ByteRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something a rank holds."""

    name: Literal["weights", "gradients", "moments", "peak"]
    planned: int
    traced: int
    tolerance: float  # of the planned; 0: to the byte

    @property
    def agrees(self) -> bool:
        return abs(self.traced - self.planned) <= self.tolerance * self.planned


class TraceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's step, planned and traced."""

    plan: str
    rank: int
    world: int
    calls: tuple[CallRow, ...]
    held: tuple[ByteRow, ...]
    moment: str  # of the peak, by the ledger
    phase: str  # of the peak, as it was traced
    notes: tuple[str, ...]  # what was traced otherwise than it will run
    refused: str = ""  # why nothing could be traced

    @property
    def agrees(self) -> bool:
        return not self.refused and all(row.agrees for row in (*self.calls, *self.held))


def trace(run: Run, job: Job, rank: int | None = None) -> TraceReport:
    """One step of a rank, the most loaded unless one is named. A step that cannot be traced is reported as such."""
    plan = traceable(run.plan)
    plain = msgspec.structs.replace(job, plan=plan, state_dtype="fp32")
    if rank is None:
        rank = worst(plain).rank * (plan.world // plan.pp)  # pp is the outermost axis
    about = {"plan": str(run.plan), "rank": rank, "world": plan.world, "notes": tuple(notes(run))}
    try:
        seen = trace_step(run, rank, lambda place: traffic(run.arch, plan, run.sequence, place=place))
    except (RuntimeError, NotImplementedError) as error:  # torch's words for an operator that needs values
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return TraceReport(**about, calls=(), held=(), moment="", phase="", refused=reason)
    said = ledger(plain, seen.place)
    held = tuple(_held(plain, plan, seen, said))
    return TraceReport(**about, calls=tuple(_calls(seen)), held=held, moment=said.moment, phase=seen.phase)


def _calls(seen: DryRunStep) -> Iterator[CallRow]:
    """Every call that was planned or made."""
    for call in sorted(seen.calls.keys() | seen.said.keys()):
        yield CallRow(
            kind=call.kind,
            axis=seen.axes.get(call.ranks, f"{len(call.ranks)} ranks"),
            bytes=call.bytes,
            planned=seen.said[call],
            traced=seen.calls[call],
        )


def _held(job: Job, plan: Plan, seen: DryRunStep, said: Ledger) -> Iterator[ByteRow]:
    near, away = (of(job.arch, plan, seen.place, state_layout(job)) for of in (states, hosted))
    planned = {line.name: line.bytes for line in (*near, *away)}
    for name in ("weights", "gradients", "moments"):
        yield ByteRow(name=name, planned=planned[name], traced=seen.states[name], tolerance=0.0)
    yield ByteRow(name="peak", planned=said.allocated + total(away), traced=seen.live_bytes, tolerance=PEAK_TOLERANCE)


def notes(run: Run) -> Iterator[str]:
    """What a trace leaves out or does otherwise, for this run."""
    plan = run.plan
    yield "traced on a CPU's operators: workspaces, the allocator's cache and the device's context are not seen"
    if plan.kernels != "plain":
        yield "traced with plain kernels, and compared with the ledger of plain kernels: Triton's need a GPU"
    yield from (text for name, text in NOTES.items() if plan.uses(name))
    if run.optim.master_weights != "fp32":
        yield "the update of weights in bf16 is not traced: its collectives and states are"
    if run.arch.experts:
        yield "routers have no values to choose by: every expert gets an equal share of the rows, as the plan assumes"
    if plan.cp > 1 and plan.cp_kind == "ring" and (plan.precision in ("fp32", "fp64") or run.data.mask_documents):
        yield "on a CPU this ring's attention is made of plain operators, whose scores a GPU's kernel does not hold"
    if plan.precision == "fp16":
        yield "no gradient overflows here: the loss scale stays as it is"


def lines(found: TraceReport) -> Iterator[str]:
    """A trace as people read it."""
    yield f"dry run of rank {found.rank} of {found.world}, one whole step on tensors without memory: {found.plan}"
    if found.refused:
        yield f"could not be traced: {found.refused}"
    else:
        yield from _tables(found)
    yield "what to know:"
    yield from (f"  {note}" for note in found.notes)
    if not found.refused:
        yield "the trainer does what was planned" if found.agrees else "the trainer does not do what was planned"


def _tables(found: TraceReport) -> Iterator[str]:
    if found.calls:
        yield f"{'collective':<16}{'axis':<18}{'bytes a call':>16}{'planned':>10}{'traced':>10}{'difference':>12}"
    else:
        yield "collectives: none, planned or traced"
    for row in found.calls:
        difference = "–" if row.agrees else f"{row.traced - row.planned:+,}"
        yield f"{row.kind:<16}{row.axis:<18}{row.bytes:>16,}{row.planned:>10,}{row.traced:>10,}{difference:>12}"
    yield f"{'bytes held':<16}{'planned':>22}{'traced':>22}{'difference':>12}"
    for row in found.held:
        difference = f"{row.traced / row.planned - 1:+.2%}" if row.planned else "new"
        difference = "–" if row.traced == row.planned else difference
        allowed = "" if not row.tolerance else f"  ({row.tolerance:.0%} allowed)"
        wrong = "" if row.agrees else "  !"
        yield f"{LABELS.get(row.name, row.name):<16}{row.planned:>22,}{row.traced:>22,}{difference:>12}{allowed}{wrong}"
    yield f"the peak was planned at {found.moment}, and traced in {found.phase}"
