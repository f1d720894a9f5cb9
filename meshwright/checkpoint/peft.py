"""Adapters as peft writes them: `adapter_config.json` and `adapter_model.safetensors`, by the base's own names.

A folder is believed only after what was written, read again beside its base, gives the logits of the adapter as it was
trained; by peft's own code where it is installed.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshwright.checkpoint import model_folder
from meshwright.checkpoint.model_folder import AdaptedFolder, Shape, StoredTensor
from meshwright.config.weights import describe
from meshwright.runtime.files import replace_json
from meshwright.spec.problem import mistake
from meshwright.spec.tuning import DOWN, MAGNITUDE, UP, Adapter, companion

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ONCE_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # names that transformers 4 gave to the matrices of experts
Shapes = dict[str, Shape]  # of our weights
THEIRS = {DOWN: "lora_A.weight", UP: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}


@dataclass(frozen=True, slots=True)
class PeftLayer:
    """A tensor of the base as transformers holds it in memory, with the adapters of our weights that it is made of."""

    module: str  # as peft names the adapter's keys, which wrap one another where experts have several
    stored: StoredTensor
    stacked: bool  # of routed experts: of three dims
    # Whether peft finds it as a parameter, as experts are, and not as a module. In an MoE model linear layers with the
    # names that experts once had are found so too: as modules peft would take them for experts.
    by_parameter: bool

    @property
    def parameter(self) -> str:
        """Its name in every layer."""
        return re.sub(r"^.*?\.\d+\.", "", self.stored.name)


def layers(folder: AdaptedFolder) -> list[PeftLayer]:
    """The adapted layers, by their names in transformers' models."""
    arch = folder.arch
    kind = describe(folder.note.base).family if folder.note.base else ""  # a run of ours has none
    found = [
        _layer(stored, [name for name in stored.made_of if companion(name, DOWN) in folder.layouts], arch.experts > 0)
        for stored in model_folder.huggingface(arch, kind, fused=True)
    ]
    named = _nested([each for each in found if each is not None])
    lost = next((each for each in named if each.by_parameter), None) if folder.note.adapter.kind == "dora" else None
    if lost is not None:
        what = f"peft has no DoRA of {lost.stored.name}, which it knows as a parameter and not as a linear layer"
        raise mistake(what, "add --merge to write the whole model with the adapter merged into it")
    if (name := _bare(named, folder)) is not None:
        what = f"{name} has no magnitude, and other parts of its matrix in Hugging Face's files have"
        raise mistake(what, "add --merge to write the whole model with the adapter merged into it")
    return named


def _bare(found: list[PeftLayer], folder: AdaptedFolder) -> str | None:
    """A weight without a magnitude that is joined with some that have one: a magnitude would have to be made for it."""
    if folder.note.adapter.kind != "dora":
        return None
    names = (name for layer in found for name in layer.stored.made_of)
    return next((name for name in names if companion(name, MAGNITUDE) not in folder.layouts), None)


def _layer(stored: StoredTensor, adapted: list[str], moe: bool) -> PeftLayer | None:
    if not adapted:
        return None
    stacked = not adapted[0].endswith(".weight")
    module = stored.name.rpartition(".")[0] if stacked else stored.name.removesuffix(".weight")
    return PeftLayer(module, stored, stacked, stacked or (moe and module.endswith(ONCE_EXPERTS)))


def _nested(found: list[PeftLayer]) -> list[PeftLayer]:
    """Layers of one module wrap one another in the order of its parameters: the last is the outermost."""
    after = Counter(each.module for each in found)
    named = []
    for each in found:
        after[each.module] -= 1
        named.append(replace(each, module=each.module + ".base_layer" * after[each.module]))
    return named


def config(folder: AdaptedFolder, found: list[PeftLayer]) -> dict[str, Any]:
    """What peft reads beside the weights."""
    adapter = folder.note.adapter
    by_parameter = {each.parameter for each in found if each.by_parameter}
    counts = {
        each.parameter if each.by_parameter else each.module.rpartition(".")[2]: len(each.stored.made_of)
        for each in found
    }
    joined = {name: count for name, count in counts.items() if count > 1}
    # As many matrices of the rank side by side; their scale is that of one.
    more = {name: math.sqrt(count) if adapter.rslora else count for name, count in joined.items()}
    modules = {each.module.rpartition(".")[2] for each in found if not each.by_parameter}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": folder.note.base or None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        # Of training alone, and refused by peft beside parameters.
        "lora_dropout": 0.0 if by_parameter else adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.kind == "dora",
        "target_modules": sorted(modules),
        "target_parameters": sorted(by_parameter) or None,
        "rank_pattern": {name: count * adapter.rank for name, count in joined.items()},
        "alpha_pattern": {name: factor * adapter.alpha for name, factor in more.items()},
        "bias": "none",
        # Of modules that multiply from the other side: GPT-2's.
        "fan_in_fan_out": any(each.stored.transposed and not each.by_parameter for each in found),
        "inference_mode": True,
        "modules_to_save": None,
    }


def tensors(folder: AdaptedFolder, found: list[PeftLayer], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """The adapter's weights by peft's names."""
    for layer in found:
        low_rank = _stacks(folder, layer) if layer.stacked else _matrix(folder, layer)
        for part, tensor in low_rank.items():
            yield f"{PREFIX}{layer.module}.{THEIRS[part]}", tensor.to(dtype).contiguous()


def _matrix(folder: AdaptedFolder, layer: PeftLayer) -> dict[str, Tensor]:
    """Of one matrix A and B, and of DoRA the magnitudes of all its rows."""
    down, up = _joined(folder, layer)
    if folder.note.adapter.kind != "dora":
        return {DOWN: down, UP: up}
    plain = msgspec.structs.replace(layer.stored, transposed=False)
    magnitudes = model_folder.store(plain, lambda name: folder.low_rank(companion(name, MAGNITUDE)))
    return {DOWN: down, UP: up, MAGNITUDE: magnitudes}


def _stacks(folder: AdaptedFolder, layer: PeftLayer) -> dict[str, Tensor]:
    """Of experts as two matrices: A by expert and rank, B by rank and expert."""
    down, up = _joined(folder, layer)
    return {DOWN: down.flatten(0, 1), UP: up.permute(1, 2, 0).flatten(1)}


def _joined(folder: AdaptedFolder, layer: PeftLayer) -> tuple[Tensor, Tensor]:
    """A and B of a tensor of the base.

    Weights that are joined have ranks of their own side by side, and zeros where the others' are; one that has no
    adapter has zeros alone.
    """
    names = layer.stored.made_of
    shapes, rank = {name: folder.tuned[name].shape for name in names}, folder.note.adapter.rank
    known = next(folder.low_rank(companion(name, DOWN)) for name in names if companion(name, DOWN) in folder.layouts)
    downs, ups = [], dict[str, Tensor]()
    for number, name in enumerate(names):
        *experts, out, into = shapes[name]
        is_there = companion(name, DOWN) in folder.layouts
        downs.append(folder.low_rank(companion(name, DOWN)) if is_there else known.new_zeros(*experts, rank, into))
        up = folder.low_rank(companion(name, UP)) if is_there else known.new_zeros(*experts, out, rank)
        ups[name] = F.pad(up, (number * rank, (len(names) - 1 - number) * rank))
    plain = msgspec.structs.replace(layer.stored, transposed=False)
    return torch.cat(downs, dim=-2), model_folder.store(plain, ups.__getitem__)


def delta(layer: PeftLayer, name: str, weights: dict[str, Tensor], adapter: Adapter, shapes: Shapes) -> Tensor:
    """What an adapter's file adds to one of our weights, by peft's rules; in float64."""
    a, b = (weights[f"{PREFIX}{layer.module}.{THEIRS[part]}"].double() for part in (DOWN, UP))
    whole = adapter.scale * b @ a
    if layer.stacked:
        experts = shapes[name][0]
        whole = adapter.scale * b.unflatten(1, (-1, experts)).permute(2, 0, 1) @ a.unflatten(0, (experts, -1))
    plain = msgspec.structs.replace(layer.stored, transposed=False)
    return model_folder.restore(name, (plain,), shapes, lambda stored: whole)


def write(stage: Path, folder: AdaptedFolder, dtype: torch.dtype | None) -> None:
    """Write an adapter into a folder, and see that it is read again as it was."""
    found = layers(folder)
    replace_json(stage / CONFIG, config(folder, found))
    whole = dict(tensors(folder, found, dtype))
    save_file(whole, stage / WEIGHTS, {"format": "pt"})
    (stage / WEIGHTS).chmod(stage.stat().st_mode & 0o666)  # safetensors lets nobody else read
    again = load_file(stage / WEIGHTS)
    if again.keys() != whole.keys() or not all(torch.equal(again[name], whole[name]) for name in whole):
        raise mistake(f"{stage / WEIGHTS} is not what was written", "write to another disk")


def beside(model: nn.Module, adapter: Path) -> nn.Module:
    """An adapter on its base by peft's own code; a key that one of the two lacks is an error."""
    from peft import PeftModel

    with warnings.catch_warnings():
        # It looks for the patterns of parameters among modules, says that it ignores them, and obeys them.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
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
