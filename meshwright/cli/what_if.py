"""`meshwright plan`'s other questions: what a change would do, how many GPUs, the largest that fits, layer by layer."""

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.cli import options as words
from meshwright.cli import plan_tables as tables
from meshwright.cli.options import show
from meshwright.cli.plan import TOP, answer_record, nothing_fits, searched
from meshwright.cli.plan_tables import as_record, found_words, in_column
from meshwright.cli.query import PlanQuery, default_precision, put
from meshwright.config import check, presets
from meshwright.hardware.cluster import cluster
from meshwright.runtime.failure import Exit
from meshwright.search import explain, sizes
from meshwright.search.best_first import Candidate, priced
from meshwright.search.question import Question
from meshwright.search.sizes import SHORTEST, Largest, largest_microbatch, largest_model, largest_sequence, layers
from meshwright.search.space import ON_DEVICE, problems, refuse_empty
from meshwright.spec.plan import LOW_PRECISIONS
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.units import gib

CHANGEABLE = ("network", "cluster", "sequence", "batch")
SOUGHT = {"model": "arch", "microbatch": "batch", "sequence": "sequence"}  # what of the question is not asked for


def what_if(options: argparse.Namespace) -> int:
    """The best plan as things are, the same plan after a change, and the best plan then."""
    asked = put(options)
    question, (changed, assumed) = asked.question, _changed(options, asked)
    base = searched(question, 1)
    if not base.found:
        return nothing_fits(options, asked, base)
    first, then = base.found[0], searched(changed, options.top or TOP)
    same = _same(first, question, changed)
    record = {
        "assumed": asked.assumed,
        "assumed_then": assumed,
        "base": as_record(first, explain.why(first)),
        "same_plan": as_record(same, explain.why(same)) if same else None,
        "plans": [as_record(found, explain.why(found)) for found in then.found],
        "counts": msgspec.to_builtins(then.counts),
    }
    lines = [*tables.plan_heading(asked, question), ""]
    lines += [f"assumed then: {', '.join(assumed)}"] if assumed else tables.without_rate(changed)
    lines.append(f"now:       {_summary(first, question)}")
    if same is None:
        lines.append("same plan: no longer legal")
    else:
        other = "" if same.plan == first.plan else f"{found_words(same, question)}: "
        seconds = f"{in_column(same.price.seconds)} s/step ({same.price.seconds / first.price.seconds:.2f} ×)"
        misfit = "" if same.fits is not False else ", does not fit"
        lines += [f"same plan: {other}{seconds}, {gib(same.peak_bytes)} GiB{misfit}", *_shifts(first, same)]
    if not then.found:
        lines.append("nothing fits then")
    else:
        after = then.found[0]
        lines += [f"best then: {_summary(after, changed)}", *_shifts(first, after), explain.why(after)]
    show(options, record, lines)
    return Exit.DONE if then.found else Exit.DOES_NOT_FIT


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
    pairs = [*([f"network={options.network}"] if options.network else []), *(options.what_if or ())]
    given = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    changes: dict[str, Any] = {}
    remedy = "use network=, cluster=, sequence= or batch="
    found = [Problem(f"--what-if {key} is unknown", remedy) for key in given if key not in CHANGEABLE]
    for key, read in (("sequence", words.positions), ("batch", words.samples)):
        try:
            changes |= {key: read(given[key])} if key in given else {}
        except argparse.ArgumentTypeError as wrong:
            found.append(Problem(f"--what-if {key}={given[key]} is not a count", str(wrong)))
    if found or len(given) < len(pairs):
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
    bf16_params = plan.bf16_params and precision in LOW_PRECISIONS
    plan = msgspec.structs.replace(plan, grad_accum=grad_accum, precision=precision, bf16_params=bf16_params)
    kinds = {"precision": precision, "master_weights": job.master_weights, "state_dtype": job.state_dtype}
    asked = msgspec.structs.replace(changed, batch=batch, optimizer=job.optimizer, **kinds)
    return None if problems(asked, plan) else priced(asked.job(plan))


def _summary(found: Candidate, asked: Question) -> str:
    plan = found_words(found, asked)
    return f"{plan}: {in_column(found.price.seconds)} s/step, {gib(found.peak_bytes)} GiB"


def _shifts(base: Candidate, other: Candidate) -> Iterator[str]:
    """The three shares of a step that changed most."""
    before, after = ({share.name: share.seconds for share in each.price.waterfall} for each in (base, other))
    reasons = {share.name: f": {share.why}" for share in other.price.waterfall}
    change = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*before, *after}}
    for name in sorted(change, key=lambda name: -abs(change[name]))[:3]:
        if abs(change[name]) >= explain.SMALL * base.price.seconds:
            by = f"{'+' if change[name] > 0 else '-'}{in_column(abs(change[name]))} s"
            yield f"           {by} {name.replace('_', ' ')}{reasons.get(name, '')}"


def gpus_needed(options: argparse.Namespace) -> int:
    """The least number of GPUs, and the plans there."""
    asked = put(options)
    needed = sizes.gpus_needed(asked.question, options.top or TOP)
    if needed is None:
        remedy = "fix less of the plan, or use a larger card or a shorter sequence"
        raise InputError([Problem(f"no number of {asked.question.cluster.gpu.name} GPUs is enough", remedy)])
    gpus, answer = needed
    question = sizes.with_gpus(asked.question, gpus)
    on_device: int | None = gpus
    if answer.found[0].ledger.offloaded.host:
        alone = sizes.gpus_needed(asked.question.with_fixed(ON_DEVICE), 1)
        on_device = alone and alone[0]
    more = None if on_device == gpus else on_device
    record = answer_record(asked, question, answer) | {"gpus": gpus, "gpus_without_offload": more}
    lines = [answer.host_question] if answer.host_question else []
    said = f"At least {gpus} {question.cluster.gpu.name} {'is' if gpus == 1 else 'are'} needed"
    if on_device != gpus:
        said += f", with offload to the host; {on_device or 'no number'} without"
    lines += [f"{said}.", *tables.plan_heading(asked, question), ""]
    ranking = tables.ranking(answer, question, words.columns())
    show(options, record, [*lines, *ranking, "", explain.why(answer.found[0])])
    return Exit.DONE


def largest(options: argparse.Namespace) -> int:
    """The largest model, microbatch or sequence that fits."""
    what = options.largest
    target, overrides = words.target(options.words)
    stated = {
        "model": target,
        "sequence": options.sequence and f"--sequence {options.sequence}",
        "microbatch": next((word for word in overrides if word.startswith("plan.microbatch=")), None),
    }[what]
    if stated:
        raise InputError([Problem(f"{stated} cannot be combined with --largest {what}", f"leave {stated} out")])
    asked = put(options, presets.preset("llama3-8b") if what == "model" else None)
    ask = {"model": largest_model, "microbatch": largest_microbatch, "sequence": largest_sequence}[what]
    found = ask(asked.question.with_unknown_host("never")) or ask(asked.question)
    if found is None:
        refuse_empty(asked.question)
        return _none(options, asked)
    asked = _answered(asked, what, found)
    beyond = found.end or (f"{found.next_value} does not fit" if found.next_value is not None else "")
    host_question = found.found.fit.host_question
    if not found.end and found.found.fits and not found.found.job.cluster.host_bytes:
        beyond += " without host memory, of which the cluster says nothing (goal.host_gib)" if beyond else ""
    plans = [as_record(found.found, explain.why(found.found))]
    answer = {"value": found.value, "next": found.next_value, "end": found.end, "plans": plans}
    answer |= {"host_question": host_question}
    lines = [host_question] if host_question else []
    lines += [f"largest {what} on {asked.machines}: {found.value}{f'; {beyond}' if beyond else ''}"]
    lines += [*tables.plan_heading(asked, asked.question), f"plan: {found_words(found.found, asked.question)}", ""]
    lines += [*tables.ledger(found.found), "", *tables.waterfall(found.found)]
    show(options, _record(options, asked) | answer, lines)
    return Exit.DONE


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
    record = _record(options, asked) | {"value": None, "next": None, "end": "", "plans": [], "host_question": None}
    line = f"no {what}{least} fits {asked.machines} ({', '.join(others)}, {question.precision})"
    show(options, record, [line])
    return Exit.DOES_NOT_FIT


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
    return Exit.DONE
