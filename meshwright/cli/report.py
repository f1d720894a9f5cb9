"""`meshwright report`: what a run did beside the prediction; from its folder alone, without torch."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from meshwright.cli import options as words
from meshwright.hardware.profile import read_profile
from meshwright.report import run_summary, run_text
from meshwright.report.plan_charts import Terminal
from meshwright.report.run_data import FolderFacts, facts, runs_in
from meshwright.report.run_summary import Given, RunReport, Runs, reported
from meshwright.runtime.files import refuse_existing, write_whole
from meshwright.spec.problem import InputError


def add_report(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    folders = "a run's folder, several to compare, or a folder of runs for a table of them, newest first"
    verb.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help=folders)
    verb.add_argument("--profile", type=Path, help="predict from this machine profile, as bench --probe wrote it")
    verb.add_argument("--cluster", default="", help="the machines to predict for, like 8xh100")
    verb.add_argument("--page", type=Path, metavar="FILE.html", help="also draw it as one self-contained HTML page")
    smooth = "of the page's loss curves: weight of their moving average, 0 (as measured) to below 1; default: 0.6"
    verb.add_argument("--smooth", type=weight, default=0.6, metavar="WEIGHT", help=smooth)
    verb.add_argument("--force", action="store_true", help="replace a page that is there")


def report(options: argparse.Namespace) -> int:
    """Read the folders and report on them."""
    if options.page:
        refuse_existing(options.page, options.force)  # before anything is read
    inside = [run for folder in options.folders for run in runs_in(folder)]
    found, unreadable = [facts(folder) for folder in options.folders if not runs_in(folder)], []
    if inside:
        others, unreadable = _read(inside)
        found = sorted([*found, *others], key=lambda each: each.updated, reverse=True)
    given = Given(cluster=options.cluster, profile=read_profile(options.profile) if options.profile else None)
    runs = [(each, reported(each, given)) for each in found]
    if options.page:
        from meshwright.report.run_charts import run_page

        write_whole(options.page, run_page(runs, options.smooth), options.force)
    reports = [shown for _, shown in runs]
    if inside:
        words.show(options, reports, (*run_text.overview(reports, words.columns()), *_drawn(runs, options.smooth)))
    elif len(reports) > 1:
        words.show(options, reports, (*run_text.lines(reports), *_drawn(runs, options.smooth)))
    else:
        words.show(options, reports[0], _lines(reports[0], found[0]))
    for problem in unreadable:
        print(f"left out: {run_text.plain(problem)}", file=sys.stderr)
    if options.page:
        words.say_to(options.json)(f"page: {options.page}")
    return 0


def weight(text: str) -> float:
    """A share of what is smoothed."""
    if not 0 <= (weight := float(text)) < 1:
        raise argparse.ArgumentTypeError("from 0 to below 1")
    return weight


def _read(folders: list[Path]) -> tuple[list[FolderFacts], list[str]]:
    """The runs of a folder of runs; one that cannot be read is said, and left out."""
    found, unreadable = [], []
    for folder in folders:
        try:
            found.append(facts(folder))
        except InputError as error:
            unreadable += [
                each if str(folder) in each.text else msgspec.structs.replace(each, text=f"{folder}: {each.text}")
                for each in error.problems
            ]
    if not found:
        raise InputError(unreadable)
    return found, [str(problem) for problem in unreadable]


def _lines(shown: RunReport, found: FolderFacts) -> Iterator[str]:
    """The sections of one run, and its loss drawn where a person looks at it."""
    yield from run_text.what_ran(shown)
    yield ""
    yield from run_text.beside_prediction(shown)
    yield ""
    yield from run_text.of_losses(shown)
    yield from _drawn([(found, shown)])
    if evaluated := list(run_text.of_evaluation(shown)):
        yield from ("", *evaluated)
    yield ""
    yield from run_text.of_time(shown)
    if ranks := list(run_text.of_ranks(shown)):
        yield from ("", *ranks)


def _drawn(runs: Runs, weight: float = 0.0) -> Iterator[str]:
    """Losses drawn where a person looks at them."""
    if columns := words.columns():
        yield from run_text.losses(run_summary.named_losses(runs), Terminal(columns=columns), weight)
