"""Pipeline schedules as data: for every rank the actions it takes, in order. Priced, drawn and executed by others."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, product
from typing import Literal

import msgspec

from meshwright.spec import schedule_orders
from meshwright.spec.schedule_orders import Action, Order

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "looped", "zb1p", "zbv", "dualpipev"]
Orders = tuple[Order, ...]  # one of each rank
Message = tuple[Literal["F", "I"], int, int]  # what a stage hands on for a microbatch: its output, its input's gradient


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How a schedule is made and what it needs."""

    order: Callable[[int, int, int, int], Order]  # of a rank, for pp, chunks and microbatches
    least_chunks: int = 1
    most_chunks: int | None = None  # None: no limit
    least_rounds: int = 0  # microbatches ÷ pp
    v_shaped: bool = False  # stages go down the ranks and up again, not round and round
    instead: str = ""  # the schedule for other numbers of chunks


_RULES: dict[Schedule, _Rule] = {
    "naive": _Rule(order=schedule_orders.naive, most_chunks=1),
    "gpipe": _Rule(order=schedule_orders.gpipe, most_chunks=1, instead="looped"),
    "1f1b": _Rule(order=schedule_orders.one_forward_one_backward, most_chunks=1, instead="interleaved"),
    "interleaved": _Rule(order=schedule_orders.interleaved, least_chunks=2, instead="1f1b"),
    "looped": _Rule(order=schedule_orders.looped, least_chunks=2, instead="gpipe"),
    "zb1p": _Rule(order=schedule_orders.zb1p),
    "zbv": _Rule(order=schedule_orders.zbv, least_chunks=2, most_chunks=2, v_shaped=True, instead="zb1p"),
    "dualpipev": _Rule(
        order=schedule_orders.dualpipev,
        least_chunks=2,
        most_chunks=2,
        least_rounds=2,
        v_shaped=True,
        instead="zb1p",
    ),
}


class Misfit(msgspec.Struct, frozen=True):
    """Why a schedule cannot have these numbers, what to do, and the key to look at."""

    text: str
    remedy: str
    key: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


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


def misfits(schedule: Schedule, pp: int, chunks: int, microbatches: int) -> list[Misfit]:
    """Everything that keeps a schedule from these numbers."""
    counts = {"plan.pp": pp, "plan.chunks": chunks, "plan.accumulate": microbatches}
    wrong = [
        Misfit(f"{key} = {value} is not a count", f"give {key} a whole number of at least 1", key)
        for key, value in counts.items()
        if value < 1
    ]
    return wrong or [*_chunk_misfits(schedule, chunks), *_microbatch_misfits(schedule, pp, microbatches)]


def _chunk_misfits(schedule: Schedule, chunks: int) -> Iterator[Misfit]:
    rule = _RULES[schedule]
    if rule.least_chunks <= chunks <= (rule.most_chunks or chunks):
        return
    allowed = f"exactly {rule.least_chunks}" if rule.most_chunks else f"at least {rule.least_chunks}"
    other = f", or plan.schedule = {rule.instead}" if rule.instead else ""
    yield Misfit(
        f"plan.chunks = {chunks}, and plan.schedule = {schedule} needs {allowed} on each rank",
        f"set plan.chunks = {rule.least_chunks}{other}",
        "plan.chunks",
    )


def _microbatch_misfits(schedule: Schedule, pp: int, microbatches: int) -> Iterator[Misfit]:
    rounds = _RULES[schedule].least_rounds
    if microbatches >= rounds * pp:
        return
    fewer = f", or plan.pp to at most {microbatches // rounds}" if microbatches >= rounds else ""
    yield Misfit(
        f"plan.schedule = {schedule} needs {rounds} microbatches for each of plan.pp = {pp} ranks to fill its V, "
        f"and plan.accumulate = {microbatches} is fewer",
        f"set plan.accumulate to at least {rounds * pp}{fewer}",
        "plan.accumulate",
    )


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


def validate(orders: Orders, placement: Sequence[int]) -> list[str]:
    """Everything that keeps orders from being one training step: nothing, for those of `actions`."""
    return [*_misplaced(orders, placement), *_incomplete(orders, len(placement)), *_stuck(orders, placement)]


def _misplaced(orders: Orders, placement: Sequence[int]) -> Iterator[str]:
    for rank, order in enumerate(orders):
        for action in order:
            if placement[action.stage] != rank:
                yield f"rank {rank} runs {action}, and stage {action.stage} is on rank {placement[action.stage]}"


def _incomplete(orders: Orders, stages: int) -> Iterator[str]:
    """Every stage takes every microbatch forward once and then back once, whole or in halves."""
    kinds: dict[tuple[int, int], str] = {}
    for action in chain.from_iterable(orders):
        visit = (action.stage, action.microbatch)
        kinds[visit] = kinds.get(visit, "") + action.kind
    microbatches = 1 + max((microbatch for _, microbatch in kinds), default=0)
    for stage, microbatch in product(range(stages), range(microbatches)):
        taken = kinds.get((stage, microbatch), "nothing")
        if taken not in ("FB", "FIW"):
            yield f"stage {stage} takes microbatch {microbatch} through {taken}, not FB or FIW"


def _stuck(orders: Orders, placement: Sequence[int]) -> Iterator[str]:
    """The action that each rank of a deadlock never gets to."""
    ran = Counter(placement[action.stage] for action, _ in flow(orders, placement))
    for rank, order in enumerate(orders):
        if ran[rank] < len(order):
            yield f"rank {rank} waits forever at {order[ran[rank]]}"


def to_csv(orders: Orders) -> str:
    """Orders as the compute-only file that torch.distributed.pipelining loads: a line a rank, 0F0,0F1,0B0."""
    return "".join(",".join(map(str, order)) + "\n" for order in orders)
