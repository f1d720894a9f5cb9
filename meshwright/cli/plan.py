"""`meshwright plan`: will it fit, which split is best, how fast, and why."""

import argparse
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli import env, query
from meshwright.cli import options as words
from meshwright.cli import plan_tables as tables
from meshwright.cli.options import show
from meshwright.cli.plan_tables import as_record, found_words, plan_words
from meshwright.cli.query import PlanQuery, described, flags, put
from meshwright.config import check, load, presets
from meshwright.config.run import Run
from meshwright.cost.traffic import Collective, bytes_by_axis, traffic
from meshwright.hardware.cluster import cluster
from meshwright.report import plan_charts
from meshwright.report.html import page
from meshwright.report.plan_charts import Pictures, Point, Terminal
from meshwright.runtime.failure import Exit
from meshwright.runtime.files import write_whole
from meshwright.search import budget, explain, sizes
from meshwright.search.best_first import Candidate, SearchCounts, SearchResult, priced, rank, search
from meshwright.search.explain import changes, nearest
from meshwright.search.question import Question
from meshwright.search.space import empty, problems
from meshwright.spec.optimizers import description_of
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.units import GIB, gib, plural

ASKED = {"cluster", "profile", "sequence", "document_tokens", "batch", "margin"}  # what the question is about
OFFERED = {"tokens", "dollars", "write", "force", "chart", "page"}  # what can be done with a plan
CHOSEN = {"vary"}  # how a plan is searched for: nothing to a plan that is stated
SHOWN = {"top"}  # of one plan all are shown, however many are wanted
READ = {  # by the option that asks for the answer; the first that is given wins
    "traffic": {"cluster", "sequence", "batch"},
    "price": {"out"},
    "trace": ASKED | CHOSEN | SHOWN | {"exact", "rank"},
    "largest": ASKED | CHOSEN | SHOWN,
    "gpus_needed": ASKED | CHOSEN | SHOWN,
    "layers": ASKED,
    "what_if": ASKED | CHOSEN | SHOWN,
    "network": ASKED | CHOSEN | SHOWN,
    "textbook": ASKED | CHOSEN | SHOWN | {"exact"},
    "exact": ASKED | OFFERED | SHOWN,
    "plan": ASKED | OFFERED | CHOSEN | SHOWN,
}
OPTIONS = set(READ) - {"plan"} | ASKED | OFFERED | CHOSEN | SHOWN | {"rank", "out"}
TOP = 5  # plans that are shown where nobody says how many
DAY = 86400.0  # seconds
ALWAYS_WRITTEN = {
    *("name", "steps", "sequence", "batch", "data.source", "optim.lr", "optim.warmup"),
    *("plan.replicate", "plan.microbatch", "plan.grad_accum", "plan.precision"),
}
LARGEST = ("model", "microbatch", "sequence")
DRAWN = 30  # of the best plans
LESS = 0.8  # of the memory that the last plan of the front took: what the next may use
MOST_POINTS = 8  # plans of the front that are searched for
SLOWEST = 3.0  # × the fastest: who wants to save so much memory takes other machines


def asked_for(options: argparse.Namespace) -> str:
    """The option that says which answer is wanted; "plan" if none does. What that answer does not read is refused."""
    asked = next((name for name in READ if _is_given(options, name)), "plan")
    read = READ[asked] - (CHOSEN if options.exact else set())
    unread = [name for name in vars(options) if name in OPTIONS - read - {asked} and _is_given(options, name)]
    if unread:
        words = {name: f"--{name.replace('_', '-')}" for name in (*unread, asked)} | {"plan": "a plan search"}
        reader = words[asked] + (" --exact" if options.exact and "exact" in READ[asked] else "")
        what = f"{' and '.join(words[name] for name in unread)} cannot be combined with {reader}"
        raise InputError([Problem(what, f"leave {'it' if len(unread) == 1 else 'them'} out, or use two commands")])
    return asked


def _is_given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name, None)
    return value is not None and value is not False  # a rank may be 0


def add_plan(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    target = "RUN.toml | MODEL | config.json | FOLDER | key=value"
    verb.add_argument("words", nargs="*", metavar=target, help="plan.tp=8 and the like fix a field of the plan")
    verb.add_argument("--cluster", metavar="64xh100", help="the machines; a file of your own works too")
    verb.add_argument("--profile", metavar="FILE.json", help="as `meshwright bench --probe` measured them")
    verb.add_argument("--sequence", type=words.positions, help="tokens of one sample")
    verb.add_argument(
        "--document-tokens",
        type=words.positions,
        help="mean length of a document where they are masked (default: that of a run's own data, else full attention)",
    )
    verb.add_argument("--batch", type=words.samples, help="samples in one optimizer step, over the whole job")
    verb.add_argument(
        "--vary",
        action="append",
        choices=("precision", "optimizer", "batch", "communication"),
        help="also search over it",
    )
    verb.add_argument(
        "--top", type=words.count, help=f"how many plans to show (default: the best of each kind, up to {TOP})"
    )
    verb.add_argument(
        "--margin", type=words.share, help="by which the memory prediction may be too low, and the plan still fit (5%%)"
    )
    verb.add_argument("--write", metavar="RUN.toml", help="write the best plan to a run file")
    verb.add_argument("--force", action="store_true", help="let --write and --page replace a file")
    verb.add_argument("--tokens", type=words.amount, help="also predict how long this many tokens take, such as 15T")
    verb.add_argument("--dollars", type=words.amount, help="a GPU-hour's price, for --tokens")
    questions = verb.add_argument_group("other questions").add_mutually_exclusive_group()
    questions.add_argument("--gpus-needed", action="store_true", help="the smallest number of these GPUs that fits")
    questions.add_argument("--largest", choices=LARGEST, help="the largest model, microbatch or sequence that fits")
    questions.add_argument(
        "--what-if", action="append", metavar="KEY=VALUE", help="network, cluster, sequence or batch"
    )
    questions.add_argument("--network", metavar="10gbe", help="what if the network between nodes were this one")
    questions.add_argument("--layers", action="store_true", help="parameters, FLOPs and bytes of each layer")
    questions.add_argument("--traffic", action="store_true", help="list the collectives that one rank issues")
    questions.add_argument("--price", metavar="IN.csv", help="predict time and memory for a table of runs")
    verb.add_argument("--exact", action="store_true", help="evaluate the stated plan only, without a search")
    verb.add_argument("--textbook", action="store_true", help="also print the closed-form formulas of the literature")
    verb.add_argument("--chart", action="store_true", help="also draw memory, time, plans and pipeline in the terminal")
    verb.add_argument("--page", metavar="FILE.html", help="also draw them as one self-contained HTML page")
    questions.add_argument(
        "--trace", action="store_true", help="dry run: one rank executes a real step on fake tensors"
    )
    verb.add_argument("--rank", type=_place, help="the rank that --trace executes (default: the most loaded)")
    verb.add_argument("--out", metavar="OUT.csv", help="where --price writes")


def plan(options: argparse.Namespace) -> int:
    """The answer to whichever question was asked."""
    from meshwright.cli import what_if

    asked = asked_for(options)
    if options.dollars is not None and options.tokens is None:
        raise InputError([Problem("--dollars needs --tokens", "add --tokens, for example 1.5e12")])
    drawing = options.chart or options.page
    answers: dict[str, Callable[[argparse.Namespace], int]] = {
        "traffic": collectives,
        "price": price_table,
        "trace": traced,
        "largest": what_if.largest,
        "gpus_needed": what_if.gpus_needed,
        "layers": what_if.layer_by_layer,
        "what_if": what_if.what_if,
        "network": what_if.what_if,
        "textbook": textbook,
        "exact": drawn if drawing else exact,
        "plan": drawn if drawing else best,
    }
    return answers[asked](options)


def price_table(options: argparse.Namespace) -> int:
    """A table of runs with what they should take."""
    from meshwright.published.rows import price_file

    if not options.out:
        raise InputError([Problem("--price needs --out", "add --out OUT.csv")])
    priced = price_file(Path(options.price), Path(options.out), words.say_to(options.json))
    if options.json:
        print(msgspec.json.encode({"out": options.out, **msgspec.to_builtins(priced)}).decode())
    return 0


def _place(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of at least 0")
    return int(text)


def run_of(put: PlanQuery, found: Candidate) -> Run:
    """The run that trains by a plan, with what was asked."""
    asked = put.asked.run
    same = found.job.cluster == put.question.cluster
    machines = put.machines if same else found.job.cluster.name
    goal = msgspec.structs.replace(asked.goal, cluster=machines, vary=put.question.vary)
    name = asked.name if "name" in put.asked.origins else f"{put.model}-{found.job.cluster.name}"
    kept = found.job.master_weights
    optim = msgspec.structs.replace(
        asked.optim, master_weights=kept, stochastic_rounding=kept == "none", state_dtype=found.job.state_dtype
    )
    chosen = {"sequence": found.job.sequence, "batch": found.plan.batch, "plan": found.plan, "optim": optim}
    run = msgspec.structs.replace(asked, name=name, goal=goal, **chosen)
    if problems := check.problems(run):
        raise InputError(problems)
    return run


def best(options: argparse.Namespace) -> int:
    """Does it fit, how fast, and the command; then the table, why, and what else."""
    asked = put(options)
    question = asked.question
    answer = ranked(question, options.top)
    if not answer.found:
        return nothing_fits(options, asked, answer)
    first = answer.found[0]
    chosen = msgspec.structs.replace(question, **tables.chosen(first), optimizer=first.job.optimizer)
    beside = explain.beside(chosen, first.plan)
    record = answer_record(asked, question, answer) | {"neighbours": msgspec.to_builtins(beside)}
    lines = [*answered(options, asked, answer, record), "", *tables.plan_heading(asked, question), ""]
    lines += [*tables.ranking(answer, question, words.columns()), "", *tables.counted(answer.counts), ""]
    lines += [f"Why the first: {explain.why(first)}", "Neighbouring plans:", *tables.neighbours(first, beside)]
    if "optimizer" in question.vary:
        others = explain.other_optimizers(chosen, first.plan)
        record["optimizers"] = msgspec.to_builtins(others)
        lines += [
            "Other optimizers under the first plan (they learn otherwise, by rates of their own: choose by optim.name):"
        ]
        lines += tables.neighbours(first, others)
    lines += _written(options, asked, first)
    show(options, record, lines)
    return Exit.DONE


def answered(
    options: argparse.Namespace, asked: PlanQuery, answer: SearchResult, record: dict[str, Any]
) -> Iterator[str]:
    """The three lines that answer; and the same for scripts, into their record."""
    found = answer.found[0]
    span = sizes.duration(found, options.tokens, options.dollars) if options.tokens is not None else None
    does_fit = found.fits is not False
    if does_fit and options.write:
        command = ["meshwright", "train", options.write]
    else:
        command = query.command(asked, run_of(asked, found)) if does_fit and not asked.approximate else None
    record["answer"] = {
        "fits": found.fits,
        "headroom_bytes": found.fit.headroom_bytes,
        "seconds": found.price.seconds,
        "days": span.seconds / DAY if span else None,
        "dollars": span.dollars if span else None,
        "command": shlex.join(command) if command else None,
        "margin": round(found.ledger.high - 1, 6),
        "question": answer.host_question,
    }
    if span:
        record["duration"] = msgspec.to_builtins(span)
    yield answer.host_question or tables.fitting(found)
    yield tables.speed(found) + (f"; {tables.lasting(span)}" if span else "")
    if command:
        yield words.pasted("Run:", command, words.columns())
    elif does_fit:
        yield f"Not to be trained here: {asked.approximate}"


def ranked(question: Question, top: int | None) -> SearchResult:
    """The best plan of each kind; of more plans than there are kinds, the next best of any."""
    answer = searched(question, top or TOP, kinds=True)
    if top is None or len(answer.found) in (0, top):
        return answer
    plans = {each.plan for each in answer.found}
    others = [each for each in search(question, top).found if each.plan not in plans]
    found = [*answer.found, *others[: top - len(plans)]]
    fastest = min(each.seconds_per_token for each in found)
    found.sort(key=lambda each: (each.is_tight, rank(each, fastest)))
    return msgspec.structs.replace(answer, found=tuple(found))


def searched(question: Question, top: int, *, kinds: bool = False) -> SearchResult:
    """The best plans; a question that no plan can be legal for is refused with the rule that empties it."""
    answer = search(question, top, kinds=kinds)
    if answer.counts.legal == 0:
        raise InputError(empty(question))
    return answer


def _written(options: argparse.Namespace, asked: PlanQuery, found: Candidate) -> list[str]:
    """What --write adds to an answer: the plan in a file."""
    if not options.write:
        return []
    if found.fits is False:
        return ["", f"not written: {options.write}, because the plan does not fit"]
    run = run_of(asked, found)
    words_of_plan = {word.partition("=")[0] for word in query.plan_overrides(run.plan)}
    heading = f"# What is left out is as usual: meshwright config show {shlex.quote(options.write)}\n\n"
    written = load.write_brief(run, ALWAYS_WRITTEN | words_of_plan)
    write_whole(Path(options.write), heading + written, options.force)
    loaded, _ = load.examine(Path(options.write))
    if loaded is None or loaded.run != run:  # something was derived that is not so here: all is stated
        written = load.write(run)
        if run.epochs:
            written = written.replace(f"steps = {run.steps}\n", "", 1)
        write_whole(Path(options.write), written, force=True)
    lines = ["", f"written: {options.write} (train it with: meshwright train {options.write})"]
    decisive = {
        "steps": run.steps,
        "data.source": run.data.source,
        "optim.lr": run.optim.lr,
        "optim.warmup": run.optim.warmup,
    }
    unsaid = [f"{key} = {value}" for key, value in decisive.items() if key not in asked.asked.origins]
    if unsaid:
        lines.append(f"set these in the file first, the planner does not choose them: {', '.join(unsaid)}")
    return lines


def answer_record(asked: PlanQuery, question: Question, answer: SearchResult) -> dict[str, Any]:
    """The best plans, as scripts read them."""
    return {
        "model": asked.model,
        "cluster": msgspec.to_builtins(question.cluster),
        "sequence": question.sequence,
        "batch": question.batch,
        "precision": question.precision,
        "assumed": asked.assumed,
        "plans": [as_record(found, explain.why(found)) for found in answer.found],
        "left_out": answer.left_out,
        "counts": msgspec.to_builtins(answer.counts),
        "ties": explain.ties(answer),
    }


def nothing_fits(options: argparse.Namespace, asked: PlanQuery, answer: SearchResult) -> int:
    """That nothing fits; the nearest misses and what would fit."""
    misses, suggestions = nearest(asked.question), changes(asked.question)
    record = answer_record(asked, asked.question, answer) | {
        "answer": dict.fromkeys(("seconds", "days", "dollars", "command", "question"))
        | {
            "fits": False,
            "headroom_bytes": misses[0].fit.headroom_bytes,
            "margin": round(misses[0].ledger.high - 1, 6),
        },
        "misses": [as_record(found, explain.why(found)) for found in misses],
        "changes": [{"change": each.change, **as_record(each.found, explain.why(each.found))} for each in suggestions],
    }
    lines = [f"Nothing fits. Of the nearest plan, {tables.lacking(misses[0])}", ""]
    lines += [*tables.plan_heading(asked, asked.question), "", *tables.missed(misses, suggestions, asked.question)]
    show(options, record, [*lines, "", *tables.counted(answer.counts)])
    return Exit.DOES_NOT_FIT


def exact(options: argparse.Namespace) -> int:
    """One plan as it stands, fields that are left out as a run would fill them."""
    asked = put(options)
    plan, question = _stated(asked)
    found = priced(question.job(plan))
    answer = SearchResult(found=(found,), counts=SearchCounts(legal=1, too_large={}, slower=0, priced=1))
    totals = bytes_by_axis(traffic(question.arch, plan, question.sequence, optimizer=question.optimizer))
    sent = {str(axis): size for axis, size in totals.items()}
    by_axis = ", ".join(f"{axis} {gib(size)} GiB" for axis, size in sent.items()) or "nothing"
    record = answer_record(asked, question, answer) | {"traffic_bytes": sent}
    lines = [*answered(options, asked, answer, record), ""]
    lines += [*tables.plan_heading(asked, question), f"plan: {plan_words(plan)}", "", *tables.ledger(found), ""]
    lines += [*tables.waterfall(found), "", f"traffic of the first rank per step: {by_axis}", explain.why(found)]
    lines += _written(options, asked, found)
    show(options, record, lines)
    return Exit.DOES_NOT_FIT if found.fits is False else Exit.DONE


def _stated(asked: PlanQuery) -> tuple[Plan, Question]:
    """The plan of the command line and the file; a batch that nobody stated is the plan's own."""
    question = asked.question
    stated = asked.asked.in_file | asked.asked.on_command_line | {"precision": question.precision}
    arch = msgspec.to_builtins(question.arch)
    table: dict[str, Any] = {"arch": arch, "batch": question.batch, "plan": stated}
    load.resolve_plan(table, {}, question.cluster.gpus, question.cluster.gpus)
    plan = msgspec.convert(table["plan"], Plan)
    if any(each.startswith("batch =") for each in asked.assumed):
        question = msgspec.structs.replace(question, batch=plan.batch)
    found = list(problems(question, plan))
    if plan.world != question.cluster.gpus:
        what = f"the plan uses {plural(plan.world, 'GPU')}, and {asked.machines} has {question.cluster.gpus}"
        found.append(Problem(what, "change an axis, or the cluster", "plan"))
    if found:
        raise InputError(found)
    if question.limit_bytes < math.inf and "recompute" not in stated:  # as `train` chooses it
        plan = budget.fitting(question.job(plan), question.limit_bytes)
    return plan, question


def textbook(options: argparse.Namespace) -> int:
    """The closed-form formulas of the literature for the best plan, or for the stated one."""
    from meshwright.cost.textbook import table

    asked = put(options)
    found = any_plan(options, asked)
    entries = table(found.job)
    record = {"plan": msgspec.to_builtins(found.plan), "entries": msgspec.to_builtins(entries)}
    lines = [*tables.plan_heading(asked, asked.question), f"plan: {found_words(found, asked.question)}", ""]
    for entry in entries:
        lines.append(f"{entry.name}: {entry.amount}")
        if entry.misfit:
            lines.append(f"    DOES NOT APPLY: {entry.misfit}")
        lines += [f"    {text}" for text in (entry.formula, entry.source, entry.note) if text]
    show(options, record, lines)
    return 0


def any_plan(options: argparse.Namespace, asked: PlanQuery) -> Candidate:
    """The plan that is stated, the best, or where nothing fits the nearest miss."""
    if options.exact:
        plan, question = _stated(asked)
        return priced(question.job(plan))
    answer = searched(asked.question, 1)
    return answer.found[0] if answer.found else nearest(asked.question)[0]


def traced(options: argparse.Namespace) -> int:
    """A dry run of the plan that is stated, or of the best; exit 1 when the trainer does something else."""
    words.require_training()
    asked = put(options)
    found = any_plan(options, asked)
    world = found.plan.world
    if options.rank is not None and options.rank >= world:
        raise InputError(
            [Problem(f"--rank {options.rank} is not one of {plural(world, 'rank')}", f"use 0 to {world - 1}")]
        )
    if asked.question.arch.compared:
        what = "--trace steps with the loss of tokens, and objective = dpo compares answers"
        raise InputError([Problem(what, "use --traffic: tests hold what it lists to real steps")])
    from meshwright.verify.trace import lines, trace

    traced = trace(run_of(asked, found), found.job, options.rank)
    show(options, {"agrees": traced.agrees, **msgspec.to_builtins(traced)}, lines(traced))
    return 0 if traced.agrees else 1


def collectives(options: argparse.Namespace) -> int:
    """The collectives of one optimizer step, as the first rank issues them."""
    target, overrides = words.target(options.words)
    ranks = cluster(options.cluster).gpus if options.cluster else 1  # of a plan that states no axis
    run = _run(target, [*overrides, *flags(options)], ranks)
    phases = {"warm-up": True, "compressed": False} if run.compresses else {"": False}
    calls, lines = list[Collective](), [f"plan: {run.plan}"]
    for phase, warm_up in phases.items():
        found = traffic(
            run.arch, run.plan, run.sequence, optimizer=description_of(run.optim), noise=run.measures_noise,
            warm_up=warm_up,
        )  # fmt: skip
        calls += [msgspec.structs.replace(each, phase=phase) for each in found]
        lines += [*_phase_lines(phase), *_traffic_lines(found)]
    show(options, calls, lines)
    return Exit.DONE


def _phase_lines(phase: str) -> list[str]:
    """What the steps of a phase are."""
    words = {"warm-up": "a step that sums gradients exactly:", "compressed": "a step that exchanges signs of momenta:"}
    return ["", words[phase]] if phase else []


def _traffic_lines(found: Sequence[Collective]) -> list[str]:
    """A table of calls, and their bytes by axis."""
    totals = ", ".join(f"{axis} {size:,}" for axis, size in bytes_by_axis(found).items())
    lines = [f"{'kind':<16}{'axis':<18}{'calls':>8}{'bytes/call':>18}"]
    lines += [f"{each.kind:<16}{each.axis:<18}{each.count:>8}{each.bytes:>18,}{_rarely(each)}" for each in found]
    rare = sum(each.total_bytes for each in found if each.every > 1)
    lines += [f"of a sync: outer {rare:,}"] if rare else []
    return [*lines, f"total{' per step, on average' if rare else ''}: {totals or 'nothing'}"]


def _rarely(call: Collective) -> str:
    return f"  once in {call.every} steps" if call.every > 1 else ""


def _run(target: str | None, overrides: list[str], ranks: int) -> Run:
    """The run of a file; or the default run, with the architecture of a model, a folder or a config.json."""
    file = None
    if target in presets.preset_names():
        overrides = [f"arch.preset={target}", *overrides]
    elif target is not None and (arch := described(Path(target))):
        stated = {f"arch.{name}": value for name, value in msgspec.to_builtins(arch).items()}
        overrides = [*query.settings(stated), *overrides]
    elif target is not None:
        file = Path(target)
    return load.load(file, overrides, default_ranks=ranks).run


def drawn(options: argparse.Namespace) -> int:
    """The answer as always, and then its pictures; those of the nearest miss where nothing fits."""
    if options.chart and options.json:
        remedy = "leave one of them out, or use --page"
        raise InputError([Problem("--chart cannot be combined with --json", remedy)])
    code = (exact if options.exact else best)(options)
    asked = put(options)
    first = any_plan(options, asked)
    others = [] if options.exact else search(asked.question, DRAWN).found
    front = frugal(asked.question, first) if first.fits is not False and not options.exact else [first]
    unique = {plan_words(each.plan): each for each in (first, *others, *front)}
    points = [Point(label=name, gib=each.peak_bytes / GIB, seconds=each.price.seconds) for name, each in unique.items()]
    device = first.job.cluster.gpu.memory_bytes
    pictures = Pictures(
        title=f"{asked.model} on {first.job.cluster.name}",
        heading=(*tables.plan_heading(asked, asked.question), f"plan: {found_words(first, asked.question)}"),
        memory=plan_charts.memory(first.ledger, device),
        time=plan_charts.seconds(first.price),
        points=plan_charts.front(points),
        limit_gib=device / GIB,
        pipeline=plan_charts.pipeline(first.job),
    )
    if options.chart:
        columns = shutil.get_terminal_size((100, 24)).columns
        screen = Terminal(columns=columns, colour=env.colour(sys.stdout.isatty()))
        print("\n".join(["", *plan_charts.charts(pictures, screen)]))
    if options.page:
        write_whole(Path(options.page), page(pictures), options.force)
        words.say_to(options.json)(f"page: {options.page}")
    return code


def frugal(question: Question, first: Candidate) -> list[Candidate]:
    """From the fastest plan on, the fastest in ever less memory: the front of memory and time, to a fifth."""
    found = [first]
    while len(found) < MOST_POINTS:
        gpu = msgspec.structs.replace(question.cluster.gpu, memory_bytes=found[-1].peak_bytes * LESS)
        small = msgspec.structs.replace(question, cluster=msgspec.structs.replace(question.cluster, gpu=gpu))
        fastest = search(small, top=1).found
        if not fastest or fastest[0].price.seconds > SLOWEST * first.price.seconds:
            break
        found += fastest
    return found
