"""The pictures of `meshwright plan`: in the terminal with --chart, as a page with --page."""

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from meshwright.report import chart, gantt, picture
from meshwright.report.chart import Screen
from meshwright.report.page import page
from meshwright.report.picture import GIB, Pictures, Point
from meshwright.search.found import Found
from meshwright.search.order import search
from meshwright.search.question import Question
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.writing import write_whole
from meshwright.verbs import plan_tables as tables
from meshwright.verbs import surroundings, words
from meshwright.verbs.plan_answers import any_plan, best, exact
from meshwright.verbs.plan_question import put
from meshwright.verbs.plan_words import found_words, plan_words

LESS = 0.8  # of the memory that the last plan of the front took: what the next may use
TRIED = 30  # of the best plans that are drawn
MOST_POINTS = 8  # plans of the front that are searched for
SLOWEST = 3.0  # × the fastest: who wants to save so much memory takes other machines


def drawn(options: argparse.Namespace) -> int:
    """The answer as always, and then its pictures; those of the nearest miss where nothing fits."""
    _check(options)
    code = (exact if options.exact else best)(options)
    asked = put(options)
    first = any_plan(options, asked)
    others = [] if options.exact else search(asked.question, TRIED).found
    front = frugal(asked.question, first) if first.fit.fits and not options.exact else [first]
    title = f"{asked.model} on {first.job.cluster.name}"
    heading = [*tables.heading(asked, asked.question), f"plan: {found_words(first, asked.question)}"]
    made = pictures(title, heading, first, [*others, *front])
    if options.chart:
        print("\n".join(["", *charts(made)]))
    if options.page:
        write_whole(Path(options.page), page(made), options.force)
        words.say_to(options.json)(f"page: {options.page}")
    return code


def _check(options: argparse.Namespace) -> None:
    if options.chart and options.json:
        remedy = "leave one of them out, or use --page"
        raise InputError([Problem("--chart is for people, and --json for programs", remedy)])


def frugal(question: Question, first: Found) -> list[Found]:
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


def pictures(title: str, heading: Iterable[str], first: Found, others: Iterable[Found]) -> Pictures:
    """A plan's memory, seconds and pipeline, beside the other plans."""
    device = first.job.cluster.gpu.memory_bytes
    return Pictures(
        title=title,
        heading=tuple(heading),
        memory=picture.memory(first.ledger, device),
        time=picture.seconds(first.price),
        points=picture.front(points([first, *others])),
        limit_gib=device / GIB,
        pipeline=gantt.pipeline(first.job),
    )


def points(found: Iterable[Found]) -> list[Point]:
    """Plans as points, each once."""
    unique = {plan_words(each.plan): each for each in found}
    return [Point(label=label, gib=each.peak_bytes / GIB, seconds=each.price.seconds) for label, each in unique.items()]


def charts(drawn: Pictures) -> Iterator[str]:
    """For the terminal that this is, or plain for a pipe."""
    columns = shutil.get_terminal_size((100, 24)).columns
    return chart.charts(drawn, Screen(columns=columns, colour=surroundings.colour(sys.stdout.isatty())))
