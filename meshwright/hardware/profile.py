"""What was measured on one machine: times of single kernels and collectives, before anything is concluded from them."""

from pathlib import Path
from typing import Literal

import msgspec

from meshwright.spec.problem import UNDECODABLE, mistake

Pass = Literal["forward", "input", "weight"]  # of a matmul: x·W, the gradient of x, the gradient of W


class MatmulTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One matmul, (m, k) times (k, n)."""

    m: int
    n: int
    k: int
    dtype: str  # bf16, fp16, fp32, tf32, fp8
    seconds: float
    kind: Pass = "forward"


class AttentionTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Causal attention of one layer, forward and backward."""

    batch: int
    heads: int
    kv_heads: int
    sequence: int
    head_dim: int
    forward_seconds: float
    backward_seconds: float
    backend: str  # flash, cudnn, efficient, math
    dtype: str = "bf16"


class ElementwiseTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel that is all memory traffic: a copy, an addition, a norm, an optimizer's step."""

    kind: str  # copy, add, norm, swiglu, rope, loss, adamw …
    bytes: float  # read and written, the least that the operation needs
    seconds: float
    compiled: bool = False


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One collective among ranks of one domain, or across domains; bytes where the tensor is whole."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"]
    ranks: int
    bytes: float
    seconds: float
    domains: int = 1  # nodes (scale-up domains) that the ranks are spread over


class CollectiveFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one collective as latency + bytes ÷ bandwidth, bytes again where the tensor is whole."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"]
    ranks: int
    latency: float  # alpha: seconds of the smallest message
    bandwidth: float  # 1 ÷ beta: bytes a second of the largest
    error: float  # the median of |fitted ÷ measured - 1| over the sizes
    domains: int = 1


class LayerTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole block of a decoder, to judge what is concluded from its kernels."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    sequence: int
    microbatch: int
    forward_seconds: float
    backward_seconds: float
    dtype: str = "bf16"
    compiled: bool = False


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that was measured on one machine. What was not is left empty, and nothing is concluded from it."""

    device: str  # the name that the driver reports
    torch: str = ""
    matmuls: tuple[MatmulTime, ...] = msgspec.field(name="products", default=())  # as all files so far have it
    attention: tuple[AttentionTime, ...] = ()
    elementwise: tuple[ElementwiseTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()  # of the collectives; plans are priced with the times themselves
    layers: tuple[LayerTime, ...] = ()
    copy_bandwidth: float = 0.0  # bytes a second read and written by a large copy on the device
    launch_seconds: float = 0.0  # that the host needs to start one small kernel from eager code
    host_bandwidth: float = 0.0  # bytes a second from the device to pinned memory of its node
    to_device_bandwidth: float = 0.0  # and from there to the device
    disk_write_bandwidth: float = 0.0  # bytes a second of a new file, until it is on the disk
    disk_read_bandwidth: float = 0.0  # of the same file, not kept in memory
    memory_bytes: float = 0.0  # of the device, or a rank's share of the machine's
    threads: int = 0  # that one rank computes with on a CPU
    ranks: int = 1  # that were measured at once


def read_profile(path: Path) -> Profile:
    """The profile in a JSON file; a file that is none is the user's mistake."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        remedy = f"measure one first: meshwright bench --probe --out {path}"
        raise mistake(f"there is no profile {path}: {error.strerror}", remedy, "profile") from error
    except UNDECODABLE as error:
        remedy = "give a file that the probe wrote, or correct it"
        raise mistake(f"{path} is not a machine profile: {error}", remedy, "profile") from error
