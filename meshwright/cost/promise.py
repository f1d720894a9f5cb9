"""What a promise about a device is made from: a profile that the user gave, the catalogue, or a probe."""

from collections.abc import Callable

import msgspec

from meshwright.cost.calibrate import measured
from meshwright.cost.machine import machine
from meshwright.spec.catalogue import catalogue, recognised
from meshwright.spec.cluster import Cluster, cluster_of_device
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.profile import Profile
from meshwright.spec.stack import Stack, stacks

CPU = "cpu"  # as measurements and profiles name it
Probed = Callable[[], Profile | None]  # asked only where the catalogue does not know the device


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to believe about this machine: a profile that the user gave, else the catalogue, else a probe."""

    given: Profile | None
    probed: Probed

    def of(self, device: str, gpus: int) -> tuple[Cluster | None, str]:
        """The cluster that runs are priced on, and what is known of it from where."""
        stack, known = stacks()["meshwright"], recognised(device, catalogue().cards) is not None
        if self.given is not None and known:
            return measured(cluster_of_device(device, gpus), self.given, stack), "the profile given"
        if self.given is not None:
            return machine(_same(self.given, device), gpus, stack), "the profile given"
        if known:
            return cluster_of_device(device, gpus), "the catalogue"
        profile = self.probed()
        return (None, "") if profile is None else (machine(profile, gpus, stack), "a quick probe of this machine")


def _same(profile: Profile, device: str) -> Profile:
    """Times of one device say nothing of another."""
    if profile.device != device:
        what = f"the profile was measured on {profile.device}, and this machine has {device}"
        raise InputError([Problem(what, "measure it with meshwright bench --probe", "profile")])
    return profile


def trainer(device: str) -> Stack:
    """Our trainer; on a CPU nothing of a message is free, since the cores that compute also carry it."""
    stack = stacks()["meshwright"]
    if device != CPU:
        return stack
    speed = msgspec.structs.replace(stack.speed, overlap_shard=0.0, overlap_replicate=0.0)
    return msgspec.structs.replace(stack, speed=speed)
