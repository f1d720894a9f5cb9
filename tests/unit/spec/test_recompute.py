import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.check import how_blocks_run
from meshwright.spec.plan import PATTERN, Plan, by_operation, problem, runs

POLICIES = st.one_of(
    st.sampled_from(["full", "selective", "sqrt"]),
    st.builds("{}-{}".format, st.sampled_from(["every", "first"]), st.integers(1, 40)),
)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(POLICIES, st.integers(1, 64))
def test_runs_follow_each_other_from_the_first_block_and_none_is_empty(policy, blocks):
    assert re.search(PATTERN, policy)
    covered = [block for run in runs(policy, blocks) for block in run]
    assert covered == list(range(len(covered)))
    assert all(runs(policy, blocks))
    assert len(covered) == (min(int(policy.split("-")[1]), blocks) if policy.startswith("first") else blocks)


def test_each_word_has_its_runs():
    assert runs("none", 6) == ()
    assert runs("full", 3) == (range(1), range(1, 2), range(2, 3))
    assert runs("selective", 2) == runs("full", 2)
    assert runs("selective-2", 5) == runs("first-2", 5)
    assert runs("every-4", 6) == (range(4), range(4, 6))
    assert runs("first-2", 6) == (range(1), range(1, 2))
    assert runs("every-1", 5) == runs("full", 5) == runs("first-5", 5)


@pytest.mark.parametrize(("blocks", "length"), [(1, 1), (2, 1), (3, 2), (6, 2), (7, 3), (32, 6), (126, 11)])
def test_sqrt_takes_the_nearest_whole_root(blocks, length):
    assert runs("sqrt", blocks) == runs(f"every-{length}", blocks)


def test_only_selective_goes_by_operation():
    assert [
        policy
        for policy in ("none", "full", "selective", "selective-2", "sqrt", "every-2", "first-2")
        if by_operation(policy)
    ] == ["selective", "selective-2"]


@pytest.mark.parametrize(
    "word", ["", "ful", "every", "every-0", "every-x", "first--1", "every-2.5", "first-01", "Full"]
)
def test_a_word_that_means_nothing_is_told_with_those_that_do(word):
    found = problem(word)
    assert found is not None
    assert not re.search(PATTERN, word)
    assert found.key == "plan.recompute"
    assert "every-K, first-K or selective-K with a whole K of at least 1" in found.remedy


def test_the_nearest_word_is_offered():
    found = problem("selectiv")
    assert found is not None
    assert found.remedy.startswith("did you mean selective?")


@pytest.mark.parametrize(
    ("plan", "near"),
    [
        (Plan(microbatch=1, pp=2, schedule="zb1p", recompute="full"), "1f1b"),
        (Plan(microbatch=1, pp=2, schedule="zbv", chunks=2, recompute="selective"), "interleaved"),
        (Plan(microbatch=1, pp=2, schedule="dualpipev", chunks=2, compile=True), "interleaved"),
    ],
)
def test_a_backward_in_two_halves_is_refused_with_the_nearest_schedule(plan, near):
    (found,) = how_blocks_run(plan)
    assert found.remedy.startswith(f"use plan.schedule = {near}, whose backwards are whole, or leave {found.key} out")


def test_whole_backwards_and_no_pipeline_allow_all():
    for schedule in ("1f1b", "zbv"):
        assert not list(how_blocks_run(Plan(microbatch=1, schedule=schedule, recompute="selective", compile=True)))
    assert not list(how_blocks_run(Plan(microbatch=1, pp=2, recompute="every-2", compile=True)))
