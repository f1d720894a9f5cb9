"""What a rank sees of its machine, and what is wrong with a set of machines: facts as values, findings as sentences.

Everything is read from the kernel's own files and asked of the driver; nothing is changed, and no GPU is used.
"""

import os
import platform
import resource
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from meshwright import __version__
from meshwright.runtime.devices import HELD_BY_SETTING, LONGEST_SECONDS, GpuHealth
from meshwright.runtime.meeting import named
from meshwright.spec.units import GIB

MIB = 2**20
TRIAL_BYTES = 32 * MIB  # written to the run folder
LEAST_SHM = 1 * GIB
LEAST_FILES = 4096
LEAST_MEMLOCK = 1 * GIB
LEAST_DISK = 100e6  # bytes a second; below it a save of a billion weights takes two minutes
MOST_CLOCK_SECONDS = 1.0  # between machines: logs and failure reports are compared by it
SLOW, LATE, FEWEST = 0.5, 3.0, 3  # share of the median bandwidth, multiple of the median latency, links to judge by
COMPARED = ("meshwright", "python", "torch", "nccl", "driver", "gpus")


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface that is up."""

    name: str
    gbit: float  # 0: it does not say
    driver: str = ""

    @property
    def rate(self) -> str:
        return f"{self.gbit:g} Gb/s" if self.gbit else "rate unknown"


class NetworkAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An InfiniBand, RoCE or EFA adapter."""

    name: str
    driver: str
    state: str
    rate: str
    layer: str


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sees."""

    rank: int = 0
    host: str = ""
    node: str = ""  # its machine: the host, with the launcher's number of it
    meshwright: str = __version__
    python: str = platform.python_version()
    torch: str = ""
    nccl: str = ""
    driver: str = ""
    gpus: tuple[str, ...] = ()
    pcie: tuple[str, ...] = ()  # speed and width of each GPU's link
    cores: int = 1
    interfaces: tuple[Interface, ...] = ()
    adapters: tuple[NetworkAdapter, ...] = ()
    memlock: int = -1  # bytes; -1: no limit
    files: int = -1
    shm: int = 0
    folder: str = ""
    sees_folder: bool = True  # that of rank 0
    health: tuple[GpuHealth, ...] | None = ()  # of its machine's GPUs, told by the first rank there; None: no answer
    disk: float = 0.0  # bytes a second written to the folder; 0: not tried
    disk_error: str = ""  # why the folder did not take what was written to try it
    address: str = ""  # where rank 0 listens, as this rank resolves it; empty: it cannot


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Two machines and the sockets between them."""

    first: str
    second: str
    seconds: float = 0.0  # there and back, of one byte
    bandwidth: float = 0.0  # bytes a second
    clock: float = 0.0  # the second's clock less the first's
    error: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong, or worth setting."""

    kind: Literal["problem", "advice"]
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}; {self.remedy}"


def look(gpus: Sequence[str], system: Path = Path("/")) -> RankFacts:
    """This machine, as far as its own files tell."""
    soft_files, soft_lock = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    return RankFacts(
        host=socket.gethostname(),
        torch=_version("torch"),
        nccl=_version("nvidia-nccl-cu13") or _version("nvidia-nccl-cu12"),
        driver=_driver(system),
        gpus=tuple(gpus),
        pcie=tuple(_links(system)),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        interfaces=tuple(_interfaces(system)),
        adapters=tuple(_adapters(system)),
        memlock=soft_lock,
        files=soft_files,
        shm=_size(system / "dev/shm"),
    )


def disk_speed(folder: Path) -> float | str:
    """Bytes a second that the folder takes, written and synced, or why it does not; the file is removed."""
    file = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    data = os.urandom(MIB)
    began = time.monotonic()
    try:
        with open(file, "wb") as out:
            for _ in range(TRIAL_BYTES // MIB):
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
        return TRIAL_BYTES / (time.monotonic() - began)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        file.unlink(missing_ok=True)


def findings(facts: Sequence[RankFacts], links: Sequence[LinkFacts], told: Mapping[str, str]) -> list[Finding]:
    """What is wrong with these machines, and what to set; `told`: variables that are set already."""
    of_ranks = [*_differences(facts), *_limits(facts), *_folders(facts), *_meeting(facts), *_gpus(facts)]
    return [*of_ranks, *_wires(links), *_advice(facts, told)]


def _differences(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    for key in COMPARED:
        values = [getattr(one, key) for one in facts]
        usual = max(values, key=values.count)
        odd = {one.rank: value for one, value in zip(facts, values, strict=True) if value != usual}
        if odd:
            text = f"{named(odd)} has {key} = {_shown(min(odd.items())[1])}, the others {_shown(usual)}"
            yield Finding(kind="problem", text=text, remedy="install the same everywhere")


def _limits(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    few = [one for one in facts if 0 <= one.files < LEAST_FILES]
    if few:
        text = f"{named(one.rank for one in few)} may open {few[0].files:,} files, and all ranks connect to the first"
        yield Finding(kind="problem", text=text, remedy="raise it: ulimit -n 65536")
    locked = [one for one in facts if 0 <= one.memlock < LEAST_MEMLOCK and one.adapters]
    if locked:
        text = f"{named(one.rank for one in locked)} may lock {locked[0].memlock:,} bytes, and adapters register memory"
        yield Finding(kind="problem", text=text, remedy="raise it: ulimit -l unlimited")
    small = [one for one in facts if one.shm < LEAST_SHM]
    if small:
        text = f"{named(one.rank for one in small)} has {small[0].shm / MIB:.0f} MiB of /dev/shm, which NCCL uses"
        yield Finding(kind="problem", text=text, remedy="mount more: a container's --shm-size, a pod's Memory volume")


def _folders(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    blind = [one for one in facts if not one.sees_folder]
    if blind:
        text = f"{named(one.rank for one in blind)} on {blind[0].host} does not see the run folder of rank 0"
        yield Finding(kind="problem", text=text, remedy="name a --folder on a file system that all machines mount")
    for one in facts:
        if one.disk_error:
            text = f"{one.host} cannot write {TRIAL_BYTES // MIB} MiB to {one.folder}: {one.disk_error}"
            yield Finding(kind="problem", text=text, remedy="free some space, or name another --folder")
    slow = [one for one in facts if 0 < one.disk < LEAST_DISK]
    if slow:
        text = f"{slow[0].host} writes {slow[0].disk / 1e6:.0f} MB/s to {slow[0].folder}: saves will be slow"
        yield Finding(kind="problem", text=text, remedy="use a faster file system, or a longer checkpoint.every")


def _meeting(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """Where rank 0 is, seen from several machines."""
    if len({one.node for one in facts}) == 1:
        return
    lost = [one for one in facts if not one.address]
    if lost:
        text = f"{named(one.rank for one in lost)} on {lost[0].host} cannot resolve MASTER_ADDR"
        yield Finding(kind="problem", text=text, remedy="set it to a name of rank 0's machine that all know")
    first = facts[0].host
    local = [one for one in facts if one.address and one.host != first and ip_address(one.address).is_loopback]
    if local:
        text = f"MASTER_ADDR is a loopback address on {local[0].host}, which is not rank 0's machine"
        yield Finding(kind="problem", text=text, remedy="set it to an address of rank 0's machine on the job's network")


def _gpus(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """What a driver says of the GPUs of each machine."""
    for one in facts:
        if one.health is None:
            text = f"the GPU driver of {one.host} did not answer within {LONGEST_SECONDS:g} s"
            yield Finding(kind="problem", text=text, remedy="see dmesg for Xid errors, and leave the machine out")
        elif one.health:
            most = max(gpu.links for gpu in one.health)
            for gpu in one.health:
                yield from _gpu(f"GPU {gpu.index} of {one.host}", gpu, most)
            if most:
                yield from _islands(one.host, one.health)


def _islands(host: str, gpus: Sequence[GpuHealth]) -> Iterator[Finding]:
    """GPUs that have NVLinks and do not all reach each other, as bridges join pairs."""
    if any(len(gpu.peers) < len(gpus) - 1 for gpu in gpus):
        pairs = "; ".join(f"{gpu.index}: {', '.join(map(str, gpu.peers)) or 'none'}" for gpu in gpus)
        text = f"NVLink does not join all GPUs of {host} (each with its peers: {pairs})"
        yield Finding(kind="advice", text=text, remedy="keep plan.tp × plan.cp within GPUs that are joined")


def _gpu(name: str, gpu: GpuHealth, most: int) -> Iterator[Finding]:
    remedy = "reset it (nvidia-smi --gpu-reset), and leave the machine out if it comes back"
    if gpu.ecc_errors:
        text = f"{name} has had {gpu.ecc_errors:,} uncorrected ECC errors since its driver was loaded"
        yield Finding(kind="problem", text=text, remedy=remedy)
    if gpu.rows_pending or gpu.rows_failed:
        what = "no spare for a broken row of memory" if gpu.rows_failed else "broken rows of memory to be replaced"
        yield Finding(kind="problem", text=f"{name} has {what}", remedy=remedy)
    if gpu.links_down or gpu.links < most:
        text = f"{name} has {gpu.links} of {max(most, gpu.links + gpu.links_down)} NVLinks up"
        yield Finding(kind="problem", text=text, remedy="see nvidia-smi nvlink --status, and leave the machine out")
    if gpu.slowdowns:
        heat = f", at {gpu.celsius} °C" if gpu.celsius is not None else ""
        text = f"{name} is held at {gpu.mhz} by {' and '.join(gpu.slowdowns)}{heat}"
        yield Finding(kind="problem", text=text, remedy="look after its cooling and power: all ranks wait for it")
    if gpu.reasons & HELD_BY_SETTING:
        text = f"a setting holds {name} at {gpu.mhz}"
        yield Finding(
            kind="advice", text=text, remedy="undo it: nvidia-smi --reset-gpu-clocks, --reset-applications-clocks"
        )


def _wires(links: Sequence[LinkFacts]) -> Iterator[Finding]:
    for link in links:
        if link.error:
            text = f"{link.first} and {link.second} cannot connect: {link.error}"
            yield Finding(kind="problem", text=text, remedy="open TCP between the machines of the job, all ports")
        elif abs(link.clock) > MOST_CLOCK_SECONDS:
            text = f"the clock of {link.second} is {link.clock:+.1f} s from that of {link.first}"
            yield Finding(kind="problem", text=text, remedy="run NTP or chrony on all machines")
    whole = [link for link in links if not link.error]
    if len(whole) < FEWEST:
        return
    usual, wait = median(link.bandwidth for link in whole), median(link.seconds for link in whole)
    for link in whole:
        if link.bandwidth < SLOW * usual or link.seconds > LATE * wait:
            text = f"{link.first} and {link.second}: {link.bandwidth / 1e9:.2f} GB/s, {link.seconds * 1e6:.0f} µs"
            text += f"; the median is {usual / 1e9:.2f} GB/s, {wait * 1e6:.0f} µs"
            yield Finding(
                kind="problem", text=text, remedy="leave out the machine that is in several such pairs, or repair it"
            )


def _advice(facts: Sequence[RankFacts], told: Mapping[str, str]) -> Iterator[Finding]:
    """Settings of NCCL and Gloo, each with its reason."""
    if len({one.node for one in facts}) == 1:
        return
    first = facts[0]
    if len(first.interfaces) > 1 and not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= told.keys():
        best = max(first.interfaces, key=lambda one: one.gbit)
        names = ", ".join(f"{one.name} ({one.rate})" for one in first.interfaces)
        text = f"{len(first.interfaces)} interfaces are up ({names}), and libraries take the first that answers"
        remedy = f"set NCCL_SOCKET_IFNAME={best.name} and GLOO_SOCKET_IFNAME={best.name}"
        if not best.gbit:
            remedy = "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the one between the machines"
        yield Finding(kind="advice", text=text, remedy=remedy)
    drivers = {one.driver for one in first.adapters}
    if "efa" in drivers and "FI_PROVIDER" not in told:
        text = "there are EFA adapters, which NCCL uses through libfabric alone"
        yield Finding(kind="advice", text=text, remedy="install aws-ofi-nccl, and set FI_PROVIDER=efa")
    idle = [one.name for one in first.adapters if "ACTIVE" not in one.state]
    if idle:
        text = f"adapters are not active: {', '.join(idle)}"
        yield Finding(kind="problem", text=text, remedy="see ibstat, or leave them out by NCCL_IB_HCA")
    if any(one.driver == "gve" for one in first.interfaces) and not drivers:
        text = "the network is Google's gVNIC, over which NCCL uses one socket"
        yield Finding(kind="advice", text=text, remedy="install NCCL Fast Socket (google-fast-socket)")
    if not first.adapters and first.gpus:
        text = "no InfiniBand, RoCE or EFA: NCCL speaks TCP"
        yield Finding(
            kind="advice", text=text, remedy="set NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4, and measure"
        )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} × {value[0]}" if value else "none"
    return str(value) or "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver(system: Path) -> str:
    words = _text(system / "proc/driver/nvidia/version").split()
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdecimal()), "")


def _interfaces(system: Path) -> Iterator[Interface]:
    """Those that are up, loopback and the virtual ones of containers apart."""
    for folder in sorted((system / "sys/class/net").glob("*")):
        if folder.name == "lo" or folder.name.startswith(("docker", "veth", "br-", "virbr")):
            continue
        if _text(folder / "operstate") in ("up", "unknown"):
            speed = _text(folder / "speed")
            gbit = int(speed) / 1000 if speed.isdecimal() else 0.0
            yield Interface(name=folder.name, gbit=gbit, driver=_link(folder / "device/driver"))


def _adapters(system: Path) -> Iterator[NetworkAdapter]:
    for folder in sorted((system / "sys/class/infiniband").glob("*")):
        port = folder / "ports/1"
        yield NetworkAdapter(
            name=folder.name,
            driver=_link(folder / "device/driver"),
            state=_text(port / "state"),
            rate=_text(port / "rate"),
            layer=_text(port / "link_layer"),
        )


def _links(system: Path) -> Iterator[str]:
    """How each NVIDIA GPU hangs on its PCIe bus."""
    for device in sorted((system / "sys/bus/pci/devices").glob("*")):
        if _text(device / "vendor") == "0x10de" and _text(device / "class").startswith("0x03"):
            yield f"{_text(device / 'current_link_speed')} ×{_text(device / 'current_link_width')}"


def _size(folder: Path) -> int:
    with suppress(OSError):
        about = os.statvfs(folder)
        return about.f_blocks * about.f_frsize
    return 0


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace").strip()
    return ""


def _link(file: Path) -> str:
    return file.resolve().name if file.exists() else ""
