"""Before anything is computed: do all ranks have the same program, the same run and the same versions?"""

import hashlib
import platform
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from meshwright import __version__
from meshwright.spec.check import InputError, Problem
from meshwright.spec.run import Run

KEY = "agreement"
MOST_NAMED = 6


def facts(run: Run) -> dict[str, str]:
    """What must not differ between ranks, each key a sentence's subject."""
    return {
        **{key: str(value) for key, value in _flat(msgspec.to_builtins(run))},
        "meshwright": __version__,
        "code": CODE,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "default dtype": str(torch.get_default_dtype()),
        "float32 products": torch.get_float32_matmul_precision(),
    }


def agree(run: Run, store: dist.Store, rank: int, world: int, mine: dict[str, str] | None = None) -> None:
    """Refuse to begin unless all ranks say the same; whoever differs is named, with the key. Travels as JSON."""
    store.set(f"{KEY}/{rank}", msgspec.json.encode(mine or facts(run)).decode())
    if rank == 0:
        said = [msgspec.json.decode(store.get(f"{KEY}/{each}"), type=dict[str, str]) for each in range(world)]
        store.set(f"{KEY}/found", msgspec.json.encode(differences(said)).decode())
    found = msgspec.json.decode(store.get(f"{KEY}/found"), type=list[str])
    if found:
        remedy = "start every rank with the same code, environment and run file"
        raise InputError([Problem(text, remedy) for text in found])


def differences(said: list[dict[str, str]]) -> list[str]:
    """Which ranks say something else than most, and about what."""
    found = []
    for key in sorted({key for one in said for key in one}):
        values = [one.get(key, "nothing") for one in said]
        usual = max(values, key=values.count)
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            found.append(f"rank {odd[0]} has {key} = {values[odd[0]]}, the others {usual}")
    return found[:MOST_NAMED]


def code_digest(package: Path) -> str:
    """A short name for the source of the package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _flat(values: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in values.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


CODE = code_digest(Path(__file__).parents[1])  # as it is when it is imported; files may change later
