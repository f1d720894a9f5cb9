"""Clusters as data: accelerators, the nodes they sit in and the links between them.

A catalogue of cards, links and networks comes with the program, and a user's file may add to it; "64xh100" or a file
then names a `Cluster` in SI units.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from meshwright.config import schema
from meshwright.spec.plan import Arithmetic
from meshwright.spec.problem import InputError, Problem, mistake
from meshwright.spec.units import GIB

if TYPE_CHECKING:
    from meshwright.hardware.stacks import Efficiency  # of a Gpu, so it imports this file

GIGA, TERA = 1e9, 1e12
MICRO = 1e-6
GBIT = 1e9 / 8  # bytes
ENTRIES = {"cards", "links", "networks"}  # tables of a file that add to the catalogue
LARGEST_FILE = 1_000_000  # bytes; no cluster file written by a person comes near
MOST_GPUS = 1_000_000  # no cluster is larger
# GB/s for one GPU, where nobody says: two channels of DDR4-3200, as in a desktop; an NVMe disk on four lanes of PCIe 3.
HOST_BANDWIDTH = 51.2
DISK_BANDWIDTH = 3.0
POSITIVE = frozenset(
    ("memory_gib", "bandwidth", "domain", "efficiency", "copies", "network_gbit", "host_bandwidth", "disk_bandwidth")
)


class Gpu(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
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

    def peak(self, precision: Arithmetic) -> float:
        """Operations a second of matmuls; 0 where the device has no such arithmetic or no figure is known."""
        return 0.0 if precision == "fp64" else getattr(self, precision)


class Link(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """A way for bytes, seen from one GPU."""

    name: str
    bandwidth: float  # bytes a second in one direction, nominal
    latency: float  # seconds before the first byte
    efficiency: float = 1.0  # the share of the nominal bandwidth that collectives reach


class Cluster(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """Some GPUs of one kind: `domain` of them share the fast link, everything beyond goes over the network."""

    name: str
    gpu: Gpu
    gpus: int
    domain: int  # GPUs behind one scale-up switch: a node, or a rack
    per_node: int  # GPUs of one machine: the domain, or a part of a rack
    scale_up: Link
    network: Link
    host: Link  # between a GPU and its node's memory
    host_bytes: float = 0.0  # memory of a node ÷ its GPUs; 0: not known
    host_bandwidth: float = HOST_BANDWIDTH * GIGA  # bytes a second of that memory ÷ its GPUs, read and written
    disk_bytes: float = 0.0  # of a node's own disks ÷ its GPUs; 0: not known
    disk_bandwidth: float = DISK_BANDWIDTH * GIGA  # bytes a second, read or written
    efficiency: "Efficiency | None" = None  # what its own kernels were measured to reach; None: as in the catalogue

    @property
    def nodes(self) -> int:
        """Machines in use."""
        return -(-self.gpus // self.per_node)


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster as a user writes it; what is left out is as in the card's usual node."""

    gpu: str
    gpus: int = 1
    name: str = ""
    domain: int = 0
    per_node: int = 0
    scale_up: str = ""
    host: str = ""
    network: str = ""
    network_gbit: float = 0.0  # of one GPU
    host_gib: float = 0.0  # of one GPU
    host_bandwidth: float = 0.0  # GB/s, of one GPU
    disk_gib: float = 0.0  # of one GPU
    disk_bandwidth: float = 0.0  # GB/s, of one GPU
    memory_gib: float = 0.0  # where it differs from the catalogue's


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of accelerator and the node it usually sits in. GiB, GB/s, dense TFLOP/s, Gb/s."""

    match: tuple[str, ...] = ()
    memory_gib: float
    bandwidth: float
    fp32: float = 0.0
    tf32: float = 0.0
    bf16: float = 0.0
    fp16: float = 0.0
    fp8: float = 0.0
    domain: int = 8
    per_node: int = 0  # GPUs of one machine; 0: a domain is one
    scale_up: str = "pcie4"
    host: str = "pcie4"
    network: str = "ethernet"
    network_gbit: float = 1.25  # of one GPU
    host_gib: float = 0.0  # of one GPU
    host_bandwidth: float = HOST_BANDWIDTH
    disk_gib: float = 0.0
    disk_bandwidth: float = DISK_BANDWIDTH


class LinkEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link inside a node. GB/s in one direction, microseconds."""

    bandwidth: float
    latency: float
    efficiency: float = 0.75
    copies: float = 0.87  # of the bandwidth, what a copy from or to pinned memory of the host reaches


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link between nodes. Gb/s of one node; 0: as fast as the card's usual one."""

    match: tuple[str, ...] = ()
    gbit: float = 0.0
    latency: float
    efficiency: float = 0.75


class Catalogue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be named."""

    cards: dict[str, Card]
    links: dict[str, LinkEntry]
    networks: dict[str, Network]

    def with_entries(self, table: Mapping[str, Any]) -> "Catalogue":
        """This catalogue and a user's own entries, which win."""
        kinds = {"cards": Card, "links": LinkEntry, "networks": Network}
        problems: list[Problem] = []
        merged: dict[str, dict[str, Any]] = {name: dict(getattr(self, name)) for name in kinds}
        for name, kind in kinds.items():
            for key, entry in table.get(name, {}).items():
                place, prefix = f"{name}.{key}", f"{name}.{key}."
                if not isinstance(entry, Mapping):
                    what = f"{place} = {schema.shown(entry)} should be a table"
                    problems.append(Problem(what, f"write [{place}] above its keys", place))
                    continue
                found = [*schema.misfits(entry, kind, prefix), *schema.missing(entry, kind, prefix)]
                found += unmeasurable(entry, kind, prefix, POSITIVE)
                problems += found
                if not found:
                    merged[name][key] = msgspec.convert(entry, kind, strict=False)
        if problems:
            raise InputError(problems)
        return Catalogue(**merged)


def unmeasurable(
    entry: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str, positive: frozenset[str] = frozenset()
) -> list[Problem]:
    """Numbers that no machine has: not finite, below 0, or 0 where something must be."""
    found = []
    for key in (each for each in kind.__struct_fields__ if each in entry):
        value = entry[key]
        if not isinstance(value, int | float):
            continue
        least = "above 0" if key in positive else "at least 0"
        if not math.isfinite(value):
            found.append(Problem(f"{prefix}{key} = {value} must be finite", "correct the value", prefix + key))
        elif value < 0 or (value == 0 and key in positive):
            found.append(Problem(f"{prefix}{key} = {value} must be {least}", "correct the value", prefix + key))
    return found


@cache
def catalogue() -> Catalogue:
    """What comes with the program."""
    text = (resources.files("meshwright.hardware") / "clusters.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Catalogue)


CPUS = {"cpu", "cpus", "laptop", "local", "localhost", "none", "mac", "macbook", "mps", "m1", "m2", "m3", "m4"}
MAKERS = {"nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "gpu", "generation"}  # say nothing of the card


def words(text: str) -> frozenset[str]:
    """A card's name as words: "NVIDIA A100-SXM4-80GB" is a100, sxm, 80g; "RTX4090" is rtx, 4090."""
    apart = re.sub(r"\brtx(?=\d)", "rtx ", text.lower())
    plain = (re.sub(r"^(\d+)gi?b?$", r"\1g", word) for word in re.findall(r"[a-z0-9]+", apart))
    return frozenset(re.sub(r"^sxm[345]$", "sxm", word) for word in plain) - MAKERS


Entry = TypeVar("Entry", Card, Network)


def named(text: str, entries: Mapping[str, Entry]) -> str | None:
    """The entry whose name or match is exactly these words."""
    asked = words(text)
    for name, entry in entries.items():
        if asked == words(name) or any(asked == words(match) for match in entry.match):
            return name
    return None


def recognised(text: str, entries: Mapping[str, Entry]) -> str | None:
    """The entry whose match a longer name holds; the most words win, then the order of the file."""
    asked = words(text)
    best, best_words = None, 0
    for name, entry in entries.items():
        for match in (name, *entry.match):
            needed = words(match)
            if needed <= asked and len(needed) > best_words:
                best, best_words = name, len(needed)
    return best


def unknown(kind: str, text: str, names: Iterable[str]) -> Problem:
    """What to say of a name that is not in the catalogue."""
    if kind == "card" and text.lower() in CPUS:
        what = f"{schema.shown(text)} is no GPU: no data sheet says what a CPU reaches"
        remedy = "`meshwright train` runs there without a cluster; `meshwright bench --probe` measures the machine"
        return Problem(what, f"{remedy}, and `meshwright bench RUN.toml --profile FILE.json` predicts it")
    if kind == "card" and re.search(r"[+,&]\s*\d+\s*[x×*]", text):
        what = f"{schema.shown(text)} mixes cards, and a plan is for machines that are alike"
        return Problem(what, "plan each kind by itself, or all of them as the smallest and slowest")
    near = difflib.get_close_matches(text.lower(), list(names), n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}? " if near else ""
    return Problem(
        f"unknown {kind} {schema.shown(text)}",
        f"{remedy}`meshwright clusters` lists them, and a file of your own can add one",
    )


def cluster(text: str, *, network: str = "", gpus: int = 0, host_gib: float = 0.0, disk_gib: float = 0.0) -> Cluster:
    """The cluster of "64xh100", "2x8xh100" (nodes × GPUs × card), "h100", or a TOML file, also "16xmine.toml"."""
    count, domain, rest = _counted(text)
    if count == 0 or domain == 0:
        raise mistake(f"cluster = {schema.shown(text)} has no GPUs", "correct the count", "cluster")
    known, machines = catalogue(), ClusterFile(gpu=rest)
    if rest.endswith(".toml"):
        known, machines = _read(Path(rest))
    given = {"gpus": gpus or count, "domain": domain, "network": network, "host_gib": host_gib, "disk_gib": disk_gib}
    machines = msgspec.structs.replace(machines, **{key: value for key, value in given.items() if value})
    return assembled(machines, known)


def cluster_of(table: Mapping[str, Any]) -> Cluster:
    """The cluster that a [cluster] table describes."""
    known, machines = _understood(table)
    return assembled(machines, known)


def cluster_of_device(device_name: str, gpus: int) -> Cluster:
    """So many of a device as its driver names it; one that nobody knows is the user's to describe."""
    card = recognised(device_name, catalogue().cards)
    if card is None:
        raise InputError([unknown("card", device_name, catalogue().cards)])
    return cluster(f"{gpus}x{card}")


def peak_flops_per_second(device_name: str, precision: Arithmetic) -> float | None:
    """The data sheet's rate for a device as its driver names it, None when the device or its rate is not known."""
    name = recognised(device_name, catalogue().cards)
    if name is None:
        return None
    return _gpu(name, catalogue().cards[name]).peak(precision) or None


@cache
def cards() -> tuple[Cluster, ...]:
    """One GPU of every card, each in its usual surroundings."""
    return tuple(assembled(ClusterFile(gpu=name), catalogue()) for name in catalogue().cards)


def _counted(text: str) -> tuple[int | None, int | None, str]:
    """GPUs, GPUs of a node (None: nobody says) and the card."""
    parts = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(.+)", text.strip(), re.IGNORECASE)
    if parts is None:
        remedy = "write a count and a card, like 64xh100"
        raise mistake(f"cluster = {schema.shown(text)} says nothing", remedy, "cluster")
    first, second, rest = parts.groups()
    if second is None:
        return int(first) if first else None, None, rest
    return int(first) * int(second), int(second), rest


def _read(file: Path) -> tuple[Catalogue, ClusterFile]:
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise mistake(f"{file} is larger than {LARGEST_FILE} bytes", "is it a cluster file?")
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "name a cluster file that can be read"
        raise mistake(f"{file}: {error.strerror}", remedy, "cluster") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise mistake(f"{file} is not TOML: {error}", "correct that line", "cluster") from None
    inner = table.get("cluster")
    return _understood(inner | {key: table[key] for key in ENTRIES & set(table)} if isinstance(inner, dict) else table)


def _understood(table: Mapping[str, Any]) -> tuple[Catalogue, ClusterFile]:
    """A user's own entries beside ours, and the machines."""
    entries = {key: table[key] for key in ENTRIES if isinstance(table.get(key), dict)}
    plain = {key: value for key, value in table.items() if key not in entries}
    problems = [*schema.misfits(plain, ClusterFile, "cluster."), *schema.missing(plain, ClusterFile, "cluster.")]
    problems += unmeasurable(plain, ClusterFile, "cluster.")
    try:
        known = catalogue().with_entries(entries)
    except InputError as error:
        raise InputError([*problems, *error.problems]) from None
    if problems:
        raise InputError(problems)
    return known, msgspec.convert(plain, ClusterFile, strict=False)


def assembled(machines: ClusterFile, known: Catalogue) -> Cluster:
    """The cluster of a user's words, with the catalogue's figures."""
    name = named(machines.gpu, known.cards)
    if name is None:
        raise InputError([unknown("card", machines.gpu, known.cards)])
    card = known.cards[name]
    problems: list[Problem] = []
    domain = machines.domain or card.domain
    if machines.gpus < 1 or domain < 1:
        problems.append(Problem("a cluster has at least one GPU", "correct the count", "cluster.gpus"))
    if machines.gpus > MOST_GPUS:
        what = f"{machines.gpus} GPUs are more than any cluster has"
        problems.append(Problem(what, f"use at most {MOST_GPUS}", "cluster.gpus"))
    usual = card.per_node if card.per_node and domain % card.per_node == 0 else domain
    per_node = machines.per_node or usual
    if per_node > 0 and domain % per_node:
        what = f"{domain} GPUs behind one switch are not whole machines of {per_node}"
        problems.append(Problem(what, "correct domain or per_node", "cluster.per_node"))
    gbit = machines.network_gbit or card.network_gbit
    network = _network(machines.network or card.network, known.networks, gbit, max(per_node, 1), problems)
    scale_up = _link(machines.scale_up or card.scale_up, known.links, problems)
    host = _link(machines.host or card.host, known.links, problems)
    if problems or network is None or scale_up is None or host is None:
        raise InputError(problems)
    # As copies to and from pinned memory use it.
    host = msgspec.structs.replace(host, efficiency=known.links[host.name].copies)
    gpu = _gpu(name, card)
    if machines.memory_gib:
        gpu = msgspec.structs.replace(gpu, memory_bytes=machines.memory_gib * GIB)
    return Cluster(
        name=machines.name or f"{machines.gpus}x{name}",
        gpu=gpu,
        gpus=machines.gpus,
        domain=domain,
        per_node=per_node,
        scale_up=scale_up,
        network=network,
        host=host,
        host_bytes=(machines.host_gib or card.host_gib) * GIB,
        host_bandwidth=(machines.host_bandwidth or card.host_bandwidth) * GIGA,
        disk_bytes=(machines.disk_gib or card.disk_gib) * GIB,
        disk_bandwidth=(machines.disk_bandwidth or card.disk_bandwidth) * GIGA,
    )


def _gpu(name: str, card: Card) -> Gpu:
    peaks = {key: getattr(card, key) * TERA for key in ("fp32", "tf32", "bf16", "fp16", "fp8")}
    memory = {"memory_bytes": card.memory_gib * GIB, "bandwidth": card.bandwidth * GIGA}
    return Gpu(name=name, match=card.match, **memory, **peaks)


def _link(name: str, links: Mapping[str, LinkEntry], problems: list[Problem]) -> Link | None:
    way = links.get(name)
    if way is None:
        problems.append(unknown("link", name, links))
        return None
    return Link(name=name, bandwidth=way.bandwidth * GIGA, latency=way.latency * MICRO, efficiency=way.efficiency)


def _network(
    name: str, networks: Mapping[str, Network], gbit: float, per_node: int, problems: list[Problem]
) -> Link | None:
    """A network seen from one GPU: a node's own rate is shared by its GPUs."""
    found = named(name, networks)
    if found is None:
        problems.append(unknown("network", name, networks))
        return None
    network = networks[found]
    bandwidth = (network.gbit / per_node if network.gbit else gbit) * GBIT
    return Link(name=found, bandwidth=bandwidth, latency=network.latency * MICRO, efficiency=network.efficiency)
