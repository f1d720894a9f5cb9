"""Deciding what a run file leaves open: the architecture from a preset or a folder, the plan from ranks and batch."""

import math
from pathlib import Path
from typing import Any

import msgspec

from meshwright.spec import schema
from meshwright.spec.arch import Arch
from meshwright.spec.check import InputError, Problem
from meshwright.spec.folder import Described, describe, shape_differences
from meshwright.spec.plan import AXES
from meshwright.spec.run import Run
from meshwright.spec.schedule import default_chunks
from meshwright.spec.stages import balanced_stages
from meshwright.spec.zoo import complete, preset_names, preset_table, unknown_preset

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


def _base(name: str | None, start: Described | None, table: dict[str, Any], stated: bool) -> tuple[dict[str, Any], str]:
    """What an architecture begins from before its own keys: a preset, or the folder whose weights it takes."""
    if name is not None:
        return preset_table(name), f"preset {name}"
    if start is not None and not stated:
        return msgspec.to_builtins(start.arch), f"folder {table['init']['from']}"
    return {}, ""


def _described(table: dict[str, Any]) -> tuple[Described | None, list[Problem]]:
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
        what = "init.moments takes the moments of the run in init.from, and none is named"
        return [Problem(what, "name one, or leave init.moments out", "init.moments")] if run.init.moments else []
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
        plan["microbatch"] = max(share // max(plan.get("accumulate", 1), 1), 1)
        origins["plan.microbatch"] = "derived: batch ÷ data ranks ÷ accumulate"
    elif "accumulate" not in plan:
        plan["accumulate"] = max(share // max(plan["microbatch"], 1), 1)
        origins["plan.accumulate"] = "derived: batch ÷ data ranks ÷ microbatch"
    if plan.get("pp", 1) > 1:
        _resolve_pipeline(table, plan, origins)
    alone = math.prod([plan["replicate"], *axes]) == 1
    alone = alone and not plan.get("deterministic", False) and not plan.get("offload_weights", False)
    if "shadow" not in plan and alone and plan.get("precision") in ("bf16", "fp16", "fp8"):
        plan["shadow"] = True
        origins["plan.shadow"] = "derived: one rank in low precision"


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
