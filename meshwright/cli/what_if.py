"""`meshwright plan --what-if`: the best plan as things are, and what a change would do to it."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.cli import options as words
from meshwright.cli import plan_tables as tables
from meshwright.cli.plan import DOES_NOT_FIT, announce, answer_record, nothing_fits, searched, show
from meshwright.cli.plan_tables import as_record, found_words, gib, short
from meshwright.cli.query import PlanQuery, default_precision, put
from meshwright.config import check, presets
from meshwright.cost.step_time import TimeShare
from meshwright.hardware.cluster import cluster
from meshwright.search import explain, sizes
from meshwright.search.best_first import Candidate, SearchResult, priced
from meshwright.search.question import Question
from meshwright.search.sizes import SHORTEST, Largest, largest_microbatch, largest_model, largest_sequence, layers
from meshwright.search.space import NARROW, problems, refuse_empty
from meshwright.spec.problem import InputError, Problem

CHANGEABLE = ("network", "cluster", "sequence", "batch")


def what_if(options: argparse.Namespace) -> int:
    """The best plan as things are, the same plan after a change, and the best plan then."""
    asked = put(options)
    question, (changed, assumed) = asked.question, _changed(options, asked)
    announce(options, asked)
    base = searched(question, 1)
    if not base.found:
        return nothing_fits(options, asked, base)
    first, then = base.found[0], searched(changed, options.top)
    same = _same(first, question, changed)
    record = {
        "assumed": asked.assumed,
        "assumed_then": assumed,
        "base": as_record(first, explain.why(first)),
        "same_plan": as_record(same, explain.why(same)) if same else None,
        "plans": [as_record(found, explain.why(found)) for found in then.found],
        "counts": msgspec.to_builtins(then.counts),
    }
    lines = [f"assumed then: {', '.join(assumed)}"] if assumed else [*tables.without_rate(changed)]
    lines += [
        f"now:       {_summary(first, question)}",
        *_same_plan(first, same, question),
        *_best(first, changed, then),
    ]
    show(options, record, lines)
    return 0 if then.found else DOES_NOT_FIT


def _changed(options: argparse.Namespace, asked: PlanQuery) -> tuple[Question, list[str]]:
    """The question after the change, held to the same rules, and what is assumed for it."""
    changes = _changes(options, asked)
    machines = changes.pop("cluster", asked.question.cluster)
    changed = msgspec.structs.replace(asked.question, **changes).on(machines)
    assumed: list[str] = []
    usual = default_precision(machines)
    if any(each.startswith("precision =") for each in asked.assumed) and usual != changed.precision:
        changed = msgspec.structs.replace(changed, precision=usual)
        assumed.append(f"precision = {usual}")
    run = asked.asked.run
    plan = msgspec.structs.replace(run.plan, microbatch=changed.batch)
    run = msgspec.structs.replace(run, sequence=changed.sequence, batch=changed.batch, plan=plan)
    if found := check.problems(run):
        raise InputError(found)
    return changed, assumed


def _changes(options: argparse.Namespace, asked: PlanQuery) -> dict[str, Any]:
    """The fields of the question that the what-ifs change."""
    words = [*([f"network={options.network}"] if options.network else []), *(options.what_if or ())]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    changes: dict[str, Any] = {}
    remedy = "use network=, cluster=, sequence= or batch="
    found = [Problem(f"--what-if {key} is unknown", remedy) for key in given if key not in CHANGEABLE]
    for key in ("sequence", "batch"):
        if key in given and not (given[key].isdecimal() and int(given[key])):
            found.append(Problem(f"--what-if {key}={given[key]} is not a count", "use a whole number of at least 1"))
        elif key in given:
            changes[key] = int(given[key])
    if found or len(given) < len(words):
        raise InputError(found or [Problem("--what-if takes key=value", "for example --what-if sequence=131072")])
    if "cluster" in given:
        changes["cluster"] = cluster(given["cluster"], network=given.get("network", ""))
    elif "network" in given:  # all else stays as it is, or as it was measured
        other = cluster(asked.machines, network=given["network"]).network
        changes["cluster"] = msgspec.structs.replace(asked.question.cluster, network=other)
    return changes


def _same(base: Candidate, question: Question, changed: Question) -> Candidate | None:
    """The plan that was best, after the change; another batch takes more or fewer microbatches of the same size."""
    plan, job = base.plan, base.job
    batch = plan.batch if changed.batch == question.batch else changed.batch
    grad_accum, rest = divmod(batch, plan.data * plan.microbatch)
    if rest or plan.world != changed.cluster.gpus:
        return None
    precision = plan.precision if changed.precision == question.precision else changed.precision
    bf16_params = plan.bf16_params and precision in NARROW
    plan = msgspec.structs.replace(plan, grad_accum=grad_accum, precision=precision, bf16_params=bf16_params)
    kinds = {"precision": precision, "master_weights": job.master_weights, "state_dtype": job.state_dtype}
    asked = msgspec.structs.replace(changed, batch=batch, **kinds)
    return None if problems(asked, plan) else priced(asked.job(plan))


def _summary(found: Candidate, asked: Question) -> str:
    plan = found_words(found, asked)
    return f"{plan}: {short(found.price.seconds)} s/step, {gib(found.peak_bytes)} GiB"


def _same_plan(base: Candidate, same: Candidate | None, question: Question) -> Iterator[str]:
    """What a change does to the plan that was best."""
    if same is None:
        yield "same plan: no longer legal"
        return
    other = "" if same.plan == base.plan else f"{found_words(same, question)}: "
    verdict = "" if same.fit.fits else ", does not fit"
    yield (
        f"same plan: {other}{short(same.price.seconds)} s/step "
        f"({same.price.seconds / base.price.seconds:.2f} ×), {gib(same.peak_bytes)} GiB{verdict}"
    )
    yield from _shifts(base, same)


def _best(base: Candidate, changed: Question, then: SearchResult) -> Iterator[str]:
    """What is best after the change."""
    if not then.found:
        yield "nothing fits then"
        return
    first = then.found[0]
    yield f"best then: {_summary(first, changed)}"
    yield from _shifts(base, first)
    yield explain.why(first)


def _shifts(base: Candidate, other: Candidate) -> Iterator[str]:
    """The three shares of a step that changed most."""
    before = {share.name: share.seconds for share in base.price.waterfall}
    after = {share.name: share for share in other.price.waterfall}
    names = sorted({*before, *after}, key=lambda name: -abs(_seconds(after, name) - before.get(name, 0.0)))
    for name in names[:3]:
        change = _seconds(after, name) - before.get(name, 0.0)
        if abs(change) >= explain.SMALL * base.price.seconds:
            why = f": {after[name].why}" if name in after else ""
            label = name.replace("_", " ")
            yield f"           {'+' if change > 0 else '-'}{short(abs(change))} s {label}{why}"


def _seconds(shares: dict[str, TimeShare], name: str) -> float:
    return shares[name].seconds if name in shares else 0.0


SOUGHT = {"model": "arch", "microbatch": "batch", "sequence": "sequence"}  # what of the question is not asked for


def gpus_needed(options: argparse.Namespace) -> int:
    """The least number of GPUs, and the plans there."""
    asked = put(options)
    needed = sizes.gpus_needed(asked.question, options.top)
    if needed is None:
        remedy = "fix less of the plan, or use a larger card or a shorter sequence"
        raise InputError([Problem(f"no number of {asked.question.cluster.gpu.name} GPUs is enough", remedy)])
    gpus, answer = needed
    question = sizes.with_gpus(asked.question, gpus)
    record = answer_record(asked, question, answer) | {"gpus": gpus}
    lines = [f"At least {gpus} {question.cluster.gpu.name} are needed.", *tables.plan_heading(asked, question), ""]
    ranking = tables.ranking(answer, question, words.room(sys.stdout))
    show(options, record, [*lines, *ranking, "", explain.why(answer.found[0])])
    return 0


def largest(options: argparse.Namespace) -> int:
    """The largest model, microbatch or sequence that fits."""
    what = options.largest
    _refuse_stated(options)
    asked = put(options, presets.preset("llama3-8b") if what == "model" else None)
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
    lines = [f"largest {what} on {asked.machines}: {found.value}{beyond}", *tables.plan_heading(asked, asked.question)]
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
        raise InputError([Problem(f"{given} cannot be combined with --largest {what}", f"leave {given} out")])


def _answered(asked: PlanQuery, what: str, found: Largest) -> PlanQuery:
    """The question with what was found in it: nothing of that was asked or assumed."""
    job, name = found.found.job, SOUGHT[what]
    value = {"arch": job.arch, "batch": job.plan.batch, "sequence": job.sequence}[name]
    return msgspec.structs.replace(
        asked,
        question=msgspec.structs.replace(asked.question, **{name: value}),
        model=str(found.value) if what == "model" else asked.model,
        assumed=tuple(each for each in asked.assumed if not each.startswith(f"{name} =")),
    )


def _none(options: argparse.Namespace, asked: PlanQuery) -> int:
    """Nothing fits, whatever its size."""
    what, question = options.largest, asked.question
    least = {"sequence": f" of {SHORTEST:,} tokens"}.get(what, "")
    given = {"sequence": f"sequence {question.sequence:,}", "batch": f"batch {question.batch:,}", "arch": asked.model}
    others = [text for name, text in given.items() if name != SOUGHT[what]]
    record = _record(options, asked) | {"value": None, "next": None, "end": "", "plans": []}
    line = f"no {what}{least} fits {asked.machines} ({', '.join(others)}, {question.precision})"
    show(options, record, [line])
    return DOES_NOT_FIT


def _record(options: argparse.Namespace, asked: PlanQuery) -> dict[str, object]:
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
