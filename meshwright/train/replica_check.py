"""Silent corruption: ranks that hold the same weights compare them, bit by bit, as sums."""

import math
import platform
from collections import Counter
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config.run import Run
from meshwright.parallel.collectives import join
from meshwright.parallel.mesh import Mesh, local
from meshwright.runtime.failure import Exit, Failure, FailureError
from meshwright.runtime.files import replace_file
from meshwright.spec.plan import Plan
from meshwright.train.state import State

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes of an element


class Replicas:
    """Compares the weights and moments of the replicas every so many steps."""

    def __init__(self, every: int, state: State, mesh: Mesh) -> None:
        self.every = every
        self.state = state
        self.mesh = mesh
        self.group = mesh.dense["replicate"].get_group()
        self.equal_at = state.step

    def look(self, step: int) -> None:
        """Raise when they differ. All ranks must ask at the same steps."""
        if not self.every or step % self.every or self.group.size() == 1:
            return
        sums = torch.stack([bit_sum(tensor) for tensor in compared(self.state)])
        rows = join(sums[None].to(self.mesh.device), 0, self.group).tolist()
        if all(row == rows[0] for row in rows):
            self.equal_at = step
            return
        ranks = [dist.get_global_rank(self.group, number) for number in range(self.group.size())]
        raise FailureError(self._verdict(rows, ranks, step))

    def _verdict(self, rows: list[list[int]], ranks: list[int], step: int) -> Failure:
        odd = odd_ones(rows)
        which = [ranks[number] for number in odd]
        names = [name for chunk in self.state.chunks for name, _ in chunk.named_parameters()]
        first = first_odd(rows)
        part = ("weight", "first moment", "second moment")[first // len(names)]
        who = (
            f"rank {which[0]} differs from its replicas"
            if len(which) == 1
            else f"ranks {' and '.join(map(str, which))} differ"
        )
        return Failure(
            kind="replicas",
            code=Exit.HARDWARE,
            what=f"{who}: the {part} of {names[first % len(names)]} is not the same number",
            where=f"{platform.node()}, seen after step {step}",
            since=f"after step {self.equal_at}, when all were equal",
            cause="a bit changed in memory or arithmetic: suspect the device of that rank",
            remedy="take the device out, and run the same command again; checkpoints in doubt are set aside",
            good_until=self.equal_at,
            rank=which[0],
            step=step,
        )


def compared(state: State) -> list[Tensor]:
    """What replicas hold alike: the weights, then their first, then their second moments."""
    optimizer = state.optimizer
    return [*(local(weight.detach()) for weight in optimizer.weights), *optimizer.first, *optimizer.second]


def first_odd(rows: list[list[int]]) -> int:
    """The first column of several rows whose numbers are not all the same."""
    return next(number for number, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1)


def bit_sum(tensor: Tensor) -> Tensor:
    """A sum that any single changed bit changes: of the elements' bits, as whole numbers that may wrap."""
    return tensor.contiguous().view(WORDS[tensor.element_size()]).sum(dtype=torch.int64)


def odd_ones(rows: list[list[int]]) -> list[int]:
    """Which of several equal rows are not: those outside the majority; all of them where there is none."""
    votes = Counter(tuple(row) for row in rows)
    (usual, most), *_ = votes.most_common()
    if most * 2 <= len(rows):
        return list(range(len(rows)))
    return [number for number, row in enumerate(rows) if tuple(row) != usual]


PAIR = 2
CLEARLY = 4.0  # times as far from the truth as the other: nearer ones may be where the disturbance has led them


class ReplicaEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The first number in which two replicas differed, as one of them had it."""

    plan: Plan  # under another plan a rank holds other parts
    tensor: int  # of the weights, then the first, then the second moments
    element: int
    value: float | None  # None: not finite


class ReplicaCheck:
    """Remembers, over a restart, who held what."""

    def __init__(self, run: Run, state: State, mesh: Mesh, folder: Path) -> None:
        self.plan = run.plan
        self.state = state
        self.rank = mesh.rank
        self.device = mesh.device
        self.folder = folder / "faults"

    def look(self, replicas: Replicas, step: int) -> tuple[int | None, str] | None:
        """Compare the replicas: leave what this rank has if they differ; tell who erred if they once differed here."""
        pair = replicas.group.size() == PAIR
        try:
            replicas.look(step)
        except FailureError:
            if pair:
                self._leave_evidence(replicas.group)
            raise
        if not pair or not replicas.every or step % replicas.every:
            return None
        return self._recall(dist.get_process_group_ranks(replicas.group))

    def _leave_evidence(self, group: dist.ProcessGroup) -> None:
        held = compared(self.state)
        sums = torch.stack([bit_sum(tensor) for tensor in held]).to(self.device)
        rows = join(sums[None], 0, group).tolist()
        number = first_odd(rows)
        element = first_difference(held[number].flatten().to(self.device), group)
        value = held[number].flatten()[element].item()
        told = ReplicaEvidence(
            plan=self.plan, tensor=number, element=element, value=value if math.isfinite(value) else None
        )
        self.folder.mkdir(exist_ok=True)
        replace_file(self._file(self.rank), msgspec.json.encode(told))

    def _recall(self, ranks: list[int]) -> tuple[int | None, str] | None:
        told = [self._left(rank) for rank in ranks]
        if any(one is None or one.plan != self.plan for one in told):
            return None
        left = [one for one in told if one is not None]
        truth = compared(self.state)[left[0].tensor].flatten()[left[0].element].item()
        odd = wrong([one.value for one in left], truth)
        if odd is None:
            return None, "made again, this step does not tell which of the replicas that differed was wrong"
        return ranks[odd], (
            f"made again, this step shows that rank {ranks[odd]} was wrong: it had {_shown(left[odd])} where "
            f"rank {ranks[1 - odd]} had {_shown(left[1 - odd])} and both have {truth:.9g} now"
        )

    def _left(self, rank: int) -> ReplicaEvidence | None:
        """What a rank left at this very step."""
        try:
            return msgspec.json.decode(self._file(rank).read_bytes(), type=ReplicaEvidence)
        except (OSError, msgspec.DecodeError):
            return None

    def _file(self, rank: int) -> Path:
        return self.folder / f"replicas-step{self.state.step}-rank{rank}.json"


def wrong(values: list[float | None], truth: float) -> int | None:
    """Which of two is clearly further from the truth; None if neither is."""
    one, other = (math.inf if value is None else abs(value - truth) for value in values)
    if one > CLEARLY * other:
        return 0
    return 1 if other > CLEARLY * one else None


def first_difference(flat: Tensor, group: dist.ProcessGroup) -> int:
    """The first element that is not the same on all ranks, found by halves: sums travel, not the tensor."""
    begin, end = 0, len(flat)
    while end - begin > 1:
        middle = (begin + end) // 2
        sums = join(bit_sum(flat[begin:middle])[None], 0, group).tolist()
        begin, end = (middle, end) if len(set(sums)) == 1 else (begin, middle)
    return begin


def _shown(one: ReplicaEvidence) -> str:
    return "no number" if one.value is None else f"{one.value:.9g}"
