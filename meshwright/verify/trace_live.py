"""Bytes that live tensors take, followed through a step by the storages behind them."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Live(TorchDispatchMode):
    """Counts every storage that an operator returns, from its first sight to the death of its last tensor.

    Views share a storage and are counted once. Storages that are resized in place, as `fully_shard` does with gathered
    weights, are no operator's result: `following` has them told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self.peak_phase = ""
        self.phase = ""  # what the step is doing, as whoever drives it says
        self.asking = 0  # calls by which DTensor asks for the shape of a whole result: such tensors are on no GPU
        self._sizes: Any = WeakIdKeyDictionary()  # bytes counted of each storage, in a box that its end can read

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it become operators on this rank's parts first
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as large as it is now."""
        box = self._sizes.get(storage)
        if box is None:
            if self.asking:
                return
            box = self._sizes[storage] = [0]
            weakref.finalize(storage, self._gone, box)
        self._changed(storage.nbytes() - box[0])
        box[0] = storage.nbytes()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The same, of one that was seen before; others are no tensor of the step."""
        if storage in self._sizes:
            self.see(storage)

    def _gone(self, box: list[int]) -> None:
        self._changed(-box[0])
        box[0] = 0

    def _changed(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.peak:
            self.peak, self.peak_phase = self.bytes, self.phase


@contextmanager
def following() -> Iterator[Live]:
    """While it lasts, what comes into being is counted until it is gone."""
    live, resize, shape = Live(), torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        live.resized(storage)
        return result

    def shape_of_whole(*arguments: Any) -> Any:
        live.asking += 1
        try:
            return shape(*arguments)
        finally:
            live.asking -= 1

    with (
        # No operator of torch's tells that memory is given back this way.
        patch.object(torch.UntypedStorage, "resize_", resize_),
        patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", shape_of_whole),
        live,
    ):
        yield live


def stored(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind tensors, which several may share."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storages[held.untyped_storage()._cdata] = held.untyped_storage().nbytes()
    return sum(storages.values())
