"""Frozen matrices in few bits, as both towers know them: which tensors stand for a weight, of which bytes.

NF4 (Dettmers 2023): a 4-bit code an element, two in a byte; a scale for every 64 of a row, itself a code of 8 bits;
and a scale in fp32 for every 256 of those, counted through the whole weight, with their mean at the end. FP8: an e4m3
number an element, and a scale in fp32 for every row. Scales in fp32 are held as their bytes, which no cast touches.
Each matrix of a stack of experts is encoded by itself.
"""

import math
from typing import Literal

Held = Literal["bf16", "fp8", "nf4"]

BLOCK, GROUP = 64, 256  # elements that share a scale, and scales that share one
CODES, ABSMAX, SCALES = "weight", "absmax", "scales"  # the names of what stands for a weight, beside each other
FLOAT = 4  # bytes

Part = tuple[str, tuple[int, ...], bool]  # its name, its shape in bytes, and whether tp cuts it as the weight


def parts(held: Held, shape: tuple[int, ...], by_rows: bool) -> tuple[Part, ...]:
    """What stands for a matrix (out, in), or a stack of them; `by_rows`: tp cuts its inputs, if anything."""
    *stack, out, into = shape
    if held == "fp8":
        return (CODES, shape, True), (SCALES, (*stack, FLOAT * out), not by_rows)
    groups = math.ceil(out * into / BLOCK / GROUP)
    return (
        (CODES, (*stack, out, into // 2), True),
        (ABSMAX, (*stack, out, into // BLOCK), True),
        (SCALES, (*stack, FLOAT * (groups + 1)), False),
    )


def is_whole(held: Held, into: int, ranks: int = 1) -> bool:
    """Whether no scale is shared by two rows, or by two ranks that cut them."""
    return held != "nf4" or into % (BLOCK * ranks) == 0
