"""One function for each question that `meshwright plan` answers about a model on some machines."""

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.search import budget, explain, questions
from meshwright.search.empty import empty
from meshwright.search.found import Answer, Found, priced
from meshwright.search.misses import changes, nearest
from meshwright.search.order import search
from meshwright.search.question import Question
from meshwright.search.space import problems
from meshwright.spec import load, resolve
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.writing import write_whole
from meshwright.verbs import plan_tables as tables
from meshwright.verbs import plan_write, words
from meshwright.verbs.plan_question import Put, put
from meshwright.verbs.plan_words import as_record, found_words, plan_words

DOES_NOT_FIT = 3


def show(options: argparse.Namespace, record: dict[str, Any], lines: Iterable[str]) -> None:
    """An answer, for a program or for a person."""
    if options.json:
        print(msgspec.json.encode(record).decode())
        return
    for line in words.wrapped(lines, words.room(sys.stdout)):
        print(line)


def best(options: argparse.Namespace) -> int:
    """The ranked table; with --tokens also how long and how much, with --write also a run file."""
    asked = put(options)
    announce(options, asked)
    answer = searched(asked.question, options.top)
    if not answer.found:
        return nothing_fits(options, asked, answer)
    return _told(options, asked, asked.question, answer)


def announce(options: argparse.Namespace, asked: Put) -> None:
    """What is asked, before it is answered: a person sees at once that the question was understood."""
    if not options.json:
        heading = words.wrapped(tables.heading(asked, asked.question), words.room(sys.stdout))
        print(*heading, "", sep="\n", flush=True)


def searched(question: Question, top: int) -> Answer:
    """The best plans; a question that no plan can be legal for is refused with the rule that empties it."""
    answer = search(question, top)
    if answer.counts.legal == 0:
        raise InputError(empty(question))
    return answer


def _told(options: argparse.Namespace, asked: Put, question: Question, answer: Answer) -> int:
    first = answer.found[0]
    job = first.job
    kinds = {"precision": job.plan.precision, "rounding": job.rounding, "states": job.states}
    chosen = msgspec.structs.replace(question, batch=job.plan.batch, **kinds)
    beside = explain.beside(chosen, first.plan)
    record = answer_record(asked, question, answer) | {"neighbours": msgspec.to_builtins(beside)}
    lines = [*tables.ranking(answer, question, words.room(sys.stdout)), "", *tables.counted(answer.counts), ""]
    lines += [f"Why the first: {explain.why(first)}", "One choice changed:", *tables.neighbours(first, beside)]
    if span := _span(options, first):
        record["duration"] = msgspec.to_builtins(span)
        lines += ["", *tables.lasting(span)]
    lines += _written(options, asked, first)
    show(options, record, lines)
    return 0


def _span(options: argparse.Namespace, found: Found) -> questions.Duration | None:
    """How long --tokens take."""
    return None if options.tokens is None else questions.duration(found, options.tokens, options.dollars)


def _written(options: argparse.Namespace, asked: Put, found: Found) -> list[str]:
    """The plan in the file of --write, and what is to be done with it."""
    if not options.write:
        return []
    if not found.fit.fits:
        return ["", f"not written: {options.write}, because the plan does not fit"]
    run = plan_write.run_of(asked, found)
    write_whole(Path(options.write), load.write(run), options.force)
    lines = ["", f"written: {options.write} (train it with: meshwright train {options.write})"]
    if unsaid := plan_write.left_open(asked, run):
        lines += [f"not the planner's to choose, so set it there first: {', '.join(unsaid)}"]
    return lines


def answer_record(asked: Put, question: Question, answer: Answer) -> dict[str, Any]:
    """The best plans, as scripts read them."""
    return {
        "model": asked.model,
        "cluster": msgspec.to_builtins(question.cluster),
        "sequence": question.sequence,
        "batch": question.batch,
        "precision": question.precision,
        "assumed": asked.assumed,
        "plans": [as_record(found, explain.why(found)) for found in answer.found],
        "counts": msgspec.to_builtins(answer.counts),
        "ties": explain.ties(answer),
    }


def nothing_fits(options: argparse.Namespace, asked: Put, answer: Answer) -> int:
    """The nearest misses and what would fit; the question has been announced."""
    misses, suggestions = nearest(asked.question), changes(asked.question)
    record = answer_record(asked, asked.question, answer) | {
        "misses": [as_record(found, explain.why(found)) for found in misses],
        "changes": [{"change": each.change, **as_record(each.found, explain.why(each.found))} for each in suggestions],
    }
    show(options, record, [*tables.missed(misses, suggestions, asked.question), "", *tables.counted(answer.counts)])
    return DOES_NOT_FIT


def exact(options: argparse.Namespace) -> int:
    """One plan as it stands, fields that are left out as a run would fill them."""
    asked = put(options)
    plan, question = _stated(asked)
    found = priced(question.job(plan))
    answer = Answer(found=(found,), counts=tables.Counts(legal=1, too_large={}, slower=0, priced=1))
    traffic = _traffic(question, plan)
    lines = [*tables.heading(asked, question), f"plan: {plan_words(plan)}", "", *tables.ledger(found), ""]
    lines += [*tables.waterfall(found), "", "sent by the first rank in a step: " + _sent(traffic), explain.why(found)]
    record = answer_record(asked, question, answer) | {"traffic_bytes": traffic}
    if span := _span(options, found):
        record["duration"] = msgspec.to_builtins(span)
        lines += ["", *tables.lasting(span)]
    lines += _written(options, asked, found)
    show(options, record, lines)
    return 0 if found.fit.fits else DOES_NOT_FIT


def _stated(asked: Put) -> tuple[Plan, Question]:
    """The plan of the command line and the file; a batch that nobody stated is the plan's own."""
    question = asked.question
    stated = asked.asked.in_file | asked.asked.on_command_line | {"precision": question.precision}
    arch = msgspec.to_builtins(question.arch)
    table: dict[str, Any] = {"arch": arch, "batch": question.batch, "plan": stated}
    resolve.resolve_plan(table, {}, question.cluster.gpus, question.cluster.gpus)
    plan = msgspec.convert(table["plan"], Plan)
    if any(each.startswith("batch =") for each in asked.assumed):
        question = msgspec.structs.replace(question, batch=plan.batch)
    found = list(problems(question, plan))
    if plan.world != question.cluster.gpus:
        what = f"the plan uses {plan.world} GPUs, and {asked.machines} has {question.cluster.gpus}"
        found.append(Problem(what, "change an axis, or the cluster", "plan"))
    if found:
        raise InputError(found)
    if question.limit_bytes < math.inf and "recompute" not in stated:  # as `train` chooses it
        plan = budget.fitting(question.job(plan), question.limit_bytes)
    return plan, question


def _traffic(question: Question, plan: Plan) -> dict[str, int]:
    from meshwright.cost.traffic import bytes_by_axis, traffic

    totals = bytes_by_axis(traffic(question.arch, plan, question.sequence))
    return {str(axis): size for axis, size in totals.items()}


def _sent(traffic: dict[str, int]) -> str:
    return ", ".join(f"{axis} {tables.gib(size)} GiB" for axis, size in traffic.items()) or "nothing"


def textbook(options: argparse.Namespace) -> int:
    """The closed forms of the literature for the best plan, or for the plan that is stated."""
    from meshwright.cost.textbook import table

    asked = put(options)
    found = any_plan(options, asked)
    entries = table(found.job)
    record = {"plan": msgspec.to_builtins(found.plan), "entries": msgspec.to_builtins(entries)}
    lines = [*tables.heading(asked, asked.question), f"plan: {found_words(found, asked.question)}", ""]
    for entry in entries:
        lines.append(f"{entry.name}: {entry.value:,.6g} {entry.unit}")
        lines += [f"    {text}" for text in (entry.formula, entry.source, entry.note) if text]
    show(options, record, lines)
    return 0


def any_plan(options: argparse.Namespace, asked: Put) -> Found:
    """The plan that is stated, the best, or where nothing fits the nearest miss."""
    if options.exact:
        plan, question = _stated(asked)
        return priced(question.job(plan))
    answer = searched(asked.question, 1)
    return answer.found[0] if answer.found else nearest(asked.question)[0]
