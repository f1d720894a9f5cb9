"""Small models that know nothing of us, and losses for them, where other processes can import them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshwright.parallel.model_spec import ModelSpec
from meshwright.parallel.model_spec import Stage
from meshwright.parallel.model_spec import sequential_stage

WIDTH = 8


class Block(nn.Module):
    """A perceptron added to what passes by, with a norm that no split table mentions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Tower(nn.Module):
    """Something before, four blocks, something after."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


class Scaled(Tower):
    """Does something of its own between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = 0.5 * layer(x)
        return self.end(x)


def plain() -> nn.Module:
    """No list of blocks: one unit. Drawn anew at every call."""
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))


class Tied(Tower):
    """The first and the last weight are one."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.end.weight = self.begin.weight


def splits(model: nn.Module) -> dict[str, ParallelStyle]:
    return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def misnamed(model: nn.Module) -> dict[str, ParallelStyle]:
    return {"layers.*.up": ColwiseParallel(), "layers.*.dwon": RowwiseParallel()}


def forgetful(model: nn.Module, stage: Stage) -> nn.Module:
    """Leaves what comes after the blocks to every stage."""
    return sequential_stage(model, stage, before=("begin",), after=())


TOWER = ModelSpec(splits=splits, part=partial(sequential_stage, before=("begin",), after=("end",)))


def loss(output: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Squares over the rows that count, and how many do."""
    _, targets, counted = batch
    return (F.mse_loss(output, targets, reduction="none").sum(1) * counted).sum(), counted.sum()


def averaged(output: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, int]:
    """The classic mistake: every microbatch's own average, which makes rows of short ones heavier."""
    total, count = loss(output, batch)
    return total / count, 1


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Eight rows, of which the second half counts for less than the first."""
    draw = torch.Generator().manual_seed(3)
    counted = torch.tensor([1, 1, 1, 1, 1, 0, 1, 0])
    return [(torch.randn(8, 3, generator=draw), torch.randn(8, 2, generator=draw), counted) for _ in range(2)]


def half_a_table(model: nn.Module) -> dict[str, ParallelStyle]:
    """Cuts what goes in and forgets what comes out, whose matrix then does not fit."""
    return {"layers.*.up": ColwiseParallel()}
