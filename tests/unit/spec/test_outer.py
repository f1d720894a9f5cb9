"""When replicas that sync rarely meet, and which elements share a scale."""

import pytest

from meshwright.spec.communication import SyncCalendar, block_length, calendar, fragment_of, outer_states
from meshwright.spec.plan import Plan


def days(**words: int) -> SyncCalendar:
    return SyncCalendar(**({"every": 4, "fragments": 1, "warmup": 0, "steps": 10} | words))


def test_the_last_step_syncs_everything():
    assert [step for step in range(1, 11) if days().due(step)] == [4, 8, 10]
    assert days(fragments=3).due(10) == (0, 1, 2)


def test_a_warm_up_is_plain_training_and_shifts_the_syncs():
    found = days(warmup=3)
    assert [step for step in range(1, 11) if found.is_plain(step)] == [1, 2, 3]
    assert [step for step in range(1, 11) if found.due(step)] == [7, 10]
    assert [step for step in range(1, 11) if found.meets(step)] == [1, 2, 3, 7, 10]


def test_fragments_are_staggered_and_each_is_synced_once_in_every_interval():
    found = days(fragments=3, steps=100)
    assert [found.due(step) for step in range(5, 13)] == [(1,), (2,), (), (0,)] * 2


def test_without_an_outer_loop_every_step_is_plain():
    plain = calendar(Plan(microbatch=1, replicate=2), warmup=0, steps=3)
    assert all(plain.is_plain(step) and plain.meets(step) and not plain.due(step) for step in (1, 2, 3))
    assert [plain.has_come(step, 2) for step in (1, 2, 3)] == [False, True, False]


@pytest.mark.parametrize(("every", "steps"), [(1, [4, 8, 10]), (3, [4, 8, 10]), (5, [8, 10]), (0, [])])
def test_what_is_due_between_syncs_comes_at_the_next(every, steps):
    assert [step for step in range(1, 11) if days().has_come(step, every)] == steps


def test_layers_are_dealt_out_to_fragments_in_turn():
    assert [fragment_of(layer, 3) for layer in range(-1, 6)] == [0, 0, 1, 2, 0, 1, 2]


def test_only_an_exact_average_needs_no_memory():
    def plan(**words: str) -> Plan:
        return Plan(microbatch=1, replicate=2, sync_every=4, **words)  # type: ignore[arg-type]

    assert outer_states(Plan(microbatch=1, replicate=2)) == ()
    assert outer_states(plan()) == ()
    assert outer_states(plan(outer_quant="int8")) == ("anchor",)
    assert outer_states(plan(outer="diloco")) == outer_states(plan(outer="slowmo")) == ("anchor", "outer_momentum")


@pytest.mark.parametrize(("length", "block"), [(4096, 128), (11008, 32), (768, 32), (64, 8), (33, 33)])
def test_a_block_is_never_cut_by_up_to_eight_ranks_of_tp(length, block):
    assert block_length(length) == block
    if length % 8 == 0:
        assert all(length // tp % block == 0 for tp in (1, 2, 4, 8))
