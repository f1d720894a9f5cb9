"""Model folders: a Hugging Face model, or what a run of ours leaves, read by the names of spec/params.py."""

import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from meshwright.checkpoint import weights
from meshwright.checkpoint.names import (
    HEAD,
    Layout,
    Shape,
    huggingface_of,
    is_harmless,
    native,
    restore,
    stored_shape,
)
from meshwright.checkpoint.weights import Reader
from meshwright.spec.arch import Arch
from meshwright.spec.check import InputError, Problem
from meshwright.spec.folder import ARCH, TOKENIZER, Described, Kind, describe
from meshwright.spec.params import params

MOST_PROBLEMS = 50  # a folder of another model differs in every tensor; the first lines say it


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked folder: every parameter is there with its shape. Data is read tensor by tensor."""

    path: Path
    kind: Kind
    arch: Arch
    tokenizer: Path | None
    reader: Reader
    layouts: dict[str, Layout]  # our name -> the stored tensors that hold it
    shapes: dict[str, Shape]  # our name -> shape

    @property
    def dtype(self) -> torch.dtype:
        """What the embedding is stored in."""
        dtype = self.reader.dtype(self.layouts["embed.weight"][0].name)
        assert dtype is not None, "opening checked that it is a float"
        return dtype

    def tensor(self, name: str) -> Tensor:
        """A parameter by our name, in our layout."""
        value = restore(name, self.layouts[name], self.shapes, self.reader.load)
        if name == "embed.weight":
            self._refuse_untied_head(value)
        return value

    def _refuse_untied_head(self, embed: Tensor) -> None:
        """Some tied models store the head as well; it must then be the embedding."""
        tied_head = self.kind == "huggingface" and self.arch.tied and HEAD in self.reader.names
        if tied_head and not torch.equal(self.reader.load(HEAD), embed):
            text = f"{self.path}: {HEAD} is not the embedding, though config.json says tie_word_embeddings"
            raise InputError([Problem(text, "set tie_word_embeddings to false in config.json", "tie_word_embeddings")])


def open_folder(path: Path) -> ModelFolder:
    """Open a Hugging Face folder, one of ours, or a run that holds one; checks all names and shapes, reads no data."""
    return _checked(describe(path))


def save_native(folder: Path, arch: Arch, tensors: Iterable[tuple[str, Tensor]], tokenizer: Path | None) -> None:
    """Write a model folder of our own, whole or not at all; an earlier one of the same name is replaced."""
    with staged(folder, replace=True) as stage:
        write_arch(stage, arch)
        weights.write(stage, tensors)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, stage / TOKENIZER)
        open_folder(stage)  # before the earlier one goes


def write_arch(folder: Path, arch: Arch) -> None:
    """Say what a native folder's weights are of."""
    (folder / ARCH).write_bytes(msgspec.json.format(msgspec.json.encode(arch), indent=2) + b"\n")


@contextmanager
def staged(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder beside the target, which takes the target's name if the body succeeds and is removed if not."""
    target = target.absolute()
    if target.exists() and not (target.is_dir() and (replace or not any(target.iterdir()))):
        raise InputError([Problem(f"{target} already exists and is not empty", "choose another folder")])
    stage = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        stage.mkdir(parents=True)
    except OSError as error:
        text = f"{target} cannot be written: {error.strerror}"
        raise InputError([Problem(text, "choose a folder that you may write to")]) from None
    try:
        yield stage
        _swap(stage, target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _swap(stage: Path, target: Path) -> None:
    if not target.exists():
        stage.rename(target)
        return
    old = stage.with_suffix(".old")
    target.rename(old)
    stage.rename(target)
    shutil.rmtree(old)


def _checked(described: Described) -> ModelFolder:
    path, arch = described.path, described.arch
    reader = Reader(path)
    layout = native(arch) if described.kind == "meshwright" else huggingface_of(arch, reader.names)
    shapes = {param.name: param.shape for param in params(arch)}
    found = list(islice(_mismatches(reader, layout, shapes, arch.tied), MOST_PROBLEMS + 1))
    if len(found) > MOST_PROBLEMS:
        found[MOST_PROBLEMS:] = [Problem(f"{path} differs in still more tensors", "see the lines above")]
    if found:
        raise InputError(found)
    layouts: dict[str, Layout] = dict.fromkeys(shapes, ())
    for stored in layout:
        for name in stored.made_of:
            layouts[name] += (stored,)
    return ModelFolder(path, described.kind, arch, described.tokenizer, reader, layouts, shapes)


def _mismatches(reader: Reader, layout: Layout, shapes: dict[str, Shape], tied: bool) -> Iterator[Problem]:
    remedy = "the weights and the description beside them must be of one model"
    for stored in layout:
        wanted = stored_shape(stored, shapes)
        if stored.name not in reader.names:
            yield Problem(f"{reader.folder} lacks the tensor {stored.name} of shape {wanted}", remedy)
        elif (shape := reader.shape(stored.name)) != wanted:
            yield Problem(f"{reader.folder}: {stored.name} has shape {shape}, not {wanted}", remedy)
        elif reader.dtype(stored.name) is None:
            supported = "use weights in float64, float32, bfloat16 or float16"
            yield Problem(f"{reader.folder}: {stored.name} is not stored as floats of 16 bits or more", supported)
    for name in sorted(reader.names - {stored.name for stored in layout}):
        if not is_harmless(name, tied):
            yield Problem(f"{reader.folder} holds {name}, which the model has no place for", remedy)
