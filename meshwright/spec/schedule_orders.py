"""Pipeline orders from their definitions: what one rank computes, one action after another.

A stage is a run of layers; a rank holds `chunks` of them. Two families cover every schedule. Where stages go round the
ranks, a rank begins with some forwards and then alternates forwards and backwards, and schedules differ in how many it
begins with. Where stages go down the ranks and up again, as a V, an order is a short list of repeated phrases.
"""

from collections.abc import Sequence
from typing import Literal, cast

import msgspec

Kind = Literal["F", "B", "I", "W"]


class Action(msgspec.Struct, frozen=True, gc=False):
    """One computation of one stage on one microbatch."""

    stage: int
    kind: Kind  # F forward; B backward, or its halves: I for the gradient of the input, W for those of the weights
    microbatch: int

    def __str__(self) -> str:
        """The action in the words of torch.distributed.pipelining: 0F0, 1I3."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = tuple[Action, ...]
Visit = tuple[int, int]  # a stage and a microbatch that passes it


def naive(rank: int, pp: int, chunks: int, microbatches: int) -> Order:
    """One microbatch at a time, forward through all stages and back: what pipelining is measured against."""
    return _alternate(*_visits(rank, pp, chunks, microbatches), warmup=0)


def gpipe(rank: int, pp: int, chunks: int, microbatches: int) -> Order:
    """All forwards, then all backwards (Huang et al. 2018)."""
    return _alternate(*_visits(rank, pp, chunks, microbatches), warmup=microbatches)


def one_forward_one_backward(rank: int, pp: int, chunks: int, microbatches: int) -> Order:
    """Backwards as soon as they can be, so that a rank holds few microbatches (Narayanan et al. 2019, with a flush)."""
    return _alternate(*_visits(rank, pp, chunks, microbatches), warmup=pp - 1 - rank)


def interleaved(rank: int, pp: int, chunks: int, microbatches: int) -> Order:
    """1F1B over several chunks a rank, a round of microbatches through each chunk in turn (Narayanan et al. 2021).

    The paper asks for rounds of exactly pp; rounds of at least pp fill the pipeline as well, so any number of
    microbatches will do.
    """
    # A microbatch comes back to a rank two actions, its forward and its backward, later for every rank behind.
    warmup = _lead(pp, chunks, microbatches) + 2 * (pp - 1 - rank)
    return _alternate(*_visits(rank, pp, chunks, microbatches), warmup)


def looped(rank: int, pp: int, chunks: int, microbatches: int) -> Order:
    """Breadth first: all microbatches through one chunk, then the next; backwards mirrored (Lamy-Poirier 2022)."""
    forwards = [(stage, microbatch) for stage in range(rank, pp * chunks, pp) for microbatch in range(microbatches)]
    return _alternate(forwards, forwards[::-1], warmup=len(forwards))


def zb1p(rank: int, pp: int, chunks: int, microbatches: int) -> Order:
    """Zero bubble in the memory of 1F1B: weight gradients wait, and fill the gaps (Qi et al. 2023).

    Input gradients travel back one action a rank, so one forward of lead a rank is enough, and the rank that starts
    `rank` actions late keeps that many weight gradients for the end.
    """
    warmup = _lead(pp, chunks, microbatches) + pp - 1 - rank
    return _split(_alternate(*_visits(rank, pp, chunks, microbatches), warmup), lag=rank)


def zbv(rank: int, pp: int, chunks: int, microbatches: int) -> Order:
    """Zero bubble on a V, every rank holding the same peak (Qi et al. 2023, section 6)."""
    behind = pp - 1 - rank
    # The phrases need a full V. A smaller batch drops what it lacks: leaving out whole microbatches keeps the order.
    played = max(microbatches, 2 * pp - 1)
    order = _phrases(
        rank,
        pp,
        (
            (2 * behind + 1, "F0"),
            (rank, "F1 F0"),
            (behind + 1, "F1 I1 W1"),
            (played - 2 * pp + rank + 1, "F0 I0 W0 F1 I1 W1"),
            (behind, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (behind + 1, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ),
    )
    return tuple(action for action in order if action.microbatch < microbatches)


def dualpipev(rank: int, pp: int, chunks: int, microbatches: int) -> Order:
    """A V whose steady state pairs a forward with the backward of another microbatch (DeepSeek-AI 2024, cut in half).

    The pairs (F0 B1, F1 B0) exist so that one's communication hides behind the other's work; listed one after another.
    """
    behind = pp - 1 - rank
    turning = ["B1", "B0"] * (rank + 1)  # the first half whole, the second half split to end with weight gradients
    turning[rank + 1 :] = [word.replace("B", "I") for word in turning[rank + 1 :]]
    return _phrases(
        rank,
        pp,
        (
            (2 * behind, "F0"),
            (rank + 1, "F0 F1"),
            (behind, "I1 W1 F1"),
            (microbatches - 2 * pp + rank + 1, "F0 B1 F1 B0"),
            (behind, "B1 F1 B0"),
            (1, " ".join(turning)),
            (behind, "W I0"),
            (rank + 1, "W"),
        ),
    )


def _rounds(pp: int, microbatches: int) -> list[range]:
    """Consecutive microbatches in as many rounds of at least pp as there are, as even as can be."""
    count = max(1, microbatches // pp)
    return [range(microbatches * i // count, microbatches * (i + 1) // count) for i in range(count)]


def _visits(rank: int, pp: int, chunks: int, microbatches: int) -> tuple[list[Visit], list[Visit]]:
    """What passes a rank, forwards and backwards: each round through all its chunks before the next round."""
    stages = range(rank, pp * chunks, pp)
    rounds = _rounds(pp, microbatches)
    forwards = [(stage, microbatch) for part in rounds for stage in stages for microbatch in part]
    backwards = [(stage, microbatch) for part in rounds for stage in reversed(stages) for microbatch in part]
    return forwards, backwards


def _lead(pp: int, chunks: int, microbatches: int) -> int:
    """Forwards that even the last rank makes before its first backward: a round through all chunks but the last."""
    return (chunks - 1) * max(len(part) for part in _rounds(pp, microbatches))


def _alternate(forwards: Sequence[Visit], backwards: Sequence[Visit], warmup: int) -> Order:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    order = [Action(stage, "F", microbatch) for stage, microbatch in forwards[:warmup]]
    for index, (stage, microbatch) in enumerate(backwards, start=warmup):
        if index < len(forwards):
            order.append(Action(forwards[index][0], "F", forwards[index][1]))
        order.append(Action(stage, "B", microbatch))
    return tuple(order)


def _split(order: Order, lag: int) -> Order:
    """Each backward in halves, its weight gradients put off until `lag` more input gradients are made."""
    halves: list[Action] = []
    put_off: list[Action] = []
    for action in order:
        if action.kind == "F":
            halves.append(action)
            continue
        halves.append(Action(action.stage, "I", action.microbatch))
        put_off.append(Action(action.stage, "W", action.microbatch))
        if len(put_off) > lag:
            halves.append(put_off.pop(0))
    return (*halves, *put_off)


def _phrases(rank: int, pp: int, phrases: Sequence[tuple[int, str]]) -> Order:
    """Phrases, each so many times, in words like F1: a kind and which of the rank's two stages, 0 down and 1 up the V.

    A stage takes its microbatches in turn. W alone makes the oldest weight gradients put off, of either stage.
    """
    stages = (rank, 2 * pp - 1 - rank)
    forwards, backwards = [0, 0], [0, 0]  # microbatches that each stage has begun
    put_off: list[Action] = []
    order: list[Action] = []
    for word in (word for times, phrase in phrases for word in phrase.split() * times):
        if word[0] == "W":
            due = next(weights for weights in put_off if word == "W" or weights.stage == stages[int(word[1])])
            put_off.remove(due)
            order.append(due)
            continue
        kind, arm = cast(Kind, word[0]), int(word[1])
        begun = forwards if kind == "F" else backwards
        order.append(Action(stages[arm], kind, begun[arm]))
        if kind == "I":
            put_off.append(Action(stages[arm], "W", begun[arm]))
        begun[arm] += 1
    return tuple(order)
