"""Small checkpoints for tests: tensors held by one rank, saved and read by the real code."""

from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.format import Progress
from meshwright.checkpoint.state import TensorShard
from meshwright.checkpoint.storage import Disk
from meshwright.checkpoint.write import Saver
from meshwright.config import load
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import AXES

RUN = load.load(
    None, ["arch.preset=tiny", "checkpoint.every=1", "checkpoint.async=false", "plan.replicate=1"]
).run  # fmt: skip
SHAPES = {"weight/embed.weight": (7, 6), "weight/norm.weight": (5,), "first/stack": (3, 4, 2)}


def alone() -> Mesh:
    """A mesh of one rank, which speaks to nobody."""
    nobody: Any = None
    place = dict.fromkeys(AXES, 0)
    device = torch.device("cpu")
    return Mesh(dense=nobody, expert=nobody, fine=nobody, device=device, rank=0, world=1, data_rank=0, place=place)


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Other numbers at every step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def holdings(held: dict[str, torch.Tensor]) -> list[TensorShard]:
    return [
        TensorShard(name, tuple(tensor.shape), tuple((0, length) for length in tensor.shape), tensor, writes=True)
        for name, tensor in held.items()
    ]


def progress(step: int) -> Progress:
    return Progress(step=step, samples=step * RUN.batch, seed=1, updates=float(step), loss_scale=1.0, streak=0.0)


def saver(
    home: Path, held: dict[str, torch.Tensor], said: list[str], disk: Disk | None = None, run=RUN, **own
) -> Saver:
    return Saver(home, run, alone(), holdings(held), said.append, disk or Disk(), **own)


def save(home: Path, *steps: int, run=RUN) -> None:
    """Save some steps, each with its own numbers."""
    held, said = tensors(0), []
    made = saver(home, held, said, run=run)
    for step in steps:
        for name, tensor in tensors(step).items():
            held[name].copy_(tensor)
        made.save(progress(step))
    made.close()
    assert not said
