"""Stragglers: who works while the others wait for it."""

import math
from collections import deque
from statistics import median

import msgspec
import torch

from meshwright.parallel.collective import join
from meshwright.parallel.mesh import Mesh
from meshwright.spec.beat import PHASES
from meshwright.train.heartbeat import SECONDS, Heart
from meshwright.train.world import world_group

EVERY = 5  # steps between two looks
IN_A_ROW = 3  # looks that must agree: a burst of five steps is over before the third
LEAST_SECONDS = 0.5  # a look over less would see only chance
NOISE = 2.5  # deviations of sampled time that are chance
STEP_PHASES = ("data", "forward", "backward", "optimizer")


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that holds up the others."""

    rank: int
    phase: str
    ratio: float  # of its own work to the others'
    cost: float  # share of the step time that the others wait for it

    def __str__(self) -> str:
        return (
            f"rank {self.rank} works {self.ratio:.1f} times as long as the others, most of it in {self.phase}: "
            f"it costs {self.cost:.0%} of the step time"
        )


class Stragglers:
    """Gathers the ranks' own working times now and then; several looks in a row must agree."""

    def __init__(self, limit: float, mesh: Mesh, heart: Heart) -> None:
        self.limit = limit
        self.mesh = mesh
        self.heart = heart
        self.before = heart.spent()
        self.suspects: deque[int | None] = deque(maxlen=IN_A_ROW)
        self.named: int | None = None

    def look(self, step: int) -> Straggler | None:
        """All ranks must ask at the same steps."""
        if not self.limit or self.mesh.world == 1 or step % EVERY:
            return None
        spent = self.heart.spent()
        mine = [[new - old for new, old in zip(*pair, strict=True)] for pair in zip(spent, self.before, strict=True)]
        work, elapsed = self._gathered(mine)
        if elapsed < LEAST_SECONDS:
            return None  # look again when there is more to see
        self.before = spent
        found = straggler(work, elapsed, self.limit)
        self.suspects.append(found.rank if found is not None else None)
        if found is None or self.suspects.count(found.rank) < IN_A_ROW:
            self.named = self.named if found is not None else None
            return None
        told, self.named = self.named == found.rank, found.rank
        return None if told else found  # once, until it has caught up

    def _gathered(self, mine: list[list[float]]) -> tuple[list[list[float]], float]:
        row = torch.tensor([*mine[0], sum(map(sum, mine))], dtype=torch.float64, device=self.mesh.device)
        rows = join(row[None], 0, world_group()).tolist()
        return [one[:-1] for one in rows], min(one[-1] for one in rows)


def straggler(work: list[list[float]], elapsed: float, limit: float) -> Straggler | None:
    """The rank whose own work is so many times the others', from seconds by rank and phase; None if there is none."""
    columns = [PHASES.index(phase) for phase in STEP_PHASES]
    totals = [sum(row[column] for column in columns) for row in work]
    rank = max(range(len(totals)), key=totals.__getitem__)
    others = [row for number, row in enumerate(work) if number != rank]
    usual = median([total for number, total in enumerate(totals) if number != rank])
    chance = NOISE * math.sqrt(SECONDS * elapsed)  # of time that is seen by looking at it every so often
    excess = totals[rank] - usual
    if totals[rank] < limit * usual or excess < chance:
        return None
    worst = max(columns, key=lambda column: work[rank][column] - median([row[column] for row in others]))
    return Straggler(
        rank=rank, phase=PHASES[worst], ratio=totals[rank] / max(usual, SECONDS), cost=min(excess / elapsed, 1.0)
    )
