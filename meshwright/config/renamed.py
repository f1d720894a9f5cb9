"""Former keys: refused with their new name where people write, translated in the folders of earlier runs."""

from collections.abc import Mapping
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


def new_name(key: str) -> str:
    """What a key is called now, "" where it never had another name."""
    table, _, rest = key.partition(".")
    if table in RENAMED and rest:
        return f"{RENAMED[table]}.{rest}"
    return RENAMED.get(key, "")


def translated(table: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of an earlier run file under the names of today; one of today comes back as it is."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if not isinstance(value, Mapping):
            found[key] = value
            continue
        section = found.setdefault(RENAMED.get(key, key), {})
        for name, entry in value.items():
            old = f"{key}.{name}"
            said = REVALUED.get((old, entry)) if isinstance(entry, str) else None
            for new, worth in (said or {new_name(old) or old: entry}).items():
                section[new.partition(".")[2]] = worth
    return found
