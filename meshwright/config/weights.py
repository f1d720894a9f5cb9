"""Where weights are: "RUN", "RUN@300", "RUN@best", a saved step, or a model folder of ours or of Hugging Face."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.config.huggingface import (
    ARCH,
    CONFIG,
    PICKLES,
    TOKENIZER,
    a_pickle,
    arch_of,
    family_of,
    quantization,
    read_arch,
    read_config,
)
from meshwright.config.renamed import translated
from meshwright.spec.addresses import is_address, without_secret
from meshwright.spec.arch import Arch
from meshwright.spec.problem import UNDECODABLE, InputError, mistake
from meshwright.spec.tuning import Adapter

RUN, SUMMARY, RECORDS = "run.toml", "summary.json", "steps.rank0.jsonl"
CHECKPOINTS, MANIFEST, MODEL = "checkpoints", "manifest.json", "model"
ADAPTER = "adapter.json"  # beside the weights of an adapter
PEFT = "adapter_config.json"  # beside those that peft wrote
BASE = "base.json"  # in the run of an adapter: the digest of what it is trained beside
TEXT = "text"  # in a run: what the folder that it began from says of its text
STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
BEST = "best"
Kind = Literal["huggingface", "meshwright", "checkpoint"]


class AdapterNote(msgspec.Struct, frozen=True, kw_only=True):
    """Of weights that are an adapter's: what they are beside."""

    adapter: Adapter
    base: str  # the folder or the run that the frozen weights are from; "": they are made from the seed
    seed: int
    digest: str = ""  # of the base's weights; empty: not known, as of older runs, or they are made from the seed


class BaseDigest(msgspec.Struct, frozen=True, kw_only=True):
    """What a run remembers of the weights that its adapter is trained beside."""

    digest: str


class FolderDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder with weights says of itself."""

    path: Path  # where the files are: a finished run's are in its model/
    kind: Kind
    arch: Arch
    tokenizer: Path | None  # that travels with the weights, if one does
    family: str = ""  # the model_type of a Hugging Face folder
    with_pictures: bool = False  # whose text model is one part of it
    more_layers: int = 0  # of multi-token prediction, which the architecture leaves out
    quantized: str = ""  # how its weights are, if they are; read as bf16
    run: Path | None = None  # the folder of the run that the weights are from
    step: int | None = None  # of it, after which the weights were so
    note: AdapterNote | None = None  # they are an adapter, and the architecture is that of its base


def with_ahead(described: FolderDescription, layers: int) -> FolderDescription:
    """A folder with so many of its layers of multi-token prediction, as far as it says that it has them."""
    if described.kind != "huggingface" or not 0 < layers <= described.more_layers:
        return described
    arch = msgspec.structs.replace(described.arch, mtp_layers=layers)
    return msgspec.structs.replace(described, arch=arch, more_layers=described.more_layers - layers)


class ValidationLine(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a run's records here."""

    kind: str
    step: int
    loss: float | None = None  # null: not finite


def describe(reference: Path | str) -> FolderDescription:
    """The weights that a reference names.

    Of a finished run those of its model, of another its newest saved step; `RUN@300` is that step, `RUN@best` the saved
    step with the lowest validation loss.
    """
    path = Path(reference)
    folder, at, word = str(reference).rpartition("@")
    if at and not path.exists() and Path(folder).is_dir():
        if not is_run(Path(folder)):
            raise mistake(
                f"{folder} is not a run, so it has no step {word}", "leave the step out, or name a run folder"
            )
        return _of_run(Path(folder), word)
    if (path / ARCH).is_file():
        return _own_model(path)
    if (path / CONFIG).is_file():
        config = read_config(path / CONFIG)
        arch, tokenizer = arch_of(config), _file(path / TOKENIZER)
        kind = {"gemma3": "gemma3_text"}.get(family_of(config)[0], family_of(config)[0])
        how = quantization(config.get("quantization_config"))
        more = config.get("num_nextn_predict_layers")
        return FolderDescription(
            path=path,
            kind="huggingface",
            arch=arch,
            tokenizer=tokenizer,
            family=kind,
            with_pictures=kind != config["model_type"],
            more_layers=more if type(more) is int and more > 0 else 0,
            quantized=how,
        )
    whole = path.absolute()
    if (path / MANIFEST).is_file() and (found := STEP.fullmatch(whole.name)) and is_run(run := whole.parents[1]):
        return _checkpoint(run, int(found[1]))
    if is_run(path):
        return _of_run(path, "")
    if (model := _model(path)) is not None:
        return model
    raise _no_weights(str(reference), folder if at else str(path))


def _no_weights(reference: str, folder: str) -> InputError:
    """Why a reference names no weights; `folder` is what of it would be one."""
    if is_address(reference):
        shown = without_secret(reference)
        what = f"{shown} is an address, and weights are read from a disk"
        return mistake(what, f"fetch them first: meshwright convert {shown} FOLDER")
    if Path(reference).suffix in PICKLES:
        return InputError([a_pickle(Path(reference))])
    if (Path(reference) / PEFT).is_file():
        what = f"{Path(reference)} is an adapter as peft has it, and no whole model"
        remedy = "of a run of yours name the run, or write the whole model by meshwright convert RUN OUT --merge"
        return mistake(what, f"{remedy}; else merge it by peft's merge_and_unload(), and save that")
    what = f"{Path(reference)} holds neither {CONFIG} nor {ARCH}"
    if not Path(reference).is_dir():
        what = f"{folder} is not a folder"
    return mistake(what, "give the folder of a Hugging Face model, or of a run (RUN, RUN@STEP, RUN@best)")


def _own_model(path: Path) -> FolderDescription:
    run = path.parent if path.name else path.absolute().parent
    return FolderDescription(
        path=path,
        kind="meshwright",
        arch=read_arch(path / ARCH),
        tokenizer=_file(path / TOKENIZER),
        run=run if path.absolute().name == MODEL and is_run(run) else None,
        note=_note(path / ADAPTER),
    )


def _note(file: Path) -> AdapterNote | None:
    """What lies beside the weights of an adapter."""
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=AdapterNote)
    except (OSError, *UNDECODABLE) as error:
        raise mistake(
            f"{file} cannot be read: {error}", "copy the folder again, or convert a step of its run"
        ) from None


def note_of(run: Mapping[str, Any], folder: Path) -> AdapterNote | None:
    """The same of a run, from its run file and what its folder remembers of the base."""
    adapter = msgspec.convert(run.get("adapter", {}), Adapter)
    base = run.get("init", {}).get("from", "")
    base = str(Path(base).absolute()) if base else ""  # as a model is opened from anywhere
    seed = run.get("seed", 1)
    if adapter.kind == "none":
        return None
    digest = ""
    with suppress(OSError, *UNDECODABLE):
        digest = msgspec.json.decode((folder / BASE).read_bytes(), type=BaseDigest).digest
    return AdapterNote(adapter=adapter, base=base, seed=seed, digest=digest)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return (folder / RUN).is_file()


def step_name(step: int) -> str:
    """The folder of a saved step."""
    return f"step-{step}"


def present(home: Path) -> list[int]:
    """The steps that have a folder, oldest first; whether they are whole is another question."""
    if not home.is_dir():
        return []
    return sorted(int(found[1]) for entry in home.iterdir() if (found := STEP.fullmatch(entry.name)))


def best_step(run: Path, steps: Iterable[int]) -> int | None:
    """Of some steps the one with the lowest validation loss by the run's own records, None where none has one."""
    losses: dict[int, float] = {}
    with suppress(FileNotFoundError), open(run / RECORDS, "rb") as lines:
        for line in lines:
            if b'"held"' in line and line.endswith(b"}\n"):
                with suppress(*UNDECODABLE):
                    one = msgspec.json.decode(line, type=ValidationLine)
                    losses[one.step] = math.inf if one.loss is None else one.loss  # the last is of a step's weights
    known = [step for step in steps if losses.get(step, math.inf) < math.inf]
    return min(known, key=lambda step: losses[step], default=None)


def _of_run(run: Path, word: str) -> FolderDescription:
    """The weights of a run: after the step that a word names, or its last ones."""
    steps, model = present(run / CHECKPOINTS), _model(run)
    last = None if model is None else model.step
    if not word:
        # A model without a summary is that of a run which has gone on since.
        if model is not None and (last is not None or not steps):
            return model
        if not steps:
            what = f"{run} is a run that has no weights yet"
            raise mistake(what, "wait for its first checkpoint (checkpoint.every), or for its end")
        return _checkpoint(run, steps[-1])
    if word == BEST:
        if (step := best_step(run, steps)) is None:
            what = f"no saved step of {run} has a validation loss ({_listed(steps, last)})"
            raise mistake(
                what, "name a step as RUN@STEP; checkpoint.every as a multiple of eval.every saves such steps"
            )
        return _checkpoint(run, step)
    if word.isdecimal() and int(word) in steps:
        return _checkpoint(run, int(word))
    if model is not None and word == str(last):
        return model
    what = f"{run} has no step {word}" if word.isdecimal() else f"{word!r} is not a step of {run}"
    raise mistake(f"{what}: {_listed(steps, last)}", "name one of them, or best, or leave it out for the newest")


def _listed(steps: list[int], last: int | None) -> str:
    there = [str(step) for step in steps] + ([f"{last} (its model)"] if last is not None and last not in steps else [])
    return f"saved are {', '.join(there)}" if there else "none is saved"


def _checkpoint(run: Path, step: int) -> FolderDescription:
    table = run_table(run / RUN)
    try:
        arch, note = msgspec.convert(table.get("arch"), Arch), note_of(table, run)
    except msgspec.ValidationError as error:
        raise mistake(f"{run / RUN}: {error}", "give the folder of a run, with its own run.toml") from None
    named = Path(str(table.get("data", {}).get("tokenizer", "")))
    places = (run / TOKENIZER, run / MODEL / TOKENIZER, named / TOKENIZER, named)
    return FolderDescription(
        path=run / CHECKPOINTS / step_name(step),
        kind="checkpoint",
        arch=arch,
        tokenizer=next(filter(None, map(_file, places)), None),
        run=run,
        step=step,
        note=note,
    )


def _model(run: Path) -> FolderDescription | None:
    """What a run has left at its end, with the step that its summary says."""
    if not (run / MODEL / ARCH).is_file():
        return None
    step = None
    with suppress(InputError):  # no summary: the run goes on
        step = read_config(run / SUMMARY).get("step")
    return msgspec.structs.replace(describe(run / MODEL), run=run, step=step)


def run_table(file: Path) -> dict[str, Any]:
    """What a run.toml states, by the keys of today."""
    try:
        return translated(tomllib.loads(file.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise mistake(f"{file} cannot be read: {error}", "give the folder of a run, with its own run.toml") from None


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None
