"""A machine measured by all ranks at once: each its own device, then what lies between them."""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch.distributed as dist

from meshwright.bench.collectives import collective_times
from meshwright.bench.fit import fits
from meshwright.bench.probe import probe
from meshwright.bench.storage import MIB, disk_bandwidths
from meshwright.parallel.mesh import Mesh
from meshwright.spec.place import Place
from meshwright.spec.profile import Profile, write_profile
from meshwright.spec.run import Run
from meshwright.train.world import world

FILE, QUICK_FILE = 512 * MIB, 64 * MIB  # bytes written to the disk


def probe_ranks(place: Place, run: Run, quick: bool, target: Path) -> None:
    """Be one rank of a probe; the first leaves the profile in `target`.

    Devices are measured by all ranks at once, because that is how they work in training.
    """
    with world(run, place) as mesh:
        say = _aloud if mesh.rank == 0 else _quietly
        dist.barrier()
        profile = probe(mesh.device, say, quick=quick or mesh.device.type == "cpu")
        profile = _with_collectives(profile, mesh, place, quick, say)
        if mesh.rank == 0:
            say("the disk")
            write, read = disk_bandwidths(target.parent, QUICK_FILE if quick else FILE)
            found = {"disk_write_bandwidth": write, "disk_read_bandwidth": read, "ranks": mesh.world}
            write_profile(msgspec.structs.replace(profile, **found), target)
        dist.barrier()


def _with_collectives(profile: Profile, mesh: Mesh, place: Place, quick: bool, say: Callable[[str], None]) -> Profile:
    if mesh.world == 1:
        say("collectives are left out: one rank has nobody to send to")
        return profile
    if mesh.device.type == "cuda" and dist.get_backend() != "nccl":
        say("collectives are left out: ranks share a GPU, and NCCL wants one for each")
        return profile
    say(f"collectives of {mesh.world} ranks by {dist.get_backend()}")
    times = tuple(collective_times(mesh, place, quick))
    return msgspec.structs.replace(profile, collectives=times, fits=fits(times))


def _aloud(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quietly(text: str) -> None:
    """Only one rank speaks."""
