"""From the words of `meshwright plan` to a question: whose model, how long, how many, on what."""

import argparse
import math
from pathlib import Path

import msgspec

from meshwright.cli import options as words
from meshwright.config import load, presets
from meshwright.config.huggingface import arch_of, describe, read_config
from meshwright.config.load import OpenRun
from meshwright.config.run import Goal
from meshwright.cost.calibrate import measured
from meshwright.hardware.cluster import Cluster, cluster
from meshwright.hardware.profile import read_profile
from meshwright.hardware.stacks import stack_of
from meshwright.search.question import Question, Vary
from meshwright.spec.arch import Arch
from meshwright.spec.params import count
from meshwright.spec.plan import Precision
from meshwright.spec.problem import InputError, Problem
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


def put(options: argparse.Namespace, arch: Arch | None = None) -> PlanQuery:
    """The question that the command line asks, with what was taken for granted; `arch` takes the place of the model."""
    target, overrides = words.target(options.words)
    asked, model = open_run(target, [*overrides, *flags(options)], arch)
    text = options.cluster or asked.run.goal.cluster
    if not text:
        remedy = "add --cluster 64xh100, or [goal] cluster to the run file; `meshwright clusters` lists the cards"
        raise InputError([Problem("no cluster is named", remedy)])
    machines = machines_of(text, asked.run.goal)
    if profile := getattr(options, "profile", None):
        machines = measured(machines, read_profile(Path(profile)), stack_of("meshwright"))
    question, assumed = question_of(asked, machines, tuple(options.vary or ()) or asked.run.goal.vary)
    return PlanQuery(question=question, asked=asked, model=model, machines=text, assumed=assumed)


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
        masked=asked.run.data.mask_documents,
        master_weights=asked.run.optim.master_weights,
        state_dtype=asked.run.optim.state_dtype,
        optimizer=asked.run.optim.name,
        fixed={key: tuple(value) if key == "stages" else value for key, value in fixed.items() if key != "precision"},
        vary=vary,
        limit_bytes=(asked.run.goal.memory_gib or math.inf) * GIB,
    )
    return question.on(machines), tuple(assumed)


def open_run(target: str | None, overrides: list[str], arch: Arch | None) -> tuple[OpenRun, str]:
    """The run of a model, a run file or a Hugging Face folder, its plan still to be found; and its name."""
    if arch is not None:
        return load.ask(None, overrides, arch=arch), "a model"
    if target is None:
        remedy = "name a model of `meshwright models`, a run file, or a Hugging Face folder or config.json"
        raise InputError([Problem("no model is named", remedy)])
    if target in presets.preset_names():
        return load.ask(None, [f"arch.preset={target}", *overrides]), target
    path = Path(target)
    if (found := described(path)) is not None:
        return load.ask(None, overrides, arch=found), (path if path.is_dir() else path.parent).name or path.name
    if path.suffix == ".toml" or path.exists():
        asked = load.ask(path, overrides)
        return asked, asked.run.name
    near = presets.unknown_preset(target).remedy
    raise InputError([Problem(f"{target} is neither a known model nor a file", near)])


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
