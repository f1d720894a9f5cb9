"""The questions of `meshwright plan` whose answer is a size: how many GPUs, the largest that fits, layer by layer."""

import argparse
import sys

import msgspec

from meshwright.search import explain, questions
from meshwright.search.empty import refuse_empty
from meshwright.search.largest import SHORTEST, Largest, largest_microbatch, largest_model, largest_sequence
from meshwright.search.layers import layers
from meshwright.spec import zoo
from meshwright.spec.problem import InputError, Problem
from meshwright.verbs import plan_tables as tables
from meshwright.verbs import words
from meshwright.verbs.plan_answers import DOES_NOT_FIT, answer_record, show
from meshwright.verbs.plan_question import Put, put
from meshwright.verbs.plan_words import as_record, found_words

SOUGHT = {"model": "arch", "microbatch": "batch", "sequence": "sequence"}  # what of the question is not asked for


def gpus_needed(options: argparse.Namespace) -> int:
    """The least number of GPUs, and the plans there."""
    asked = put(options)
    needed = questions.gpus_needed(asked.question, options.top)
    if needed is None:
        remedy = "fix less of the plan, or use a larger card or a shorter sequence"
        raise InputError([Problem(f"no number of {asked.question.cluster.gpu.name} is enough", remedy)])
    gpus, answer = needed
    question = questions.with_gpus(asked.question, gpus)
    record = answer_record(asked, question, answer) | {"gpus": gpus}
    lines = [f"{gpus} {question.cluster.gpu.name} are needed at least.", *tables.heading(asked, question), ""]
    ranking = tables.ranking(answer, question, words.room(sys.stdout))
    show(options, record, [*lines, *ranking, "", explain.why(answer.found[0])])
    return 0


def largest(options: argparse.Namespace) -> int:
    """The largest model, microbatch or sequence that fits."""
    what = options.largest
    _refuse_stated(options)
    asked = put(options, zoo.preset("llama3-8b") if what == "model" else None)
    ask = {"model": largest_model, "microbatch": largest_microbatch, "sequence": largest_sequence}[what]
    found = ask(asked.question)
    if found is None:
        refuse_empty(asked.question)
        return _none(options, asked)
    asked = _answered(asked, what, found)
    beyond = f"; {found.next_value} does not fit" if found.next_value is not None else ""
    why = explain.why(found.found)
    record = _record(options, asked) | {
        "value": found.value,
        "next": found.next_value,
        "end": found.end,
        "plans": [as_record(found.found, why)],
    }
    beyond = f"; {found.end}" if found.end else beyond
    lines = [f"largest {what} on {asked.machines}: {found.value}{beyond}", *tables.heading(asked, asked.question)]
    lines += [f"plan: {found_words(found.found, asked.question)}", "", *tables.ledger(found.found), ""]
    show(options, record, [*lines, *tables.waterfall(found.found)])
    return 0


def _refuse_stated(options: argparse.Namespace) -> None:
    """What is sought cannot be given."""
    target, overrides = words.target(options.words)
    what = options.largest
    given = {
        "model": target,
        "sequence": options.sequence and f"--sequence {options.sequence}",
        "microbatch": next((word for word in overrides if word.startswith("plan.microbatch=")), None),
    }[what]
    if given:
        raise InputError([Problem(f"--largest {what} looks for what {given} states", f"leave {given} out")])


def _answered(asked: Put, what: str, found: Largest) -> Put:
    """The question with what was found in it: nothing of that was asked or assumed."""
    job, name = found.found.job, SOUGHT[what]
    value = {"arch": job.arch, "batch": job.plan.batch, "sequence": job.sequence}[name]
    return msgspec.structs.replace(
        asked,
        question=msgspec.structs.replace(asked.question, **{name: value}),
        model=str(found.value) if what == "model" else asked.model,
        assumed=tuple(each for each in asked.assumed if not each.startswith(f"{name} =")),
    )


def _none(options: argparse.Namespace, asked: Put) -> int:
    """Nothing fits, whatever its size."""
    what, question = options.largest, asked.question
    least = {"sequence": f" of {SHORTEST:,} tokens"}.get(what, "")
    given = {"sequence": f"sequence {question.sequence:,}", "batch": f"batch {question.batch:,}", "arch": asked.model}
    others = [text for name, text in given.items() if name != SOUGHT[what]]
    record = _record(options, asked) | {"value": None, "next": None, "end": "", "plans": []}
    line = f"no {what}{least} fits {asked.machines} ({', '.join(others)}, {question.precision})"
    show(options, record, [line])
    return DOES_NOT_FIT


def _record(options: argparse.Namespace, asked: Put) -> dict[str, object]:
    question = asked.question
    return {
        "largest": options.largest,
        "model": asked.model,
        "sequence": question.sequence,
        "batch": question.batch,
        "precision": question.precision,
        "assumed": asked.assumed,
    }


def layer_by_layer(options: argparse.Namespace) -> int:
    """Parameters, operations and bytes of every layer."""
    asked = put(options)
    table = layers(asked.question)
    record = {"model": asked.model, "sequence": asked.question.sequence, "layers": msgspec.to_builtins(table)}
    heading = f"{asked.model}, sequence {asked.question.sequence:,}, {asked.question.precision}"
    show(options, record, [heading, *tables.layer_table(table)])
    return 0
