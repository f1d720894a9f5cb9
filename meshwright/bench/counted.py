"""The operations of a model as torch counts them while it runs, beside those that it is priced and rated with."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.cost.flops import step_flops
from meshwright.models.decoder import Decoder
from meshwright.spec.arch import Arch


def counted_flops(arch: Arch, sequence: int) -> int:
    """Matrix products and attention of the forward and backward of one sequence.

    Nothing is computed: tensors have shapes only, which takes as long for a large model as for a small one.
    """
    with torch.device("meta"):
        model, tokens = Decoder(arch), torch.zeros(1, sequence, dtype=torch.int64)
    # Torch counts the products of plain attention, not those of its fast kernel for CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).sum().backward()
    return counter.get_total_flops()


def counted_ratio(arch: Arch, sequence: int) -> float | None:
    """Operations counted ÷ operations by formula; None where experts choose by values, which shapes do not have."""
    if arch.experts:
        return None
    return counted_flops(arch, sequence) / step_flops(arch, sequence, 1)
