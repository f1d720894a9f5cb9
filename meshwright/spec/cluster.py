"""Clusters as data: accelerators, the nodes they sit in and the links between them."""

import msgspec

from meshwright.spec.plan import Precision

GIGA, TERA = 1e9, 1e12


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of accelerator. Peaks are dense and from the data sheet; achievable shares of them are measured."""

    name: str
    match: tuple[str, ...]  # words in the name that a driver or a publication gives
    memory_bytes: float  # what a program can allocate at most, as the driver reports it
    bandwidth: float  # bytes a second of the device's own memory
    fp32: float  # operations a second; 0: the device has no such arithmetic
    tf32: float = 0.0
    bf16: float = 0.0
    fp16: float = 0.0
    fp8: float = 0.0

    def peak(self, precision: Precision) -> float:
        """Operations a second of matrix products; 0 where the device has no such arithmetic or no figure is known."""
        return {"fp32": self.fp32, "bf16": self.bf16, "fp16": self.fp16, "fp8": self.fp8}.get(precision, 0.0)


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way for bytes, seen from one GPU."""

    name: str
    bandwidth: float  # bytes a second in one direction, nominal
    latency: float  # seconds before the first byte
    efficiency: float = 1.0  # the share of the nominal bandwidth that collectives reach


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some GPUs of one kind: `domain` of them share the fast link, everything beyond goes over the network."""

    name: str
    gpu: Gpu
    gpus: int
    domain: int  # GPUs behind one scale-up switch: a node, or a rack
    scale_up: Link
    network: Link
    host: Link  # between a GPU and its node's memory
    host_bytes: float = 0.0  # memory of a node ÷ its GPUs; 0: not known

    @property
    def nodes(self) -> int:
        """Domains in use."""
        return -(-self.gpus // self.domain)
