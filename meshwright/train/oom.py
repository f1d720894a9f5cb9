"""Out of memory, explained: who else holds the card or which line of the ledger overran, and three changes that fit."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.cost.layout import LABELS, StateLayout, state_layout
from meshwright.cost.memory import Ledger, ledger, worst
from meshwright.hardware.cluster import catalogue, cluster_of_device, recognised
from meshwright.parallel import precision
from meshwright.parallel.mesh import local
from meshwright.runtime.devices import CONTEXT_BYTES, CardProcess, others, processes
from meshwright.runtime.failure import Exit, Failure, FailureError
from meshwright.search import budget
from meshwright.search.best_first import Candidate, fit_of, priced
from meshwright.search.explain import neighbours, smaller_microbatches
from meshwright.search.question import Question
from meshwright.spec.plan import Plan
from meshwright.spec.units import GIB, gib
from meshwright.train.state import State

# Lines that are measured by adding up tensors.
STATES = ("weights", "master", "reference", "gradients", "moments", "outer_states", "error_feedback")
WANTED = 3
FREE = "end them, or take another card (CUDA_VISIBLE_DEVICES)"
LESS = 0.97  # of what the plan needs: a change that is to help needs clearly less


class FittingChange(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to change so that it fits."""

    change: str
    peak_bytes: int
    cost: float  # predicted time of a step ÷ the present plan's

    def __str__(self) -> str:
        return f"{self.change}: {gib(self.peak_bytes)} GiB, {self.cost:.2f}× the time"


@contextmanager
def explaining(run: Run, device: torch.device, state: State | None = None) -> Iterator[None]:
    """An allocation that fails in here has a failure report of its own."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise FailureError(explained(error, run, state, device)) from error


class CardUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a card has, and what processes other than this one hold of it."""

    total_bytes: int
    other_bytes: int
    holders: tuple[CardProcess, ...]  # as far as the driver names them

    @property
    def is_shared(self) -> bool:
        """Whether others hold more than what any process holds beside its tensors."""
        return self.other_bytes > CONTEXT_BYTES

    def __str__(self) -> str:
        named = f": {'; '.join(map(str, self.holders))}" if self.holders else " (the driver does not say which)"
        return f"other processes hold {gib(self.other_bytes)} of this card's {self.total_bytes / GIB:.0f} GiB{named}"


def card_use(device: torch.device) -> CardUse:
    """Who holds a card now; what this process holds is left out."""
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    found = processes(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    holders = others(found, os.getpid(), own)
    named = sum(each.bytes or 0 for each in holders)
    # Of a process that the driver hides, what is missing tells. This one has a context beside its tensors.
    return CardUse(
        total_bytes=total,
        other_bytes=max(named, total - free - own - CONTEXT_BYTES, 0),
        holders=tuple(holders),
    )


def explained(error: Exception, run: Run, state: State | None, device: torch.device) -> Failure:
    """The report on an allocation that failed; where the catalogue has no such card, little more than who holds it."""
    use = card_use(device) if device.type == "cuda" else None
    if use is None or recognised(torch.cuda.get_device_name(device), catalogue().cards) is None:
        shared = f"; {use}" if use is not None and use.is_shared else ""
        remedy = "use a smaller plan.microbatch, plan.recompute=full, or more ranks with plan.zero=3"
        remedy = f"{FREE}; or {remedy}" if shared else remedy
        return Failure(kind="memory", code=Exit.DOES_NOT_FIT, what=f"out of memory: {error}{shared}", remedy=remedy)
    question = question_of(run, torch.cuda.get_device_name(device))
    measured = held(state, state_layout(question.job(run.plan))) if state is not None else {}
    return failure_report(question, run, measured, torch.cuda.max_memory_allocated(device), str(error), use)


def expected(run: Run, device: torch.device) -> str:
    """The peak that the planner expects, before anything is allocated; nothing of a device that it does not know."""
    if device.type != "cuda" or recognised(torch.cuda.get_device_name(device), catalogue().cards) is None:
        return ""
    return peak_words(question_of(run, torch.cuda.get_device_name(device)), run)


def peak_words(question: Question, run: Run) -> str:
    """What the most loaded rank is expected to hold, and whether it can."""
    peak, room = worst(question.job(run.plan)).allocated, question.cluster.gpu.memory_bytes
    words = f"{gib(peak)} of {room / GIB:.0f} GiB expected at the peak"
    return f"memory: {words}" if peak <= room else f"warning: {words}: this will not fit"


def question_of(run: Run, device_name: str) -> Question:
    """What the planner would have been asked for this run, on cards as their driver names them."""
    return budget.question_of(run, cluster_of_device(device_name, run.plan.world))


def held(state: State, layout: StateLayout) -> dict[str, int]:
    """Bytes that this rank's device holds between steps, by line of the ledger."""
    if layout.cpu_offload:
        return {}
    weights = state.optimizer.weights
    found = {"gradients": _bytes([local(weight.grad) for weight in weights if weight.grad is not None])}
    parameters = (weight for chunk in state.chunks for weight in chunk.parameters())
    frozen = [local(weight.detach()) for weight in parameters if not weight.requires_grad]
    if layout.offloaded:  # with the master weights
        return found | {"weights": _bytes([*(local(weight.detach()) for weight in weights), *frozen])}
    owed = [tensor for reduction in state.reductions for tensor in reduction.kept()]
    copied = [local(weight.detach()) for chunk in state.reference for weight in chunk.parameters()]
    outer = [tensor for tensors in state.outer.states().values() for tensor in tensors.values()]
    return found | {
        "weights": _bytes([*(precision.master(weight) for weight in weights), *frozen]),
        "moments": sum(_bytes(tensors) for tensors in state.optimizer.states().values()) if layout.of("moments") else 0,
        **({"reference": _bytes(copied)} if copied else {}),
        **({"outer_states": _bytes(outer)} if outer else {}),
        **({"error_feedback": _bytes(owed)} if owed else {}),
    }


def failure_report(
    question: Question, run: Run, measured: Mapping[str, int], peak: int, words: str, use: CardUse | None = None
) -> Failure:
    """Who holds the card, or what overran, measured beside predicted; and what to do about it."""
    predicted = ledger(question.job(run.plan))
    room = question.cluster.gpu.memory_bytes
    shared = use is not None and use.is_shared
    left = max(room - use.other_bytes, 0.0) if use is not None and shared else room
    found = changes(question, run, left)
    remedy = "; ".join(str(each) for each in found) or "no single change fits: use more GPUs, or a smaller model"
    if shared and predicted.allocated <= room:
        into = f", or fit into the {gib(left)} GiB that are left: {remedy}" if found else ""
        remedy = f"{FREE}{into}"
    why = f"{use}; this plan needs {gib(predicted.allocated)} GiB" if shared else ""
    return Failure(
        kind="memory",
        code=Exit.DOES_NOT_FIT,
        what=f"out of memory: {why or cause(predicted, measured, peak, room)}",
        where=f"{question.cluster.gpu.name}, {room / GIB:.0f} GiB; the peak was due at {predicted.moment}",
        since=f"{peak / GIB:.2f} GiB given out by torch, {predicted.allocated / GIB:.2f} GiB predicted",
        cause=words.splitlines()[0] if words else "",
        remedy=remedy,
    )


def cause(predicted: Ledger, measured: Mapping[str, int], peak: int, room: float) -> str:
    """A plan that never had room, or else the line that overran."""
    if predicted.allocated > room:
        most = max(predicted.lines, key=lambda line: line.bytes)
        return (
            f"the plan needs {gib(predicted.allocated)} GiB of {room / GIB:.0f}, as predicted, "
            f"{gib(most.bytes)} of them for {most.label}"
        )
    name, here, there = overrun(predicted, measured, peak)
    return f"{LABELS.get(name, name)} took {here / GIB:.2f} GiB, {there / GIB:.2f} GiB were predicted"


def overrun(predicted: Ledger, measured: Mapping[str, int], peak: int) -> tuple[str, int, int]:
    """The line that took most above its prediction: name, measured, predicted. What cannot be told apart is one."""
    said = {line.name: line.bytes for line in predicted.lines}
    rows = [(name, measured[name], said.get(name, 0)) for name in STATES if name in measured]
    rest = max(peak - sum(measured.values()), 0)
    rows.append(("what a step needs for itself", rest, max(predicted.allocated - sum(row[2] for row in rows), 0)))
    return max(rows, key=lambda row: row[1] - row[2])


def changes(question: Question, run: Run, room: float = math.inf) -> list[FittingChange]:
    """Changes of the plan that fit into so much: one thing before two, then the quickest; the mathematics stays.

    What was predicted to fit and did not is no measure of what does: every change needs less than the plan.
    """
    before = priced(question.job(run.plan))
    now = before.price.seconds
    limit = min(room, LESS * before.peak_bytes)
    question = msgspec.structs.replace(question, limit_bytes=limit).on(question.cluster)
    one = _beside(question, run.plan)
    fitting = _fitting(question, one)
    if len(fitting) < WANTED:
        two = {
            further: f"{change} and {second}"
            for first, change in one.items()
            for further, second in _beside(question, first).items()
            if further not in one and further != run.plan
        }
        fitting += _fitting(question, two)
    return [
        FittingChange(change=change, peak_bytes=found.peak_bytes, cost=found.price.seconds / now)
        for change, found in fitting[:WANTED]
    ]


def _fitting(question: Question, plans: Mapping[Plan, str]) -> list[tuple[str, Candidate]]:
    """Those that fit, the quickest first."""
    found = [(change, priced(question.job(plan))) for plan, change in plans.items()]
    return sorted((pair for pair in found if pair[1].fits is not False), key=lambda pair: pair[1].price.seconds)


def _beside(question: Question, plan: Plan) -> dict[Plan, str]:
    """Plans with one thing changed; of smaller microbatches the largest that fits."""
    beside = {each.plan: each.change for each in neighbours(question, plan) if each.plan is not None}
    for each in smaller_microbatches(question, plan):
        if each.plan is not None and fit_of(question.job(each.plan)).fits is not False:
            return beside | {each.plan: each.change}
    return beside


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
