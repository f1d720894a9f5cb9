"""Small models that know nothing of us, and losses for them, where other processes can import them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshwright.parallel.model_spec import ModelSpec, Stage, sequential_stage

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


class Choice(nn.Module):
    """Every row passes one of two matrices: even kinds the left one, odd kinds the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        for side, matrix in enumerate((self.left, self.right)):
            rows = (kind % 2 == side).nonzero().flatten()
            if len(rows):
                x = x.index_add(0, rows, matrix(self.norm(x[rows])).tanh())
        return x


class Forked(nn.Module):
    """Rows take branches by their kind, 0 to 7, the last number of each; what no row needs is not called.

    All pass the first block; block n is for kinds 2n and 2n + 1 alone, and `aside`, which is in no block, for 6 and 7.
    Nobody needs `never`, and `fixed` is not trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.aside, self.end = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Choice() for _ in range(4))
        self.never = nn.Parameter(torch.ones(4, 4))
        self.fixed = nn.Parameter(torch.full((WIDTH, WIDTH), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        kind, x = x[:, 3].long(), self.begin(x[:, :3])
        for number, layer in enumerate(self.layers):
            rows = (kind // 2 == number).nonzero().flatten() if number else torch.arange(len(x))
            if len(rows):
                x = x.index_copy(0, rows, layer(x[rows], kind[rows]))
        rows = (kind // 2 == 3).nonzero().flatten()
        if len(rows):
            x = x.index_add(0, rows, self.aside(x[rows]))
        return self.end(x @ self.fixed)


class Fork(nn.Module):
    """Rows pass one of two perceptrons by the sign of their first number, which stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 12) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(12, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for side, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows = ((x[:, 0] > 0) == side).nonzero().flatten()
            if len(rows):
                x = x.index_add(0, rows, F.pad(down(up(x[rows]).tanh())[:, 1:], (1, 0)))
        return x


class Carry(nn.Module):
    """Widens rows and keeps their first number."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(4, WIDTH - 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], self.matrix(x)], 1)


class Forks(Tower):
    """All of its blocks are called, and can be split every way; what is used of them depends on the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = Carry()
        self.layers = nn.ModuleList(Fork() for _ in range(4))


def forks_tp_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    return {"layers.*.up.*": ColwiseParallel(), "layers.*.down.*": RowwiseParallel()}


class Short(Tower):
    """Never calls its last block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.end(x)


class Looped(Tower):
    """Calls every block twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.end(x)


KINDS = [
    (0, 0, 0, 0, 2, 2, 2, 2),  # one half of the ranks needs block 1; blocks 2 and 3 and all right sides rest
    (0, 0, 0, 0, 0, 0, 4, 5),  # one rank needs block 2, in its last microbatch
    (6, 7, 0, 0, 0, 0, 0, 0),  # another rank needs block 3, in its first; blocks 1 and 2 rest, with moments
    (2, 3, 4, 5, 6, 7, 0, 1),
    (0, 0, 0, 0, 2, 2, 2, 2),
]


def forked_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows whose kinds send ranks and microbatches different ways."""
    draw = torch.Generator().manual_seed(4)
    inputs = [torch.cat([torch.randn(8, 3, generator=draw), torch.tensor(kinds)[:, None]], 1) for kinds in KINDS]
    return [(x, torch.randn(8, 2, generator=draw), torch.ones(8)) for x in inputs]


def signed_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows whose first numbers send ranks and microbatches different ways; in the second step all go one way."""
    signs = [(1, 1, 1, 1, -1, -1, 1, 1), (1,) * 8, (-1, -1, 1, 1, 1, 1, 1, 1)]
    return [
        (torch.cat([torch.tensor(sign)[:, None] * x[:, :1].abs(), x[:, 1:]], 1), *rest)
        for sign, (x, *rest) in zip(signs, forked_batches(), strict=False)
    ]


def tp_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def misnamed(model: nn.Module) -> dict[str, ParallelStyle]:
    return {"layers.*.up": ColwiseParallel(), "layers.*.dwon": RowwiseParallel()}


def forgetful(model: nn.Module, stage: Stage) -> nn.Module:
    """Leaves what comes after the blocks to every stage."""
    return sequential_stage(model, stage, before=("begin",), after=())


FORKS = ModelSpec(tp_plan=forks_tp_plan, stage_fn=partial(sequential_stage, before=("begin",), after=("end",)))
TOWER = ModelSpec(tp_plan=tp_plan, stage_fn=partial(sequential_stage, before=("begin",), after=("end",)))


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
