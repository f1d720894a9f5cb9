"""A gradient that is not finite: whose it was, of which samples, and a copy of them to look at."""

from pathlib import Path

import msgspec
import safetensors.torch
import torch

from meshwright.data.loader import Batch
from meshwright.parallel.collective import join
from meshwright.parallel.mesh import Mesh, local
from meshwright.spec.run import Run
from meshwright.train.state import State
from meshwright.train.step import losses
from meshwright.train.world import world_group

NONE = -1


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """Where numbers stopped being finite."""

    step: int
    rank: int | None  # None: the loss is finite on all of them, computed again
    microbatch: int
    samples: tuple[int, ...]  # global sample indices of the microbatch
    parameter: str  # the first, in the model's order, whose gradient is not finite; empty where that is gone
    batch: str = ""  # a file with the token ids

    def __str__(self) -> str:
        weight = f", first in the gradient of {self.parameter}" if self.parameter else ""
        if self.rank is None:
            return f"the gradient is not finite{weight}; computed again, the loss is: an overflow, or a passing fault"
        samples = f"samples {self.samples[0]} to {self.samples[-1]}" if self.samples else "no samples"
        saved = f"; saved in {self.batch}" if self.batch else ""
        return (
            f"the gradient is not finite: rank {self.rank}, microbatch {self.microbatch}, {samples}{weight}. "
            f"No rank has moved its weights{saved}"
        )


def culprit(run: Run, state: State, mesh: Mesh, step: int, folder: Path) -> Culprit:
    """Compute the step's losses again, one microbatch at a time. All ranks must ask; healthy steps never do."""
    parameter = first_parameter(state)
    microbatches = state.loader.take(step - 1).microbatches
    bad = NONE
    if run.plan.pp == 1:  # under a pipeline a microbatch has no rank of its own
        found = [number for number, batch in enumerate(microbatches) if not _finite(run, state, mesh, batch)]
        bad = found[0] if found else NONE
    samples = _samples(microbatches[bad], run) if bad != NONE else ()
    first, last = (samples[0], samples[-1]) if samples else (NONE, NONE)
    row = torch.tensor([[bad, first, last]], dtype=torch.int64, device=mesh.device)
    rows = join(row, 0, world_group()).tolist() if mesh.world > 1 else row.tolist()
    guilty = next((rank for rank, (number, *_) in enumerate(rows) if number != NONE), None)
    mine = Culprit(step=step, rank=mesh.rank, microbatch=bad, samples=samples, parameter=parameter)
    if bad != NONE:
        save(mine, microbatches[bad], folder)
    if guilty is None:
        return Culprit(step=step, rank=None, microbatch=NONE, samples=(), parameter=parameter)
    number, first, last = rows[guilty]
    return Culprit(
        step=step,
        rank=guilty,
        microbatch=number,
        samples=(first, last),
        parameter=parameter,
        batch=str(_file(folder, step, guilty)),
    )


def save(culprit: Culprit, batch: Batch, folder: Path) -> None:
    """The token ids beside what is known of them."""
    file = _file(folder, culprit.step, culprit.rank or 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"tokens": batch.tokens.cpu().contiguous(), "targets": batch.targets.cpu().contiguous()}
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(safetensors.torch.save(tensors))
    temporary.replace(file)
    file.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(culprit)) + b"\n")


def first_parameter(state: State) -> str:
    """The first weight whose gradient, if it is still there, is not finite."""
    for chunk in state.chunks:
        for name, weight in chunk.named_parameters():
            if weight.grad is not None and not local(weight.grad).isfinite().all().item():
                return name
    return ""


@torch.no_grad()
def _finite(run: Run, state: State, mesh: Mesh, batch: Batch) -> bool:
    weight = torch.ones((), device=mesh.device)
    _, loss = losses(state.chunks[0], run.plan, mesh, weight, batch)
    return bool(loss.isfinite().item())


def _samples(batch: Batch, run: Run) -> tuple[int, ...]:
    return tuple((batch.index[:, 0] // run.sequence).tolist())


def _file(folder: Path, step: int, rank: int) -> Path:
    return folder / "faults" / f"not-finite-step{step}-rank{rank}.safetensors"
