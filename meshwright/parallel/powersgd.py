"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): replicas exchange two thin factors of each matrix's gradient.

One step of the power method, begun with the last step's factor (warm start), and error feedback. With M_r a replica's
gradient and what it is owed, turned so that it has no more rows than columns, and n replicas:

    P = Σ M_r Q;   P ← an orthonormal basis of its columns;   Q ← Σ M_rᵀ P;   sum ≈ P Qᵀ;   owed: M_r − P Qᵀ / n

Of full rank P is square, P Pᵀ is one, and the sum is exact. Vectors are summed as they are, with P. A stack of
experts is so many matrices.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config.run import Run
from meshwright.parallel import precision
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.reduction import FeedbackPart, ReducedWeight, take_earlier
from meshwright.spec.communication import FACTOR, REPLICA_ERROR, Factors, factors, of_part
from meshwright.spec.plan import Plan


class PowerSGD:
    """The gradient reduction of one group of weights that replicas hold whole."""

    def __init__(self, plan: Plan, group: Any, weights: Sequence[ReducedWeight], replicas: dist.ProcessGroup) -> None:
        self.group, self.weights, self.replicas = group, list(weights), replicas
        self.feeds_back = plan.error_feedback
        self.lengths = [weight.elements for weight in weights]
        self.shapes = [factors(weight.whole, plan.powersgd) for weight in weights]
        self.factors: list[Tensor] = []  # of each matrix the long one, Q
        self.error: Tensor | None = None

    def begin(self, run: Run, mesh: Mesh) -> None:
        dtype = precision.weight_dtype(run.plan)
        matrices = [(weight, shape) for weight, shape in zip(self.weights, self.shapes, strict=True) if shape]
        self.factors = [first_factor(run.seed, weight.name, shape).to(mesh.device, dtype) for weight, shape in matrices]
        if self.feeds_back:
            self.error = torch.zeros(sum(self.lengths), dtype=dtype, device=mesh.device)

    def over_replicas(self, gradient: Tensor) -> None:
        """Sum a group's gradient over replicas, with the last microbatch of a step."""
        if not self.group.all_reduce_grads:
            return  # torch adds it to this rank's own
        take_earlier(gradient, self.weights)
        if self.error is not None:
            gradient.add_(self.error)
        pieces = gradient.split(self.lengths)
        vectors = [piece for piece, shape in zip(pieces, self.shapes, strict=True) if shape is None]
        matrices = [matrices_of(piece, shape) for piece, shape in zip(pieces, self.shapes, strict=True) if shape]
        firsts = [matrix @ factor for matrix, factor in zip(matrices, self.factors, strict=True)]
        summed = self._summed([*firsts, *vectors])
        bases = [torch.linalg.qr(first).Q for first in summed[: len(firsts)]]
        seconds = self._summed([matrix.mT @ base for matrix, base in zip(matrices, bases, strict=True)])
        if self.error is not None:
            self.error.copy_(gradient)
        for matrix, base, second, factor in zip(matrices, bases, seconds, self.factors, strict=True):
            matrix.copy_(base @ second.mT)
            # What is not finite is skipped by the update, and must not be what the next step begins with.
            factor.copy_(torch.where(second.isfinite().all(), second, factor))
        if self.error is not None:
            self.error.sub_(gradient, alpha=1 / self.replicas.size()).nan_to_num_(0.0, 0.0, 0.0)
        for piece, total in zip(vectors, summed[len(firsts) :], strict=True):
            piece.copy_(total)
        for error, shape in zip(self._errors(), self.shapes, strict=False):
            if shape is None:
                error.zero_()

    def _errors(self) -> Sequence[Tensor]:
        return () if self.error is None else self.error.split(self.lengths)

    def _summed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each summed over replicas, by one collective."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.replicas)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def kept(self) -> list[Tensor]:
        return [*self.factors, *(() if self.error is None else (self.error,))]

    def states(self, mesh: Mesh) -> Iterator[FeedbackPart]:
        replica, remaining = mesh.dense.get_local_rank("replicate"), iter(self.factors)
        for weight, shape in zip(self.weights, self.shapes, strict=True):
            if shape is not None:
                factor = next(remaining)
                region = tuple((0, size) for size in factor.shape)
                yield FeedbackPart(f"{FACTOR}/{weight.name}", tuple(factor.shape), region, factor, replica == 0)
        for weight, error in zip(self.weights, self._errors(), strict=False):
            name = f"{of_part(REPLICA_ERROR, replica)}/{weight.name}"
            yield FeedbackPart(name, weight.whole, weight.here, error.view(weight.whole), writes=True)


def matrices_of(flat: Tensor, shape: Factors) -> Tensor:
    """The matrices of a gradient, none with more rows than columns; a view of it."""
    if shape.turned:
        return flat.view(shape.stack, shape.long, shape.short).mT
    return flat.view(shape.stack, shape.short, shape.long)


def first_factor(seed: int, name: str, shape: Factors) -> Tensor:
    """What a run begins with: normal draws that follow from its seed and the weight's name, on every replica alike."""
    draws = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape.stack, shape.long, shape.rank, generator=draws, dtype=torch.float64)
