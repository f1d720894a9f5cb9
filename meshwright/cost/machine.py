"""Machines that no catalogue has, a CPU for one, as their own probe describes them."""

from typing import Any

import msgspec

from meshwright.cost.calibrate import calibrated, calibrated_cluster, fastest
from meshwright.spec.cluster import Cluster, Gpu, Link
from meshwright.spec.efficiency import Efficiency
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.profile import Profile
from meshwright.spec.stack import Stack


def machine(profile: Profile, gpus: int, stack: Stack) -> Cluster:
    """The cluster that a profile alone describes.

    Its peaks are the fastest products measured, so what is priced as a share of a peak is a share of those.
    """
    if problem := _says_nothing(profile):
        raise InputError([problem])
    gpu = _device(profile)
    domains = max((each.domains for each in profile.collectives), default=1)
    link = _first_guess(profile)
    bare = Cluster(
        name=f"{gpus}x{profile.device}",
        gpu=gpu,
        gpus=gpus,
        domain=max(profile.ranks // domains, 1) if domains > 1 else gpus,
        scale_up=link,
        network=link,
        host=Link(name="host", bandwidth=profile.host_bandwidth or profile.copy_bandwidth, latency=0.0),
        efficiency=_efficiency(profile, gpu, stack),
    )
    return calibrated_cluster(bare, profile)


def _device(profile: Profile) -> Gpu:
    return Gpu(
        name=profile.device,
        match=(),
        memory_bytes=profile.memory_bytes,
        bandwidth=profile.copy_bandwidth,
        fp32=_fastest_product(profile, "fp32"),
        bf16=_fastest_product(profile, "bf16"),
        fp16=_fastest_product(profile, "fp16"),
        fp8=_fastest_product(profile, "fp8"),
    )


def _efficiency(profile: Profile, gpu: Gpu, stack: Stack) -> Efficiency:
    """What its kernels reach; the stack's own factor on attention is in the measured times already."""
    start = Efficiency(name=profile.device, **_begun(profile))
    found = calibrated(start, gpu, profile, fastest(profile.attention), "fp32" if profile.threads else "bf16")
    own = stack.speed.attention
    forward, backward = found.attention_forward / own, found.attention_backward / own
    return msgspec.structs.replace(found, attention_forward=forward, attention_backward=backward)


def _says_nothing(profile: Profile) -> Problem | None:
    if profile.products and profile.copy_bandwidth:
        return None
    return Problem("the profile has no products or no copy", "measure it with meshwright bench --probe", "profile")


def _fastest_product(profile: Profile, dtype: str) -> float:
    """Operations a second; 0 where none was measured."""
    return max((2 * e.m * e.n * e.k / e.seconds for e in profile.products if e.dtype == dtype), default=0.0)


def _begun(profile: Profile) -> dict[str, Any]:
    """Where the search for the constants of an unknown device begins, and where what was not measured stays."""
    shares = {"product": 1.0, "attention_forward": 0.5, "attention_backward": 0.5, "memory": 1.0}
    shapes = {"wave": 1e3, "depth": 10.0, "attention_sequence": 100.0}
    return {**shares, **shapes, "kernel_seconds": profile.launch_seconds}


def _first_guess(profile: Profile) -> Link:
    """A link as fast as the fastest collective and as quick as the quickest; what it reaches is fitted later."""
    times = profile.collectives
    bandwidth = max((each.bytes / each.seconds for each in times), default=profile.copy_bandwidth)
    latency = min((each.seconds for each in times), default=profile.launch_seconds)
    return Link(name="measured", bandwidth=2 * bandwidth, latency=latency, efficiency=0.5)
