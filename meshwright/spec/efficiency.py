"""How much of its data sheet an accelerator reaches in single kernels: measured or fitted, as data."""

import tomllib
from functools import cache
from importlib import resources

import msgspec

from meshwright.spec.cluster import Gpu

GENERIC = "generic"  # the entry for accelerators of which nothing was measured


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What kernels of one kind of accelerator reach. Shares are of the data sheet's figure."""

    name: str
    match: tuple[str, ...] = ()  # beginnings of the accelerators' names in the catalogue
    product: float  # share of the peak that large matrix products reach
    product_fp8: float = 0.0  # the same in fp8, which falls further behind its peak; 0: like the others
    wave: float  # outputs of a product that take no less time than none: half a wave of tiles
    depth: float  # and terms of its sums: filling and draining a tile
    attention_forward: float  # share of the peak that fused causal attention reaches, long sequences, heads of 128
    attention_backward: float
    attention_sequence: float  # positions that take no less time than none
    memory: float  # share of the bandwidth that element-wise kernels reach
    kernel_seconds: float  # of the smallest kernel on the device
    variation: float = 0.02  # by which speeds of such accelerators differ, as a share: everyone waits for the slowest


@cache
def efficiencies() -> tuple[Efficiency, ...]:
    """Every entry of the catalogue."""
    table = tomllib.loads((resources.files("meshwright.spec") / "efficiencies.toml").read_text())
    return tuple(msgspec.convert({"name": name, **entry}, Efficiency) for name, entry in table.items())


@cache
def efficiency_of(gpu: Gpu) -> Efficiency:
    """The entry whose beginning of the name is the longest; the generic one for a card that none names."""
    generic = next(each for each in efficiencies() if each.name == GENERIC)
    fitting = [(len(word), each) for each in efficiencies() for word in each.match if gpu.name.startswith(word)]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else generic
