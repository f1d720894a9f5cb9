"""Model folders: a Hugging Face model, or what a run of ours leaves, read by the names of spec/params.py.

A layout says which stored tensors our parameters are: GPT-2 stores q, k and v as one matrix and multiplies from the
other side, Mixtral stores each expert apart. A folder is checked whole before a tensor is read, and written whole or
not at all.
"""

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.read import StepWeights
from meshwright.checkpoint.state import TORCH_DTYPES
from meshwright.config.huggingface import ARCH, INDEX, SINGLE, TOKENIZER, family, no_weights
from meshwright.config.weights import Kind, describe
from meshwright.runtime.files import replace_file, replace_json
from meshwright.spec.arch import Arch
from meshwright.spec.params import params
from meshwright.spec.problem import InputError, Problem

SHARD_BYTES = 5 * 10**9
INDEX_BYTES = 100 * 10**6  # half a million tensors; the largest public index has a tenth of it
HEAD = "lm_head.weight"
HARMLESS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # masks and frequencies that old versions stored
# Of each block of GPT-2: its name, our parameters, and whether it multiplies from the other side.
GPT2_BLOCK = (
    ("ln_1", ("attn_norm",), False),
    ("attn.c_attn", ("attn.q", "attn.k", "attn.v"), True),
    ("attn.c_proj", ("attn.out",), True),
    ("ln_2", ("mlp_norm",), False),
    ("mlp.c_fc", ("mlp.up",), True),
    ("mlp.c_proj", ("mlp.down",), True),
)
MOST_PROBLEMS = 50  # a folder of another model differs in every tensor; the first lines say it


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
                self._heads[name] = (file, tuple(head.get_shape()), TORCH_DTYPES.get(head.get_dtype()))
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
            files = _shard_names(len(sizes))
            weight_map = {name: file for file, shard in zip(files, sizes, strict=True) for name in shard}
            index = Index(weight_map=weight_map, metadata={"total_size": sum(sum(shard.values()) for shard in sizes)})
            content = msgspec.json.format(msgspec.json.encode(index, order="sorted"), indent=2) + b"\n"
            replace_file(folder / INDEX, content)
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
        plain = tensor.detach().cpu().contiguous()
        # Safetensors refuses views that share their memory.
        shard[name] = plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()
        room -= tensor.nbytes
    yield shard


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]


def _files(folder: Path) -> dict[str, list[str] | None]:
    """The weight files of a folder and the tensors that each should hold."""
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    path = folder / INDEX
    if not path.is_file():
        raise InputError([no_weights(folder)])
    try:
        if (size := path.stat().st_size) > INDEX_BYTES:
            raise InputError([_damaged(path, f"{size} bytes are more than {INDEX_BYTES}")])
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError([_damaged(path, str(error))]) from None
    files: dict[str, list[str]] = {}
    for name, file in index.weight_map.items():
        files.setdefault(file, []).append(name)
    problems = []
    for file in files:
        if not file.endswith(".safetensors") or set(file) & set("/\\\0:") or file.startswith("."):
            text = f"{path} places tensors in {file!r}, which is not a .safetensors file of the folder itself"
            problems.append(Problem(text, "do not trust this folder"))
    if problems:
        raise InputError(problems)
    return dict(files)


def _damaged(path: Path, reason: str) -> Problem:
    return Problem(f"{path} cannot be used: {reason}", "copy the file again from where it came")


Load = Callable[[str], Tensor]
Shape = tuple[int, ...]


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in a file."""

    name: str
    made_of: tuple[str, ...]  # our parameters, joined along `dim`
    dim: int = 0
    expert: int | None = None  # holds this expert of a stacked parameter alone
    transposed: bool = False  # GPT-2 multiplies from the other side


Layout = tuple[StoredTensor, ...]


def native(arch: Arch) -> Layout:
    """Our own files: every parameter as it is."""
    return tuple(StoredTensor(name=param.name, made_of=(param.name,)) for param in params(arch))


def huggingface(arch: Arch, *, prefix: str | None = None, fused: bool = False) -> Layout:
    """The layout that transformers writes; `fused` experts are those of its version 5 in memory."""
    if family(arch) == "gpt2":
        return tuple(_gpt2(arch, "transformer." if prefix is None else prefix))
    return tuple(_llama(arch, "model." if prefix is None else prefix, fused))


def stored_shape(stored: StoredTensor, shapes: dict[str, Shape]) -> Shape:
    """The shape that a stored tensor must have, from those of our parameters."""
    parts = [shapes[name] if stored.expert is None else shapes[name][1:] for name in stored.made_of]
    shape = list(parts[0])
    shape[stored.dim] = sum(part[stored.dim] for part in parts)
    return tuple(reversed(shape)) if stored.transposed else tuple(shape)


def store(stored: StoredTensor, load: Load) -> Tensor:
    """A stored tensor, made of our parameters."""
    parts = [load(name) if stored.expert is None else load(name)[stored.expert] for name in stored.made_of]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=stored.dim)
    return whole.T if stored.transposed else whole


def restore(name: str, layout: Layout, shapes: dict[str, Shape], load: Load) -> Tensor:
    """Our parameter, taken out of the stored tensors that hold it."""
    pieces = []
    for stored in layout:
        whole = load(stored.name)
        whole = whole.T if stored.transposed else whole
        widths = [shapes[part][stored.dim] for part in stored.made_of]
        is_whole = len(stored.made_of) == 1
        pieces.append(whole if is_whole else whole.split(widths, dim=stored.dim)[stored.made_of.index(name)])
    return pieces[0] if layout[0].expert is None else torch.stack(pieces)


def _gpt2(arch: Arch, prefix: str) -> Iterator[StoredTensor]:
    yield StoredTensor(name=f"{prefix}wte.weight", made_of=("embed.weight",))
    yield StoredTensor(name=f"{prefix}wpe.weight", made_of=("positions.weight",))
    for layer in range(arch.layers):
        theirs, ours = f"{prefix}h.{layer}", f"blocks.{layer}"
        for kind in ("weight", "bias"):
            for name, parts, is_transposed in GPT2_BLOCK:
                made_of = tuple(f"{ours}.{part}.{kind}" for part in parts)
                turned = is_transposed and kind == "weight"
                yield StoredTensor(name=f"{theirs}.{name}.{kind}", made_of=made_of, transposed=turned)
    for kind in ("weight", "bias"):
        yield StoredTensor(name=f"{prefix}ln_f.{kind}", made_of=(f"norm.{kind}",))
    yield from _head(arch)


def _llama(arch: Arch, prefix: str, fused: bool) -> Iterator[StoredTensor]:
    yield StoredTensor(name=f"{prefix}embed_tokens.weight", made_of=("embed.weight",))
    for layer in range(arch.layers):
        theirs, ours = f"{prefix}layers.{layer}", f"blocks.{layer}"
        yield StoredTensor(name=f"{theirs}.input_layernorm.weight", made_of=(f"{ours}.attn_norm.weight",))
        for their, our in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out")):
            yield StoredTensor(name=f"{theirs}.self_attn.{their}.weight", made_of=(f"{ours}.attn.{our}.weight",))
        yield StoredTensor(name=f"{theirs}.post_attention_layernorm.weight", made_of=(f"{ours}.mlp_norm.weight",))
        yield from _feed_forward(arch, theirs, ours, fused)
    yield StoredTensor(name=f"{prefix}norm.weight", made_of=("norm.weight",))
    yield from _head(arch)


def _feed_forward(arch: Arch, theirs: str, ours: str, fused: bool) -> Iterator[StoredTensor]:
    if arch.experts == 0:
        for part in ("gate", "up", "down"):
            yield StoredTensor(name=f"{theirs}.mlp.{part}_proj.weight", made_of=(f"{ours}.mlp.{part}.weight",))
        return
    router, experts = (f"{ours}.mlp.router.weight",), f"{ours}.mlp.experts"
    if fused:
        yield StoredTensor(name=f"{theirs}.mlp.gate.weight", made_of=router)
        gate_up = (f"{experts}.gate", f"{experts}.up")
        yield StoredTensor(name=f"{theirs}.mlp.experts.gate_up_proj", made_of=gate_up, dim=1)
        yield StoredTensor(name=f"{theirs}.mlp.experts.down_proj", made_of=(f"{experts}.down",))
        return
    yield StoredTensor(name=f"{theirs}.block_sparse_moe.gate.weight", made_of=router)
    for their, our in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        for expert in range(arch.experts):  # inside: a stacked parameter is then read once for all its experts
            name = f"{theirs}.block_sparse_moe.experts.{expert}.{their}.weight"
            yield StoredTensor(name=name, made_of=(f"{experts}.{our}",), expert=expert)


def _head(arch: Arch) -> Iterator[StoredTensor]:
    if not arch.tied:
        yield StoredTensor(name=HEAD, made_of=("head.weight",))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked folder: every parameter is there with its shape. Data is read tensor by tensor."""

    path: Path
    kind: Kind
    arch: Arch
    tokenizer: Path | None
    run: Path | None  # the folder of the run that the weights are from
    step: int | None  # of it, after which the weights were so
    reader: Reader | StepWeights
    layouts: dict[str, Layout]  # our name -> the stored tensors that hold it
    shapes: dict[str, Shape]  # our name -> shape

    @property
    def home(self) -> Path:
        """Where its tokenizer belongs: of a saved step, beside its run file."""
        return self.path.parents[1] if self.kind == "checkpoint" else self.path

    @property
    def dtype(self) -> torch.dtype:
        """What the embedding is stored in."""
        dtype = self.reader.dtype(self.layouts["embed.weight"][0].name)
        assert dtype is not None, "opening checked that it is a float"
        return dtype

    def tensor(self, name: str) -> Tensor:
        """A parameter by our name, in our layout."""
        value = restore(name, self.layouts[name], self.shapes, self.reader.load)
        # Some tied models store the head as well; it must then be the embedding.
        tied_head = self.kind == "huggingface" and self.arch.tied and HEAD in self.reader.names
        if name == "embed.weight" and tied_head and not torch.equal(self.reader.load(HEAD), value):
            text = f"{self.path}: {HEAD} is not the embedding, though config.json says tie_word_embeddings"
            raise InputError([Problem(text, "set tie_word_embeddings to false in config.json", "tie_word_embeddings")])
        return value


def open_folder(reference: Path | str) -> ModelFolder:
    """Open a Hugging Face folder, one of ours, or a run (RUN, RUN@STEP); checks all names and shapes, reads no data."""
    described = describe(reference)
    path, arch = described.path, described.arch
    reader = StepWeights(path) if described.kind == "checkpoint" else Reader(path)
    if described.kind != "huggingface":
        layout = native(arch)
    else:  # files of a bare model lack the prefix, and experts come apart or fused
        embed = "wte.weight" if family(arch) == "gpt2" else "embed_tokens.weight"
        fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in reader.names)
        layout = huggingface(arch, prefix="" if embed in reader.names else None, fused=fused)
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
    origin = described.run, described.step
    return ModelFolder(path, described.kind, arch, described.tokenizer, *origin, reader, layouts, shapes)


def save_native(folder: Path, arch: Arch, tensors: Iterable[tuple[str, Tensor]], tokenizer: Path | None) -> None:
    """Write a model folder of our own, whole or not at all; an earlier one of the same name is replaced."""
    with staged(folder, replace=True) as stage:
        write_arch(stage, arch)
        write(stage, tensors)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, stage / TOKENIZER)
        open_folder(stage)  # before the earlier one goes


def write_arch(folder: Path, arch: Arch) -> None:
    """Say what a native folder's weights are of."""
    replace_json(folder / ARCH, arch)


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
        old = stage.with_suffix(".old")
        if is_replaced := target.exists():
            target.rename(old)
        stage.rename(target)
        if is_replaced:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _mismatches(
    reader: Reader | StepWeights, layout: Layout, shapes: dict[str, Shape], tied: bool
) -> Iterator[Problem]:
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
        if not (name.endswith(HARMLESS) or (tied and name == HEAD)):
            yield Problem(f"{reader.folder} holds {name}, which the model has no place for", remedy)
