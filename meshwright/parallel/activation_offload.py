"""Activation offload and quantization: blocks' saved activations go to host memory or 8 bits, by saved-tensor hooks.

Weights, small tensors and arguments that all blocks share (RoPE table, document mask) are left alone. Tensors that
share memory are saved once, as without hooks. docs/compress.md says what is exact and what is not.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from meshwright.parallel.model_spec import ModelSpec, note, present_blocks
from meshwright.spec.plan import Plan

Kind = Literal["fp8", "int8", "bits", "whole"]
Forward = Callable[..., Any]

WAITING = 1  # blocks whose tensors may still be copied out while a later one computes
GROUP = 128  # neighbouring elements that share a scale: its four bytes are 3 % of their own
LARGEST_INT8 = 127.0  # symmetric
BYTE = 8  # bools
SMALL = 64 * 1024  # bytes; a smaller tensor is not worth its launches
# Log-sum-exps and norms' statistics are a head's or a row's width below activations, and exponents: an error there is
# an error of everything they scale. What has no more than this share of a block's input is one of them: heads of 16 and
# wider.
STATISTIC = 1 / 16
# Queries, keys, values and attention's result are saved with a dimension for the heads. The backward puts them through
# an exponential again: in fp8, with 3 bits behind the first, a weight's gradient was off by 15 %, in int8 by 2 %.
HEADED = 4  # dims


class HostLane:
    """A CUDA stream for copies between device and host; on a CPU every copy is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.leaving: deque[OffloadBatch] = deque()  # those whose device memory is still held

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, complete once the stream reaches it."""
        if self.stream is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        return host

    def to_device(self, hosts: list[Tensor]) -> list[Tensor]:
        """Copies on the device, complete once the stream reaches them."""
        if self.stream is None:
            return [host.clone() for host in hosts]
        here = torch.cuda.current_stream(self.stream.device)
        # Memory of the compute stream, so that it is reused there without waiting once freed.
        devices = [torch.empty(host.shape, dtype=host.dtype, device=self.stream.device) for host in hosts]
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            for host, device in zip(hosts, devices, strict=True):
                device.copy_(host, non_blocking=True)
                device.record_stream(self.stream)  # a graph may be dropped before anybody has waited for the copy
        return devices

    def mark(self) -> torch.Event | None:
        """An event after all copies so far."""
        return self.stream.record_event() if self.stream is not None else None

    def wait(self, event: torch.Event | None) -> None:
        """Let the compute stream wait for an event; the host does not wait."""
        if self.stream is not None and event is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)


class OffloadedTensor:
    """One saved tensor: still on the device, on the host, or back on the device."""

    def __init__(self, tensor: Tensor, batch: "OffloadBatch") -> None:
        self.here: Tensor | None = tensor
        self.host = batch.lane.to_host(tensor)
        self.batch = batch

    def fetch(self) -> Tensor:
        """The tensor on the device."""
        self.batch.restore()
        assert self.here is not None, "a batch comes back whole"
        return self.here


class OffloadBatch:
    """The tensors that one forward of one block offloads."""

    def __init__(self, lane: HostLane, before: "OffloadBatch | None") -> None:
        self.lane, self.before = lane, before
        self.tensors: list[ref[OffloadedTensor]] = []  # the graph holds them, and drops each when its backward is done
        self.event: torch.Event | None = None
        self.prefetched = False

    def offload(self, tensor: Tensor) -> OffloadedTensor:
        """Start to copy a tensor to the host; it must not be written to any more."""
        offloaded = OffloadedTensor(tensor, self)
        self.tensors.append(ref(offloaded))
        return offloaded

    def close(self) -> None:
        """End the block's forward: earlier batches but the newest free their device memory once copied."""
        self.event = self.lane.mark()
        self.lane.leaving.append(self)
        while len(self.lane.leaving) > WAITING:
            self.lane.leaving.popleft().free()

    def free(self) -> None:
        """Free the device memory, after the copies in the order of the compute stream."""
        self.lane.wait(self.event)
        for offloaded in self._alive():
            offloaded.here = None

    def restore(self) -> None:
        """Wait for this batch in the backward, and prefetch the one before it."""
        if not self.prefetched:
            self.prefetch()
        self.lane.wait(self.event)
        if self.before is not None:
            self.before.prefetch()
            self.before = None

    def prefetch(self) -> None:
        """Start to copy back what is on the host."""
        if self.prefetched:
            return
        self.prefetched = True
        if self in self.lane.leaving:
            self.lane.leaving.remove(self)
        gone = [offloaded for offloaded in self._alive() if offloaded.here is None]
        for offloaded, tensor in zip(gone, self.lane.to_device([offloaded.host for offloaded in gone]), strict=True):
            offloaded.here = tensor
        self.event = self.lane.mark()

    def _alive(self) -> list[OffloadedTensor]:
        return [offloaded for each in self.tensors if (offloaded := each()) is not None]


@dataclass(frozen=True, slots=True)
class QuantizedActivation:
    """A flat tensor quantized, and what dequantization needs: the memory of one or several saved tensors."""

    kind: Kind
    parts: tuple[Tensor | OffloadedTensor, ...]
    length: int
    dtype: torch.dtype


@torch.no_grad()
def encode(flat: Tensor, kind: Kind, kernels: Kernels = "auto") -> QuantizedActivation:
    """Quantize a flat tensor; a NaN or an infinity spoils its group, and is found by the gradient norm."""
    if kind == "fp8":
        parts = quantize(_grouped(flat, GROUP), kernels)
    elif kind == "int8":
        parts = _int8(_grouped(flat, GROUP))
    elif kind == "bits":
        parts = (_packed(flat),)
    else:
        parts = (flat,)
    return QuantizedActivation(kind, parts, len(flat), flat.dtype)


@torch.no_grad()
def decode(quantized: QuantizedActivation) -> Tensor:
    """The flat tensor, dequantized on the device."""
    parts = [part.fetch() if isinstance(part, OffloadedTensor) else part for part in quantized.parts]
    if quantized.kind == "whole":
        return parts[0]
    if quantized.kind == "bits":
        return _unpacked(parts[0])[: quantized.length]
    values, scale = parts
    scale = scale.to(torch.promote_types(quantized.dtype, torch.float32))
    # fp8 has no arithmetic.
    elements = values * scale if quantized.kind == "int8" else values.to(scale.dtype).mul_(scale)
    return elements.to(quantized.dtype).flatten()[: quantized.length]


def _grouped(flat: Tensor, group: int) -> Tensor:
    """Groups of neighbours as rows, the last one padded with zeros."""
    lacking = -len(flat) % group
    return (F.pad(flat, (0, lacking)) if lacking else flat).view(-1, group)


def _int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    least, most = torch.aminmax(rows, dim=1, keepdim=True)
    amax = torch.maximum(-least, most).to(accum_dtype(rows))
    amax = amax.where(~(amax < LEAST), LEAST)  # a NaN stays
    # The scale is fp32 and has dims, so the result is fp32 without an fp32 copy of the rows.
    return (rows * (LARGEST_INT8 / amax)).round_().to(torch.int8), (amax / LARGEST_INT8).to(torch.float32)


def _packed(flat: Tensor) -> Tensor:
    rows = _grouped(flat.to(torch.uint8), BYTE)
    packed = torch.zeros(len(rows), dtype=torch.uint8, device=flat.device)
    for bit in range(BYTE):
        packed |= rows[:, bit] << bit
    return packed


def _unpacked(packed: Tensor) -> Tensor:
    bits = torch.arange(BYTE, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> bits) & 1).to(torch.bool).flatten()


def wrap(model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Offload or quantize what every block saves, as the plan says."""
    if plan.activation_quant == "none" and not plan.activation_offload:
        return model
    blocks = present_blocks(model, model_spec)
    hooks = SavedTensorHooks(plan, HostLane(mesh.device) if plan.activation_offload else None)
    form = "" if plan.activation_quant == "none" else f" in {plan.activation_quant}"
    for number, block in enumerate(blocks):
        # Without a pipeline the backward of the last block follows at once: offloading would gain nothing.
        stays = number == len(blocks) - 1 and plan.pp == 1
        if how := form + (" on the host" if plan.activation_offload and not stays else ""):
            note(block, f"saved activations{how}")
        block.forward = partial(hooks.run, block, block.forward, (number == 0, stays))
    return model


class SavedTensorHooks:
    """What the blocks of a chunk share: the copy stream, and the last block's batch."""

    def __init__(self, plan: Plan, lane: HostLane | None) -> None:
        self.plan, self.lane = plan, lane
        self.last: OffloadBatch | None = None

    def run(self, block: nn.Module, forward: Forward, place: tuple[bool, bool], *args: Any, **kwargs: Any) -> Any:
        """A block's forward; `place`: whether it is the first, and whether its tensors stay on the device."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        differentiable = [inner for tensor in given if tensor.requires_grad and (inner := plain(tensor)) is not None]
        largest = max((tensor.numel() for tensor in differentiable), default=0)  # the hidden states
        # What outlives the block's graph anyway: weights, buffers, and arguments without a gradient.
        lasting = [*block.parameters(), *block.buffers(), *(tensor for tensor in given if not tensor.requires_grad)]
        untouched = {inner.untyped_storage()._cdata for tensor in lasting if (inner := plain(tensor)) is not None}
        first, stays = place
        batch = None
        if self.lane is not None:
            batch = None if stays else OffloadBatch(self.lane, None if first else self.last)
            self.last = batch
        with saved_tensors_hooks(SavedMemory(self.plan, untouched, largest, batch).pack, unpack):
            result = forward(*args, **kwargs)
        if batch is not None:
            batch.close()
        return result


@dataclass(frozen=True, slots=True)
class Window:
    """A saved tensor as a view of its stored memory."""

    stored: QuantizedActivation
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    around: Any  # a DTensor's spec


def unpack(saved: Tensor | Window) -> Tensor:
    """The saved tensor, for the backward."""
    if isinstance(saved, Tensor):
        return saved
    inner = decode(saved.stored).as_strided(saved.size, saved.stride, saved.offset)
    return inner if saved.around is None else DTensor(inner, saved.around, requires_grad=False)  # pyright: ignore


class SavedMemory:
    """What one forward of one block saves, by storage."""

    def __init__(self, plan: Plan, untouched: set[int], largest: int, batch: OffloadBatch | None) -> None:
        self.plan, self.untouched, self.batch = plan, untouched, batch
        self.least = largest * STATISTIC  # elements below which a tensor stays exact
        self.stored: dict[tuple[int, int, torch.dtype], tuple[StorageWeakRef, QuantizedActivation]] = {}

    def pack(self, tensor: Tensor) -> Tensor | Window:
        """Store a tensor that an operation saves."""
        inner = plain(tensor)
        # Weights that are gathered inside the block do not exist when it begins.
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if inner is None or is_weight or inner.untyped_storage()._cdata in self.untouched:
            return tensor
        if inner.numel() * inner.element_size() < SMALL:
            return tensor
        kind = self._kind(inner)
        if kind == "whole" and self.batch is None:
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
            # Attention's additive mask: one for all heads, and minus infinity where masked, which int8 cannot hold.
            is_bias = tensor.shape[1] == 1 or tensor.stride(1) == 0
            return "whole" if is_bias else "int8"
        return self.plan.activation_quant

    def _stored(self, tensor: Tensor, kind: Kind) -> QuantizedActivation:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.dtype)
        known = self.stored.get(key)
        # Memory that was freed meanwhile may have been given out again at the same place.
        if known is not None and not known[0].expired():
            return known[1]
        length = storage.nbytes() // tensor.element_size()
        stored = encode(tensor.detach().as_strided((length,), (1,), 0), kind, self.plan.kernels)
        if self.batch is not None:
            parts = (self.batch.offload(part) for part in stored.parts if isinstance(part, Tensor))
            stored = replace(stored, parts=tuple(parts))
        self.stored[key] = StorageWeakRef(storage), stored
        return stored


def plain(tensor: Tensor) -> Tensor | None:
    """The tensor that holds this rank's elements; None for other tensor-like objects."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # the operation that saves it has waited already
    return tensor if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided else None


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
