"""The catalogue of cards, links and networks, in the units of its file, and how a name finds its entry."""

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

from meshwright.spec import schema
from meshwright.spec.problem import InputError, Problem

# GB/s for one GPU, where nobody says: two channels of DDR4-3200, as in a desktop; an NVMe disk on four lanes of PCIe 3.
HOST_BANDWIDTH = 51.2
DISK_BANDWIDTH = 3.0
POSITIVE = frozenset(
    ("memory_gib", "bandwidth", "domain", "efficiency", "copies", "network_gbit", "host_bandwidth", "disk_bandwidth")
)


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
    scale_up: str = "pcie4"
    host: str = "pcie4"
    network: str = "ethernet"
    network_gbit: float = 1.25  # of one GPU
    host_gib: float = 0.0  # of one GPU
    host_bandwidth: float = HOST_BANDWIDTH
    disk_gib: float = 0.0
    disk_bandwidth: float = DISK_BANDWIDTH


class Way(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    links: dict[str, Way]
    networks: dict[str, Network]

    def with_entries(self, table: Mapping[str, Any]) -> "Catalogue":
        """This catalogue and a user's own entries, which win."""
        kinds = {"cards": Card, "links": Way, "networks": Network}
        problems: list[Problem] = []
        merged: dict[str, dict[str, Any]] = {name: dict(getattr(self, name)) for name in kinds}
        for name, kind in kinds.items():
            for key, entry in table.get(name, {}).items():
                found = _misfits(entry, kind, f"{name}.{key}.")
                problems += found
                if not found:
                    merged[name][key] = msgspec.convert(entry, kind, strict=False)
        if problems:
            raise InputError(problems)
        return Catalogue(**merged)


def _misfits(entry: Any, kind: type[msgspec.Struct], prefix: str) -> list[Problem]:
    if not isinstance(entry, Mapping):
        key = prefix.rstrip(".")
        return [Problem(f"{key} = {schema.shown(entry)} should be a table", f"write [{key}] above its keys", key)]
    found = [*schema.misfits(entry, kind, prefix), *schema.missing(entry, kind, prefix)]
    return found + unmeasurable(entry, kind, prefix, POSITIVE)


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
    text = (resources.files("meshwright.spec") / "clusters.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Catalogue)


def words(text: str) -> frozenset[str]:
    """A card's name as words: "NVIDIA A100-SXM4-80GB" is a100, sxm, 80g (and nvidia)."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    return frozenset(_word(word) for word in found)


def _word(word: str) -> str:
    size = re.fullmatch(r"(\d+)gi?b?", word)
    if size:
        return f"{size[1]}g"
    return "sxm" if re.fullmatch(r"sxm[345]", word) else word


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
    near = difflib.get_close_matches(text.lower(), list(names), n=1, cutoff=0.4)
    remedy = f"did you mean {near[0]}? " if near else ""
    return Problem(
        f"{schema.shown(text)} is no {kind} of the catalogue",
        f"{remedy}`meshwright clusters` lists them, and a file of your own can add one",
    )
