"""Fused AdamW with quantized moments: one launch reads codes and scales, updates in fp32, and writes both again.

Per element with a bf16 gradient and bf16 parameters beside fp32 masters: 2 + 4 + 2 bytes read, 4 + 2 + 2 written with
int8 or fp8 codes (half as many with int4), and two scales each way for every block. A program has whole blocks, so it
knows their new scales. Of blocks that several ranks share, one launch measures this rank's part of the new scales, and
after the ranks have agreed on them another makes the update.

Neither codes nor values are looked up: arithmetic takes as long as memory here, and a gather longer than either. Inside
a decade a dynamic map has equal intervals, so that the code is a straight line of the magnitude; the lines of all
decades meet at powers of ten, each less steep than the one below it, so that the code is the least of them. A value is
its decade's power of ten times a line of the mantissa of its code. e4m3 is the upper bits of fp32. What concerns a
block is multiplied once for all its elements. Plain references: `Codec` in kernels/blockwise.py, and `arithmetic` of
optim/adamw.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshwright.kernels.adamw import AdamWStep, RoundingDraws, _addresses, _hashed, _name, _pointer, _rounded
from meshwright.kernels.adamw import scalars as step_scalars
from meshwright.kernels.blockwise import MAPS
from meshwright.kernels.dispatch import Pointer, Values, constexpr, jit, tl
from meshwright.spec.quantized import FORMATS

TILE, WARPS = 2048, 8  # elements of one program: eight of each thread, and a block is a warp's
Form = Literal["fp32", "split", "stochastic"]
Way = Literal["update", "measure", "given"]  # at once; only the new scales; with new scales that were agreed

ScalePair = Sequence[Tensor]  # of a weight's first moments and of its second


@dataclass(frozen=True, slots=True)
class QuantizedMoments:
    """Both moments of one weight: codes and scales of its rows."""

    first: Tensor
    first_scales: Tensor
    second: Tensor
    second_scales: Tensor
    lead: int = 0  # columns of the first block that other ranks have


class QuantizedGroup:
    """Weights that are updated together, their quantized moments, and what their form has beside them.

    `beside`: of fp32 master weights the bf16 or fp16 parameters, if any; of split ones the 16 low bits.
    """

    def __init__(
        self,
        state_dtype: str,
        form: Form,
        masters: Sequence[Tensor],
        moments: Sequence[QuantizedMoments],
        beside: Sequence[Tensor] = (),
        draws: Sequence[RoundingDraws] = (),
    ) -> None:
        self.state_dtype, self.form, self.masters = state_dtype, form, masters
        self.moments, self.beside = moments, beside
        self.device, self.block = masters[0].device, FORMATS[state_dtype].block
        shapes = [self._shape(master, each) for master, each in zip(masters, moments, strict=True)]
        each = TILE // self.block
        programs = [-(-total // each) for _, _, _, total in shapes]
        self.owner = torch.repeat_interleave(torch.arange(len(shapes)), torch.tensor(programs)).int().to(self.device)
        self.start = torch.cat([torch.arange(count) * each for count in programs]).int().to(self.device)
        self.shapes = torch.tensor(shapes, dtype=torch.int32).flatten().to(self.device)
        self.ragged = any(lead or columns % self.block for columns, _, lead, _ in shapes)
        self.aligned = all(columns % 16 == 0 and lead % 16 == 0 for columns, _, lead, _ in shapes)
        kinds = [(state.first, state.first_scales, state.second, state.second_scales) for state in moments]
        held = [*masters, *(tensor for kind in zip(*kinds, strict=True) for tensor in kind), *(beside or masters)]
        codes = (tensor for state in moments for tensor in (state.first, state.second))
        self.aligned &= all(tensor.data_ptr() % 16 == 0 for tensor in (*masters, *beside, *codes))
        self.fixed = _addresses(held).to(self.device)
        by_field = [list(field) for field in zip(*draws, strict=True)]
        # Where the kernel reads none any valid pointer serves.
        self.draws = torch.tensor(by_field, dtype=torch.int64).flatten().to(self.device) if draws else self.fixed

    def _shape(self, master: Tensor, moments: QuantizedMoments) -> tuple[int, int, int, int]:
        """Columns, blocks of a row, columns of the first block that are elsewhere, blocks in total."""
        return master.shape[-1], moments.first_scales.shape[-1], moments.lead, moments.first_scales.numel()

    def update(self, gradients: Sequence[Tensor], decay: float, step: AdamWStep) -> None:
        """Update every weight of the group, whose blocks are all whole."""
        self._launch("update", gradients, decay, step, [])

    def measured(self, gradients: Sequence[Tensor], decay: float, step: AdamWStep) -> list[ScalePair]:
        """The new scales of what is here of each weight's blocks."""
        found: list[ScalePair] = [
            (torch.zeros_like(each.first_scales), torch.zeros_like(each.second_scales)) for each in self.moments
        ]
        self._launch("measure", gradients, decay, step, found)
        return found

    def update_with(
        self, gradients: Sequence[Tensor], decay: float, step: AdamWStep, scales: Sequence[ScalePair]
    ) -> None:
        """Update every weight with the new scales that the ranks have agreed on."""
        self._launch("given", gradients, decay, step, scales)

    def _launch(
        self, way: Way, gradients: Sequence[Tensor], decay: float, step: AdamWStep, scales: Sequence[ScalePair]
    ) -> None:
        if not len(self.owner):  # every weight's part is empty here
            return
        dense = [gradient.contiguous() for gradient in gradients]
        addresses = _addresses([*dense, *(each for kind in zip(*scales, strict=True) for each in kind)])
        if self.owner.is_cuda:  # from pinned memory, so that nothing waits
            addresses = addresses.pin_memory().to(self.device, non_blocking=True)
        _adamw_quantized[(len(self.owner),)](
            self.owner, self.start, self.shapes, self.fixed, addresses, step_scalars(step), step.count, self.draws,
            step.lr, step.beta1, step.beta2, step.eps, decay, len(self.masters),
            grad_dtype=_name(dense[0]), form=self.form,
            copy_dtype=_name(self.beside[0]) if self.form == "fp32" and self.beside else "",
            kind=self.state_dtype, bits=FORMATS[self.state_dtype].bits, way=way, ragged=self.ragged,
            aligned=self.aligned and all(gradient.data_ptr() % 16 == 0 for gradient in dense),
            block=self.block, each=TILE // self.block, lines=_lines(self.state_dtype), num_warps=WARPS,
        )  # fmt: skip


def _lines(state_dtype: str) -> tuple[float, ...]:
    """Of both moments: slope and start of the lowest decade's line, and what is nearer to 1 than to the value below it.

    The lines of the other decades follow from the map. This one passes where the two codes above the lowest begin: 0.2
    of an interval beyond a decade's beginning, or at the next interval's.
    """
    if state_dtype == "fp8":  # which has no decades
        return (0.0,) * 6
    found = list[float]()
    for values, smallest in zip(MAPS[state_dtype], (1, 2), strict=True):
        zero = values.index(min(values, key=abs))  # the code of the lowest magnitude
        begins = [(values[zero + number] + values[zero + number + 1]) / 2 for number in range(2)]
        slope = (1.0 if smallest == 1 else 0.8) / (begins[1] - begins[0])
        found += [slope, smallest + 0.2 - slope * begins[0], (values[-2] + values[-1]) / 2]
    return tuple(found)


@jit
def _saturated(x: Values) -> Values:
    """Between 0 and 1: a modifier of the instruction before it."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@jit
def _magnitude(code: Values, middle: Values, bits: constexpr, smallest: constexpr) -> Values:
    """The value of a code from 1 on, in fp32 as its middle is: half an interval further."""
    exponent = code.to(tl.int32, bitcast=True) & 0x7F800000
    mantissa = (middle.to(tl.int32, bitcast=True) - exponent + 0x3F800000).to(tl.float32, bitcast=True)
    highest = (127 + bits - 3 + smallest) << 23  # the last decade's exponent, in place
    return ((mantissa - 1.0) * 0.9 + 0.1) * tl.exp2(
        (exponent.to(tl.float32) - highest) * (3.321928094887362 / 8388608.0)
    )


@jit
def _first_value(code: Values, kind: constexpr, bits: constexpr) -> Values:
    if kind == "fp8":
        word = ((code & 128) << 24) | ((code & 127) << 20)
        value = word.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2¹²⁰: its exponent is 120 less than fp32's
    else:
        code = code.to(tl.float32) - ((1 << (bits - 1)) - 1)
        value = _saturated(_magnitude(code, tl.abs(code) + 0.5, bits, 1))
        sign = code.to(tl.int32, bitcast=True) & -2147483648
        value = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return value


@jit
def _second_value(code: Values, kind: constexpr, bits: constexpr) -> Values:
    if kind == "fp8":
        value = _first_value(code, kind, bits)
    elif bits == 4:
        value = (code.to(tl.float32) + 1) * 0.0625
    else:
        code = code.to(tl.float32) + 1
        value = tl.minimum(tl.maximum(_magnitude(code, code + 0.5, bits, 2), 10.0 ** (1 - bits)), 1.0)
    return value


@jit
def _dynamic_code(x: Values, lines: constexpr, bits: constexpr, smallest: constexpr, least: constexpr) -> Values:
    """2²³ − `least` and the magnitude's number, from `smallest` on, which is how many intervals the lowest decade has.

    Of two decades the middle between their nearest values is 0.2 of an interval beyond the power of ten: until there
    the number is one less than the line says.
    """
    a = tl.abs(x)
    y = a * lines[3 * smallest - 3] + lines[3 * smallest - 2]
    for decade in tl.static_range(1, bits - 1):
        count = smallest << decade
        y = tl.minimum(y, a * (count * 10.0 ** (bits - 2 - decade) / 0.9) + count * (8 / 9))
    y = tl.minimum(y, (smallest << (bits - 1)) - 0.25)
    begin = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # the power of two below
    early = _saturated((y - begin) * -16777216.0 + 0.2 * 16777216.0)
    last = _saturated(x * 1073741824.0 - lines[3 * smallest - 1] * 1073741824.0)
    return (y + last + 8388607.5) - (early + least)  # a sum of 2²³ has no room for a fraction: it is cut off


@jit
def _e4m3_code(a: Values) -> Values:
    """The byte of a magnitude in e4m3: below 2⁻⁶ equal steps, above the exponent and three bits of the mantissa."""
    word = a.to(tl.float32).to(tl.int32, bitcast=True)
    above = ((word + 0x7FFFF) >> 20) - (120 << 3)  # its exponent is 120 less than that of fp32
    below = tl.ceil(a * 512 - 0.5).to(tl.int32)
    return tl.minimum(tl.where(a < 0.015625, below, above), 126)


@jit
def _first_code(x: Values, lines: constexpr, kind: constexpr, bits: constexpr) -> Values:
    if kind == "fp8":
        code = _e4m3_code(tl.abs(x))
        code = tl.where((x < 0) & (code > 0), code + 128, code)
    else:
        code = _dynamic_code(x, lines, bits, 1, 8388608.0).to(tl.int32, bitcast=True)
        code = (code | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
        code = (code + (8388608.0 + ((1 << (bits - 1)) - 1))).to(tl.int32, bitcast=True) & ((1 << bits) - 1)
    return code


@jit
def _second_code(x: Values, lines: constexpr, kind: constexpr, bits: constexpr) -> Values:
    if kind == "fp8":
        code = tl.maximum(_e4m3_code(x), 1)
    elif bits == 4:
        code = tl.minimum(tl.maximum(tl.ceil(x * 16 - 1.5).to(tl.int32), 0), 15)
    else:
        code = _dynamic_code(x, lines, bits, 2, 1.0).to(tl.int32, bitcast=True) & 255
    return code


@jit
def _byte_pointer(address: Values, aligned: constexpr) -> Values:
    pointer = address.to(tl.pointer_type(tl.uint8))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _codes(pointer: Pointer, at: Values, column: Values, inside: Values, bits: constexpr) -> Values:
    """The codes of a tile, whose bytes begin at `at` of each row of it."""
    if bits == 4:
        byte = tl.load(pointer + at + column // 2, mask=inside, other=0).to(tl.int32)
        code = (byte >> ((column & 1) * 4)) & 15
    else:
        code = tl.load(pointer + at + column, mask=inside, other=0).to(tl.int32)
    return code


@jit
def _store_codes(
    pointer: Pointer, code: Values, at: Values, column: Values, inside: Values,
    bits: constexpr, block: constexpr, each: constexpr,
) -> None:  # fmt: skip
    """Write the codes of a tile."""
    if bits == 4:  # beyond a row's end there is nothing: a last code alone has zeros beside it
        low, high = tl.split(tl.reshape(tl.where(inside, code, 0), (each, block // 2, 2)))
        place, _ = tl.split(tl.reshape(at + column // 2, (each, block // 2, 2)))
        exists, _ = tl.split(tl.reshape(inside.to(tl.int32), (each, block // 2, 2)))
        tl.store(pointer + place, (low | (high << 4)).to(tl.uint8), mask=exists > 0)
    else:
        tl.store(pointer + at + column, code.to(tl.uint8), mask=inside)


@jit
def _scaled(x: Values, scale: Values) -> Values:
    """Elements over their block's scale; those of a block of zeros stay zeros.

    One division a block. A moment of 10⁻³⁷ is nothing beside ε, so that its reciprocal need not be more than a float.
    """
    return x * (1.0 / tl.maximum(scale, 1e-37))[:, None]


@jit
def _moved(
    w: Values, m: Values, v: Values, m_scale: Values, v_scale: Values, g: Values, scalars: Pointer,
    lr: float, beta1: float, beta2: float, eps: float, decay: float,
) -> Values:  # fmt: skip
    """A weight and its moments, which are given over their blocks' scales, after the update."""
    factor = tl.load(scalars)
    m = m * (m_scale * beta1)[:, None] + g * (factor * (1 - beta1))
    g = g * (factor * tl.sqrt(1 - beta2))
    v = v * (v_scale * beta2)[:, None] + g * g
    first, second = 1.0 / tl.load(scalars + 1), 1.0 / tl.load(scalars + 2)
    ratio = (m * first) / (tl.sqrt(v * second) + eps)
    return w * (1 - lr * decay) - lr * ratio, m, v


@jit
def _tile(
    shapes: Pointer, owner: Values, number: Values,
    bits: constexpr, ragged: constexpr, aligned: constexpr, block: constexpr, each: constexpr,
) -> Values:  # fmt: skip
    """Of some blocks of a tensor: their columns, where their rows' bytes and their elements are, and which exist."""
    exists = number < tl.load(shapes + owner * 4 + 3)
    if ragged:
        columns = tl.load(shapes + owner * 4)
        of_row = tl.load(shapes + owner * 4 + 1)
        row = (number // of_row).to(tl.int64)
        from_row = row * columns
        begin = (number % of_row) * block - tl.load(shapes + owner * 4 + 2)
        if aligned:
            columns = tl.multiple_of(columns, 16)
            from_row = tl.multiple_of(from_row, 16)
            begin = tl.multiple_of(begin, 16)
        bytes_at = row * ((columns * bits + 7) // 8)
        if aligned:
            bytes_at = tl.multiple_of(bytes_at, 2 * bits)
        bytes_at = bytes_at[:, None]
        column = begin[:, None] + tl.arange(0, block)[None, :]
        inside = exists[:, None] & (column >= 0) & (column < columns)
        at = from_row[:, None] + column
    else:  # blocks follow each other without a gap
        bytes_at = (number.to(tl.int64) * (block * bits // 8))[:, None]
        column = tl.broadcast_to(tl.arange(0, block)[None, :], (each, block))
        inside = tl.broadcast_to(exists[:, None], (each, block))
        at = (number.to(tl.int64) * block)[:, None] + column
    return column, bytes_at, at, inside, exists


@jit
def _weight(address: Values, beside: Values, at: Values, inside: Values, form: constexpr, aligned: constexpr) -> Values:
    """A weight in fp32, in whatever form it is."""
    if form == "fp32":
        w = tl.load(_pointer(address, "fp32", aligned) + at, mask=inside, other=0.0)
    else:
        word = tl.load(_pointer(address, "int16", aligned) + at, mask=inside, other=0).to(tl.int32) << 16
        if form == "split":
            word += tl.load(_pointer(beside, "int16", aligned) + at, mask=inside, other=0).to(tl.int32)
        w = word.to(tl.float32, bitcast=True)
    return w


@jit
def _store_weight(
    w: Values, drawn: Values, address: Values, beside: Values, at: Values, inside: Values,
    form: constexpr, copy_dtype: constexpr, aligned: constexpr,
) -> None:  # fmt: skip
    """Write a weight in its form; `drawn`: 16 bits where it is rounded stochastically."""
    if form == "fp32":
        tl.store(_pointer(address, "fp32", aligned) + at, w, mask=inside)
        if copy_dtype != "":
            copy = _pointer(beside, copy_dtype, aligned) + at
            tl.store(copy, w.to(copy.dtype.element_ty), mask=inside)
    elif form == "stochastic":
        tl.store(_pointer(address, "int16", aligned) + at, _rounded(w, drawn), mask=inside)
    else:
        word = w.to(tl.int32, bitcast=True)
        high = (word + 0x8000) >> 16
        tl.store(_pointer(address, "int16", aligned) + at, high.to(tl.int16), mask=inside)
        tl.store(_pointer(beside, "int16", aligned) + at, (word - (high << 16)).to(tl.int16), mask=inside)


@jit
def _adamw_quantized(
    owners: Pointer,
    starts: Pointer,
    shapes: Pointer,
    fixed: Pointer,
    given: Pointer,
    scalars: Pointer,
    updates: Pointer,
    draws: Pointer,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    count: int,
    grad_dtype: constexpr,
    form: constexpr,
    copy_dtype: constexpr,
    kind: constexpr,
    bits: constexpr,
    way: constexpr,
    ragged: constexpr,
    aligned: constexpr,
    block: constexpr,
    each: constexpr,
    lines: constexpr,
) -> None:
    if tl.load(scalars + 3) == 0:
        return
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    number = tl.load(starts + program) + tl.arange(0, each)
    column, bytes_at, at, inside, exists = _tile(shapes, owner, number, bits, ragged, aligned, block, each)

    first_bytes = _byte_pointer(tl.load(fixed + count + owner), aligned)
    first_scales = _pointer(tl.load(fixed + 2 * count + owner), "fp32", False) + number
    second_bytes = _byte_pointer(tl.load(fixed + 3 * count + owner), aligned)
    second_scales = _pointer(tl.load(fixed + 4 * count + owner), "fp32", False) + number
    beside = tl.load(fixed + 5 * count + owner)

    gradient = _pointer(tl.load(given + owner), grad_dtype, aligned) + at
    g = tl.load(gradient, mask=inside, other=0.0).to(tl.float32)
    m = _first_value(_codes(first_bytes, bytes_at, column, inside, bits), kind, bits)
    v = _second_value(_codes(second_bytes, bytes_at, column, inside, bits), kind, bits)
    m_scale = tl.load(first_scales, mask=exists, other=0.0)
    v_scale = tl.load(second_scales, mask=exists, other=0.0)
    master = tl.load(fixed + owner)
    w = _weight(master, beside, at, inside, form, aligned)
    w, m, v = _moved(w, m, v, m_scale, v_scale, g, scalars, lr, beta1, beta2, eps, decay)

    agreed_first, agreed_second = first_scales, second_scales
    if way != "update":
        agreed_first = _pointer(tl.load(given + count + owner), "fp32", False) + number
        agreed_second = _pointer(tl.load(given + 2 * count + owner), "fp32", False) + number
    if way == "given":
        first_scale = tl.load(agreed_first, mask=exists, other=0.0)
        second_scale = tl.load(agreed_second, mask=exists, other=0.0)
    else:
        if ragged:  # else a block is here whole, or not at all
            m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
        first_scale, second_scale = tl.max(tl.abs(m), axis=1), tl.max(v, axis=1)
        if kind == "fp8":  # over the largest number of e4m3
            first_scale, second_scale = first_scale / 448.0, second_scale / 448.0
    if way == "measure":
        tl.store(agreed_first, first_scale, mask=exists)
        tl.store(agreed_second, second_scale, mask=exists)
    else:
        code = _first_code(_scaled(m, first_scale), lines, kind, bits)
        _store_codes(first_bytes, code, bytes_at, column, inside, bits, block, each)
        code = _second_code(_scaled(v, second_scale), lines, kind, bits)
        _store_codes(second_bytes, code, bytes_at, column, inside, bits, block, each)
        tl.store(first_scales, first_scale, mask=exists)
        tl.store(second_scales, second_scale, mask=exists)
        drawn = at
        if form == "stochastic":
            drawn = _hashed(draws, updates, owner, at, count) >> 48
        _store_weight(w, drawn, master, beside, at, inside, form, copy_dtype, aligned)
