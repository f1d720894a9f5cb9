"""The model zoo: architectures by name, as data."""

import difflib
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import schema
from meshwright.spec.arch import Arch
from meshwright.spec.problem import InputError, Problem, mistake


def preset(name: str) -> Arch:
    """A model of the zoo by its name."""
    if name not in preset_names():
        raise InputError([unknown_preset(name)])
    return msgspec.convert(complete(preset_table(name))[0], Arch)


def preset_names() -> tuple[str, ...]:
    """The names of the model zoo."""
    return tuple(_zoo())


def run_file(target: str | None) -> Path | None:
    """The file that a first word names; None if it names a model of the zoo, or nothing."""
    if target is None or target in preset_names():
        return None
    if not Path(target).is_file():
        known = ", ".join(preset_names()[:4])
        raise mistake(f"{target!r} is neither a run file nor a model", f"name a .toml, or one of {known} …")
    return Path(target)


@cache
def _zoo() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text())


def preset_table(name: str) -> dict[str, Any]:
    table = dict(_zoo()[name])
    parent = table.pop("preset", None)
    return preset_table(parent) | table if parent else table


def nearest_preset(name: str) -> str | None:
    """The model that is most likely meant, by its own name or as the hub calls it."""
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], preset_names(), n=1, cutoff=0.6)
    return near[0] if near else None


def unknown_preset(name: Any) -> Problem:
    near = nearest_preset(str(name))
    remedy = f"did you mean {near}?" if near else "`meshwright models` lists them"
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(name)):  # meta-llama/Llama-3.1-8B: what the hub calls a model
        remedy += " A model of Hugging Face's hub is named by the folder or config.json that was downloaded"
    return Problem(f"arch.preset = {schema.shown(name)} is not a known model", remedy, "arch.preset")


def complete(arch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fill what follows from other fields, unless stated."""
    derived = {}
    arch = dict(arch)
    heads, hidden = arch.get("heads", 0), arch.get("hidden", 0)
    if "kv_heads" not in arch and "heads" in arch:
        arch["kv_heads"], derived["kv_heads"] = heads, "derived: heads"
    if "head_dim" not in arch and "heads" in arch:
        arch["head_dim"], derived["head_dim"] = hidden // max(heads, 1), "derived: hidden ÷ heads"
    return arch, derived
