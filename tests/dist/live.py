"""Bytes of tensors that are alive, counted by their storages as operations make them."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts what is made inside it and still held; `existing` is not counted, nor views of it."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.existing = list(existing)
        self.known = {tensor.untyped_storage()._cdata for tensor in self.existing}
        self.made: dict[int, weakref.ref[UntypedStorage]] = {}
        self.peak = 0

    @property
    def bytes(self) -> int:
        """Of all that is alive now."""
        storages = [storage for made in self.made.values() if (storage := made()) is not None]
        return sum(storage.nbytes() for storage in storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.made[id(storage)] = weakref.ref(storage)
        self.peak = max(self.peak, self.bytes)
        return result
