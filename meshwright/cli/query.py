"""From the words of `meshwright plan` to a question: whose model, how long, how many, on what."""

import argparse
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli import options as words
from meshwright.config import load, presets
from meshwright.config.huggingface import ARCH, CONFIG, arch_of, arch_problems, decoder_like, read_config
from meshwright.config.load import OpenRun
from meshwright.config.run import Goal, Run
from meshwright.config.weights import describe
from meshwright.cost.calibrate import measured
from meshwright.hardware.cluster import Cluster, cluster
from meshwright.hardware.profile import read_profile
from meshwright.hardware.stacks import stack_of
from meshwright.runtime import run_folder
from meshwright.search.question import Question, Vary
from meshwright.spec.arch import Arch
from meshwright.spec.optimizers import description_of
from meshwright.spec.params import count
from meshwright.spec.plan import FIELDS, Plan, Precision, balanced_stages
from meshwright.spec.problem import ContradictionError, InputError, Problem
from meshwright.spec.schedule import default_chunks
from meshwright.spec.units import GIB

LONGEST = 8192  # a sequence that nobody stated: the model's context, and no more than this
LARGE = 10e9  # parameters
TOKENS_OF_A_STEP = {False: 2**19, True: 2**22}  # a batch that nobody stated: what GPT-2's and Llama's trainings used


class PlanQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A question as it was put."""

    question: Question
    asked: OpenRun
    model: str  # as a person would name it
    machines: str  # likewise
    assumed: tuple[str, ...]  # what was not said
    words: tuple[str, ...] = ()  # that a run of it begins with: a run file or a model, and settings beside the plan
    stated: frozenset[str] = frozenset()  # keys that the command line states, whatever a run file says
    approximate: str = ""  # why the model is not quite what was asked about, and cannot be trained


def put(options: argparse.Namespace, arch: Arch | None = None) -> PlanQuery:
    """The question that the command line asks, with what was taken for granted; `arch` takes the place of the model."""
    target, overrides = words.target(options.words)
    guessed = _guessed(target, [*overrides, *flags(options)])
    overrides += guessed
    near, approximate = _nearest_arch(target) if arch is None else (arch, "")
    asked, model = open_run(target, [*overrides, *flags(options)], near)
    text = options.cluster or asked.run.goal.cluster
    if not text:
        remedy = "add --cluster 64xh100, or [goal] cluster to the run file; `meshwright clusters` lists the cards"
        raise InputError([Problem("no cluster is named", remedy)])
    machines = machines_of(text, asked.run.goal)
    if profile := getattr(options, "profile", None):
        machines = measured(machines, read_profile(Path(profile)), stack_of("meshwright"))
    question, assumed = question_of(asked, machines, tuple(options.vary or ()) or asked.run.goal.vary)
    stated = getattr(options, "document_tokens", None)
    if stated and not asked.run.data.masks:
        what = f"--document-tokens {stated} is for masked documents, and data.mask_documents = false"
        raise InputError([Problem(what, "add data.mask_documents=true, or leave --document-tokens out")])
    if asked.run.data.masks:
        mean = stated or run_folder.document_tokens(Path(target or ""))
        question = msgspec.structs.replace(question, document_tokens=mean)
        told = f"documents of {mean:,.0f} tokens in the mean" if mean else "documents as long as a sample"
        assumed = (*assumed, told)
    if (margin := getattr(options, "margin", None)) is not None:
        question = with_margin(question, margin)
    kept = [
        word for word in overrides if not word.startswith(("plan.", "sequence=", "batch=", "name=", "goal.cluster="))
    ]
    return PlanQuery(
        question=question,
        asked=asked,
        model=_named(Path(target)) if target and approximate else model,
        machines=text,
        assumed=(*(word.replace("=", " = ") for word in guessed), *assumed),
        stated=frozenset(word.partition("=")[0] for word in (*overrides, *flags(options))),
        words=() if approximate or arch else tuple(_begin(target, asked.run.arch, kept)),
        approximate=approximate,
    )


def _guessed(target: str | None, overrides: list[str]) -> list[str]:
    """Of a model that is stated by its numbers alone, those that were left out, as such models usually have them."""
    stated = {key: value for key, _, value in (word.partition("=") for word in overrides)}
    if target is not None or "arch.preset" in stated or not stated.get("arch.hidden", "").isdecimal():
        return []
    hidden = int(stated["arch.hidden"])
    gated = stated.get("arch.mlp", "swiglu") == "swiglu"
    most = min(max(hidden // (128 if hidden >= 2048 else 64), 1), 1024)  # or fewer, if these do not divide
    usual = {
        "heads": next(count for count in range(most, 0, -1) if hidden % count == 0),
        "ffn": -(-8 * hidden // 3 // 256) * 256 if gated else 4 * hidden,
        "vocab": 32_000,  # Llama's
        "context": stated.get("sequence", "4096"),
    }
    return [f"arch.{name}={value}" for name, value in usual.items() if f"arch.{name}" not in stated]


def _nearest_arch(target: str | None) -> tuple[Arch | None, str]:
    """Of a Hugging Face model that cannot be trained here, the nearest that can, and why; else nothing."""
    path = Path(target or "")
    file = path / CONFIG if path.is_dir() else path
    if target is None or target in presets.preset_names() or file.suffix != ".json" or not file.is_file():
        return None, ""
    if (path / ARCH).is_file():
        return None, ""
    config = read_config(file)
    try:
        arch_of(config)
    except ContradictionError:
        raise
    except InputError as error:
        arch = decoder_like(config)
        if arch is None or arch_problems(arch):
            raise
        kind = config.get("model_type")
        unknown = f"model_type {kind} is not one that `meshwright train` knows"
        why = unknown if error.problems[0].key == "model_type" else error.problems[0].text
        likeness = "Llama" if arch.norm == "rms" else "GPT"
        experts = f" with {arch.experts} experts" if arch.experts else ""
        return arch, f"{why}; priced as a decoder like {likeness}{experts} with its numbers"
    return None, ""


def with_margin(question: Question, margin: float) -> Question:
    """The question of plans that fit even if the ledger says too little by a share."""
    holds = msgspec.structs.replace(question.stack.holds, high=1 + margin)
    return msgspec.structs.replace(question, stack=msgspec.structs.replace(question.stack, holds=holds))


def _begin(target: str | None, arch: Arch, overrides: list[str]) -> list[str]:
    """The words of a run that say what is planned: of a model by its numbers, those and what the default run lacks."""
    if target is not None and Path(target).suffix == ".toml":
        return [target, *overrides]
    if target in presets.preset_names():
        return [f"arch.preset={target}", *overrides]
    if target is not None and Path(target).is_dir():
        return [f"init.from={target}", *overrides]
    if any(word.startswith(("arch.preset=", "init.from=")) for word in overrides):
        return overrides
    usual, stated = presets.preset("starter"), {word.partition("=")[0] for word in overrides}
    numbers = {
        f"arch.{name}": value
        for name, value in msgspec.to_builtins(arch).items()
        if value != getattr(usual, name) or f"arch.{name}" in stated
    }
    return [*settings(numbers), *(word for word in overrides if not word.startswith("arch."))]


def command(asked: PlanQuery, run: Run) -> list[str]:
    """What to type to train a plan that was found, word by word."""
    plan, machines = run.plan, asked.question.cluster
    stated = {"replicate", "microbatch", "grad_accum", *(field.name for field in FIELDS if plan.uses(field.name))}
    if plan.stages == balanced_stages(run.arch, plan.pp * plan.chunks):
        stated.discard("stages")
    values: dict[str, Any] = {"name": run.name, "sequence": run.sequence, "batch": run.batch}
    if asked.words and asked.words[0].endswith(".toml"):
        said, written = asked.stated, asked.asked.run
        values = {key: value for key, value in values.items() if key in said or getattr(written, key) != value}
    values |= {"goal.cluster": run.goal.cluster}
    optim: dict[str, Any] = {}
    for name in ("master_weights", "stochastic_rounding", "state_dtype"):
        if getattr(run.optim, name) != getattr(asked.asked.run.optim, name):
            optim[f"optim.{name}"] = getattr(run.optim, name)
    fields = plan_overrides(plan, stated | set(asked.asked.in_file))
    return [*launcher(machines), "train", *asked.words, *settings(values), *fields, *settings(optim)]


def settings(values: Mapping[str, Any]) -> list[str]:
    """Keys and their values as words of a run."""
    return [f"{key}={words.toml(value)}" for key, value in values.items()]


def plan_overrides(plan: Plan, names: Iterable[str] | None = None) -> list[str]:
    """The words that state a plan's fields, those that are not neutral if nobody says which; and what a run of these
    words alone would derive otherwise: the chunks of some schedules, the bf16 copy of a lone rank."""
    stated = {field.name for field in FIELDS if plan.uses(field.name)} if names is None else set(names)
    if plan.pp > 1 and plan.chunks != default_chunks(plan.schedule):
        stated.add("chunks")
    if plan.world == 1:
        stated.add("bf16_params")
    return settings({f"plan.{field.name}": getattr(plan, field.name) for field in FIELDS if field.name in stated})


def launcher(machines: Cluster) -> list[str]:
    """The program that starts the ranks: on several machines torchrun, on each of them."""
    if machines.nodes == 1:
        return ["meshwright"]
    ranks = ["--nnodes", str(machines.nodes), "--nproc-per-node", str(machines.per_node)]
    return ["torchrun", *ranks, "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500", "-m", "meshwright"]


def machines_of(text: str, goal: Goal) -> Cluster:
    """The machines of a few words, with what a goal says of them."""
    return cluster(text, network=goal.network or "", host_gib=goal.host_gib or 0.0, disk_gib=goal.disk_gib or 0.0)


def question_of(asked: OpenRun, machines: Cluster, vary: tuple[Vary, ...]) -> tuple[Question, tuple[str, ...]]:
    """What is to be searched for on given machines, and what was taken for granted."""
    assumed: list[str] = []
    sequence, batch = _sizes(asked, machines.gpus, assumed)
    fixed = asked.on_command_line | {key: asked.in_file[key] for key in ("deterministic",) if key in asked.in_file}
    precision = asked.on_command_line.get("precision", asked.in_file.get("precision"))
    if precision is None:
        precision = default_precision(machines)
        assumed.append(f"precision = {precision}")
    question = Question(
        arch=asked.run.arch,
        sequence=sequence,
        batch=batch,
        precision=precision,
        cluster=machines,
        stack=stack_of("meshwright"),
        masked=asked.run.data.masks,
        master_weights=asked.run.optim.master_weights,
        state_dtype=asked.run.optim.state_dtype,
        optimizer=description_of(asked.run.optim),
        fixed={key: tuple(value) if key == "stages" else value for key, value in fixed.items() if key != "precision"},
        vary=vary,
        limit_bytes=(asked.run.goal.memory_gib or math.inf) * GIB,
    )
    return question.on(machines), tuple(assumed)


def open_run(target: str | None, overrides: list[str], arch: Arch | None) -> tuple[OpenRun, str]:
    """The run of a model, a run file or a Hugging Face folder, its plan still to be found; and its name."""
    if arch is not None:
        return load.ask(None, overrides, arch=arch), "a model"
    if target is None and any(word.startswith(("arch.", "init.from=")) for word in overrides):
        asked = load.ask(None, overrides)
        return asked, next((word[12:] for word in overrides if word.startswith("arch.preset=")), "your-model")
    if target is None:
        remedy = "name a model of `meshwright models`, a run file, a Hugging Face folder or config.json, or its numbers"
        raise InputError([Problem("no model is named", remedy)])
    if target in presets.preset_names():
        return load.ask(None, [f"arch.preset={target}", *overrides]), target
    path = Path(target)
    if (found := described(path)) is not None:
        return load.ask(None, overrides, arch=found), _named(path)
    if path.suffix == ".toml" or path.exists():
        asked = load.ask(path, overrides)
        return asked, asked.run.name
    near = presets.unknown_preset(target).remedy
    raise InputError([Problem(f"{target} is neither a known model nor a file", near)])


def _named(path: Path) -> str:
    """A model folder, or that of a config.json, as people call it."""
    return (path if path.is_dir() else path.parent).name or path.name


def described(path: Path) -> Arch | None:
    """The architecture of a Hugging Face folder or config.json; None if the path is neither."""
    if path.is_dir():
        return describe(path).arch
    return arch_of(read_config(path)) if path.suffix == ".json" else None


def flags(options: argparse.Namespace) -> list[str]:
    """Sequence and batch as words of a run."""
    return [f"{name}={value}" for name in ("sequence", "batch") if (value := getattr(options, name)) is not None]


def _sizes(asked: OpenRun, gpus: int, assumed: list[str]) -> tuple[int, int]:
    """Sequence and batch: as stated, or what such a model is usually trained with."""
    run, unsaid = asked.run, {key for key in ("sequence", "batch") if asked.origins.get(key) == load.UNSAID}
    sequence, batch = run.sequence, run.batch
    if "sequence" in unsaid:
        sequence = min(run.arch.context, LONGEST)
        assumed.append(f"sequence = {sequence}")
    if "batch" in unsaid:
        batch = max(TOKENS_OF_A_STEP[count(run.arch) >= LARGE] // sequence, 1)
        odd = gpus // (gpus & -gpus)  # a number that the GPUs can share however many they are: 56 of 64 for 56
        batch = batch if batch % odd == 0 else odd << max((batch // odd).bit_length() - 1, 0)
        assumed.append(f"batch = {batch}")
    return sequence, batch


def default_precision(machines: Cluster) -> Precision:
    """The usual one, where the card has its arithmetic."""
    if machines.gpu.peak("bf16") > 0:
        return "bf16"
    return "fp16" if machines.gpu.peak("fp16") > 0 else "fp32"
