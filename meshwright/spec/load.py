"""TOML and overrides → Run, strictly; Run → TOML. Every value remembers where it came from."""

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from meshwright.spec import check, resolve, schema, toml
from meshwright.spec.arch import Arch
from meshwright.spec.check import InputError, Problem
from meshwright.spec.resolve import Origins
from meshwright.spec.run import Run
from meshwright.spec.zoo import preset_names

LARGEST_FILE = 1_000_000  # bytes; no run file written by a person comes near
DEEPEST = 16  # files that extend each other
UNSAID = "not stated"  # the origin of what a question left open


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A run and the origin of each of its values, by dotted key."""

    run: Run
    origins: Origins


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose plan is still to be found, and the fields of a plan that were stated, by where they were."""

    run: Run  # with a plan of one rank in place of the one to be found
    in_file: dict[str, Any]
    on_command_line: dict[str, Any]
    origins: Origins


def load(
    file: Path | None, overrides: Iterable[str] = (), *, ranks: int | None = None, default_ranks: int = 1
) -> Loaded:
    """The run that a file and a command line describe; without a file, the default run.

    `ranks` is what the user asked for, `default_ranks` what a plan without axes uses.
    """
    loaded, problems = examine(file, overrides, ranks=ranks, default_ranks=default_ranks)
    if loaded is None or problems:
        raise InputError(problems)
    return loaded


def examine(
    file: Path | None, overrides: Iterable[str] = (), *, ranks: int | None = None, default_ranks: int = 1
) -> tuple[Loaded | None, list[Problem]]:
    """Like `load`, but with all problems as values: the run without its unusable keys goes on to the other rules."""
    overrides = list(overrides)
    table, origins = _read(file) if file else _default(overrides)
    found = [*_apply(overrides, table, origins), *schema.misfits(_without_preset(table))]
    for problem in found:
        _drop(table, problem.key)
    incomplete = resolve.resolve_arch(table, origins)
    found += incomplete
    loaded = None
    if not incomplete:
        resolve.resolve_plan(table, origins, ranks, default_ranks)
        run = msgspec.convert(table, Run)
        loaded = Loaded(run=run, origins=origins)
        found += [*resolve.rank_problems(run, ranks, origins), *resolve.init_problems(run), *check.problems(run)]
    return loaded, [placed(problem, origins) for problem in found]


def ask(file: Path | None, overrides: Iterable[str] = (), *, arch: Arch | None = None) -> Asked:
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
    incomplete = resolve.resolve_arch(table, origins, ahead=True)
    if found or incomplete:
        raise InputError([placed(problem, origins) for problem in (*found, *incomplete)])
    stated = table.pop("plan", {})
    said = {name: value for name, value in stated.items() if origins.get(f"plan.{name}") == "command line"}
    run = msgspec.convert(table | {"plan": _alone(table, stated)}, Run)
    if problems := [placed(problem, origins) for problem in check.problems(run)]:
        raise InputError(problems)
    written = {name: value for name, value in stated.items() if name not in said}
    return Asked(run=run, in_file=written, on_command_line=said, origins=origins)


def _open() -> tuple[dict[str, Any], Origins]:
    """Where nothing is stated yet."""
    return {}, {"sequence": UNSAID, "batch": UNSAID}


def _alone(table: dict[str, Any], stated: dict[str, Any]) -> dict[str, Any]:
    """A plan of one rank, for the rules that need one."""
    batch = table.get("batch", next(field.default for field in msgspec.structs.fields(Run) if field.name == "batch"))
    optim = table.get("optim", {})
    is_narrow = optim.get("rounding", "master") != "master" or optim.get("states", "fp32") != "fp32"
    alone = {"microbatch": batch, "precision": stated.get("precision", "bf16" if is_narrow else "fp32")}
    if "offload" in stated:  # narrow weights stay on the device, where there are any
        alone |= {"offload": stated["offload"], "shadow": alone["precision"] in ("bf16", "fp16", "fp8")}
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
    return toml.dumps(table, remarks)


def _default(overrides: list[str]) -> tuple[dict[str, Any], Origins]:
    text = (resources.files("meshwright.spec") / "default.toml").read_text()
    table = tomllib.loads(text)
    if any(word.startswith("init.from=") for word in overrides):
        del table["arch"]  # the folder knows what it is
    return table, dict.fromkeys(toml.lines_of(text), "default run")


def _read(file: Path, depth: int = 0) -> tuple[dict[str, Any], Origins]:
    text = _text(file)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError([Problem(f"{file} is not TOML: {error}", "correct that line")]) from None
    origins = {key: f"{file}:{line}" for key, line in toml.lines_of(text).items()}
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
            yield Problem(f"{word!r} is not key=value", "write overrides like plan.accumulate=4", where="command line")
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
