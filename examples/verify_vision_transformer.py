"""Prove plans on a model that is not ours and reads no text: a small vision transformer that classifies images."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshwright.parallel.model_spec import ModelSpec, sequential_stage
from meshwright.verify import parity

HIDDEN, HEAD_DIM, LAYERS, CLASSES = 32, 8, 4, 10
SIDE, PATCH = 16, 4


class Patches(nn.Module):
    """Images (b, 3, side, side) as embedded patches after a token that will stand for the whole (b, 1 + s, hidden)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, HIDDEN, PATCH, stride=PATCH)
        self.whole = nn.Parameter(torch.randn(1, 1, HIDDEN))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 1 + (SIDE // PATCH) ** 2, HIDDEN))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.project(images).flatten(2).mT
        return torch.cat((self.whole.expand(len(images), -1, -1), patches), dim=1) + self.positions


class Block(nn.Module):
    """Attention and a perceptron, each added to what passes by; heads are counted from the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (linear(normed).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Head(nn.Module):
    """Scores of the classes, from the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.norm(x[:, 0]))


class VisionTransformer(nn.Module):
    """Patches, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = Patches(), Head()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tp_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Heads and hidden units over ranks; all else stays whole on each."""
    into = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    return {**into, "blocks.*.out": RowwiseParallel(), "blocks.*.down": RowwiseParallel()}


VIT = ModelSpec(tp_plan=tp_plan, stage_fn=partial(sequential_stage, before=("patches",), after=("head",)))


def loss(scores: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum over images, and their number."""
    return F.cross_entropy(scores, batch["labels"], reduction="sum"), len(scores)


def batch(step: int) -> dict[str, Tensor]:
    """Noise with labels; the model is called with the first entry."""
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(8, 3, SIDE, SIDE, generator=draw)
    return {"images": images, "labels": torch.randint(CLASSES, (8,), generator=draw)}


PLANS = ["shard=2,zero=3", "tp=2", "pp=2,schedule=1f1b"]


def main() -> None:
    verdicts = parity(VisionTransformer, [batch(step) for step in range(3)], loss, PLANS, VIT, print)
    if not all(verdict.passed for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
