"""TOML and overrides → Run, strictly; Run → TOML. Every value remembers where it came from."""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import check, schema
from meshwright.config.huggingface import FolderDescription, describe, shape_differences
from meshwright.config.presets import complete, preset_names, preset_table, unknown_preset
from meshwright.config.renamed import is_recorded, new_name, translated
from meshwright.config.run import Run
from meshwright.spec.arch import Arch
from meshwright.spec.plan import AXES, balanced_stages
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.schedule import default_chunks

_KEY = re.compile(r"""^\s*(?P<key>[A-Za-z0-9_.\-"' ]+?)\s*=""")
_TABLE = re.compile(r"^\s*\[\[?\s*(?P<table>[^\[\]]+?)\s*\]")


def dumps(table: Mapping[str, Any], remarks: Mapping[str, str] | None = None) -> str:
    """Nested plain values as TOML. A remark on a dotted key becomes the comment behind it."""
    lines = _section(table, "", remarks or {})
    return "\n".join(lines).strip() + "\n"


def _section(table: Mapping[str, Any], prefix: str, remarks: Mapping[str, str]) -> list[str]:
    lines = []
    for key, value in table.items():
        if value is None or isinstance(value, Mapping) or _is_tables(value):
            continue
        text = f"{key} = {_value(value)}"
        remark = remarks.get(prefix + key)
        lines.append(f"{text:<32}  # {remark}" if remark else text)
    for key, value in table.items():
        if isinstance(value, Mapping):
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


def lines_of(text: str) -> dict[str, int]:
    """The line of every dotted key. Good enough to point at; the parser is tomllib."""
    found: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if table := _TABLE.match(line):
            prefix = _plain(table["table"]) + "."
            found.setdefault(prefix[:-1], number)
        elif key := _KEY.match(line):
            found.setdefault(prefix + _plain(key["key"]), number)
    return found


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


Origins = dict[str, str]  # by dotted key


def resolve_arch(table: dict[str, Any], origins: Origins, *, ahead: bool = False) -> list[Problem]:
    """Complete table["arch"] in place. `ahead` of time a folder may be missing, unless the architecture is in it."""
    stated = table.get("arch", {})
    name = stated.pop("preset", None)
    if name is not None and not (isinstance(name, str) and name in preset_names()):
        return [unknown_preset(name)]
    start, problems = _described(table)
    if problems and not (ahead and (name is not None or stated)):
        return problems
    base, origin = _base(name, start, table, bool(stated))
    if not base and not stated:
        remedy = 'begin with [arch] preset = "gpt2"; `meshwright models` lists them'
        return [Problem("the run does not say what to train: arch is missing", remedy, "arch")]
    origins |= {f"arch.{key}": origin for key in base if key not in stated}
    table["arch"], derived = complete(base | stated)
    origins |= {f"arch.{key}": reason for key, reason in derived.items()}
    if start is not None and start.tokenizer is not None and "tokenizer" not in table.setdefault("data", {}):
        table["data"]["tokenizer"] = str(start.tokenizer)
        origins["data.tokenizer"] = "derived: init.from"
    return [*schema.missing(table["arch"], Arch, "arch.")]


def _base(
    name: str | None, start: FolderDescription | None, table: dict[str, Any], stated: bool
) -> tuple[dict[str, Any], str]:
    """What an architecture begins from before its own keys: a preset, or the folder whose weights it takes."""
    if name is not None:
        return preset_table(name), f"preset {name}"
    if start is not None and not stated:
        return msgspec.to_builtins(start.arch), f"folder {table['init']['from']}"
    return {}, ""


def _described(table: dict[str, Any]) -> tuple[FolderDescription | None, list[Problem]]:
    folder = table.get("init", {}).get("from", "")
    if not folder:
        return None, []
    try:
        return describe(Path(folder)), []
    except InputError as error:
        return None, [msgspec.structs.replace(problem, key="init.from") for problem in error.problems]


def init_problems(run: Run) -> list[Problem]:
    """Weights that a run begins from must fit it."""
    if not run.init.folder:
        what = "init.optimizer_state takes the optimizer state of the run in init.from, and none is named"
        return (
            [Problem(what, "name one, or leave init.optimizer_state out", "init.optimizer_state")]
            if run.init.optimizer_state
            else []
        )
    differences = shape_differences(describe(Path(run.init.folder)).arch, run.arch)
    text = f"the weights in {run.init.folder} are of another shape: {'; '.join(differences)}"
    remedy = "leave arch out to take the folder's, or begin from another folder"
    return [Problem(text, remedy, "init.from")] if differences else []


def resolve_plan(table: dict[str, Any], origins: Origins, ranks: int | None, default_ranks: int) -> None:
    """Decide what the plan leaves open: spare ranks replicate, a rank's share of the batch is one microbatch, …"""
    plan = table.setdefault("plan", {})
    axes = [plan.get(axis, 1) for axis in AXES if axis != "replicate"]
    if "replicate" not in plan:
        others = max(math.prod(axes), 1)
        world = ranks if ranks is not None else default_ranks if others == 1 else others
        plan["replicate"] = max(world // others, 1)
        origins["plan.replicate"] = "derived: ranks" if others == 1 else "derived: ranks ÷ the other axes"
    data = max(plan["replicate"] * plan.get("shard", 1), 1)
    share = max(table.get("batch", _default_of("batch")) // data, 1)
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


def _resolve_pipeline(table: dict[str, Any], plan: dict[str, Any], origins: Origins) -> None:
    if "chunks" not in plan:
        plan["chunks"] = default_chunks(plan.get("schedule", "1f1b"))
        origins["plan.chunks"] = "derived: schedule"
    if "stages" not in plan:
        arch = msgspec.convert(table["arch"], Arch)
        plan["stages"] = list(balanced_stages(arch, plan["pp"] * plan["chunks"]))
        origins["plan.stages"] = "derived: balanced"


def _default_of(name: str) -> Any:
    return next(field.default for field in msgspec.structs.fields(Run) if field.name == name)


def rank_problems(run: Run, ranks: int | None, origins: Origins) -> list[Problem]:
    """The ranks that were asked for must be the plan's."""
    if ranks is None or ranks == run.plan.world:
        return []
    plan = run.plan
    if origins.get("plan.replicate", "").startswith("derived"):
        others = [f"{axis} {getattr(plan, axis)}" for axis in AXES if axis != "replicate" and getattr(plan, axis) > 1]
        each = plan.world // plan.replicate
        some = f"{each}, {2 * each} or {3 * each}"
        return [Problem(f"{ranks} ranks are no multiple of {' × '.join(others)} = {each}", f"start {some} ranks")]
    axes = [f"{axis} {getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1] or ["replicate 1"]
    return [
        Problem(
            f"the plan needs {' × '.join(axes)} = {plan.world} ranks, not {ranks}",
            f"start {plan.world} ranks, or leave plan.replicate out",
            "plan.replicate",
        )
    ]


LARGEST_FILE = 1_000_000  # bytes; no run file written by a person comes near
DEEPEST = 16  # files that extend each other
UNSAID = "not stated"  # the origin of what a question left open


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
    found = [*_apply(overrides, table, origins), *schema.misfits(_without_preset(table))]
    for problem in found:
        _drop(table, problem.key)
    incomplete = resolve_arch(table, origins)
    found += incomplete
    loaded = None
    if not incomplete:
        resolve_plan(table, origins, ranks, default_ranks)
        run = msgspec.convert(table, Run)
        loaded = LoadedRun(run=run, origins=origins)
        found += [*rank_problems(run, ranks, origins), *init_problems(run), *check.problems(run)]
    return loaded, [placed(problem, origins) for problem in found]


def ask(file: Path | None, overrides: Iterable[str] = (), *, arch: Arch | None = None) -> OpenRun:
    """The question that a file and a command line put: the mathematics is checked, and nothing of the plan decided.

    `arch` takes the place of the file's. A folder that the weights will come from need not be there yet, where the
    architecture is stated.
    """
    table, origins = _read(file) if file else _open()
    if arch is not None:
        table["arch"] = msgspec.to_builtins(arch)
    found = [*_apply(overrides, table, origins), *schema.misfits(_without_preset(table))]
    for problem in found:
        _drop(table, problem.key)
    incomplete = resolve_arch(table, origins, ahead=True)
    if found or incomplete:
        raise InputError([placed(problem, origins) for problem in (*found, *incomplete)])
    stated = table.pop("plan", {})
    said = {name: value for name, value in stated.items() if origins.get(f"plan.{name}") == "command line"}
    run = msgspec.convert(table | {"plan": _alone(table, stated)}, Run)
    if problems := [placed(problem, origins) for problem in check.problems(run)]:
        raise InputError(problems)
    written = {name: value for name, value in stated.items() if name not in said}
    return OpenRun(run=run, in_file=written, on_command_line=said, origins=origins)


def _open() -> tuple[dict[str, Any], Origins]:
    """Where nothing is stated yet."""
    return {}, {"sequence": UNSAID, "batch": UNSAID}


def _alone(table: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """A plan of one rank, for the rules that need one."""
    batch = table.get("batch", next(field.default for field in msgspec.structs.fields(Run) if field.name == "batch"))
    optim = table.get("optim", {})
    is_narrow = optim.get("master_weights", "fp32") != "fp32" or optim.get("state_dtype", "fp32") != "fp32"
    alone = {"microbatch": batch, "precision": stated.get("precision", "bf16" if is_narrow else "fp32")}
    if "optimizer_offload" in stated:  # narrow weights stay on the device, where there are any
        alone |= {
            "optimizer_offload": stated["optimizer_offload"],
            "bf16_params": alone["precision"] in ("bf16", "fp16", "fp8"),
        }
    return alone


def _drop(table: dict[str, Any], key: str) -> None:
    """Take an unusable key out, so that the rest can still be judged."""
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(table.get(section), dict):
            last = section  # a list of tables, or a value where a table should be: the whole of it goes
            break
        table = table[section]
    table.pop(last, None)


def write(run: Run, origins: Mapping[str, str] | None = None) -> str:
    """A run as TOML, each value with its origin behind it if origins are given."""
    table = msgspec.to_builtins(run)
    remarks = {key: (origins or {}).get(key, "default") for key in schema.every_key()} if origins is not None else {}
    return dumps(table, remarks)


def _default(overrides: list[str]) -> tuple[dict[str, Any], Origins]:
    text = Path(__file__).with_name("default.toml").read_text()
    table = tomllib.loads(text)
    if any(word.startswith("init.from=") for word in overrides):
        del table["arch"]  # the folder knows what it is
    return table, dict.fromkeys(lines_of(text), "default run")


def _read(file: Path, depth: int = 0) -> tuple[dict[str, Any], Origins]:
    text = _text(file)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError([Problem(f"{file} is not TOML: {error}", "correct that line")]) from None
    origins = {key: f"{file}:{line}" for key, line in lines_of(text).items()}
    if is_recorded(file):
        table, origins = translated(table), {new_name(key) or key: where for key, where in origins.items()}
    parent = table.pop("extends", None)
    if parent is None:
        return table, origins
    if not isinstance(parent, str) or depth >= DEEPEST:
        what = (
            f"extends = {schema.shown(parent)} is not a file name"
            if depth < DEEPEST
            else "extends goes round in a circle"
        )
        raise InputError([Problem(what, "name one other run file", "extends", origins["extends"])])
    base, base_origins = _read(file.parent / parent, depth + 1)
    return _merged(base, table), base_origins | origins


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise InputError([Problem(f"{file} is larger than {LARGEST_FILE} bytes", "is it a run file?")])
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError([Problem(f"{file} is not UTF-8 text (byte {error.start})", "is it a run file?")]) from None
    except OSError as error:
        if str(file) in preset_names():
            raise InputError([Problem(f"{file} is a model, not a run file", f"write arch.preset={file}")]) from None
        raise InputError([Problem(f"{file}: {error.strerror}", "name a run file that can be read")]) from None


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in top.items():
        under = both.get(key)
        both[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return both


def _apply(overrides: Iterable[str], table: dict[str, Any], origins: Origins) -> Iterable[Problem]:
    """Put key=value words into the table; what is not such a word is a problem."""
    known = schema.every_key()
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            yield Problem(f"{word!r} is not key=value", "write overrides like plan.grad_accum=4", where="command line")
            continue
        *sections, last = key.removeprefix("--").split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                break
        if isinstance(inner, dict):
            inner[last] = _override(text, known.get(key))
            origins[key] = "command line"
        else:
            yield schema.unknown(key, list(known))


def _override(text: str, kind: Any) -> Any:
    """The value of an override: TOML where it is TOML, else the plain words."""
    if kind is str and not text.startswith(('"', "'")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _without_preset(table: dict[str, Any]) -> dict[str, Any]:
    arch = table.get("arch")
    if not isinstance(arch, dict):
        return table
    return table | {"arch": {key: value for key, value in arch.items() if key != "preset"}}


def placed(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """A problem with the place where its key was written."""
    where = problem.where
    key = problem.key
    while not where and key:
        where = origins.get(key, "")
        key = key.rpartition(".")[0]
    return msgspec.structs.replace(problem, where=where)
