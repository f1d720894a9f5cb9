"""Out of memory is explained from the ledger; nothing is allocated here."""

import re

import pytest

from meshwright.config import load
from meshwright.cost.memory import ledger
from meshwright.runtime.failure import Exit
from meshwright.spec.units import GIB
from meshwright.train.oom import cause, changes, overrun, peak_words, question_of, verdict

WORDS = (
    "arch.preset=llama3-8b",
    "sequence=4096",
    "batch=64",
    "plan.precision=bf16",
    "plan.shard=8",
    "plan.zero=2",
    "plan.microbatch=8",
)


@pytest.fixture(scope="module")
def run():
    return load.load(None, WORDS, default_ranks=8).run


@pytest.fixture(scope="module")
def question(run):
    return question_of(run, "NVIDIA A100-SXM4-80GB")


def test_three_changes_fit_and_say_what_they_cost(question, run):
    found = changes(question, run)
    assert len(found) == 3
    assert all(each.peak_bytes <= question.cluster.gpu.memory_bytes for each in found)
    assert all(each.cost > 0 for each in found)
    assert " and " not in found[0].change  # one thing is easier to change than two


def test_what_is_expected_is_told_before_anything_is_allocated(question, run):
    told = peak_words(question, run)
    assert re.fullmatch(r"warning: \d+\.\d of 79 GiB expected at the peak: this will not fit", told)
    small = load.load(None, [*WORDS, "plan.microbatch=1", "plan.recompute=full"], default_ranks=8).run
    assert re.fullmatch(r"memory: \d+\.\d of 79 GiB expected at the peak", peak_words(question, small))


def test_a_plan_that_never_had_room_is_said_to_and_smaller_microbatches_are_found():
    words = [*WORDS, "batch=4096", "plan.microbatch=512"]
    run = load.load(None, words, default_ranks=8).run
    question = question_of(run, "NVIDIA A100-SXM4-80GB")
    told = verdict(question, run, {"gradients": 0}, 70 * GIB, "CUDA out of memory. Tried to allocate 4.00 GiB.")
    assert "as predicted" in told.what
    assert "activations" in told.what
    found = changes(question, run)
    assert len(found) == 3
    assert all("microbatch" in each.change for each in found)  # nothing else is enough
    assert all(each.peak_bytes <= question.cluster.gpu.memory_bytes for each in found)


def test_the_line_that_overran_is_named_beside_its_prediction(question, run):
    predicted = ledger(question.job(run.plan))
    said = {line.name: line.bytes for line in predicted.lines}
    measured = {"weights": said["weights"] + 7 * GIB, "moments": said["moments"]}
    peak = predicted.allocated + 7 * GIB
    assert overrun(predicted, measured, peak) == ("weights", said["weights"] + 7 * GIB, said["weights"])
    as_said = {"weights": said["weights"], "moments": said["moments"]}
    name, here, there = overrun(predicted, as_said, peak)
    assert name == "what a step needs for itself"
    assert here - there == 7 * GIB


def test_the_states_of_any_optimizer_have_one_name(question, run):
    predicted = ledger(question.job(run.plan))
    told = cause(predicted, {"moments": 2 * predicted.allocated}, 2 * predicted.allocated, 1e18)
    assert told.startswith("optimizer states took ")


def test_the_verdict_has_six_lines_and_the_code_of_a_plan_that_does_not_fit(question, run):
    told = verdict(question, run, {}, 79 * GIB, "CUDA out of memory. Tried to allocate 4.00 GiB.")
    assert told.code == Exit.DOES_NOT_FIT
    assert len(told.lines()) == 5  # the details are added by the rank
    assert "predicted" in told.what
    assert "GiB" in told.remedy
