"""Pipeline schedules as data: for every rank the actions it takes, in order. Priced, drawn and executed by others."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, cast

import msgspec

from meshwright.spec.problem import Problem

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "looped", "zb1p", "zbv", "dualpipev"]
SPLIT_BACKWARD: tuple[Schedule, ...] = ("zb1p", "zbv", "dualpipev")  # for a block's input, and later for its weights
Kind = Literal["F", "B", "I", "W"]
IN_SIGHT = 3  # stages that torch's pipeline runtime holds gathered on a rank under zero 3: those it computes next


class Action(msgspec.Struct, frozen=True, gc=False):
    """One computation of one stage on one microbatch."""

    stage: int
    kind: Kind  # F forward; B backward, or its halves: I for the gradient of the input, W for those of the weights
    microbatch: int

    def __str__(self) -> str:
        """The action in the words of torch.distributed.pipelining: 0F0, 1I3."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = tuple[Action, ...]
Orders = tuple[Order, ...]  # one of each rank
Message = tuple[Literal["F", "I"], int, int]  # what a stage hands on for a microbatch: its output, its input's gradient
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


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How a schedule is made and what it needs."""

    order: Callable[[int, int, int, int], Order]  # of a rank, for pp, chunks and microbatches
    least_chunks: int = 1
    most_chunks: int | None = None  # None: no limit
    least_rounds: int = 0  # microbatches ÷ pp
    v_shaped: bool = False  # stages go down the ranks and up again, not round and round
    instead: str = ""  # the schedule for other numbers of chunks


_RULES: dict[Schedule, _Rule] = {
    "naive": _Rule(order=naive, most_chunks=1),
    "gpipe": _Rule(order=gpipe, most_chunks=1, instead="looped"),
    "1f1b": _Rule(order=one_forward_one_backward, most_chunks=1, instead="interleaved"),
    "interleaved": _Rule(order=interleaved, least_chunks=2, instead="1f1b"),
    "looped": _Rule(order=looped, least_chunks=2, instead="gpipe"),
    "zb1p": _Rule(order=zb1p),
    "zbv": _Rule(order=zbv, least_chunks=2, most_chunks=2, v_shaped=True, instead="zb1p"),
    "dualpipev": _Rule(order=dualpipev, least_chunks=2, most_chunks=2, least_rounds=2, v_shaped=True, instead="zb1p"),
}


def default_chunks(schedule: Schedule) -> int:
    """Chunks on each rank when nobody says."""
    return 1 if _RULES[schedule].most_chunks == 1 else 2


@lru_cache(maxsize=1024)
def stage_ranks(schedule: Schedule, pp: int, chunks: int) -> tuple[int, ...]:
    """The rank that holds each stage: round the ranks, or down and up again."""
    if _RULES[schedule].v_shaped:
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(pp * chunks))


@lru_cache(maxsize=256)
def actions(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> Orders:
    """What every rank computes in one step, in order."""
    if reason := legal(schedule, pp, chunks, microbatches):
        raise ValueError(reason)
    order = _RULES[schedule].order
    return tuple(order(rank, pp, chunks, microbatches) for rank in range(pp))


def legal(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> str | None:
    """None, or why the schedule cannot have these numbers and which ones it can."""
    return "\n".join(map(str, misfits(schedule, pp, chunks, microbatches))) or None


def misfits(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> list[Problem]:
    """Everything that keeps a schedule from these numbers."""
    counts = {"plan.pp": pp, "plan.chunks": chunks, "plan.grad_accum": microbatches}
    found = [
        Problem(f"{key} = {value} is not a count", f"give {key} a whole number of at least 1", key)
        for key, value in counts.items()
        if value < 1
    ]
    if found:
        return found
    rule = _RULES[schedule]
    if not rule.least_chunks <= chunks <= (rule.most_chunks or chunks):
        allowed = f"exactly {rule.least_chunks}" if rule.most_chunks else f"at least {rule.least_chunks}"
        other = f", or plan.schedule = {rule.instead}" if rule.instead else ""
        what = f"plan.chunks = {chunks}, and plan.schedule = {schedule} needs {allowed} on each rank"
        found.append(Problem(what, f"set plan.chunks = {rule.least_chunks}{other}", "plan.chunks"))
    rounds = rule.least_rounds
    if microbatches < rounds * pp:
        fewer = f", or plan.pp to at most {microbatches // rounds}" if microbatches >= rounds else ""
        what = (
            f"plan.schedule = {schedule} needs {rounds} microbatches for each of plan.pp = {pp} ranks to fill its V, "
            f"and plan.grad_accum = {microbatches} is fewer"
        )
        found.append(Problem(what, f"set plan.grad_accum to at least {rounds * pp}{fewer}", "plan.grad_accum"))
    return found


def flow(orders: Orders, placement: Sequence[int]) -> Iterator[tuple[Action, Message | None]]:
    """Every action with the message it waited for, as ranks that block on receiving would run; ends at a deadlock."""
    last = len(placement) - 1
    sent: set[Message] = set()
    blocked: dict[Message, int] = {}
    position = [0] * len(orders)
    free = list(range(len(orders)))
    while free:
        rank = free.pop()
        while position[rank] < len(orders[rank]):
            action = orders[rank][position[rank]]
            message = awaited(action, last)
            if message is not None and message not in sent:
                blocked[message] = rank
                break
            yield action, message
            position[rank] += 1
            if action.kind == "W":
                continue
            handed_on = ("F" if action.kind == "F" else "I", action.stage, action.microbatch)
            sent.add(handed_on)
            if handed_on in blocked:
                free.append(blocked.pop(handed_on))


def awaited(action: Action, last: int) -> Message | None:
    """What an action receives from the stage before (a forward) or behind (a backward); `last` is the last stage."""
    if action.kind == "F":
        return ("F", action.stage - 1, action.microbatch) if action.stage > 0 else None
    if action.kind != "W" and action.stage < last:
        return ("I", action.stage + 1, action.microbatch)
    return None
