"""Out of memory is explained from the ledger; nothing is allocated here."""

import re

import pytest

from meshwright.config import load
from meshwright.cost.memory import ledger
from meshwright.runtime.devices import CardProcess
from meshwright.runtime.failure import Exit
from meshwright.search.best_first import priced
from meshwright.spec.units import GIB
from meshwright.train.oom import CardUse, cause, changes, failure_report, overrun, peak_words, question_of

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
    told = failure_report(question, run, {"gradients": 0}, 70 * GIB, "CUDA out of memory. Tried to allocate 4.00 GiB.")
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


def test_the_report_has_six_lines_and_the_code_of_a_plan_that_does_not_fit(question, run):
    told = failure_report(question, run, {}, 79 * GIB, "CUDA out of memory. Tried to allocate 4.00 GiB.")
    assert told.code == Exit.DOES_NOT_FIT
    assert len(told.lines()) == 5  # the details are added by the rank
    assert "predicted" in told.what
    assert "GiB" in told.remedy


SMALL = ("arch.preset=llama3.2-1b", "sequence=4096", "batch=64", "plan.precision=bf16", "plan.microbatch=8")


@pytest.fixture(scope="module")
def fitting():
    """A plan that fits a card of its own, and the question it answers."""
    run = load.load(None, [*SMALL, "plan.recompute=full"], default_ranks=1).run
    question = question_of(run, "NVIDIA A100-SXM4-80GB")
    assert ledger(question.job(run.plan)).allocated < question.cluster.gpu.memory_bytes
    return question, run


def test_every_change_needs_less_than_the_plan_also_where_that_was_predicted_to_fit(fitting):
    question, run = fitting
    now = priced(question.job(run.plan)).peak_bytes
    found = changes(question, run)
    assert found
    assert all(each.peak_bytes < 0.98 * now for each in found)


def test_who_holds_the_card_is_named_and_what_is_left_is_what_must_do(fitting):
    question, run = fitting
    holder = CardProcess(pid=4242, name="python other.py --with a --long list=of words", bytes=50 * GIB)
    use = CardUse(total_bytes=int(question.cluster.gpu.memory_bytes), other_bytes=50 * GIB, holders=(holder,))
    told = failure_report(question, run, {}, 20 * GIB, "CUDA out of memory. " + "Tried to allocate. " * 20, use)
    assert "other processes hold 50.0 of this card's 79 GiB: process 4242 (python other.py" in told.what
    assert told.remedy.startswith("end them, or take another card")
    assert not any(line.endswith("…") for line in told.lines())
    left = question.cluster.gpu.memory_bytes - 50 * GIB
    assert all(each.peak_bytes <= left for each in changes(question, run, left))
    assert "took" not in told.what  # no line of the ledger is to blame


def test_a_hidden_holder_is_told_by_what_is_missing(fitting):
    use = CardUse(total_bytes=80 * GIB, other_bytes=60 * GIB, holders=())
    assert "hold 60.0 of this card's 80 GiB (the driver does not say which)" in str(use)
    assert not CardUse(total_bytes=80 * GIB, other_bytes=GIB, holders=()).is_shared
