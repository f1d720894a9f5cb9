"""Frozen weights in few bits, made of whole weights and made into numbers again: NF4 with double quantization, FP8.

A weight is encoded whole, so that its codes do not depend on who holds which part, and decoded part by part. Sums and
products are in fp32, as in bitsandbytes, whose codes these are. Plain operators of torch, on any device; on a GPU one
kernel decodes NF4 to the same bits, reading each byte once: half a byte an element, and what it writes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from meshwright.kernels.dispatch import FUSED_TYPES, Pointer, constexpr, jit, tl
from meshwright.spec.quantized import BLOCK, FLOAT, GROUP, Held

# Quantiles of a normal distribution, scaled to one: appendix E of the paper.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
DECADES = 7  # of scales' codes, the more densely filled the larger they are (Dettmers 2016)
CHUNK = 1 << 22  # elements that are decoded at a time: some 50 MB while they are
TINY = 1e-38  # below every scale that is not zero
TILE = 64  # blocks that a program decodes


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """How a matrix is held, and where a rank's part of it begins."""

    held: Held
    row_blocks: int  # of the whole matrix, in a row
    row: int = 0
    block: int = 0
    is_fused: bool = False  # decoded by one kernel


def encode(held: Held, weight: Tensor) -> tuple[Tensor, ...]:
    """What stands for a whole matrix, or a stack of them, as `spec/quantized.py` lists it."""
    if weight.dim() == 3:
        each = [encode(held, matrix) for matrix in weight]
        return tuple(torch.stack(part) for part in zip(*each, strict=True))
    return _encode_fp8(weight.float()) if held == "fp8" else _encode_nf4(weight.float())


def decode(how: FrozenPart, parts: tuple[Tensor, ...], dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """A rank's part of a matrix, or of each of a stack: all of them by the same operators, whatever their number.

    `after` is not read; see `decode_nf4`.
    """
    codes, *scales = parts
    if how.is_fused and how.held == "nf4" and dtype in FUSED_TYPES:
        return decode_nf4(codes, *scales, how.row_blocks, how.row, how.block, dtype, after)
    width = codes.shape[-1] * (1 if how.held == "fp8" else 2)
    numbers = _fp8_rows(codes, floats(scales[0])) if how.held == "fp8" else _nf4_rows(how, codes, *scales)
    matrix = torch.empty(*codes.shape[:-1], width, dtype=dtype, device=codes.device)
    rows = matrix.view(-1, width)
    step = max(CHUNK // width, 1)
    for begin in range(0, len(rows), step):
        rows[begin : begin + step] = numbers(slice(begin, begin + step))
    return matrix


def _fp8_rows(codes: Tensor, scales: Tensor) -> Callable[[slice], Tensor]:
    """Some of all rows as numbers."""
    numbers, each = codes.flatten(0, -2).view(torch.float8_e4m3fn), scales.flatten()
    return lambda rows: numbers[rows].float() * each[rows, None]


def _nf4_rows(how: FrozenPart, codes: Tensor, absmax: Tensor, scales: Tensor) -> Callable[[slice], Tensor]:
    """The same, each block times its scale, which is decoded first."""
    second = floats(scales).view(-1, scales.shape[-1] // FLOAT)  # of each matrix
    rows, blocks = absmax.shape[-2:]
    row = how.row + torch.arange(rows, device=absmax.device)
    number = row[:, None] * how.row_blocks + (how.block + torch.arange(blocks, device=absmax.device))
    # In place, and the mean after the product: as bitsandbytes rounds.
    first = _scale_codes(codes.device)[absmax.view(-1, rows, blocks).int()]
    first = first.mul_(second[:, number // GROUP]).add_(second[:, -1, None, None]).flatten(0, 1)
    bytes_of = codes.flatten(0, -2)

    def numbers(rows: slice) -> Tensor:
        pairs = _pairs(codes.device)[bytes_of[rows].int()].view(-1, blocks, BLOCK)
        return pairs.mul_(first[rows, :, None]).view(-1, blocks * BLOCK)

    return numbers


@torch.library.custom_op("meshwright::decode_nf4", mutates_args=())
def decode_nf4(
    codes: Tensor, absmax: Tensor, scales: Tensor,
    row_blocks: int, row: int, block: int, dtype: torch.dtype, after: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same by one kernel.

    `after` is not read. In a backward it is a tensor of the backward, so that the compiler, which would save what a
    kernel makes of its inputs alone rather than call it again, does not hold whole weights from the forward on.
    """
    matrix = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=dtype, device=codes.device)
    second, (rows, blocks) = floats(scales), absmax.shape[-2:]
    count = absmax.numel()
    if count:
        _decode_nf4[(-(-count // TILE),)](
            codes.contiguous(), absmax.contiguous(), second, _scale_codes(codes.device), _levels(codes.device), matrix,
            count, rows, blocks, row_blocks, row, block, scales.shape[-1] // FLOAT,
            group=GROUP, bytes_each=BLOCK // 2, tile=TILE, num_warps=4,
            enable_fp_fusion=False,  # the mean is added after the product is rounded
        )  # fmt: skip
    return matrix


@decode_nf4.register_fake
def _(
    codes: Tensor, absmax: Tensor, scales: Tensor,
    row_blocks: int, row: int, block: int, dtype: torch.dtype, after: Tensor | None,
) -> Tensor:  # fmt: skip
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)


@jit
def _decode_nf4(
    codes: Pointer,
    absmax: Pointer,
    second: Pointer,
    scale_codes: Pointer,
    levels: Pointer,
    matrix: Pointer,
    count: int,
    rows: int,
    blocks: int,
    row_blocks: int,
    row: int,
    block: int,
    floats_each: int,
    group: constexpr,
    bytes_each: constexpr,
    tile: constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    exists = number < count
    of_matrix = number // (rows * blocks)
    inside = number % (rows * blocks)
    place = (row + inside // blocks) * row_blocks + block + inside % blocks  # of the block in the whole matrix
    held = second + of_matrix * floats_each
    scale = tl.load(scale_codes + tl.load(absmax + number, mask=exists, other=0).to(tl.int32))
    scale = scale * tl.load(held + place // group, mask=exists, other=0.0)
    scale = scale + tl.load(held + floats_each - 1, mask=exists, other=0.0)
    at = number[:, None] * bytes_each + tl.arange(0, bytes_each)[None, :]
    byte = tl.load(codes + at, mask=exists[:, None], other=0).to(tl.int32)
    pair = tl.join(tl.load(levels + (byte >> 4)), tl.load(levels + (byte & 15)))
    found = tl.reshape(pair, (tile, 2 * bytes_each)) * scale[:, None]
    to = number[:, None] * (2 * bytes_each) + tl.arange(0, 2 * bytes_each)[None, :]
    tl.store(matrix + to, found.to(matrix.dtype.element_ty), mask=exists[:, None])


def _encode_nf4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = weight.shape
    blocks = weight.reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1 / absmax.clamp(min=TINY))[:, None]).clamp(-1, 1)
    codes = _nearest(scaled, torch.tensor(NF4, device=weight.device)).view(rows, columns // 2, 2)
    mean = absmax.double().mean().float()  # in float64: the same bits however many threads add
    padded = torch.nn.functional.pad(absmax - mean, (0, -len(absmax) % GROUP)).view(-1, GROUP)
    second = padded.abs().amax(1)
    ratios = (padded * (1 / second.clamp(min=TINY))[:, None]).flatten()[: len(absmax)]
    first = _nearest(ratios, _scale_codes(weight.device)).view(rows, columns // BLOCK)
    return (codes[..., 0] << 4) | codes[..., 1], first, torch.cat((second, mean[None])).view(torch.uint8)


def _encode_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = weight.abs().amax(1).clamp(min=TINY) / largest
    codes = (weight / scales[:, None]).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales.view(torch.uint8)


def _nearest(x: Tensor, levels: Tensor) -> Tensor:
    """The number of the nearest of some levels that rise."""
    return torch.bucketize(x, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)


def floats(scales: Tensor) -> Tensor:
    """Scales from their bytes, which may begin anywhere."""
    return scales.clone(memory_format=torch.contiguous_format).view(torch.float32)


def forget_tables() -> None:
    """Make the tables of codes anew when they are next needed: what was made of fake tensors has no values."""
    for table in (_pairs, _levels, _scale_codes):
        table.cache_clear()


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two numbers of each byte."""
    levels, byte = _levels(device), torch.arange(256, device=device)
    return torch.stack((levels[byte >> 4], levels[byte & 15]), -1)


@cache
def _levels(device: torch.device) -> Tensor:
    """The sixteen numbers."""
    return torch.tensor(NF4, device=device)


@cache
def _scale_codes(device: torch.device) -> Tensor:
    """The 256 levels of scales, rising: in every decade twice as many as in the one below, at even distances."""
    levels = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (10 ** (decade - DECADES + 1) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        levels += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(levels), dtype=torch.float32, device=device)
