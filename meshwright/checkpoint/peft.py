"""Adapters as peft writes them: `adapter_config.json` and `adapter_model.safetensors`, by the base's own names.

A folder is believed only after what was written, read again beside its base, gives the logits of the adapter as it was
trained; by peft's own code where it is installed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshwright.checkpoint import model_folder
from meshwright.checkpoint.model_folder import AdaptedFolder
from meshwright.config.weights import describe
from meshwright.runtime.files import replace_json
from meshwright.spec.problem import mistake
from meshwright.spec.tuning import DOWN, MAGNITUDE, UP

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
THEIRS = {DOWN: "lora_A.weight", UP: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}


def layers(folder: AdaptedFolder) -> dict[str, str]:
    """Our adapted linear layers, each with its name in the base's own files."""
    names = {}
    kind = describe(folder.note.base).family if folder.note.base else ""  # a run of ours has none
    theirs = {stored.made_of: stored for stored in model_folder.huggingface(folder.arch, kind)}
    for name in (name.removesuffix(f".{DOWN}") for name in folder.layouts if name.endswith(f".{DOWN}")):
        stored = theirs.get((f"{name}.weight",))
        if stored is None or stored.transposed:
            what = (
                f"{name} is a part of a larger or transposed matrix in Hugging Face's files, so it has no adapter there"
            )
            raise mistake(what, "add --merge to write the whole model with the adapter merged into it")
        names[name] = stored.name.removesuffix(".weight")
    return names


def config(folder: AdaptedFolder, names: dict[str, str]) -> dict[str, Any]:
    """What peft reads beside the weights."""
    adapter = folder.note.adapter
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": folder.note.base or None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.kind == "dora",
        "target_modules": sorted({name.rpartition(".")[2] for name in names.values()}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }


def tensors(folder: AdaptedFolder, names: dict[str, str], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """The adapter's weights by peft's names."""
    for ours, theirs in names.items():
        for part, name in THEIRS.items():
            if f"{ours}.{part}" in folder.layouts:
                yield f"{PREFIX}{theirs}.{name}", folder.low_rank(f"{ours}.{part}").to(dtype).contiguous()


def write(stage: Path, folder: AdaptedFolder, dtype: torch.dtype | None) -> None:
    """Write an adapter into a folder, and see that it is read again as it was."""
    names = layers(folder)
    replace_json(stage / CONFIG, config(folder, names))
    whole = dict(tensors(folder, names, dtype))
    save_file(whole, stage / WEIGHTS, {"format": "pt"})
    (stage / WEIGHTS).chmod(stage.stat().st_mode & 0o666)  # safetensors lets nobody else read
    again = load_file(stage / WEIGHTS)
    if again.keys() != whole.keys() or not all(torch.equal(again[name], whole[name]) for name in whole):
        raise mistake(f"{stage / WEIGHTS} is not what was written", "write to another disk")


def beside(model: nn.Module, adapter: Path) -> nn.Module:
    """An adapter on its base by peft's own code; a key that one of the two lacks is an error."""
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(model, adapter)
    held = {name for name, _ in loaded.named_parameters() if "lora_" in name}
    stored = {f"{name.removesuffix('.weight')}.default.weight" for name in load_file(adapter / WEIGHTS)}
    if held != stored:
        raise KeyError(f"peft reads other weights than {adapter / WEIGHTS} has: {sorted(held ^ stored)[:4]}")
    return loaded


def has_peft() -> bool:
    """Whether its own code can judge."""
    try:
        import peft  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:  # its own missing dependencies included
        return False
    return True
