"""What blocks keep for the backward, made smaller or sent to the host, by torch's hooks on saved tensors.

Weights are not touched, nor small tensors, nor what all blocks are handed alike (rotations, documents). Tensors that
share memory are kept once, as they were before. docs/compress.md says what is exact and what is not.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.flex_attention import BlockMask

from meshwright.kernels.dispatch import Kernels
from meshwright.kernels.fp8 import LEAST, quantize
from meshwright.models.layers import accum_dtype
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import Absent, ModelSpec
from meshwright.spec.plan import Plan

WAITING = 1  # blocks whose tensors may still be leaving while a later one computes


class HostLane:
    """The way between a device and its host. Without streams, on a CPU, every copy is done when it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving: deque[Load] = deque()  # those whose device memory is still held

    def depart(self, tensor: Tensor) -> Tensor:
        """A copy on the host that will be whole when the stream gets there."""
        if self.stream is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        return host

    def arrive(self, hosts: list[Tensor]) -> list[Tensor]:
        """Copies on the device that will be whole when the stream gets there."""
        if self.stream is None:
            return [host.clone() for host in hosts]
        here = torch.cuda.current_stream(self.stream.device)
        # The memory is the computing stream's, so that what is freed there is used again there without waiting.
        devices = [torch.empty(host.shape, dtype=host.dtype, device=self.stream.device) for host in hosts]
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            for host, device in zip(hosts, devices, strict=True):
                device.copy_(host, non_blocking=True)
                device.record_stream(self.stream)  # a graph may be dropped before anybody has waited for the copy
        return devices

    def mark(self) -> torch.Event | None:
        """Everything that was asked for until now."""
        return self.stream.record_event() if self.stream is not None else None

    def wait(self, event: torch.Event | None) -> None:
        """Let the computing stream go on after what was marked; nobody waits on the host."""
        if self.stream is not None and event is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)


class OffloadedTensor:
    """One tensor: on the device still, on the host, or on the device again."""

    def __init__(self, tensor: Tensor, load: "Load") -> None:
        self.here: Tensor | None = tensor
        self.host = load.lane.depart(tensor)
        self.load = load

    def fetch(self) -> Tensor:
        """The tensor, on the device and whole."""
        self.load.back()
        assert self.here is not None, "a load comes back whole"
        return self.here


class Load:
    """What one forward of one block sent."""

    def __init__(self, lane: HostLane, before: "Load | None") -> None:
        self.lane, self.before = lane, before
        self.sent: list[ref[OffloadedTensor]] = []  # the graph holds them, and drops each when its backward is done
        self.event: torch.Event | None = None
        self.asked = False

    def send(self, tensor: Tensor) -> OffloadedTensor:
        """Let a tensor leave; it must not be written to any more."""
        sent = OffloadedTensor(tensor, self)
        self.sent.append(ref(sent))
        return sent

    def closed(self) -> None:
        """The block is done: of those before it, all but the newest give up their memory once they have left."""
        self.event = self.lane.mark()
        self.lane.leaving.append(self)
        while len(self.lane.leaving) > WAITING:
            self.lane.leaving.popleft().leave()

    def leave(self) -> None:
        """Nothing of it is on the device any more, as far as the computing stream can tell."""
        self.lane.wait(self.event)
        for sent in self._alive():
            sent.here = None

    def back(self) -> None:
        """The backward is here: all of this load must be whole, and the one before it comes next."""
        if not self.asked:
            self.ask()
        self.lane.wait(self.event)
        if self.before is not None:
            self.before.ask()
            self.before = None

    def ask(self) -> None:
        """Start to bring back what has left."""
        if self.asked:
            return
        self.asked = True
        if self in self.lane.leaving:
            self.lane.leaving.remove(self)
        gone = [sent for sent in self._alive() if sent.here is None]
        for sent, tensor in zip(gone, self.lane.arrive([sent.host for sent in gone]), strict=True):
            sent.here = tensor
        self.event = self.lane.mark()

    def _alive(self) -> list[OffloadedTensor]:
        return [sent for each in self.sent if (sent := each()) is not None]


Kind = Literal["fp8", "int8", "bits", "whole"]

GROUP = 128  # neighbouring numbers that share a scale: four bytes of it are 3 % of their codes
LARGEST = 127.0  # code of int8, both ways alike
BYTE = 8  # truth values


@dataclass(frozen=True, slots=True)
class QuantizedActivation:
    """A flat tensor as codes, and what it takes to read them."""

    kind: Kind
    parts: tuple[Tensor, ...]
    length: int
    dtype: torch.dtype


@torch.no_grad()
def encode(flat: Tensor, kind: Kind, kernels: Kernels = "auto") -> QuantizedActivation:
    """A flat tensor in the codes of a kind. A NaN or an infinity spoils its group, and is found by the step's norm."""
    if kind == "fp8":
        codes = quantize(_grouped(flat, GROUP), torch.float8_e4m3fn, "rowwise", kernels=kernels)
        parts = (codes.values, codes.scale)
    elif kind == "int8":
        parts = _int8(_grouped(flat, GROUP))
    elif kind == "bits":
        parts = (_packed(flat),)
    else:
        parts = (flat,)
    return QuantizedActivation(kind, parts, len(flat), flat.dtype)


@torch.no_grad()
def decode(coded: QuantizedActivation, parts: tuple[Tensor, ...]) -> Tensor:
    """The flat tensor again, from its parts wherever they have been meanwhile."""
    if coded.kind == "whole":
        return parts[0]
    if coded.kind == "bits":
        return _unpacked(parts[0])[: coded.length]
    codes, scale = parts
    scale = scale.to(torch.promote_types(coded.dtype, torch.float32))
    numbers = codes * scale if coded.kind == "int8" else codes.to(scale.dtype).mul_(scale)  # fp8 has no arithmetic
    return numbers.to(coded.dtype).flatten()[: coded.length]


def _grouped(flat: Tensor, group: int) -> Tensor:
    """Rows of neighbours, the last one filled up with zeros."""
    lacking = -len(flat) % group
    return (F.pad(flat, (0, lacking)) if lacking else flat).view(-1, group)


def _int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    least, most = torch.aminmax(rows, dim=1, keepdim=True)
    amax = torch.maximum(-least, most).to(accum_dtype(rows))
    amax = amax.where(~(amax < LEAST), LEAST)  # a NaN stays
    # The scale is wide and has dims, so the product is wide without a wide copy of the rows.
    return (rows * (LARGEST / amax)).round_().to(torch.int8), (amax / LARGEST).to(torch.float32)


def _packed(flat: Tensor) -> Tensor:
    rows = _grouped(flat.to(torch.uint8), BYTE)
    packed = torch.zeros(len(rows), dtype=torch.uint8, device=flat.device)
    for bit in range(BYTE):
        packed |= rows[:, bit] << bit
    return packed


def _unpacked(packed: Tensor) -> Tensor:
    bits = torch.arange(BYTE, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> bits) & 1).to(torch.bool).flatten()


SMALL = 64 * 1024  # bytes; a smaller tensor is not worth its launches
# Log-sum-exps and norms' statistics are a head's or a row's width below activations, and exponents: an error there is
# an error of everything they scale. What has no more than this share of a block's input is one of them: heads of 16 and
# wider.
STATISTIC = 1 / 16
# Queries, keys, values and attention's result are saved with a dimension for the heads. The backward puts them through
# an exponential again: in fp8, with 3 bits behind the first, a weight's gradient was off by 15 %, in int8 by 2 %.
HEADED = 4  # dims

Forward = Callable[..., Any]


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, anatomy: ModelSpec) -> nn.Module:
    """Let every block keep what it saves as the plan says."""
    if plan.activation_quant == "none" and not plan.activation_offload:
        return model
    blocks = [block for block in anatomy.blocks(model).values() if not isinstance(block, Absent)]
    keeper = SavedTensorHooks(plan, HostLane(mesh.device) if plan.activation_offload else None)
    for number, block in enumerate(blocks):
        # Without a pipeline the backward of the last block comes at once: what it saves need not travel.
        stays = number == len(blocks) - 1 and plan.pp == 1
        block.forward = partial(_kept, keeper, block, block.forward, (number == 0, stays))
    return model


def _kept(
    keeper: "SavedTensorHooks",
    block: nn.Module,
    forward: Forward,
    place: tuple[bool, bool],
    *arguments: Any,
    **words: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **words)
    first, stays = place
    given = list(_tensors((arguments, words)))
    load = keeper.load(first, stays)
    memory = SavedMemory(keeper.plan, _untouched(block, given), _largest(given), load)
    with saved_tensors_hooks(memory.pack, unpack):
        result = forward(*arguments, **words)
    if load is not None:
        load.closed()
    return result


class SavedTensorHooks:
    """What the blocks of one part of a model share: the way to the host, and whose turn was last."""

    def __init__(self, plan: Plan, lane: HostLane | None) -> None:
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
class SavedTensor:
    """The memory of one or several saved tensors."""

    coded: QuantizedActivation
    parts: tuple[Tensor | OffloadedTensor, ...]

    def flat(self) -> Tensor:
        """It again, as one line of numbers."""
        return decode(
            self.coded, tuple(part.fetch() if isinstance(part, OffloadedTensor) else part for part in self.parts)
        )


@dataclass(frozen=True, slots=True)
class Window:
    """A saved tensor: where it lies in its memory, and what was around it."""

    stored: SavedTensor
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


class SavedMemory:
    """What one forward of one block saves, by the memory it lies in."""

    def __init__(self, plan: Plan, untouched: set[int], largest: int, load: Load | None) -> None:
        self.plan, self.untouched, self.load = plan, untouched, load
        self.least = largest * STATISTIC  # numbers of what may be made inexact
        self.stored: dict[tuple[int, int, torch.dtype], tuple[StorageWeakRef, SavedTensor]] = {}

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
        if self.plan.activation_quant == "none":
            return "whole"
        if tensor.dtype == torch.bool:
            return "bits"
        if not tensor.is_floating_point() or tensor.numel() <= self.least:
            return "whole"
        if tensor.dim() == HEADED:
            return "whole" if _is_bias(tensor) else "int8"
        return self.plan.activation_quant

    def _stored(self, tensor: Tensor, kind: Kind) -> SavedTensor:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.dtype)
        known = self.stored.get(key)
        # Memory that was freed meanwhile may have been given out again at the same place.
        if known is not None and not known[0].expired():
            return known[1]
        length = storage.nbytes() // tensor.element_size()
        coded = encode(tensor.detach().as_strided((length,), (1,), 0), kind, self.plan.kernels)
        parts = coded.parts if self.load is None else tuple(map(self.load.send, coded.parts))
        stored = SavedTensor(_without_parts(coded), parts)
        self.stored[key] = StorageWeakRef(storage), stored
        return stored


def _without_parts(coded: QuantizedActivation) -> QuantizedActivation:
    return QuantizedActivation(coded.kind, (), coded.length, coded.dtype)


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
