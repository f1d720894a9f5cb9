"""Optimizer states in int8, int4 or fp8: decoded, updated in fp32 and encoded again, a few rows at a time.

No whole fp32 copy of a state ever exists. Blocks are those of the whole weight (spec/quantized.py). Where a plan cuts
one, its ranks first measure their parts of the new scales and agree on the largest, in one all-reduce of all such
weights for each axis that cuts them, and then update: the codes are those that one rank would have.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.blockwise import HELD_AS, Codec, codecs
from meshwright.models.layers import accum_dtype
from meshwright.optim import master_weights
from meshwright.optim.interface import Arithmetic, SavedPart, Tensors, Update, UpdateRule, UpdateTerms
from meshwright.optim.master_weights import CPU_BLOCK, DEVICE_BLOCK, Blocks, given
from meshwright.parallel import precision
from meshwright.parallel.mesh import CUT_AXES, Cut, cuts, local
from meshwright.spec.quantized import FORMATS, BlockFormat, Columns, is_quantized, is_scales, scales_name

if TYPE_CHECKING:
    from meshwright.optim.resident import ResidentOptimizer

UNSIGNED = "second"  # the state that is never below 0; all others have the signed map


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """This rank's part of a weight whose states are quantized."""

    format: BlockFormat
    dtype: torch.dtype  # of codes
    columns: Columns
    size: int  # columns of the whole weight
    shared: tuple[Cut, ...]  # among whom its blocks are cut

    @property
    def lead(self) -> int:
        """Columns of its first block that other ranks have."""
        return self.columns[0] % self.format.block

    @property
    def blocks(self) -> range:
        """Those of a row that it has something of."""
        return self.format.blocks(self.columns)

    @property
    def kind(self) -> Literal["whole", "ragged", "shared"]:
        """Whether its blocks are all whole and follow each other, rows end inside one, or ranks share some."""
        if self.shared:
            return "shared"
        return "ragged" if self.lead or (self.columns[1] - self.columns[0]) % self.format.block else "whole"

    @property
    def row_blocks(self) -> int:
        """Those of a row of the whole weight."""
        return len(self.format.blocks((0, self.size)))


def quantized_parts(weights: Sequence[Tensor], state_dtype: str) -> dict[int, QuantizedPart]:
    """Those weights, by their index, whose states are quantized."""
    if state_dtype not in FORMATS:
        return {}
    format, dtype = FORMATS[state_dtype], HELD_AS.get(state_dtype, torch.uint8)
    return {i: _part(weight, format, dtype) for i, weight in enumerate(weights) if is_quantized(tuple(weight.shape))}


def _part(weight: Tensor, format: BlockFormat, dtype: torch.dtype) -> QuantizedPart:
    size, begin, length = weight.shape[-1], 0, weight.shape[-1]
    among = tuple(cut for cut in cuts(weight) if cut.dim == weight.dim() - 1)
    for cut in reversed(among):  # tp cuts first, and FSDP what that leaves
        each, rank = math.ceil(length / cut.group.size()), dist.get_rank(cut.group)
        begin, length = begin + min(rank * each, length), max(min(each, length - rank * each), 0)
    parts = math.prod(cut.group.size() for cut in among)
    return QuantizedPart(format, dtype, (begin, begin + length), size, among if format.cuts_block(size, parts) else ())


def empty_states(names: Sequence[str], master: Tensor, part: QuantizedPart) -> dict[str, Tensor]:
    """New states of a weight: of every name its codes, and its scales, which are 0."""
    made: dict[str, Tensor] = {}
    for name in names:
        codes, blocks = len(part.format.code_bytes(part.columns)), len(part.blocks)
        made[name] = master.new_zeros(*master.shape[:-1], codes, dtype=part.dtype)
        made[scales_name(name)] = master.new_zeros(*master.shape[:-1], blocks, dtype=accum_dtype(master))
    return made


def saved_parts(part: QuantizedPart, kind: str, tensor: Tensor) -> Iterator[SavedPart]:
    """A state tensor as a checkpoint has it: its whole last dim, and this rank's parts of it.

    The scale of a block that is cut is saved by the rank that has its first column, and read by all of them.
    """
    if not is_scales(kind):
        there = part.format.code_bytes(part.columns)
        yield SavedPart(part.format.code_bytes((0, part.size)).stop, (there.start, there.stop), tensor, True)
        return
    first, end = part.blocks.start, part.blocks.stop
    own = min(first + (part.lead > 0), end)
    yield SavedPart(part.row_blocks, (own, end), tensor[..., own - first :], True)
    if own > first:
        yield SavedPart(part.row_blocks, (first, own), tensor[..., : own - first], False)


def update_quantized(optimizer: "ResidentOptimizer", rule: UpdateRule) -> Update:
    """The update of weights whose states are quantized, by plain operations."""
    round_to = master_weights.ROUND_TO[optimizer.optim.master_weights]

    def update(indices: list[int], terms: UpdateTerms) -> None:
        dtypes = {accum_dtype(optimizer.masters[i]) for i in indices}
        rules = {dtype: rule.arithmetic(terms, dtype) for dtype in dtypes}
        pieces = {i: RowPieces(optimizer, i, rules[accum_dtype(optimizer.masters[i])], terms) for i in indices}
        agreed = agree({i: (each.part, each.measured()) for i, each in pieces.items() if each.part.shared})
        for i, each in pieces.items():
            round_to(optimizer.weights[i], optimizer.masters[i].view(-1), each.updates(agreed.get(i)), terms.count)
        if precision.has_master(optimizer.weights[0]):  # all weights have a bf16 copy, or none has
            torch._foreach_copy_([optimizer.weights[i] for i in indices], [optimizer.masters[i] for i in indices])

    return update


Scales = Sequence[Tensor]  # of every state of a weight, in the order of the rule


def agree(parts: Mapping[int, tuple[QuantizedPart, Scales]]) -> dict[int, Scales]:
    """The scales of whole blocks from those of every rank's part, by weight: their largest."""
    held: dict[int, list[Tensor]] = {}
    for i, (part, scales) in parts.items():
        held[i] = [scale.new_zeros(*scale.shape[:-1], part.row_blocks) for scale in scales]
        for whole, scale in zip(held[i], scales, strict=True):
            whole[..., part.blocks.start : part.blocks.stop] = scale
    for axis in CUT_AXES:
        groups = {i: cut.group for i, (part, _) in parts.items() for cut in part.shared if cut.axis == axis}
        if groups:
            tensors = [tensor for i in groups for tensor in held[i]]
            flat = torch.cat([tensor.view(-1) for tensor in tensors])
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=next(iter(groups.values())))
            for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
    return {
        i: [whole[..., part.blocks.start : part.blocks.stop].contiguous() for whole in held[i]]
        for i, (part, _) in parts.items()
    }


def send_scales(optimizer: "ResidentOptimizer", indices: list[int], terms: UpdateTerms) -> None:
    """What an update sends, without the update: for a trace of a step, which has no values to update."""
    parts = {i: optimizer.quantized[i] for i in indices if i in optimizer.quantized}
    agree({i: (part, optimizer.states_of(i)[1::2]) for i, part in parts.items() if part.shared})


class RowPieces:
    """A weight's rows, a few at a time, with the gradient and the states of each piece."""

    def __init__(self, optimizer: "ResidentOptimizer", i: int, arithmetic: Arithmetic, terms: UpdateTerms) -> None:
        self.part, self.arithmetic, self.finite = optimizer.quantized[i], arithmetic, terms.finite > 0
        self.weight, self.master = optimizer.weights[i], optimizer.masters[i]
        self.columns, self.rows = self.master.shape[-1], math.prod(self.master.shape[:-1])
        self.gradient = local(given(self.weight)).reshape(self.rows, self.columns)
        held = [state.view(self.rows, state.shape[-1]) for state in optimizer.states_of(i)]
        self.states = [(codes.view(torch.uint8), scales) for codes, scales in zip(held[::2], held[1::2], strict=True)]
        self.codecs = codecs_of(optimizer, i)

    def measured(self) -> list[Tensor]:
        """The scales of the updated states, of what is here of their blocks."""
        found = [torch.zeros_like(scales) for _, scales in self.states]
        for rows in self._pieces():
            _, updated = self._updated(rows, self._value(rows))
            for codec, into, new in zip(self.codecs, found, updated, strict=True):
                into[rows] = codec.scales(new, self.part.lead)
        return found

    def updates(self, agreed: Scales | None) -> Blocks:
        """Parts of the flattened weight, each with the function from its master values to the updated ones."""
        for rows in self._pieces():
            yield slice(rows.start * self.columns, rows.stop * self.columns), partial(self._write, rows, agreed)

    def _write(self, rows: slice, agreed: Scales | None, flat: Tensor) -> Tensor:
        """Write the states of some rows; returns their weights."""
        weight, lead = flat.view(-1, self.columns), self.part.lead
        moved, states = self._updated(rows, weight)
        for number, (codec, new) in enumerate(zip(self.codecs, states, strict=True)):
            codes, scales = (held[rows] for held in self.states[number])
            largest = codec.scales(new, lead) if agreed is None else agreed[number][rows]
            codes.copy_(torch.where(self.finite, codec.encode(new, largest, lead), codes))
            scales.copy_(torch.where(self.finite, largest, scales))
        return torch.where(self.finite, moved, weight).view(-1)

    def _updated(self, rows: slice, weight: Tensor) -> tuple[Tensor, Tensors]:
        """The new weight and states, in the precision of updates."""
        states = [
            codec.decode(codes[rows], scales[rows], self.part.lead, self.columns)
            for codec, (codes, scales) in zip(self.codecs, self.states, strict=True)
        ]
        return self.arithmetic(weight, self.gradient[rows].to(weight.dtype), states)

    def _value(self, rows: slice) -> Tensor:
        flat, low = self.master.view(self.rows, self.columns)[rows], getattr(self.weight, "low_bits", None)
        return (
            flat.to(accum_dtype(flat))
            if low is None
            else master_weights.join(flat, low.view(self.rows, self.columns)[rows])
        )

    def _pieces(self) -> Iterator[slice]:
        block = CPU_BLOCK if self.master.device.type == "cpu" else DEVICE_BLOCK
        each = max(block // self.columns, 1)
        return (slice(first, min(first + each, self.rows)) for first in range(0, self.rows, each))


def codecs_of(optimizer: "ResidentOptimizer", i: int) -> list[Codec]:
    """Those of a weight's states, in the order of the rule."""
    signed, unsigned = codecs(
        optimizer.optim.state_dtype, accum_dtype(optimizer.masters[i]), optimizer.masters[i].device
    )
    return [unsigned if state.name == UNSIGNED else signed for state in optimizer.spec.states]
