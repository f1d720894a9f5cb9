"""Out of memory, explained: which line of the ledger overran, and three changes that fit."""

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from meshwright.cost.memory import Ledger, ledger
from meshwright.parallel.mesh import local
from meshwright.search.found import Found, priced
from meshwright.search.neighbours import neighbours
from meshwright.search.question import Question
from meshwright.spec.catalogue import catalogue, recognised
from meshwright.spec.cluster import cluster_of_device
from meshwright.spec.exits import Exit
from meshwright.spec.run import Run
from meshwright.spec.stack import stacks
from meshwright.spec.verdict import Verdict
from meshwright.train.state import State

GIB = 2**30
STATES = ("weights", "master", "gradients", "moments")  # lines that are measured by adding up tensors
WANTED = 3


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to change so that it fits."""

    change: str
    peak_bytes: int
    cost: float  # predicted time of a step ÷ the present plan's

    def __str__(self) -> str:
        return f"{self.change}: {self.peak_bytes / GIB:.1f} GiB, {self.cost:.2f}× the time"


def explained(error: Exception, run: Run, state: State | None, device: torch.device) -> Verdict:
    """The verdict on an allocation that failed. Of a device that the catalogue does not know, no more than that."""
    if device.type != "cuda" or recognised(torch.cuda.get_device_name(device), catalogue().cards) is None:
        remedy = "use a smaller plan.microbatch, plan.recompute=full, or more ranks with plan.zero=3"
        return Verdict(kind="memory", code=Exit.DOES_NOT_FIT, what=f"out of memory: {error}", remedy=remedy)
    question = question_of(run, torch.cuda.get_device_name(device))
    measured = {} if state is None or run.plan.offload_weights else held(state)
    return verdict(question, run, measured, torch.cuda.max_memory_allocated(device), str(error))


def question_of(run: Run, device_name: str) -> Question:
    """What the planner would have been asked for this run, on cards as their driver names them."""
    return Question(
        arch=run.arch,
        sequence=run.sequence,
        batch=run.batch,
        precision=run.plan.precision,
        cluster=cluster_of_device(device_name, run.plan.world),
        stack=stacks()["meshwright"],
        masked=run.data.mask_documents,
    )


def held(state: State) -> dict[str, int]:
    """Bytes that this rank holds between steps, by line of the ledger."""
    weights = [local(weight.detach()) for weight in state.optimizer.weights]
    gradients = [local(weight.grad) for weight in state.optimizer.weights if weight.grad is not None]
    return {
        "weights": _bytes(weights),
        "gradients": _bytes(gradients),
        "moments": _bytes([*state.optimizer.first, *state.optimizer.second]),
    }


def verdict(question: Question, run: Run, measured: Mapping[str, int], peak: int, words: str) -> Verdict:
    """What overran, measured beside predicted, and what to do about it."""
    predicted = ledger(question.job(run.plan))
    name, here, there = overrun(predicted, measured, peak)
    found = changes(question, run)
    room = question.cluster.gpu.memory_bytes
    return Verdict(
        kind="memory",
        code=Exit.DOES_NOT_FIT,
        what=f"out of memory: {name} took {here / GIB:.2f} GiB, {there / GIB:.2f} GiB were predicted",
        where=f"{question.cluster.gpu.name}, {room / GIB:.0f} GiB; the peak was due at {predicted.moment}",
        since=f"{peak / GIB:.2f} GiB given out by torch, {predicted.allocated / GIB:.2f} GiB predicted",
        cause=words.splitlines()[0] if words else "",
        remedy="; ".join(str(each) for each in found) or "no single change fits: use more GPUs, or a smaller model",
    )


def overrun(predicted: Ledger, measured: Mapping[str, int], peak: int) -> tuple[str, int, int]:
    """The line that took most above its prediction: name, measured, predicted. What cannot be told apart is one."""
    said = {line.name: line.bytes for line in predicted.lines}
    rows = [(name, measured[name], said.get(name, 0)) for name in STATES if name in measured]
    rest = max(peak - sum(measured.values()), 0)
    rows.append(("what a step needs for itself", rest, max(predicted.allocated - sum(row[2] for row in rows), 0)))
    return max(rows, key=lambda row: row[1] - row[2])


def changes(question: Question, run: Run) -> list[Change]:
    """Changes of the plan that fit: one thing before two, then the quickest; the mathematics stays."""
    now = priced(question.job(run.plan)).price.seconds
    one = {each.plan: each.change for each in neighbours(question, run.plan) if each.plan is not None}
    two = {
        each.plan: f"{change} and {each.change}"
        for plan, change in one.items()
        for each in neighbours(question, plan)
        if each.plan is not None and each.plan not in one and each.plan != run.plan
    }
    fitting: list[tuple[str, Found]] = []
    for ring in (one, two):
        if len(fitting) < WANTED:
            found = [(change, priced(question.job(plan))) for plan, change in ring.items()]
            fitting += sorted((pair for pair in found if pair[1].fit.fits), key=lambda pair: pair[1].price.seconds)
    return [
        Change(change=change, peak_bytes=found.peak_bytes, cost=found.price.seconds / now)
        for change, found in fitting[:WANTED]
    ]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
