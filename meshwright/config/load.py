"""TOML and overrides → Run, strictly; Run → TOML. Every value remembers where it came from.

A file (and those it extends), then the command line, make one nested table of what was stated. Keys and values are
checked by the schema, `[arch]` and `[plan]` completed, and the rules between fields asked; problems are collected.
"""

import json
import math
import re
import tomllib
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import check, schema
from meshwright.config.huggingface import shape_differences
from meshwright.config.presets import complete, nearest_preset, preset, preset_names, preset_table, unknown_preset
from meshwright.config.renamed import is_recorded, new_name, translated
from meshwright.config.rules.arch import endless
from meshwright.config.run import Run
from meshwright.config.weights import describe, with_ahead
from meshwright.spec.arch import Arch
from meshwright.spec.communication import warm_up_steps
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.plan import AXES, balanced_stages
from meshwright.spec.problem import InputError, Problem, mistake
from meshwright.spec.schedule import default_chunks
from meshwright.spec.units import plural

LARGEST_FILE = 1_000_000  # bytes; no run file written by a person comes near
DEEPEST = 16  # files that extend each other
UNSAID = "not stated"  # the origin of what a question left open
OWN_DATA = ("data.source", "data.mix", "init.from")  # stated: the text is not the default run's
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Run)}
DEFAULT_BATCH, DEFAULT_SEQUENCE = _DEFAULTS["batch"], _DEFAULTS["sequence"]
FROM_EPOCHS = "of epochs, once the data is read"
WARMUP = 22  # of so many steps one warms up, as in the default run
_KEY = re.compile(r"""^\s*(?P<key>[A-Za-z0-9_.\-"' ]+?)\s*=""")
_TABLE = re.compile(r"^\s*\[\[?\s*(?P<table>[^\[\]]+?)\s*\]")

Table = dict[str, Any]  # a run file as tomllib reads it
Origins = dict[str, str]  # by dotted key


class LoadedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run and the origin of each of its values, by dotted key."""

    run: Run
    origins: Origins


class OpenRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose plan is still to be found, and the fields of a plan that were stated, by where they were."""

    run: Run  # with a plan of one rank in place of the one to be found
    in_file: dict[str, Any]
    on_command_line: dict[str, Any]
    origins: Origins


def load(
    file: Path | None, overrides: Iterable[str] = (), *, ranks: int | None = None, default_ranks: int = 1
) -> LoadedRun:
    """The run that a file and a command line describe; without a file, the default run.

    `ranks` is what the user asked for, `default_ranks` what a plan without axes uses.
    """
    loaded, problems = examine(file, overrides, ranks=ranks, default_ranks=default_ranks)
    if loaded is None or problems:
        raise InputError(problems)
    return loaded


def examine(
    file: Path | None, overrides: Iterable[str] = (), *, ranks: int | None = None, default_ranks: int = 1
) -> tuple[LoadedRun | None, list[Problem]]:
    """Like `load`, but with all problems as values: the run without its unusable keys goes on to the other rules."""
    overrides = list(overrides)
    table, origins = _read(file) if file else _default(overrides)
    found = _override(table, origins, overrides)
    if file is None:
        _fit_to_own_text(table, origins)
    resolve_optim(table, origins)
    resolve_data(table, origins)
    found += [*_length_problems(table, origins, file), *_adapter_problems(table, found)]
    is_arch_wrong = any(problem.key == "arch" for problem in found)
    incomplete = [] if is_arch_wrong else resolve_arch(table, origins)
    found += incomplete
    loaded = None
    if not incomplete and not is_arch_wrong:
        resolve_plan(table, origins, ranks, default_ranks)
        run = msgspec.convert(table, Run)
        loaded = LoadedRun(run=run, origins=origins)
        unusable = [problem.key for problem in found if problem.key]
        broken = [*_rank_problems(run, ranks, origins), *_init_problems(run), *_warmup_problems(run, origins)]
        broken += check.problems(run)
        found += [problem for problem in broken if not _supposes(problem, unusable)]
    return loaded, [placed(problem, origins) for problem in found]


def _supposes(problem: Problem, unusable: list[str]) -> bool:
    """Whether a broken rule speaks of a value that nobody stated: the default in the place of one that was refused."""
    return any(f"{key} = " in problem.text for key in unusable)


def ask(file: Path | None, overrides: Iterable[str] = (), *, arch: Arch | None = None) -> OpenRun:
    """The question that a file and a command line put: the mathematics is checked, and nothing of the plan decided.

    `arch` takes the place of the file's. A folder that the weights will come from need not be there yet, where the
    architecture is stated.
    """
    table, origins = _read(file) if file else ({}, {"sequence": UNSAID, "batch": UNSAID})
    if arch is not None:
        table["arch"] = msgspec.to_builtins(arch)
    found = _override(table, origins, overrides)
    resolve_optim(table, origins)
    resolve_data(table, origins)
    found += [*_length_problems(table, origins, file), *_adapter_problems(table, found)]
    found += resolve_arch(table, origins, ahead=True)
    if found:
        raise InputError([placed(problem, origins) for problem in found])
    if origins.get("sequence") == UNSAID:  # learned positions may be fewer than the default's
        table["sequence"] = min(DEFAULT_SEQUENCE, table["arch"]["context"])
    stated = table.pop("plan", {})
    run = msgspec.convert(table | {"plan": _single_rank_plan(table, stated)}, Run)
    if problems := [placed(problem, origins) for problem in check.problems(run, decided=False)]:
        raise InputError(problems)
    overridden = {name: value for name, value in stated.items() if origins.get(f"plan.{name}") == "command line"}
    written = {name: value for name, value in stated.items() if name not in overridden}
    return OpenRun(run=run, in_file=written, on_command_line=overridden, origins=origins)


def placed(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """A problem with the place where its key was written."""
    where = problem.where
    key = problem.key
    while not where and key:
        where = origins.get(key, "")
        key = key.rpartition(".")[0]
    return msgspec.structs.replace(problem, where=where)


def write(run: Run, origins: Mapping[str, str] | None = None) -> str:
    """A run as TOML, each value with its origin behind it if origins are given."""
    remarks = {} if origins is None else {key: origins.get(key, "default") for key in schema.every_key()}
    return "\n".join(_section(msgspec.to_builtins(run), "", remarks)).strip() + "\n"


def write_brief(run: Run, named: Collection[str]) -> str:
    """A run as a person writes it: named keys, and what differs from the defaults; a preset by its name."""
    table = _unusual(run, "", named)
    arch = msgspec.structs.replace(run.arch, tuning=msgspec.UNSET)
    if (name := next((each for each in preset_names() if preset(each) == arch), None)) is not None:
        table["arch"] = {"preset": name}
    if run.epochs:  # which become steps when the data is read
        table.pop("steps", None)
    return "\n".join(_section(table, "", {})).strip() + "\n"


def _unusual(struct: msgspec.Struct, prefix: str, named: Collection[str]) -> Table:
    found: Table = {}
    for field in schema.stated_fields(type(struct)):
        value, key = getattr(struct, field.name), prefix + field.encode_name
        if isinstance(value, msgspec.Struct):
            inner = _unusual(value, f"{key}.", named)
            found |= {field.encode_name: inner} if inner else {}
        elif key in named or value != field.default:
            found[field.encode_name] = msgspec.to_builtins(value)
    return found


def _section(table: Mapping[str, Any], prefix: str, remarks: Mapping[str, str]) -> list[str]:
    lines = []
    for key, value in table.items():
        if value is None or isinstance(value, Mapping) or _is_tables(value):
            continue
        text = f"{key} = {_value(value)}"
        remark = remarks.get(prefix + key)
        lines.append(f"{text:<32}  # {remark}" if remark else text)
    for key, value in table.items():
        if isinstance(value, Mapping) and key not in schema.DERIVED:
            lines += ["", f"[{prefix}{key}]", *_section(value, f"{prefix}{key}.", remarks)]
        elif _is_tables(value):
            for entry in value:
                lines += ["", f"[[{prefix}{key}]]", *_section(entry, f"{prefix}{key}.", remarks)]
    return lines


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[" + ", ".join(_value(entry) for entry in value) + "]"


def _default(overrides: list[str]) -> tuple[Table, Origins]:
    text = Path(__file__).with_name("default.toml").read_text()
    table = tomllib.loads(text)
    if any(word.startswith("init.from=") for word in overrides):
        del table["arch"]  # the folder knows what it is
    return table, dict.fromkeys(_lines(text), "default run")


def usual_warmup(steps: int) -> int:
    """The warm-up of a run of somebody's own text, if nobody says."""
    return max(steps // WARMUP, 0)


def _fit_to_own_text(table: Table, origins: Origins) -> None:
    """Of the default run, take away what was chosen for its own text: the sample's prompt, and the warm-up's length."""
    if all(origins.get(key) != "command line" for key in OWN_DATA) or table.get("data", {}).get("source") == "stdlib":
        return
    if origins.get("eval.prompt") == "default run":
        del table["eval"]["prompt"], origins["eval.prompt"]
    if origins.get("optim.warmup") == "default run":
        table["optim"]["warmup"] = usual_warmup(table.get("steps", 0))
        origins["optim.warmup"] = f"derived: steps ÷ {WARMUP}"


def _read(file: Path, depth: int = 0) -> tuple[Table, Origins]:
    text = _text(file)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        remedy = _toml_remedy(text, str(error))
        if file.suffix != ".toml":
            remedy = f"a run file is TOML, as in docs/run-file.md; if it is text to train on, write data.source={file}"
        raise mistake(f"{file} is not TOML: {error}", remedy) from None
    origins = {key: f"{file}:{line}" for key, line in _lines(text).items()}
    if is_recorded(file):
        table, origins = translated(table), {new_name(key) or key: where for key, where in origins.items()}
    parent = table.pop("extends", None)
    if parent is None:
        return table, origins
    if not isinstance(parent, str) or depth >= DEEPEST:
        not_a_name = f"extends = {schema.shown(parent)} is not a file name"
        what = not_a_name if depth < DEEPEST else "extends goes round in a circle"
        raise InputError([Problem(what, "name one other run file", "extends", origins["extends"])])
    base, base_origins = _read(file.parent / parent, depth + 1)
    return _merged(base, table), base_origins | origins


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise mistake(f"{file} is larger than {LARGEST_FILE} bytes", "is it a run file?")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise mistake(f"{file} is not UTF-8 text (byte {error.start})", "is it a run file?") from None
    except OSError as error:
        if str(file) in preset_names():
            raise mistake(f"{file} is a model, not a run file", f"write arch.preset={file}") from None
        if key := schema.meant(re.split("[: ]", str(file))[0]):
            raise mistake(f"{file} is not a file", f"write settings as key=value: {key}=…") from None
        if file.suffix != ".toml" and not file.exists() and (near := nearest_preset(str(file))):
            raise mistake(
                f"{file} is neither a run file nor a model", f"for the model write arch.preset={near}"
            ) from None
        inside = f"; for the text in it write data.source={file}, for the model in it init.from={file}"
        remedy = f"name a run file that can be read{inside if file.is_dir() else ''}"
        raise mistake(f"{file}: {error.strerror}", remedy) from None


def _toml_remedy(text: str, error: str) -> str:
    """What to write on the line that the parser stopped at."""
    place, lines = re.search(r"line (\d+)", error), text.splitlines()
    line = lines[int(place[1]) - 1].strip() if place and int(place[1]) <= len(lines) else ""
    value = line.partition("=")[2].partition("#")[0].strip()
    if value.lower() in ("true", "false"):
        return f"write {value.lower()} for {value}"
    if re.fullmatch(r"[A-Za-z_./*][\w./*-]*", value):
        return f'write strings in quotes: "{value}"'
    return f"correct that line: {line}" if line else "correct that line"


def _lines(text: str) -> dict[str, int]:
    """The line of every dotted key. Good enough to point at; the parser is tomllib."""
    found: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if table := _TABLE.match(line):
            prefix = _plain(table["table"]) + "."
            found.setdefault(prefix[:-1], number)
        elif key := _KEY.match(line):
            parts = (prefix + _plain(key["key"])).split(".")
            for depth in range(1, len(parts) + 1):  # a dotted key begins its tables too
                found.setdefault(".".join(parts[:depth]), number)
    return found


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _merged(base: Table, top: Table) -> Table:
    both = dict(base)
    for key, value in top.items():
        under = both.get(key)
        both[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return both


def _override(table: Table, origins: Origins, overrides: Iterable[str]) -> list[Problem]:
    """Put key=value words into a table, and take out what no run has, so that the rest can still be checked."""
    found = [*_apply(overrides, table, origins)]
    arch = table.get("arch")
    without_preset = {key: value for key, value in arch.items() if key != "preset"} if isinstance(arch, dict) else arch
    found += schema.misfits(table if arch is None else table | {"arch": without_preset})
    for problem in found:
        _drop(table, problem.key)
    return found


def _apply(overrides: Iterable[str], table: Table, origins: Origins) -> Iterator[Problem]:
    """Put key=value words into the table; what is not such a word is a problem."""
    known = schema.every_key()
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            remedy = "write overrides like plan.grad_accum=4"
            remedy = f"write --cluster {word}" if re.fullmatch(r"\d+x\w[\w.-]*", word) else remedy
            yield Problem(f"{word!r} is not key=value", remedy, where="command line")
            continue
        *sections, last = key.removeprefix("--").split(".")
        inner = table
        for depth, section in enumerate(sections, start=1):
            inner = inner.setdefault(section, {})
            if (name := ".".join(sections[:depth])) not in known:  # a table that no run has is a problem as a whole
                origins.setdefault(name, "command line")
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict):
            yield schema.unknown(key, list(known))
            continue
        origins[key] = "command line"
        inner[last] = _worth(text, known.get(key))


def _worth(text: str, kind: Any) -> Any:
    """The value of a key=value word: TOML, a plain word as it is, True as Python writes it, and a list without []."""
    if kind is str and not text.startswith(('"', "'")):
        return text
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    is_list = typing.get_origin(kind) is tuple and not text.startswith("[")
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"value = [{text}]" if is_list else f"value = {text}")["value"]
    return [word.strip() for word in text.split(",")] if is_list else text


def _drop(table: Table, key: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(table.get(section), dict):
            last = section  # a list of tables, or a value where a table should be: the whole of it goes
            break
        table = table[section]
    table.pop(last, None)


def resolve_optim(table: Table, origins: Origins) -> None:
    """Complete table["optim"] in place by what is usual for the optimizer it names."""
    stated = table.get("optim", {})
    spec = OPTIMIZERS.get(stated.get("name", "")) if isinstance(stated, dict) else None
    if spec is None:
        return
    usual = dict(spec.defaults)
    if spec.compresses and isinstance(steps := table.get("steps", _DEFAULTS["steps"]), int):
        usual["freeze_step"] = warm_up_steps(steps)
    for key, value in usual.items():
        if key not in stated or (key == "freeze_step" and stated[key] == 0):
            stated[key], origins[f"optim.{key}"] = value, f"usual for {spec.label}"


def resolve_data(table: Table, origins: Origins) -> None:
    """Complete table["data"] in place: conversations are packed unless the run says otherwise."""
    data = table.get("data", {})
    if any(each.get("format") == "chat" for each in (data, *data.get("mix", ()))) and "pack" not in data:
        data["pack"], origins["data.pack"] = "best_fit", "usual for chat"
    if table.get("epochs") and origins.get("steps", "default run") == "default run":
        origins["steps"] = FROM_EPOCHS


def _length_problems(table: Table, origins: Origins, file: Path | None) -> list[Problem]:
    """Steps or epochs: of a run that has begun, epochs have become steps."""
    if not table.get("epochs") or "steps" not in table or (file is not None and is_recorded(file)):
        return []
    if origins.get("steps") == FROM_EPOCHS:
        return []
    what = f"steps = {table['steps']} and epochs = {table['epochs']} both say how long the run is"
    return [Problem(what, "leave one of them out", "epochs")]


def _adapter_problems(table: Table, found: list[Problem]) -> list[Problem]:
    """Numbers of an adapter that nobody asked for: every weight would be trained. They are taken out once said."""
    stated = table.get("adapter", {})
    if not stated or "kind" in stated or any(problem.key.startswith("adapter.") for problem in found):
        return []
    del table["adapter"]
    names = " and ".join(f"adapter.{name}" for name in stated)
    what = f"{names} without adapter.kind: all weights would be trained"
    return [
        Problem(
            what,
            'add adapter.kind = "lora", "dora" or "qlora", or leave [adapter] out',
            f"adapter.{next(iter(stated))}",
        )
    ]


def resolve_arch(table: Table, origins: Origins, *, ahead: bool = False) -> list[Problem]:
    """Complete table["arch"] in place. `ahead` of time a folder may be missing, unless the architecture is in it."""
    stated = table.get("arch", {})
    name = stated.pop("preset", None)
    if name is not None and not (isinstance(name, str) and name in preset_names()):
        return [unknown_preset(name)]
    folder, start = table.get("init", {}).get("from", ""), None
    try:
        start = describe(folder) if folder else None
    except InputError as error:
        if not (ahead and (name is not None or stated)):
            return [msgspec.structs.replace(problem, key="init.from") for problem in error.problems]
    base, origin = {}, ""  # what an architecture begins from before its own keys: a preset, or the folder of weights
    if name is not None:
        base, origin = preset_table(name), f"preset {name}"
    elif start is not None and schema.missing(complete(dict(stated))[0], Arch, "arch."):  # some keys, or none
        base, origin = msgspec.to_builtins(start.arch), f"folder {folder}"
    if not base and not stated:
        remedy = 'begin with [arch] preset = "gpt2"; `meshwright models` lists them'
        return [Problem("the run does not say what to train: arch is missing", remedy, "arch")]
    origins |= {f"arch.{key}": origin for key in base if key not in stated}
    table["arch"], derived = complete(base | stated)
    origins |= {f"arch.{key}": reason for key, reason in derived.items()}
    if start is not None and start.tokenizer is not None and "tokenizer" not in table.setdefault("data", {}):
        table["data"]["tokenizer"] = str(start.tokenizer)
        origins["data.tokenizer"] = "derived: init.from"
    counts = (table["arch"].get(name, 0) for name in ("layers", "experts"))
    return [*schema.missing(table["arch"], Arch, "arch."), *endless(*counts)]


def resolve_plan(table: Table, origins: Origins, ranks: int | None, default_ranks: int) -> None:
    """Decide what the plan leaves open: spare ranks replicate, a rank's share of the batch is one microbatch, …"""
    plan = table.setdefault("plan", {})
    axes = [plan.get(axis, 1) for axis in AXES if axis != "replicate"]
    if "replicate" not in plan:
        others = max(math.prod(axes), 1)
        world = ranks if ranks is not None else default_ranks if others == 1 else others
        plan["replicate"] = max(world // others, 1)
        origins["plan.replicate"] = "derived: ranks" if others == 1 else "derived: ranks ÷ the other axes"
    data = max(plan["replicate"] * plan.get("shard", 1), 1)
    share = max(table.get("batch", DEFAULT_BATCH) // data, 1)
    if "microbatch" not in plan:
        plan["microbatch"] = max(share // max(plan.get("grad_accum", 1), 1), 1)
        origins["plan.microbatch"] = "derived: batch ÷ data ranks ÷ grad_accum"
    elif "grad_accum" not in plan:
        plan["grad_accum"] = max(share // max(plan["microbatch"], 1), 1)
        origins["plan.grad_accum"] = "derived: batch ÷ data ranks ÷ microbatch"
    if plan.get("pp", 1) > 1:
        _resolve_pipeline(table, plan, origins)
    alone = math.prod([plan["replicate"], *axes]) == 1
    alone = alone and not plan.get("deterministic", False) and not plan.get("cpu_offload", False)
    if "bf16_params" not in plan and alone and plan.get("precision") in ("bf16", "fp16", "fp8"):
        plan["bf16_params"] = True
        origins["plan.bf16_params"] = "derived: one rank in low precision"


def _resolve_pipeline(table: Table, plan: dict[str, Any], origins: Origins) -> None:
    if "chunks" not in plan:
        plan["chunks"] = default_chunks(plan.get("schedule", "1f1b"))
        origins["plan.chunks"] = "derived: schedule"
    if "stages" not in plan:
        arch = msgspec.convert(table["arch"], Arch)
        plan["stages"] = list(balanced_stages(arch, min(plan["pp"] * plan["chunks"], arch.blocks + 1)))
        origins["plan.stages"] = "derived: balanced"


def _single_rank_plan(table: Table, stated: dict[str, Any]) -> dict[str, Any]:
    """A plan of one rank, for the rules that need one."""
    optim = table.get("optim", {})
    is_bf16 = optim.get("master_weights", "fp32") != "fp32" or optim.get("state_dtype") == "bf16"
    precision = stated.get("precision", "bf16" if is_bf16 else "fp32")
    plan = {"microbatch": table.get("batch", DEFAULT_BATCH), "precision": precision}
    if "optimizer_offload" in stated:  # a low-precision copy stays on the device, where there is one
        plan["optimizer_offload"] = stated["optimizer_offload"]
        plan["bf16_params"] = precision in ("bf16", "fp16", "fp8")
    return plan


def _warmup_problems(run: Run, origins: Origins) -> list[Problem]:
    """A warm-up is longer than the run by mistake where it is said beside it; a file's may be tried for a few steps."""
    if origins.get("optim.warmup") != "command line" or run.epochs or run.optim.warmup < run.steps:
        return []
    what = f"optim.warmup = {run.optim.warmup} is not shorter than the run, whose steps = {run.steps}"
    return [Problem(what, f"use at most {run.steps - 1}, or more steps", "optim.warmup")]


def _init_problems(run: Run) -> list[Problem]:
    """Weights that a run begins from must fit it."""
    if not run.init.folder:
        what = "init.optimizer_state takes the optimizer state of the run in init.from, and none is named"
        found = Problem(what, "name one, or leave init.optimizer_state out", "init.optimizer_state")
        return [found] if run.init.optimizer_state else []
    described = with_ahead(describe(run.init.folder), run.arch.mtp_layers)
    differences = shape_differences(described.arch, run.arch)
    text = f"the weights in {run.init.folder} are of another shape: {'; '.join(differences)}"
    remedy = "leave arch out to take the folder's, or begin from another folder"
    return [Problem(text, remedy, "init.from")] if differences else []


def _rank_problems(run: Run, ranks: int | None, origins: Origins) -> list[Problem]:
    """The ranks that were asked for must be the plan's."""
    plan = run.plan
    if ranks is None or ranks == plan.world:
        return []
    used = {axis: f"{axis} {getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1}
    if origins.get("plan.replicate", "").startswith("derived"):
        others = " × ".join(text for axis, text in used.items() if axis != "replicate")
        each = plan.world // plan.replicate
        some = f"{each}, {2 * each} or {3 * each}"
        return [
            Problem(
                f"{plural(ranks, 'rank')} {'is' if ranks == 1 else 'are'} no multiple of {others} = {each}",
                f"start {some} ranks",
            )
        ]
    what = f"the plan needs {' × '.join(used.values()) or 'replicate 1'} = {plural(plan.world, 'rank')}, not {ranks}"
    return [Problem(what, f"start {plural(plan.world, 'rank')}, or leave plan.replicate out", "plan.replicate")]
