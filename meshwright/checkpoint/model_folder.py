"""Model folders: a Hugging Face model, or what a run of ours leaves, read by the names of spec/params.py.

A layout says which stored tensors our parameters are: GPT-2 stores q, k and v as one matrix and multiplies from the
other side, Mixtral stores each expert apart. A folder is checked whole before a tensor is read, and written whole or
not at all.
"""

import hashlib
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.read import StepWeights
from meshwright.checkpoint.state import TORCH_DTYPES
from meshwright.config.families import FAMILIES, Family
from meshwright.config.huggingface import ARCH, CONFIG, INDEX, SINGLE, TOKENIZER, family, no_weights, shape_differences
from meshwright.config.weights import ADAPTER, TEXT, AdapterNote, FolderDescription, Kind, describe, with_ahead
from meshwright.kernels.quantized import FrozenPart, decode, encode
from meshwright.models.init import initial
from meshwright.runtime.files import held_folder, replace_file, replace_json, sweep_beside
from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, buffers, params, trained
from meshwright.spec.problem import UNDECODABLE, InputError, Problem
from meshwright.spec.quantized import BLOCK
from meshwright.spec.tuning import DOWN, MAGNITUDE, UP, Tuning, companion, is_adapter

SHARD_BYTES = 5 * 10**9
INDEX_BYTES = 100 * 10**6  # half a million tensors; the largest public index has a tenth of it
HEADS = ("lm_head.weight", "embed_out.weight")
HARMLESS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # masks and frequencies that old versions stored
# Files about text rather than weights, by their endings or beginnings: carried from folder to folder as they are.
TEXTS, PAPERS = (".json", ".jinja", ".txt", ".model", ".tiktoken"), ("LICENSE", "NOTICE")
NO_TEXTS = (CONFIG, ARCH, ADAPTER, TOKENIZER)  # written anew, and the tokenizer apart
TEXT_BYTES = 100 * 10**6
MOST_READ = 20 * 10**9  # values that a digest is made of, about
SAMPLED = 1024  # values of a weight that its digest has one by one, beside the sum of all
MOST_PROBLEMS = 50  # a folder of another model differs in every tensor; the first lines say it
PUT_BACK = "put the model back that the adapter was trained beside"


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
    except (OSError, *UNDECODABLE, RecursionError) as error:
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
    turns: int = 0  # joined parts take turns after so many rows (GPT-NeoX, gpt-oss); 0: one after the other
    row: int = 0  # elements of a row, where a vector is stored as a matrix (Cohere)


Layout = tuple[StoredTensor, ...]


def native(arch: Arch) -> Layout:
    """Our own files: every parameter as it is."""
    return tuple(StoredTensor(name=param.name, made_of=(param.name,)) for param in (*params(arch), *buffers(arch)))


def huggingface(arch: Arch, kind: str = "", *, prefix: bool = True, fused: bool = False) -> Layout:
    """The layout that transformers writes for a model_type, by default the nearest.

    Files of a bare model lack the prefix; `fused` experts are those of transformers 5 in memory.
    """
    kind = kind or family(arch)
    found = dict[str, StoredTensor]()
    for param in (*params(arch), *buffers(arch)):
        for stored in _named(param.name, arch, FAMILIES[kind], fused):
            name = stored.name if prefix else stored.name.split(".", 1)[1]
            name = stored.name if stored.name.startswith("lm_head") else name
            before = found.get(name)
            made_of = stored.made_of if before is None else before.made_of + stored.made_of
            found[name] = msgspec.structs.replace(stored, name=name, made_of=made_of)
    return tuple(found.values())


def _named(name: str, arch: Arch, family: Family, fused: bool) -> Iterator[StoredTensor]:
    """The stored tensors that hold a parameter, or a part of each; those of several have one name."""
    words = name.split(".")
    at, place = "", words
    if words[0] == "blocks":
        at, place = f"{family.names['blocks']}.{words[1]}.", words[2:]
    module, last = ".".join(place), ""
    if module not in family.names:  # a module's weight or bias
        module, last = ".".join(place[:-1]), f".{place[-1]}"
    theirs = family.names[module]
    turned = theirs in family.transposed and not last.endswith("bias")
    turns = {"row": 1, "head": arch.head_dim}.get(family.alternate.get(theirs, ""), 0)
    if "*" not in theirs:
        dim = 1 if module.startswith("mlp.experts.") else 0
        row = arch.head_dim if theirs in family.by_head else 0
        stored = StoredTensor(name=f"{at}{theirs}{last}", made_of=(name,), dim=dim, transposed=turned, turns=turns)
        yield msgspec.structs.replace(stored, row=row)
    elif fused:
        theirs = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}[place[-1]]
        yield StoredTensor(name=f"{at}mlp.experts.{theirs}", made_of=(name,), dim=1)
    else:
        for expert in range(arch.experts):  # inside: a stacked parameter is then read once for all its experts
            yield StoredTensor(name=f"{at}{theirs.replace('*', str(expert))}", made_of=(name,), expert=expert)


def stored_shape(stored: StoredTensor, shapes: dict[str, Shape]) -> Shape:
    """The shape that a stored tensor must have, from those of our parameters."""
    parts = [shapes[name] if stored.expert is None else shapes[name][1:] for name in stored.made_of]
    shape = list(parts[0])
    shape[stored.dim if len(parts) > 1 else 0] = sum(part[stored.dim if len(parts) > 1 else 0] for part in parts)
    if stored.row:
        return shape[0] // stored.row, stored.row
    return (*shape[:-2], shape[-1], shape[-2]) if stored.transposed else tuple(shape)


def store(stored: StoredTensor, load: Load) -> Tensor:
    """A stored tensor, made of our parameters."""
    parts = [load(name) if stored.expert is None else load(name)[stored.expert] for name in stored.made_of]
    if stored.row:
        whole = parts[0].unflatten(0, (-1, stored.row))
    elif len(parts) == 1:
        whole = parts[0]
    elif stored.turns:
        split = [part.unflatten(stored.dim, (-1, stored.turns)) for part in parts]
        whole = torch.stack(split, dim=stored.dim + 1).flatten(stored.dim, stored.dim + 2)
    else:
        whole = torch.cat(parts, dim=stored.dim)
    return whole.mT if stored.transposed else whole


def restore(name: str, layout: Layout, shapes: dict[str, Shape], load: Load) -> Tensor:
    """Our parameter, taken out of the stored tensors that hold it."""
    pieces = []
    for stored in layout:
        whole = load(stored.name)
        whole = whole.mT if stored.transposed else whole
        number, count, dim = stored.made_of.index(name), len(stored.made_of), stored.dim
        if count == 1:
            pieces.append(whole.flatten() if stored.row else whole)
        elif stored.turns:
            split = whole.unflatten(dim, (-1, count, stored.turns))
            pieces.append(split.select(dim + 1, number).flatten(dim, dim + 1))
        else:
            pieces.append(whole.split([shapes[part][dim] for part in stored.made_of], dim=dim)[number])
    return pieces[0] if layout[0].expert is None else torch.stack(pieces)


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
    quantized: str = ""  # how they are stored, if they are quantized
    left_out: int = 0  # tensors of pictures, or of multi-token prediction, which are not read

    @property
    def home(self) -> Path:
        """Where its tokenizer belongs: of a saved step, beside its run file."""
        return self.path.parents[1] if self.kind == "checkpoint" else self.path

    @property
    def texts(self) -> Path:
        """Where what is said of its text is: template, special tokens, settings of generation."""
        return self.home / TEXT if self.kind == "checkpoint" else self.path

    @property
    def dtype(self) -> torch.dtype:
        """The widest that a weight is stored in: frozen ones may be narrower than those that were trained."""
        # Buffers apart: a load bias is wide beside weights of any dtype.
        stored = (self.reader.dtype(each.name) for param in params(self.arch) for each in self.layouts[param.name])
        return reduce(torch.promote_types, (dtype for dtype in stored if dtype is not None))

    def tensor(self, name: str) -> Tensor:
        """A parameter by our name, in our layout."""
        value = restore(name, self.layouts[name], self.shapes, self.reader.load)
        # Some tied models store the head as well; it must then be the embedding.
        tied = self.kind == "huggingface" and self.arch.tied and name == "embed.weight"
        head = next((each for each in HEADS if each in self.reader.names), "") if tied else ""
        if head and not torch.equal(self.reader.load(head), value):
            text = f"{self.path}: {head} is not the embedding, though config.json says tie_word_embeddings"
            raise InputError([Problem(text, "set tie_word_embeddings to false in config.json", "tie_word_embeddings")])
        return value


def open_folder(reference: Path | str, mtp_layers: int | None = 0) -> ModelFolder:
    """Open a Hugging Face folder, one of ours, or a run (RUN, RUN@STEP); checks all names and shapes, reads no data.

    `mtp_layers`: of a Hugging Face folder, those of multi-token prediction that are wanted; None: what there is.
    """
    described = describe(reference)
    if described.note is not None:
        return _open_adapted(described, described.note)
    path = described.path
    reader = StepWeights(path) if described.kind == "checkpoint" else _reader(path, described.quantized)
    wanted = int(_holds_ahead(described, reader.names)) if mtp_layers is None else mtp_layers
    described = with_ahead(described, wanted)
    arch = described.arch
    if described.kind != "huggingface":
        layout = native(arch)
    else:  # files of a bare model lack the prefix, and experts come apart or fused
        kind = described.family
        embed = f"{FAMILIES[kind].names['embed']}.weight"
        fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in reader.names)
        layout = huggingface(arch, kind, prefix=embed.split(".", 1)[1] not in reader.names, fused=fused)
        if described.with_pictures:
            layout = _of_text(layout, reader.names)
    shapes = {param.name: param.shape for param in (*params(arch), *buffers(arch))}
    outside = _outside(described)
    found = list(islice(_mismatches(reader, layout, shapes, arch.tied, outside), MOST_PROBLEMS + 1))
    if len(found) > MOST_PROBLEMS:
        found[MOST_PROBLEMS:] = [Problem(f"{path} differs in still more tensors", "see the lines above")]
    if found:
        raise InputError(found)
    layouts: dict[str, Layout] = dict.fromkeys(shapes, ())
    for stored in layout:
        for name in stored.made_of:
            layouts[name] += (stored,)
    origin = described.run, described.step
    left_out = sum(name.startswith(outside) for name in reader.names) if outside else 0
    held = (reader, layouts, shapes, described.quantized, left_out)
    return ModelFolder(path, described.kind, arch, described.tokenizer, *origin, *held)


def _of_text(layout: Layout, names: frozenset[str]) -> Layout:
    """The layout of a text model that is one part of another."""
    old = any(name.startswith("language_model.") for name in names)
    prefix = "language_model.model." if old else "model.language_model."
    return tuple(msgspec.structs.replace(stored, name=prefix + stored.name.removeprefix("model.")) for stored in layout)


def _outside(described: FolderDescription) -> tuple[str, ...]:
    """What the names of tensors begin with that belong to no text model, or to multi-token prediction."""
    found: list[str] = []
    if described.with_pictures:
        found += [f"{at}{part}." for at in ("", "model.") for part in ("vision_tower", "multi_modal_projector")]
    if described.more_layers:
        blocks, first = FAMILIES[described.family].names["blocks"], described.arch.blocks
        found += [f"{blocks}.{layer}." for layer in range(first, first + described.more_layers)]
    if described.kind == "huggingface" and described.arch.mtp_layers:  # copies, of what it shares with the model
        at = f"{FAMILIES[described.family].names['blocks']}.{described.arch.layers}"
        found += [f"{at}.{shared}.weight" for shared in ("embed_tokens", "shared_head.head")]
    return tuple(found)


def _holds_ahead(described: FolderDescription, names: frozenset[str]) -> bool:
    """Whether the tensors of multi-token prediction are there: transformers keeps the key and drops the tensors."""
    if described.kind != "huggingface" or not described.more_layers:
        return False
    words = FAMILIES[described.family].names
    return f"{words['blocks']}.{described.arch.layers}.{words['join']}.weight" in names


def _reader(path: Path, quantized: str) -> Reader:
    if not quantized:
        return Reader(path)
    from meshwright.checkpoint.quantized_folder import QuantizedReader  # which reads as a Reader does

    return QuantizedReader(path)


@dataclass(frozen=True, slots=True)
class SeededWeights:
    """The weights that a run begins from without a folder."""

    arch: Arch
    seed: int
    dtype: torch.dtype = torch.float32

    def tensor(self, name: str) -> Tensor:
        every = (*params(self.arch), *buffers(self.arch))
        return initial(next(param for param in every if param.name == name), self.seed)


def digest(weights: ModelFolder | SeededWeights) -> str:
    """A name for all weights by their values, and for what is learned beside them, whatever files and floats hold them.

    Reads every one; of models so large that a start would wait for it, every second matrix, or fewer.
    """
    found, every = hashlib.sha256(), params(weights.arch)
    read = every[:: math.ceil(sum(param.numel for param in every) / MOST_READ)]
    for param in (*read, *buffers(weights.arch)):
        bits = weights.tensor(param.name).to(torch.float32).contiguous().view(torch.int32)
        found.update(f"{param.name} {tuple(bits.shape)} {int(bits.sum(dtype=torch.int64))} ".encode())
        found.update(bits.flatten()[:: max(bits.numel() // SAMPLED, 1)].numpy().tobytes())  # in their places
    return found.hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedFolder(ModelFolder):
    """An adapter, read as the model that it makes of its base: each adapted weight is W + s · B A.

    Of DoRA its rows have the norms that were trained.
    """

    base: ModelFolder | SeededWeights
    note: AdapterNote

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def tensor(self, name: str) -> Tensor:
        weight = self.held_base(name)
        if companion(name, DOWN) not in self.layouts:
            return weight
        # Once, in float64: the sum is rounded to the dtype of the base, and nothing before it.
        down, up = (self.low_rank(companion(name, part)).double() for part in (DOWN, UP))
        merged = weight.double() + self.note.adapter.scale * (up @ down)
        if self.note.adapter.kind == "dora":
            merged *= (self.low_rank(companion(name, MAGNITUDE)).double() / merged.norm(dim=-1))[..., None]
        return merged.to(weight.dtype)

    def require_base(self) -> None:
        """Refuse a base of other weights than those that the adapter was trained beside, where these are known."""
        if self.note.digest and digest(self.base) != self.note.digest:
            what = f"{self.note.base} is not the base of the adapter in {self.path}: its weights are others"
            raise InputError([Problem(what, PUT_BACK, "init.from")])

    def low_rank(self, name: str) -> Tensor:
        """A weight of the adapter."""
        return self.reader.load(name)

    def held_base(self, name: str) -> Tensor:
        """A weight of the base as the adapter was trained beside it: what few bits leave of it."""
        weight, param = self.base.tensor(name), self.tuned.get(name)
        if param is None or param.held == "bf16":
            return weight
        how = FrozenPart(param.held, param.shape[-1] // BLOCK)
        return decode(how, encode(param.held, weight), torch.float32).to(weight.dtype)

    @property
    def tuned(self) -> dict[str, Param]:
        """The parameters of the base as the adapter's run held them."""
        arch = replace(self.arch, tuning=Tuning(adapter=self.note.adapter))
        return {param.name: param for param in params(arch)}

    @property
    def apart(self) -> "UnmergedFolder":
        """The same with the adapter beside its base, as it is trained."""
        return self._beside(self.held_base)

    @property
    def beside_whole(self) -> "UnmergedFolder":
        """The same beside the base as it is in its files, whatever the adapter was trained beside."""
        return self._beside(self.base.tensor)

    def _beside(self, base: Load) -> "UnmergedFolder":
        kind = "dora" if self.note.adapter.kind == "dora" else "lora"
        adapter = replace(self.note.adapter, kind=kind, base="bf16", dropout=0.0)
        return UnmergedFolder(replace(self.arch, tuning=Tuning(adapter=adapter)), self, base)


@dataclass(frozen=True, slots=True)
class UnmergedFolder:
    """An adapter and its base, each as it is."""

    arch: Arch
    folder: AdaptedFolder
    base: Load

    def tensor(self, name: str) -> Tensor:
        return self.folder.low_rank(name) if is_adapter(name) else self.base(name)


def _open_adapted(described: FolderDescription, note: AdapterNote) -> AdaptedFolder:
    """Open an adapter beside its base."""
    arch, path = described.arch, described.path
    shapes = {p.name: p.shape for p in trained(replace(arch, tuning=Tuning(adapter=note.adapter)))}
    reader = StepWeights(path) if described.kind == "checkpoint" else Reader(path)
    layout = tuple(StoredTensor(name=name, made_of=(name,)) for name in shapes)
    if found := list(islice(_mismatches(reader, layout, shapes, tied=False, outside=()), MOST_PROBLEMS)):
        raise InputError(found)
    base = _base(path, note.base) if note.base else SeededWeights(arch, note.seed)
    if differences := shape_differences(base.arch, arch):
        what = f"{note.base} is not the base of the adapter in {path}: {'; '.join(differences)}"
        raise InputError([Problem(what, PUT_BACK, "init.from")])
    layouts: dict[str, Layout] = {stored.name: (stored,) for stored in layout}
    held = (described.tokenizer, described.run, described.step, reader, layouts, shapes)
    return AdaptedFolder(path, described.kind, arch, *held, base=base, note=note)


def _base(adapter: Path, reference: str) -> ModelFolder:
    """Open the base of an adapter, which was named when that was trained and may have gone since."""
    try:
        return open_folder(reference)
    except InputError as error:
        found = [f"the base of the adapter in {adapter} cannot be read: {each.text}" for each in error.problems]
        raise InputError([Problem(what, PUT_BACK, "init.from") for what in found]) from None


def copy_texts(source: Path, target: Path) -> None:
    """Copy the files of a model folder that are about text: templates, tokenizers, settings of generation."""
    for file in sorted(source.glob("*")) if source.is_dir() else ():
        known = file.suffix in TEXTS or file.name.startswith(PAPERS)
        about_text = known and file.name not in NO_TEXTS and not file.name.endswith(".index.json")
        if about_text and file.is_file() and file.stat().st_size <= TEXT_BYTES:
            shutil.copyfile(file, target / file.name)


def save_native(
    folder: Path,
    arch: Arch,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Path | None,
    texts: Path | None = None,
    note: AdapterNote | None = None,
) -> None:
    """Write a model folder of our own, whole or not at all; an earlier one of the same name is replaced.

    Of an adapter its own weights alone, and a note of what they are beside.
    """
    with staged(folder, replace=True) as stage:
        write_arch(stage, replace(arch, tuning=msgspec.UNSET))
        write(stage, tensors if note is None else (pair for pair in tensors if is_adapter(pair[0])))
        if note is not None:
            replace_json(stage / ADAPTER, note)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, stage / TOKENIZER)
        if texts is not None:
            copy_texts(texts, stage)
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
    sweep_beside(target)
    held = held_folder(stage)
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
        if held is not None:
            os.close(held)


def _mismatches(
    reader: Reader | StepWeights, layout: Layout, shapes: dict[str, Shape], tied: bool, outside: tuple[str, ...]
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
        is_known = name.endswith(HARMLESS) or (tied and name.endswith(HEADS)) or name.startswith(outside)
        if not is_known:
            yield Problem(f"{reader.folder} holds {name}, which the model has no place for", remedy)
