"""What blocks keep for the backward, made smaller or sent to the host, by torch's hooks on saved tensors.

Weights are not touched, nor small tensors, nor what all blocks are handed alike (rotations, documents). Tensors that
share memory are kept once, as they were before. docs/compress.md says what is exact and what is not.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.flex_attention import BlockMask

from meshwright.parallel.anatomy import Absent, Anatomy
from meshwright.parallel.away import Lane, Load, Sent
from meshwright.parallel.codes import Coded, Kind, decode, encode
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan

SMALL = 64 * 1024  # bytes; a smaller tensor is not worth its launches
# Log-sum-exps and norms' statistics are a head's or a row's width below activations, and exponents: an error there is
# an error of everything they scale. What has no more than this share of a block's input is one of them: heads of 16 and
# wider.
STATISTIC = 1 / 16
# Queries, keys, values and attention's result are saved with a dimension for the heads. The backward puts them through
# an exponential again: in fp8, with 3 bits behind the first, a weight's gradient was off by 15 %, in int8 by 2 %.
HEADED = 4  # dims

Forward = Callable[..., Any]


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: Anatomy) -> nn.Module:
    """Let every block keep what it saves as the plan says."""
    if plan.compress == "none" and plan.activations == "device":
        return model
    blocks = [block for block in anatomy.blocks(model).values() if not isinstance(block, Absent)]
    keeper = Keeper(plan, Lane(mesh.device) if plan.activations == "host" else None)
    for number, block in enumerate(blocks):
        # Without a pipeline the backward of the last block comes at once: what it saves need not travel.
        stays = number == len(blocks) - 1 and plan.pp == 1
        block.forward = partial(_kept, keeper, block, block.forward, (number == 0, stays))
    return model


def _kept(
    keeper: "Keeper", block: nn.Module, forward: Forward, place: tuple[bool, bool], *arguments: Any, **words: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **words)
    first, stays = place
    given = list(_tensors((arguments, words)))
    load = keeper.load(first, stays)
    memory = Memory(keeper.plan, _untouched(block, given), _largest(given), load)
    with saved_tensors_hooks(memory.pack, unpack):
        result = forward(*arguments, **words)
    if load is not None:
        load.closed()
    return result


class Keeper:
    """What the blocks of one part of a model share: the way to the host, and whose turn was last."""

    def __init__(self, plan: Plan, lane: Lane | None) -> None:
        self.plan, self.lane = plan, lane
        self.last: Load | None = None

    def load(self, first: bool, stays: bool) -> Load | None:
        """Where a forward of a block puts what it saves; None: it stays on the device."""
        if self.lane is None:
            return None
        before = None if first else self.last
        self.last = None if stays else Load(self.lane, before)
        return self.last


@dataclass(frozen=True, slots=True)
class Stored:
    """The memory of one or several saved tensors."""

    coded: Coded
    parts: tuple[Tensor | Sent, ...]

    def flat(self) -> Tensor:
        """It again, as one line of numbers."""
        return decode(self.coded, tuple(part.fetch() if isinstance(part, Sent) else part for part in self.parts))


@dataclass(frozen=True, slots=True)
class Window:
    """A saved tensor: where it lies in its memory, and what was around it."""

    stored: Stored
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    around: Any  # the layout over ranks of one that is spread over them


def unpack(saved: Tensor | Window) -> Tensor:
    """A saved tensor as the backward wants it."""
    if isinstance(saved, Tensor):
        return saved
    inner = saved.stored.flat().as_strided(saved.size, saved.stride, saved.offset)
    return inner if saved.around is None else DTensor(inner, saved.around, requires_grad=False)  # pyright: ignore


class Memory:
    """What one forward of one block saves, by the memory it lies in."""

    def __init__(self, plan: Plan, untouched: set[int], largest: int, load: Load | None) -> None:
        self.plan, self.untouched, self.load = plan, untouched, load
        self.least = largest * STATISTIC  # numbers of what may be made inexact
        self.stored: dict[tuple[int, int, torch.dtype], tuple[StorageWeakRef, Stored]] = {}

    def pack(self, tensor: Tensor) -> Tensor | Window:
        """A tensor that an operation saves, as it is kept."""
        inner = plain(tensor)
        if inner is None or _is_weight(tensor) or inner.untyped_storage()._cdata in self.untouched:
            return tensor
        if inner.numel() * inner.element_size() < SMALL:
            return tensor
        kind = self._kind(inner)
        if kind == "whole" and self.load is None:
            return tensor
        around = tensor._spec if isinstance(tensor, DTensor) else None
        return Window(self._stored(inner, kind), inner.shape, inner.stride(), int(inner.storage_offset()), around)

    def _kind(self, tensor: Tensor) -> Kind:
        if self.plan.compress == "none":
            return "whole"
        if tensor.dtype == torch.bool:
            return "bits"
        if not tensor.is_floating_point() or tensor.numel() <= self.least:
            return "whole"
        if tensor.dim() == HEADED:
            return "whole" if _is_bias(tensor) else "int8"
        return self.plan.compress

    def _stored(self, tensor: Tensor, kind: Kind) -> Stored:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.dtype)
        known = self.stored.get(key)
        # Memory that was freed meanwhile may have been given out again at the same place.
        if known is not None and not known[0].expired():
            return known[1]
        length = storage.nbytes() // tensor.element_size()
        coded = encode(tensor.detach().as_strided((length,), (1,), 0), kind, self.plan.kernels)
        parts = coded.parts if self.load is None else tuple(map(self.load.send, coded.parts))
        stored = Stored(_without_parts(coded), parts)
        self.stored[key] = StorageWeakRef(storage), stored
        return stored


def _without_parts(coded: Coded) -> Coded:
    return Coded(coded.kind, (), coded.length, coded.dtype)


def plain(tensor: Tensor) -> Tensor | None:
    """The tensor that holds this rank's numbers; None for anything else that behaves like one."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # the operation that saves it has waited already
    return tensor if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided else None


def _is_bias(tensor: Tensor) -> bool:
    """Attention's mask as it is added: one for all heads, and minus infinity where nobody looks, which has no code."""
    return tensor.shape[1] == 1 or tensor.stride(1) == 0


def _is_weight(tensor: Tensor) -> bool:
    """Weights gathered inside the block are not there when it begins."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _untouched(block: nn.Module, given: Iterable[Tensor]) -> set[int]:
    """Memory that outlives the block's graph anyway: weights, buffers, and arguments without a gradient."""
    lasting = [*block.parameters(), *block.buffers(), *(tensor for tensor in given if not tensor.requires_grad)]
    return {inner.untyped_storage()._cdata for tensor in lasting if (inner := plain(tensor)) is not None}


def _largest(given: Iterable[Tensor]) -> int:
    """Numbers of the hidden states that a block is given."""
    inner = (plain(tensor) for tensor in given if tensor.requires_grad)
    return max((tensor.numel() for tensor in inner if tensor is not None), default=0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, BlockMask):
        yield from _tensors(value.as_tuple())
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
