"""`meshwright report`: what a run did beside the prediction; from its folder alone, without torch."""

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from meshwright.cli import options as words
from meshwright.config.run import Goal
from meshwright.hardware.profile import read_profile
from meshwright.report import run_summary, run_text
from meshwright.report.plan_charts import Terminal
from meshwright.report.run_data import FolderFacts, facts
from meshwright.report.run_summary import NO_PREDICTION, Given, PredictedFigures, RunReport, Steps, steps_of
from meshwright.runtime.files import refuse_existing, write_whole
from meshwright.search.budget import job_of
from meshwright.spec.problem import InputError


def add_report(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run's folder; several are compared")
    verb.add_argument("--profile", type=Path, help="predict from this machine profile, as bench --probe wrote it")
    verb.add_argument("--cluster", default="", help="the machines to predict for, like 8xh100")
    verb.add_argument("--page", type=Path, metavar="FILE.html", help="also draw it as one self-contained HTML page")
    verb.add_argument("--force", action="store_true", help="replace a page that is there")


def report(options: argparse.Namespace) -> int:
    """Read the folders and report on them."""
    if options.page:
        refuse_existing(options.page, options.force)  # before anything is read
    found = [facts(folder) for folder in options.folders]
    reports = []
    for each in found:
        measured = steps_of(each)
        reports.append(run_summary.report(each, measured, _predicted(each, measured, options)))
    if options.page:
        from meshwright.report.run_charts import run_page

        write_whole(options.page, run_page(list(zip(found, reports, strict=True))), options.force)
    if len(reports) > 1:
        words.show(options, reports, run_text.lines(reports))
    else:
        words.show(options, reports[0], _lines(reports[0], found[0]))
    if options.page:
        words.say_to(options.json)(f"page: {options.page}")
    return 0


def _predicted(each: FolderFacts, steps: Steps | None, options: argparse.Namespace) -> PredictedFigures:
    """The planner's words about exactly this run; a reason where it has none."""
    run, device = each.run, run_summary.device_of(each.environment)
    given = Given(cluster=options.cluster, profile=read_profile(options.profile) if options.profile else None)
    try:
        found, source = run_summary.machines(device, run.goal, run.plan.world, given)
    except InputError as error:
        if options.cluster or options.profile:
            raise
        why = "; ".join(map(str, error.problems))
        return PredictedFigures(why_not=why if why.startswith(NO_PREDICTION) else f"{NO_PREDICTION}: {why}")
    job = msgspec.structs.replace(job_of(msgspec.structs.replace(run, goal=Goal())), cluster=found)
    used = run_summary.utilized(job, device, steps) if steps else None
    return PredictedFigures(prediction=run_summary.predict(job, device, source), utilized=used)


def _lines(shown: RunReport, found: FolderFacts) -> Iterator[str]:
    """The sections of one run, and its loss drawn where a person looks at it."""
    yield from run_text.what_ran(shown)
    yield ""
    yield from run_text.beside_prediction(shown)
    yield ""
    yield from run_text.of_losses(shown)
    if sys.stdout.isatty() and shown.losses is not None:
        screen = Terminal(columns=shutil.get_terminal_size((100, 24)).columns)
        yield from run_text.losses(found.kept, shown.losses.validation, screen)
    yield ""
    yield from run_text.of_time(shown)
    if ranks := list(run_text.of_ranks(shown)):
        yield from ("", *ranks)
