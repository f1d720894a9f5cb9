"""What replicas send each other at a sync, in eight or four bits: whole numbers times a scale for each few elements.

A row of a matrix is cut into blocks of up to 128 elements of the whole weight, whatever part of it a rank holds: codes
do not depend on the plan inside a replica. A block's scale is its largest absolute value ÷ 127 (int4: ÷ 7). Vectors are
sent as they are. Replicas all-gather codes and scales and add them up in the precision of the weights: no
sum is ever made of codes, and all replicas compute the same mean.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.block_codes import as_bytes, as_codes, codes_of
from meshwright.parallel.mesh import join
from meshwright.spec.communication import BITS, block_length
from meshwright.spec.plan import Plan

Tensors = list[Tensor]


class Codes:
    """How the deltas of one bucket travel."""

    def __init__(self, plan: Plan, weights: list[nn.Parameter]) -> None:
        self.bits = BITS.get(plan.outer_quant, 0)
        self.blocks = [block_length(weight.shape[-1]) if weight.ndim > 1 else 0 for weight in weights]  # 0: as it is

    def mean(self, deltas: Tensors, group: dist.ProcessGroup) -> Tensors:
        """The mean over the replicas of what each has rounded."""
        received = join(self.encode(deltas)[None], 0, group)
        total = self.decode(received[0], deltas)
        for row in received[1:]:
            torch._foreach_add_(total, self.decode(row, deltas))
        torch._foreach_div_(total, len(received))
        return total

    def encode(self, deltas: Tensors) -> Tensor:
        """Bytes: vectors as they are, then all scales, then all codes."""
        plain, scales, codes = list[Tensor](), list[Tensor](), list[Tensor]()
        for delta, block in zip(deltas, self.blocks, strict=True):
            if not block:
                plain.append(delta.reshape(-1).view(torch.uint8))
                continue
            code, scale = codes_of(delta.reshape(-1, block), self.bits)
            codes.append(code.reshape(-1))
            scales.append(scale.view(torch.uint8))
        return torch.cat([*plain, *scales, *([as_bytes(torch.cat(codes), self.bits)] if codes else [])])

    def decode(self, received: Tensor, like: Tensors) -> Tensors:
        """The deltas that bytes stand for, in the shapes and the precision of others."""
        matrices = [(tensor, block) for tensor, block in zip(like, self.blocks, strict=True) if block]
        sizes = [tensor.nbytes for tensor, block in zip(like, self.blocks, strict=True) if not block]
        sizes += [tensor.numel() // block * 4 for tensor, block in matrices]
        parts = list(received.split([*sizes, received.numel() - sum(sizes)]))
        whole = as_codes(parts.pop(), self.bits, sum(tensor.numel() for tensor, _ in matrices))
        codes = iter(whole.split([tensor.numel() for tensor, _ in matrices]))
        scales = iter(parts[len(like) - len(matrices) :])
        vectors = iter(parts[: len(like) - len(matrices)])
        found = []
        for tensor, block in zip(like, self.blocks, strict=True):
            if block:
                scale = next(scales).clone().view(torch.float32).to(tensor.dtype)
                found.append((next(codes).view(-1, block).to(tensor.dtype) * scale[:, None]).view(tensor.shape))
            else:
                found.append(next(vectors).clone().view(tensor.dtype).view(tensor.shape))
        return found
