"""Prove plans on a module of one's own: the same numbers as in one process."""

import torch
from torch import nn

import meshwright


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10))


def loss(scores: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(scores, batch[1], reduction="sum"), len(scores)


if __name__ == "__main__":
    batches = [(torch.randn(8, 16), torch.randint(10, (8,))) for _ in range(3)]
    meshwright.parity(make_model, batches, loss, ["replicate=2", "shard=2,zero=3"], say=print)
