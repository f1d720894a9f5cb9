"""Quantized tensors as both towers know them: frozen weights, and optimizer states; which bytes stand for each.

**Frozen weights.** NF4 (Dettmers 2023): a 4-bit code an element, two in a byte; a scale for every 64 of a row, itself a
code of 8 bits; and a scale in fp32 for every 256 of those, counted through the whole weight, with their mean at the
end. FP8: an e4m3 number an element, and a scale in fp32 for every row. Scales in fp32 are held as their bytes, which no
cast touches. Each matrix of a stack of experts is encoded by itself.

**Optimizer states**, blockwise: blocks run along the last dim of the whole weight, and each has one scale. They are
counted from the first column, so that codes and scales are the same under every plan: a cut between rows cuts no block,
and of a block that a plan cuts between columns all its ranks hold the scale, agreed by a maximum over them.
"""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

Held = Literal["bf16", "fp8", "nf4"]

BLOCK, GROUP = 64, 256  # of NF4: elements that share a scale, and scales that share one
CODES, ABSMAX, SCALES = "weight", "absmax", "scales"  # the names of what stands for a weight, beside each other
FLOAT = 4  # bytes

Part = tuple[str, tuple[int, ...], bool]  # its name, its shape in bytes, and whether tp cuts it as the weight

# Smaller weights keep fp32 states, as in Dettmers et al. (2022) and Li et al. (2023); so do vectors, and rows so short,
# of convolutions for instance, that their scales would weigh more than their codes. An adapter B has rows of its rank.
LEAST_ELEMENTS, LEAST_ROW = 4096, 8

SCALES_ENDING = "_scales"  # how the names of states' scales in checkpoints end

Columns = tuple[int, int]  # the first and one past the last of a rank's columns, in the whole weight


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


class BlockFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The width of a code, and how many elements of a row share a scale."""

    bits: int
    block: int

    def blocks(self, columns: Columns) -> range:
        """The blocks of a row that have something of these columns."""
        begin, end = columns
        return range(begin // self.block, -(-end // self.block) if end > begin else begin // self.block)

    def code_bytes(self, columns: Columns) -> range:
        """Where the codes of these columns are in a row's bytes; no cut divides a byte, see `cuts_byte`."""
        begin, end = (-(-edge * self.bits // 8) for edge in columns)
        return range(begin, end)

    def cuts_byte(self, edge: int) -> bool:
        """Whether a cut before this column would part two codes of one byte."""
        return edge * self.bits % 8 != 0

    def cuts_block(self, size: int, parts: int) -> bool:
        """Whether so many equal parts of a row of some size cut a block."""
        return parts > 1 and math.ceil(size / parts) < size and math.ceil(size / parts) % self.block != 0

    def state_bytes(self, rows: int, columns: Columns, scale_bytes: int) -> int:
        """Bytes of one quantized state of a part of a weight: its codes and its scales."""
        return rows * (len(self.code_bytes(columns)) + len(self.blocks(columns)) * scale_bytes)


FORMATS: Mapping[str, BlockFormat] = {
    "int8": BlockFormat(bits=8, block=256),
    "int4": BlockFormat(bits=4, block=128),
    "fp8": BlockFormat(bits=8, block=128),  # e4m3 spans five decades: short blocks need fewer of them
}


def is_quantized(shape: tuple[int, ...]) -> bool:
    """Whether a weight of this whole shape has quantized states, where optim.state_dtype asks for them."""
    return len(shape) >= 2 and shape[-1] >= LEAST_ROW and math.prod(shape) >= LEAST_ELEMENTS


def scales_name(state: str) -> str:
    """The name of a state's scales in checkpoints."""
    return state + SCALES_ENDING


def is_scales(kind: str) -> bool:
    """Whether a kind of tensor in checkpoints is a state's scales."""
    return kind.endswith(SCALES_ENDING)
