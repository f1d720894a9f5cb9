"""Of two replicas that differ neither is the majority: the steps made again say which of them was right.

Their gradients are summed, so a wrong number in one soon disturbs both; but only the number itself differs between
them. Each leaves that number as it had it. The run goes on from the last state that both agreed on; when it comes to
the same step again, whose number is far from the one that both have now was wrong.
"""

import math
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.collective import join
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan
from meshwright.spec.run import Run
from meshwright.spec.verdict import FaultError
from meshwright.train.replicas import Replicas, bit_sum, compared, first_odd
from meshwright.train.state import State

PAIR = 2
CLEARLY = 4.0  # times as far from the truth as the other: nearer ones may be where the disturbance has led them


class Testimony(msgspec.Struct, frozen=True, kw_only=True):
    """The first number in which two replicas differed, as one of them had it."""

    plan: Plan  # under another plan a rank holds other parts
    tensor: int  # of the weights, then the first, then the second moments
    element: int
    value: float | None  # None: not finite


class Witness:
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
        except FaultError:
            if pair:
                self._testify(replicas.group)
            raise
        if not pair or not replicas.every or step % replicas.every:
            return None
        return self._recall(dist.get_process_group_ranks(replicas.group))

    def _testify(self, group: dist.ProcessGroup) -> None:
        held = compared(self.state)
        sums = torch.stack([bit_sum(tensor) for tensor in held]).to(self.device)
        rows = join(sums[None], 0, group).tolist()
        number = first_odd(rows)
        element = first_difference(held[number].flatten().to(self.device), group)
        value = held[number].flatten()[element].item()
        told = Testimony(plan=self.plan, tensor=number, element=element, value=value if math.isfinite(value) else None)
        self.folder.mkdir(exist_ok=True)
        temporary = self._file(self.rank).with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(told))
        temporary.replace(self._file(self.rank))

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

    def _left(self, rank: int) -> Testimony | None:
        """What a rank left at this very step."""
        try:
            return msgspec.json.decode(self._file(rank).read_bytes(), type=Testimony)
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


def _shown(one: Testimony) -> str:
    return "no number" if one.value is None else f"{one.value:.9g}"
