"""Silent corruption: ranks that hold the same weights compare them, bit by bit, as sums."""

import platform
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.collective import join
from meshwright.parallel.mesh import Mesh, local
from meshwright.spec.exits import Exit
from meshwright.spec.verdict import FaultError, Verdict
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
        raise FaultError(self._verdict(rows, ranks, step))

    def _verdict(self, rows: list[list[int]], ranks: list[int], step: int) -> Verdict:
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
        return Verdict(
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
