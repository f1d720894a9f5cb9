"""Accelerators as data: what a device of a given name can do at best."""

import tomllib
from functools import cache
from importlib import resources

import msgspec

from meshwright.spec.plan import Precision


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of accelerator: dense peaks in TFLOP/s, as in the catalogue."""

    name: str
    match: tuple[str, ...]  # words in the name that the driver reports
    fp32: float
    bf16: float = 0.0  # 0: the device has no such arithmetic
    fp16: float = 0.0


@cache
def catalogue() -> tuple[Gpu, ...]:
    """Every known accelerator, the more special names first."""
    table = tomllib.loads((resources.files("meshwright.spec") / "gpus.toml").read_text())
    return tuple(msgspec.convert({"name": name, **entry}, Gpu) for name, entry in table.items())


def peak_flops_per_second(device_name: str, precision: Precision) -> float | None:
    """The data sheet's rate for a device, None when the device or its rate is not known."""
    for gpu in catalogue():
        if any(word in device_name for word in gpu.match):
            peak = getattr(gpu, precision, 0.0)
            return peak * 1e12 if peak else None
    return None
