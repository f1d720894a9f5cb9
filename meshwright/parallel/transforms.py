"""What `print(model)` shows of the transforms: each notes what it did on the module it did it to.

Sharding needs no note, as `fully_shard` renames classes (`FSDPBlock`), nor does FP8, whose layers are `Fp8Linear`.
"""

from functools import partial

from torch import nn


def note(module: nn.Module, transform: str) -> None:
    """Show a transform among a module's own words when it is printed."""
    # Text, not a function of the module: a reference to itself would keep its weights until a garbage collection.
    module.extra_repr = partial(str, ", ".join(filter(None, (module.extra_repr(), transform))))
