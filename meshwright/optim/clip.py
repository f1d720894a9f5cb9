"""One judgement of a step's gradient, over the whole mesh: its norm, whether it is finite, how far to shrink it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel import deterministic, fsdp
from meshwright.parallel.mesh import Mesh, copies, local
from meshwright.spec.plan import Plan

LONG = 1 << 18  # elements of a tensor in host memory that are too many to add up in one go
ROW = 1 << 14  # and how many are

Measure = Callable[[Sequence[nn.Module], Tensor, Mesh, float], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class GradStats:
    """What all ranks agree on before an update. Device scalars: nothing here waits for the device."""

    loss: Tensor  # sum of token losses over the whole job
    norm: Tensor  # of the whole gradient, loss scale taken out
    finite: Tensor  # 1.0 or 0.0; the update is skipped on every rank alike
    factor: Tensor  # what the gradient is multiplied with: clipping and the loss scale's inverse


def choose(plan: Plan) -> Measure:
    """How this plan adds up the loss, the square norm and the wish to stop over its ranks."""
    return deterministic.measured if plan.deterministic else measured


def measured(chunks: Sequence[nn.Module], loss_sum: Tensor, mesh: Mesh, asked: float) -> tuple[Tensor, Tensor, Tensor]:
    """One collective of three numbers: the loss, the gradient's square norm, and the sum of what ranks ask for.

    And one number a parameter of a model that may leave some out; what no rank used has no gradient after this.
    """
    totals = torch.stack([loss_sum.double(), square_share(chunks, mesh), deterministic.flag(asked, mesh)])
    used = fsdp.used_parameters(chunks)
    if used is not None:
        totals = torch.cat([totals, used.flags])
    if mesh.world > mesh.parts:
        dist.all_reduce(totals, group=mesh.peers)
    if used is not None:
        used.drop_unused(totals[3:])
    loss, square, stops = totals[:3].unbind()
    return loss, square, stops


def grad_stats(loss: Tensor, square: Tensor, scale: Tensor, limit: float) -> GradStats:
    """Statistics of the job's loss and the gradient's square norm, which still has the loss scale in it."""
    norm = square.sqrt() / scale
    finite = norm.isfinite()
    shrink = (limit / norm.clamp(min=limit)) if limit > 0 else torch.ones_like(norm)
    return GradStats(loss, norm, finite.double(), torch.where(finite, shrink / scale, 0.0))


def square_share(chunks: Iterable[nn.Module], mesh: Mesh, names: Collection[str] | None = None) -> Tensor:
    """This rank's share of the square norm: what several ranks hold alike each of them counts in part.

    Of some weights alone, if they are named.
    """
    groups: dict[int, list[Tensor]] = {}
    for chunk in chunks:
        twice = getattr(chunk, "tied_across_stages", frozenset())
        for name, weight in chunk.named_parameters():
            if weight.grad is not None and (names is None or name in names):
                count = copies(weight, mesh) * (2 if name in twice else 1)
                groups.setdefault(count, []).append(local(weight.grad))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for count, gradients in groups.items():
        total += square_norm(gradients).to(mesh.device) / count  # gradients may be in host memory
    return total


def square_norm(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of all elements, summed in at least fp32."""
    accum = torch.promote_types(tensors[0].dtype, torch.float32)
    parts = [_rows(tensor) for tensor in tensors]
    norms = torch.stack(torch._foreach_norm([rest for _, rest in parts], 2.0, dtype=accum))
    long = [torch.linalg.vector_norm(rows, dim=1, dtype=accum) for rows, _ in parts if rows is not None]
    return torch.cat([norms, *long]).double().square().sum()


def _rows(tensor: Tensor) -> tuple[Tensor | None, Tensor]:
    """A long tensor in host memory as rows, and what they leave; any other has no rows.

    A CPU adds up squares one after the other: in fp32 it loses 1 % of 2²⁶ random ones, and in rows 4e-8 of them.
    """
    if tensor.device.type != "cpu" or tensor.numel() < LONG:
        return None, tensor
    flat, count = tensor.reshape(-1), tensor.numel() // ROW
    return flat[: count * ROW].view(count, ROW), flat[count * ROW :]


FIRST = 2.0**16
GROW_AFTER = 1000  # finite steps in a row before the scale doubles
LOWEST = 1.0


class LossScale:
    """What the loss is multiplied with so that small gradients survive fp16. One, always, in other precisions.

    The only overflow test is the global gradient norm, which all ranks see; a test per process would let ranks that
    hold different shards skip different steps.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.moves = plan.precision == "fp16"
        self.value = torch.tensor(FIRST if self.moves else 1.0, dtype=torch.float64, device=device)
        self.streak = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, finite: Tensor) -> None:
        """Halve after an overflow, double after a long streak without one. Nothing waits for the device."""
        if not self.moves:
            return
        self.streak = (self.streak + 1) * finite
        grown = self.streak >= GROW_AFTER
        factor = torch.where(finite > 0, torch.where(grown, 2.0, 1.0), 0.5)
        self.value = (self.value * factor).clamp(min=LOWEST)
        self.streak = torch.where(grown, 0.0, self.streak)
