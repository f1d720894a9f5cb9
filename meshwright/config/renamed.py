"""Former keys: refused with their new name where people write, translated in the folders of earlier runs."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Old key -> new key, dotted as in a run file. A table (held) stands for all its keys.
RENAMED = {
    "plan.accumulate": "plan.grad_accum",
    "plan.shadow": "plan.bf16_params",
    "plan.compress": "plan.activation_quant",
    "plan.activations": "plan.activation_offload",
    "plan.scaling": "plan.fp8_scaling",
    "plan.offload": "plan.optimizer_offload",
    "plan.offload_update": "plan.optimizer_offload_update",
    "plan.offload_host_bytes": "plan.optimizer_offload_host_bytes",
    "plan.offload_folder": "plan.optimizer_offload_folder",
    "plan.offload_weights": "plan.cpu_offload",
    "optim.rate": "optim.lr",
    "optim.floor": "optim.min_lr_ratio",
    "optim.decay": "optim.decay_fraction",
    "optim.clip": "optim.grad_clip",
    "optim.states": "optim.state_dtype",
    "optim.rounding": "optim.master_weights",
    "data.held_out": "data.eval_fraction",
    "init.moments": "init.optimizer_state",
    "held": "eval",
}
# Old key and value -> the new keys and values that say the same, where the value changed too.
REVALUED: dict[tuple[str, Any], dict[str, Any]] = {
    ("plan.activations", "device"): {"plan.activation_offload": False},
    ("plan.activations", "host"): {"plan.activation_offload": True},
    ("plan.scaling", "tensor"): {"plan.fp8_scaling": "tensorwise"},
    ("plan.scaling", "row"): {"plan.fp8_scaling": "rowwise"},
    ("optim.rounding", "master"): {"optim.master_weights": "fp32"},
    ("optim.rounding", "compensated"): {"optim.master_weights": "split"},
    ("optim.rounding", "stochastic"): {"optim.master_weights": "none", "optim.stochastic_rounding": True},
}
FORMER = {new: old for old, new in RENAMED.items()}
RECORDED = re.compile(r"run(\.\d+)?\.toml")  # how a run folder calls its run, and what the run was before
BESIDE = ("lock", "env.json")  # one of which every run folder has, and the folder of somebody's own run file has not


def new_name(key: str) -> str:
    """What a key is called now, "" where it never had another name."""
    table, _, rest = key.partition(".")
    if table in RENAMED and rest:
        return f"{RENAMED[table]}.{rest}"
    return RENAMED.get(key, "")


def new_words(key: str, value: Any) -> str:
    """What to write for a former key, and its value where that changed too; "" where it never had another name."""
    said = REVALUED.get((key, value)) if isinstance(value, str) else None
    if said is None:
        return new_name(key)
    return " and ".join(f"{new} = {json.dumps(worth)}" for new, worth in said.items())


def is_recorded(file: Path) -> bool:
    """Whether a run file is the record in a run folder, which no person wrote."""
    return RECORDED.fullmatch(file.name) is not None and any((file.parent / name).is_file() for name in BESIDE)


def translated(table: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of an earlier run file under the names of today; one of today comes back as it is."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if not isinstance(value, Mapping):
            found[key] = value
            continue
        now = RENAMED.get(key, key)
        section = found.setdefault(key if now in table else now, {})  # one under both names is left for the rules
        for name, entry in value.items():
            old = f"{key}.{name}"
            said = REVALUED.get((old, entry)) if isinstance(entry, str) else None
            for new, worth in (said or {new_name(old) or old: entry}).items():
                section[new.partition(".")[2]] = worth
    return found


def former(mathematics: Mapping[str, Any]) -> dict[str, Any]:
    """A run's mathematics under its former names, of which the digests in earlier folders were made."""
    found: dict[str, Any] = {}
    for key, value in mathematics.items():
        if isinstance(value, Mapping):
            found[key] = _former(key, value)
        else:
            found |= _former("plan", {key: value})  # what the mathematics has of the plan stands outside any table
    return found


def _former(table: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    left = {f"{table}.{name}": entry for name, entry in entries.items()}
    found: dict[str, Any] = {}
    for (old, value), said in REVALUED.items():
        if said.items() <= left.items():
            found[old] = value
            left = {key: entry for key, entry in left.items() if key not in said}
    found |= {FORMER.get(key, key): entry for key, entry in left.items()}
    return {key.partition(".")[2]: entry for key, entry in found.items()}
