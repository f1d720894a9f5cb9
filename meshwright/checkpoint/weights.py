"""A folder of weights in safetensors: one file, or shards with the index that Hugging Face reads."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.spec.check import InputError, Problem
from meshwright.spec.folder import PICKLES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
INDEX_BYTES = 100 * 10**6  # half a million tensors; the largest public index has a tenth of it
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Which file holds which tensor."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


class Reader:
    """The tensors of a folder by name. Opening reads headers only; data is read when a tensor is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}  # file name -> open file
        self._heads: dict[str, tuple[str, tuple[int, ...], torch.dtype | None]] = {}  # tensor -> file, shape, dtype
        problems: list[Problem] = []
        for file, names in _files(folder).items():
            problems += self._open(file, names)
        if problems:
            raise InputError(problems)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._heads)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._heads[name][1]

    def dtype(self, name: str) -> torch.dtype | None:
        """None: not a float of at least 16 bits."""
        return self._heads[name][2]

    def load(self, name: str) -> Tensor:
        file = self._heads[name][0]
        try:
            return self._files[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise InputError([_damaged(self.folder / file, f"{name}: {error}")]) from None

    def _open(self, file: str, names: list[str] | None) -> Iterator[Problem]:
        """Read a file's header; names are the tensors that it should hold, None when there is no index to say."""
        path = self.folder / file
        try:
            opened = safe_open(path, framework="pt")
            held = set(opened.keys())
            for name in held if names is None else held.intersection(names):
                head = opened.get_slice(name)
                self._heads[name] = (file, tuple(head.get_shape()), DTYPES.get(head.get_dtype()))
        except FileNotFoundError:
            yield Problem(f"{path} is missing, though {INDEX} names it", "copy the folder again, with all its shards")
            return
        except (SafetensorError, OSError) as error:
            yield _damaged(path, str(error))
            return
        self._files[file] = opened
        for name in sorted(set(names or ()) - held):
            yield Problem(f"{path} lacks the tensor {name}, which {INDEX} places there", "copy the folder again")


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    limit_bytes: int = SHARD_BYTES,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write tensors as they come, at most one shard of them in memory. On an error nothing is left behind."""
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        raise InputError([Problem(f"{folder} already holds weights", "choose an empty folder")])
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    try:
        sizes: list[dict[str, int]] = []  # of each shard: tensor -> bytes
        for shard in _shards(tensors, limit_bytes):
            made.append(folder / f".shard-{len(made)}.partial")
            save_file(shard, made[-1], metadata or {"format": "pt"})
            made[-1].chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody else read; the folder knows better
            sizes.append({name: tensor.nbytes for name, tensor in shard.items()})
            shard.clear()  # frees it before the next one fills
        for number, name in enumerate(_shard_names(len(sizes))):
            made[number] = made[number].rename(folder / name)
        if len(sizes) > 1:  # last: whoever finds an index finds all its shards
            made.append(folder / f".{INDEX}.partial")
            made[-1].write_bytes(_index(sizes))
            made[-1].rename(folder / INDEX)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise


def _shards(tensors: Iterable[tuple[str, Tensor]], limit_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    room = limit_bytes
    for name, tensor in tensors:
        if shard and tensor.nbytes > room:
            yield shard
            shard, room = {}, limit_bytes
        assert name not in shard, f"{name} came twice"
        shard[name] = _owned(tensor)
        room -= tensor.nbytes
    yield shard


def _owned(tensor: Tensor) -> Tensor:
    """A tensor alone in its memory: safetensors refuses views that share it."""
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]


def _index(sizes: list[dict[str, int]]) -> bytes:
    files = _shard_names(len(sizes))
    weight_map = {name: file for file, shard in zip(files, sizes, strict=True) for name in shard}
    index = Index(weight_map=weight_map, metadata={"total_size": sum(sum(shard.values()) for shard in sizes)})
    return msgspec.json.format(msgspec.json.encode(index, order="sorted"), indent=2) + b"\n"


def _files(folder: Path) -> dict[str, list[str] | None]:
    """The weight files of a folder and the tensors that each should hold."""
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    if not (folder / INDEX).is_file():
        raise InputError([_no_weights(folder)])
    index = _read_index(folder / INDEX)
    files: dict[str, list[str] | None] = {}
    for name, file in index.weight_map.items():
        names = files.setdefault(file, [])
        assert names is not None
        names.append(name)
    if strange := [file for file in files if not _is_plain(file)]:
        raise InputError([_outside(folder / INDEX, file) for file in strange])
    return files


def _is_plain(file: str) -> bool:
    return file.endswith(".safetensors") and not set(file) & set("/\\\0:") and not file.startswith(".")


def _read_index(path: Path) -> Index:
    try:
        if (size := path.stat().st_size) > INDEX_BYTES:
            raise InputError([_damaged(path, f"{size} bytes are more than {INDEX_BYTES}")])
        return msgspec.json.decode(path.read_bytes(), type=Index)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError([_damaged(path, str(error))]) from None


def _damaged(path: Path, reason: str) -> Problem:
    return Problem(f"{path} cannot be used: {reason}", "copy the file again from where it came")


def _outside(path: Path, file: str) -> Problem:
    text = f"{path} places tensors in {file!r}, which is not a .safetensors file of the folder itself"
    return Problem(text, "do not trust this folder")


def _no_weights(folder: Path) -> Problem:
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
    if not pickles:
        return Problem(f"{folder} holds neither {SINGLE} nor {INDEX}", "give the folder of a model")
    return Problem(
        f"{folder} holds its weights only in {pickles[0]}, a pickle: loading one runs its code, so that is never done",
        "if you trust it, convert it once with transformers:\n"
        "    from transformers import AutoModelForCausalLM as Model\n"
        f"    Model.from_pretrained({str(folder)!r}).save_pretrained({str(folder) + '-safetensors'!r})",
    )
