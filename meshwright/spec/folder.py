"""Model folders, as far as they can be understood without reading a weight: whose they are and of what shape."""

from pathlib import Path
from typing import Literal

import msgspec

from meshwright.spec.arch import Arch
from meshwright.spec.check import InputError, Problem
from meshwright.spec.huggingface import arch_of, arch_problems, read_config
from meshwright.spec.params import params

ARCH = "arch.json"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")

Kind = Literal["huggingface", "meshwright"]


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder says of itself."""

    path: Path  # where the files are: a run's are in its model/
    kind: Kind
    arch: Arch

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer that travels with the weights, if one does."""
        file = self.path / TOKENIZER
        return file if file.is_file() else None


def describe(path: Path) -> Described:
    """A Hugging Face folder, one of ours, or a run that holds one."""
    if (path / ARCH).is_file():
        return Described(path=path, kind="meshwright", arch=_read_arch(path / ARCH))
    if (path / CONFIG).is_file():
        return Described(path=path, kind="huggingface", arch=arch_of(read_config(path / CONFIG)))
    if (path / "model" / ARCH).is_file():
        return describe(path / "model")
    if (path / "run.toml").is_file():
        raise InputError([Problem(f"{path} is a run that has no model yet", "finish the run: it then writes model/")])
    if path.suffix in PICKLES:
        raise InputError([a_pickle(path)])
    what = f"holds neither {CONFIG} nor {ARCH}" if path.is_dir() else "is not a folder"
    raise InputError([Problem(f"{path} {what}", "give the folder of a Hugging Face model or of a finished run")])


def a_pickle(path: Path) -> Problem:
    """Why a file of another program is not read, and how its owner can have it read."""
    return Problem(
        f"{path} is a pickle: loading one runs its code, so that is never done here",
        "if you trust it, convert it elsewhere:\n"
        "    import torch, safetensors.torch\n"
        f"    safetensors.torch.save_file(torch.load({str(path)!r}, weights_only=True), 'model.safetensors')",
    )


def shape_differences(there: Arch, here: Arch) -> list[str]:
    """Why the weights of one architecture do not fit another; empty when they do.

    Fields that no weight's shape depends on (rotary scaling, losses, the context of rotary positions) may differ.
    """
    if [(p.name, p.shape) for p in params(there)] == [(p.name, p.shape) for p in params(here)]:
        return []
    old, new = msgspec.to_builtins(there), msgspec.to_builtins(here)
    return [f"arch.{name} is {old[name]} there and {new[name]} here" for name in old if old[name] != new[name]]


def _read_arch(path: Path) -> Arch:
    try:
        arch = msgspec.convert(read_config(path), Arch)
    except msgspec.ValidationError as error:
        raise InputError([Problem(f"{path}: {error}", "convert or save the model again")]) from None
    if found := arch_problems(arch):
        raise InputError([msgspec.structs.replace(problem, where=str(path)) for problem in found])
    return arch
