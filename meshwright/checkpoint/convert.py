"""Hugging Face folder ↔ native folder, believed only after the logits agree."""

import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch
from torch import Tensor, nn

from meshwright.checkpoint import model_folder, peft
from meshwright.checkpoint.model_folder import (
    SHARD_BYTES,
    AdaptedFolder,
    ModelFolder,
    SeededWeights,
    open_folder,
    staged,
    write_arch,
)
from meshwright.checkpoint.state import TORCH_DTYPES
from meshwright.config.huggingface import CONFIG, TOKENIZER, config_of, read_config
from meshwright.config.weights import RUN, Kind, is_run, run_table
from meshwright.models.decoder import Decoder
from meshwright.runtime.files import replace_json
from meshwright.spec.arch import Arch
from meshwright.spec.params import buffers, count, params
from meshwright.spec.problem import UNDECODABLE, InputError, Problem, mistake
from meshwright.spec.units import plural

SEED = 20_170_612  # any constant: the same tokens for every check

# Two correct programs sum in different orders. A float32 sum of n terms is off by about √n roundings of 2⁻²⁴, and every
# layer adds its own: √(hidden · layers) · 2⁻²⁴ of the largest logit. Against transformers, on random models from two
# layers of 32 to GPT-2's 12 of 768, the difference was 0 to 0.73 of that. Four times leaves room for trained models,
# whose few large activations round worse, and still catches the wrong kind of GELU.
ROUNDING = 4 * 2.0**-24

MERGED = 1e-5  # of the largest logit: an adapter merged into fp32 weights rounds each of them once more
DTYPE_OF = {str(dtype).removeprefix("torch."): dtype for dtype in TORCH_DTYPES.values()}
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
Say = Callable[[str], None]


class Weights(Protocol):
    """Something that has every weight of an architecture."""

    @property
    def arch(self) -> Arch: ...

    def tensor(self, name: str) -> Tensor: ...


class MismatchError(RuntimeError):
    """Two folders do not hold the same model."""


def probe_tokens(arch: Arch, count: int) -> Tensor:
    """Fixed pseudo-random tokens (1, count), no more than the model has positions."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(arch.vocab, (1, min(count, arch.context)), generator=generator)


def tolerance(arch: Arch, logits: Tensor) -> float:
    """The largest difference that float32 rounding explains."""
    return ROUNDING * math.sqrt(arch.hidden * arch.layers) * float(logits.abs().max())


@torch.inference_mode()
def logits(folder: Weights, tokens: Tensor, rounded: torch.dtype | None = None) -> Tensor:
    """Our model's logits in float32, with weights first rounded to a dtype. Holds one block's weights at a time."""
    with torch.device("meta"):
        model = Decoder(folder.arch).eval()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    blocks, model.blocks = dict(model.blocks.items()), nn.ModuleDict()
    last, model.norm = model.norm, None
    _load(model, folder, rounded)  # what is outside the blocks, but for the last norm
    x = model(tokens, positions)
    for name in list(blocks):
        model.blocks = nn.ModuleDict({name: blocks.pop(name)})
        _load(model, folder, rounded)
        x = model(x, positions)
    model.blocks, model.norm = nn.ModuleDict(), last
    _load(model, folder, rounded)
    return model(x, positions)


def _load(model: Decoder, folder: Weights, rounded: torch.dtype | None) -> None:
    """Fill the parameters that are still on the meta device."""
    held = chain(model.named_parameters(), model.named_buffers())
    known = {param.name for param in (*params(folder.arch), *buffers(folder.arch))}
    waiting = [name for name, tensor in held if tensor.is_meta and name in known]
    values = {name: folder.tensor(name).to(rounded).to(torch.float32) for name in waiting}
    model.load_state_dict(values, strict=False, assign=True)


def fits_memory(parameters: int) -> bool:
    """Whether transformers, which holds the whole model, can hold it in float32 here."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1.5 * 4 * parameters < total  # half as much again, while files are read


@torch.inference_mode()
def stock_logits(path: Path, tokens: Tensor, adapter: Path | None = None) -> Tensor:
    """Logits of a Hugging Face folder by transformers' own code: local files, safetensors, no code from the folder.

    With an adapter beside it, by peft's.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        model = model.float() if adapter is None else peft.beside(model.float(), adapter)
        return model.eval()(tokens).logits
    except Exception as error:  # whatever stops it, a model that stock code cannot run is not converted
        raise MismatchError(f"transformers cannot run {path}: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


class ConvertReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was converted and how it was checked."""

    source: str
    kind_from: Kind
    step: int | None  # of the run that the weights are from
    target: str
    kind_to: Kind | Literal["adapter"]
    parameters: int
    dtype: str
    files: tuple[str, ...]
    bytes: int
    largest_difference: float  # of the logits
    tolerance: float
    checked_with: str

    @property
    def agrees(self) -> bool:
        return self.largest_difference <= self.tolerance < math.inf


def default_target(folder: ModelFolder) -> Path:
    """Where a converted model goes if nobody says: beside what it is made from."""
    source = folder.run or folder.path
    source = source if source.name else source.absolute()
    step = f"-step-{folder.step}" if folder.kind == "checkpoint" else ""
    return source.with_name(f"{source.name}{step}-{'meshwright' if folder.kind == 'huggingface' else 'hf'}")


def convert(
    source: Path | str,
    target: Path | None,
    say: Say,
    *,
    dtype: str | None = None,
    check_tokens: int = 64,
    shard_bytes: int = SHARD_BYTES,
    merge: bool = False,
) -> ConvertReport:
    """Convert a model folder to the other kind; the target appears only when its logits are those of the source.

    An adapter is written as peft has it, or with `merge` as the model that it makes of its base.
    """
    found = []
    if dtype is not None and dtype not in DTYPE_OF:
        found.append(Problem(f"dtype = {dtype} is not a type for weights", f"use {', '.join(DTYPE_OF)}", "dtype"))
    if check_tokens < 1:
        found.append(Problem(f"check_tokens = {check_tokens} checks nothing", "use at least 1", "check_tokens"))
    if found:
        raise InputError(found)
    rounded = None if dtype is None else DTYPE_OF[dtype]
    folder = open_folder(source, mtp_layers=None)
    target = target or default_target(folder)
    if isinstance(folder, AdaptedFolder) and not merge:
        return _write_adapter(folder, target, say, rounded, check_tokens)
    if isinstance(folder, AdaptedFolder):
        _say_merged(folder, say, check_tokens)
    elif merge:
        raise mistake(f"{source} is no adapter: there is nothing to merge", "leave --merge out")
    write = _write_native if folder.kind == "huggingface" else _write_huggingface
    with staged(target) as stage:
        step = "" if folder.step is None else f" (step {folder.step})"
        step += f" ({folder.quantized}, read and written as bfloat16)" if folder.quantized else ""
        say(f"converting {count(folder.arch):,} parameters of {folder.path}{step}")
        if folder.left_out:
            say(f"left out: {folder.left_out} tensors of pictures or of multi-token prediction that have no place here")
        write(stage, folder, rounded, shard_bytes)
        say(f"comparing the logits of {check_tokens} tokens")
        written = open_folder(stage, folder.arch.mtp_layers)
        compared = _compare(folder, written, rounded, check_tokens)
        report = _report(folder, target, stage, written.kind, count(folder.arch), written.dtype, compared)
    say(_matching(report))
    say(f"wrote {target}: {report.dtype}, {plural(len(report.files), 'file')}, {report.bytes / 1e6:.1f} MB")
    for name in report.files:
        say(f"  {name}")
    return report


def _report(
    folder: ModelFolder,
    target: Path,
    stage: Path,
    kind: Kind | Literal["adapter"],
    parameters: int,
    dtype: torch.dtype,
    compared: tuple[float, float, str],
) -> ConvertReport:
    """What was written, for whoever asked; it is refused if its logits are not those of the source."""
    largest, allowed, judges = compared
    report = ConvertReport(
        source=str(folder.path),
        kind_from=folder.kind,
        step=folder.step,
        target=str(target),
        kind_to=kind,
        parameters=parameters,
        dtype=str(dtype).removeprefix("torch."),
        files=tuple(sorted(file.name for file in stage.iterdir())),
        bytes=sum(file.stat().st_size for file in stage.iterdir()),
        largest_difference=largest,
        tolerance=allowed,
        checked_with=judges,
    )
    if not report.agrees:
        raise MismatchError(
            f"the logits of {folder.path} and of what was written differ by {largest:.3g}, and float32 rounding "
            f"explains {allowed:.3g} (checked with {judges}); nothing was left at {target}"
        )
    return report


def _matching(report: ConvertReport) -> str:
    within = f"max difference {report.largest_difference:.3g}, tolerance {report.tolerance:.3g}"
    return f"logits match ({within}; {report.checked_with})"


def _say_merged(folder: AdaptedFolder, say: Say, check_tokens: int) -> None:
    """Compare the adapter merged into its base with the two apart, in float32."""
    folder.require_base()
    tokens = probe_tokens(folder.arch, check_tokens)
    reference = logits(folder.apart, tokens)
    difference = _largest(reference, logits(folder, tokens)) / float(reference.abs().max())
    # A base of 16 bits takes the sum rounded to as many, and every weight of it is then off by up to half a bit.
    allowed = MERGED if folder.dtype.itemsize >= 4 else 2 * torch.finfo(folder.dtype).eps
    within = f"max difference {difference:.2g} of the largest logit, tolerance {allowed:.2g}"
    if not difference <= allowed:
        raise MismatchError(f"the adapter merged into its base differs from the two apart: {within}")
    held = folder.note.adapter.held
    base = "base" if held == "bf16" else f"base as {held.upper()} holds it, decoded"
    say(f"merged = adapter + {base} ({within})")


def _write_adapter(
    folder: AdaptedFolder, target: Path, say: Say, rounded: torch.dtype | None, check_tokens: int
) -> ConvertReport:
    """Write an adapter as peft has it; by peft's own code its logits are those of the adapter as it was trained."""
    folder.require_base()
    tokens = probe_tokens(folder.arch, check_tokens)
    with staged(target) as stage:
        say(f"writing the adapter of {folder.path}, {len(folder.layouts)} weights")
        peft.write(stage, folder, rounded)
        _carry(folder, stage)
        # Beside the base of the files, which peft opens too.
        reference, largest, judges = logits(folder.beside_whole, tokens), 0.0, "read again, bit by bit"
        base = folder.base
        judged = rounded is None and peft.has_peft() and fits_memory(count(folder.arch))
        if judged and isinstance(base, ModelFolder) and base.kind == "huggingface" and not base.quantized:
            largest = _largest(reference, stock_logits(base.path, tokens, stage))
            judges = f"peft and meshwright in float32 on {tokens.shape[1]} tokens"
        parameters = sum(math.prod(shape) for shape in folder.shapes.values())
        dtype = rounded or folder.low_rank(next(iter(folder.layouts))).dtype
        compared = largest, tolerance(folder.arch, reference), judges
        report = _report(folder, target, stage, "adapter", parameters, dtype, compared)
    say(_matching(report))
    size = f"{report.dtype}, {report.bytes / 1e6:.1f} MB"
    say(f"wrote {target}: an adapter for peft, {size}; --merge writes the whole model")
    if words := _only_ours(base):
        say(f"note: the adapter is nothing without its base, {words}")
    return report


def _only_ours(base: ModelFolder | SeededWeights) -> str:
    """What is said of a base that peft cannot open, and that an adapter would be loaded without."""
    if isinstance(base, SeededWeights):
        return "which is drawn from the seed of its run: peft has none, and --merge writes the whole"
    if base.kind == "huggingface":
        return ""
    merge = " --merge" if isinstance(base, AdaptedFolder) else ""
    return f"{base.path}, which peft cannot open: give it what meshwright convert {base.path} FOLDER{merge} writes"


def _write_native(stage: Path, folder: ModelFolder, rounded: torch.dtype | None, shard_bytes: int) -> None:
    write_arch(stage, folder.arch)
    model_folder.write(stage, _stored(folder, model_folder.native(folder.arch), rounded), shard_bytes)
    _carry(folder, stage)


def _write_huggingface(stage: Path, folder: ModelFolder, rounded: torch.dtype | None, shard_bytes: int) -> None:
    dtype = str(rounded or folder.dtype).removeprefix("torch.")
    config = config_of(folder.arch, dtype)  # refuses before anything large is written
    model_folder.write(stage, _stored(folder, model_folder.huggingface(folder.arch), rounded), shard_bytes)
    _carry(folder, stage)
    if folder.tokenizer is not None:
        end = _end_token(folder.tokenizer)
        config["eos_token_id"] = None if end is None else end.id
        if not (description := stage / "tokenizer_config.json").exists():  # the least with which AutoTokenizer opens it
            described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": folder.arch.context}
            replace_json(description, described | ({} if end is None else {"eos_token": end.content}))
    replace_json(stage / CONFIG, config)


def _stored(
    folder: ModelFolder, layout: model_folder.Layout, rounded: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    # The last parameter is kept: Mixtral stores each expert apart, and their stack should be read once.
    load = lru_cache(maxsize=1)(lambda name: folder.tensor(name).to(rounded))
    for stored in layout:
        yield stored.name, model_folder.store(stored, load)


def _carry(folder: ModelFolder, stage: Path) -> None:
    model_folder.copy_texts(folder.texts, stage)
    if folder.tokenizer is not None:  # of a saved step it is the run's
        shutil.copyfile(folder.tokenizer, stage / TOKENIZER)
    _require_template(folder, stage)


def _require_template(folder: ModelFolder, stage: Path) -> None:
    """Refuse a model of chat data whose template has been lost since it was trained: nobody could ask it anything."""
    if folder.run is None or not is_run(folder.run):
        return
    described = stage / "tokenizer_config.json"
    has_own = (stage / "chat_template.jinja").is_file() or (
        described.is_file() and "chat_template" in read_config(described)
    )
    if not has_own and run_table(folder.run / RUN).get("data", {}).get("format") == "chat":
        what = f"{folder.run} was trained on chat data, and {folder.texts} has no chat template any more"
        raise mistake(what, "put the base's chat_template.jinja or tokenizer_config.json back into it")


class AddedToken(msgspec.Struct, frozen=True):
    """A token outside the merges of a tokenizer.json."""

    id: int
    content: str


class TokenizerFile(msgspec.Struct, frozen=True):
    """What is read of a tokenizer.json."""

    added_tokens: tuple[AddedToken, ...] = ()


def _end_token(tokenizer: Path) -> AddedToken | None:
    """The token that closes a document, if it has one of the usual names."""
    try:
        added = msgspec.json.decode(tokenizer.read_bytes(), type=TokenizerFile).added_tokens
    except (*UNDECODABLE, RecursionError) as error:
        problem = Problem(f"{tokenizer} is not a tokenizer: {error}", "remove it, or copy it again")
        raise InputError([problem]) from None
    by_content = {token.content: token for token in added}
    return next((by_content[content] for content in END_TOKENS if content in by_content), None)


def _compare(
    source: ModelFolder, written: ModelFolder, rounded: torch.dtype | None, check_tokens: int
) -> tuple[float, float, str]:
    """The largest difference of the logits, how much rounding explains, and who compared."""
    tokens = probe_tokens(source.arch, check_tokens)
    reference = logits(source, tokens, rounded)
    largest = _largest(reference, logits(written, tokens))
    judges = f"meshwright in float32 on {tokens.shape[1]} tokens"
    try:
        from transformers import __version__ as version
    except ImportError:  # its own missing dependencies included
        version = None
    # Quantized matmuls of transformers want a GPU, and kernels of others.
    if version is not None and fits_memory(count(source.arch)) and not source.quantized:
        theirs = source if source.kind == "huggingface" else written
        ours = logits(theirs, tokens)  # of the same files: rounding to another dtype is not a difference
        largest = max(largest, _largest(ours, stock_logits(theirs.path, tokens)))
        judges = f"transformers {version} and {judges}"
    return largest, tolerance(source.arch, reference), judges


def _largest(left: Tensor, right: Tensor) -> float:
    difference = float((left - right).abs().max())
    return math.inf if math.isnan(difference) else difference
