import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, product
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from meshwright.spec.schedule import (
    Action,
    Orders,
    Schedule,
    actions,
    default_chunks,
    flow,
    legal,
    misfits,
    stage_ranks,
)


def validate(orders: Orders, placement: Sequence[int]) -> list[str]:
    """Everything that keeps orders from being one training step: nothing, for those of `actions`."""
    return [*_misplaced(orders, placement), *_incomplete(orders, len(placement)), *_stuck(orders, placement)]


def _misplaced(orders: Orders, placement: Sequence[int]) -> Iterator[str]:
    for rank, order in enumerate(orders):
        for action in order:
            if placement[action.stage] != rank:
                yield f"rank {rank} runs {action}, and stage {action.stage} is on rank {placement[action.stage]}"


def _incomplete(orders: Orders, stages: int) -> Iterator[str]:
    """Every stage takes every microbatch forward once and then back once, whole or in halves."""
    kinds: dict[tuple[int, int], str] = {}
    for action in chain.from_iterable(orders):
        visit = (action.stage, action.microbatch)
        kinds[visit] = kinds.get(visit, "") + action.kind
    microbatches = 1 + max((microbatch for _, microbatch in kinds), default=0)
    for stage, microbatch in product(range(stages), range(microbatches)):
        taken = kinds.get((stage, microbatch), "nothing")
        if taken not in ("FB", "FIW"):
            yield f"stage {stage} takes microbatch {microbatch} through {taken}, not FB or FIW"


def _stuck(orders: Orders, placement: Sequence[int]) -> Iterator[str]:
    """The action that each rank of a deadlock never gets to."""
    ran = Counter(placement[action.stage] for action, _ in flow(orders, placement))
    for rank, order in enumerate(orders):
        if ran[rank] < len(order):
            yield f"rank {rank} waits forever at {order[ran[rank]]}"


def to_csv(orders: Orders) -> str:
    """Orders as the compute-only file that torch.distributed.pipelining loads: a line a rank, 0F0,0F1,0B0."""
    return "".join(",".join(map(str, order)) + "\n" for order in orders)


ALL = get_args(Schedule)
TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped": "LoopedBFS",
    "zb1p": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
any_shapes = st.tuples(st.sampled_from(ALL), st.integers(1, 8), st.integers(1, 4), st.integers(1, 32))
SHAPES = [shape for shape in product(ALL, range(1, 9), range(1, 5), range(1, 33)) if legal(*shape) is None]
shapes = st.sampled_from(SHAPES)
some = settings(deadline=None, max_examples=150, derandomize=True)


def words(text: str) -> tuple[Action, ...]:
    return tuple(Action(int(word[0]), word[1], int(word[2:])) for word in text.split())


def named(orders) -> list[list[str]]:
    return [[str(action) for action in order] for order in orders]


def torch_orders(schedule: str, pp: int, chunks: int, microbatches: int) -> list[list[str]]:
    """Torch's own computations in order, its paired ones one after the other."""
    listed = get_schedule_ops(TORCH_NAMES[schedule], pp, microbatches, chunks)
    flat = [[part for action in rank if action for part in action.sub_actions or (action,)] for rank in listed]
    return [[str(action) for action in rank if action.is_compute_op] for rank in flat]


# Two ranks are few enough to write the orders down by hand.
def test_naive_takes_one_microbatch_at_a_time():
    assert actions("naive", 2, 1, 2) == (words("0F0 0B0 0F1 0B1"), words("1F0 1B0 1F1 1B1"))


def test_gpipe_does_all_forwards_first():
    assert actions("gpipe", 2, 1, 2) == (words("0F0 0F1 0B0 0B1"), words("1F0 1F1 1B0 1B1"))


def test_1f1b_alternates_after_one_forward_for_each_rank_behind():
    first, last = actions("1f1b", 2, 1, 3)
    assert first == words("0F0 0F1 0B0 0F2 0B1 0B2")
    assert last == words("1F0 1B0 1F1 1B1 1F2 1B2")


def test_interleaved_takes_a_round_through_each_chunk():
    _, last = actions("interleaved", 2, 2, 4)
    assert last == words("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3")


def test_looped_takes_all_microbatches_through_each_chunk_and_mirrors_them_back():
    first, _ = actions("looped", 2, 2, 2)
    assert first == words("0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0")


def test_zb1p_puts_off_as_many_weight_gradients_as_there_are_ranks_before():
    first, last = actions("zb1p", 2, 1, 3)
    assert first == words("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2")
    assert last == words("1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2")


def test_zbv_turns_at_the_last_rank():
    _, last = actions("zbv", 2, 2, 3)
    assert last == words("1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2")


def test_dualpipev_ends_with_split_backwards():
    _, last = actions("dualpipev", 2, 2, 4)
    assert last == words("1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3")


def test_stages_go_round_the_ranks():
    assert stage_ranks("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert stage_ranks("1f1b", 3, 1) == (0, 1, 2)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_stages_of_a_v_come_back_up(schedule):
    assert stage_ranks(schedule, 3, 2) == (0, 1, 2, 2, 1, 0)


@some
@given(shapes)
def test_every_legal_order_is_a_whole_training_step_without_a_deadlock(shape):
    schedule, pp, chunks, _ = shape
    assert validate(actions(*shape), stage_ranks(schedule, pp, chunks)) == []


@some
@given(shapes)
def test_only_zero_bubble_schedules_split_a_backward(shape):
    kinds = {action.kind for order in actions(*shape) for action in order}
    assert (kinds > {"I", "W"}) == (shape[0] in ("zb1p", "zbv", "dualpipev"))


@some
@given(any_shapes)
def test_what_is_not_legal_is_refused_with_every_reason(shape):
    reason = legal(*shape)
    assert (reason is None) == (shape in SHAPES) == (misfits(*shape) == [])
    if reason:
        assert reason == "\n".join(map(str, misfits(*shape)))
        with pytest.raises(ValueError, match=re.escape(reason)):
            actions(*shape)


@pytest.mark.parametrize("schedule", ALL)
def test_the_default_number_of_chunks_is_legal(schedule):
    assert legal(schedule, 4, default_chunks(schedule), 8) is None
    assert default_chunks(schedule) == (1 if schedule in ("naive", "gpipe", "1f1b") else 2)


@pytest.mark.parametrize("schedule", ["interleaved", "zb1p", "zbv"])
@pytest.mark.parametrize("microbatches", [1, 3, 7, 9])
def test_microbatches_need_not_be_a_multiple_of_the_ranks(schedule, microbatches):
    assert legal(schedule, 4, 2, microbatches) is None


# Each refusal names the numbers that work, so following it must help.
def test_one_chunk_schedules_refuse_more_and_name_the_schedule_for_them():
    reason = legal("1f1b", 4, 2, 8)
    assert reason == (
        "plan.chunks = 2, and plan.schedule = 1f1b needs exactly 1 on each rank; "
        "set plan.chunks = 1, or plan.schedule = interleaved"
    )
    assert legal("1f1b", 4, 1, 8) is None
    assert legal("interleaved", 4, 2, 8) is None


def test_schedules_of_several_chunks_refuse_one():
    (misfit,) = misfits("looped", 4, 1, 8)
    assert misfit.key == "plan.chunks"
    assert misfit.remedy == "set plan.chunks = 2, or plan.schedule = gpipe"


def test_a_v_has_two_chunks():
    assert [misfit.key for misfit in misfits("zbv", 4, 3, 8)] == ["plan.chunks"]


def test_dualpipev_names_the_microbatches_and_the_ranks_that_work():
    (misfit,) = misfits("dualpipev", 4, 2, 7)
    assert misfit.remedy == "set plan.grad_accum to at least 8, or plan.pp to at most 3"
    assert legal("dualpipev", 4, 2, 8) is None
    assert legal("dualpipev", 3, 2, 7) is None


def test_all_misfits_are_told_at_once():
    assert [misfit.key for misfit in misfits("dualpipev", 4, 1, 1)] == ["plan.chunks", "plan.grad_accum"]
    assert [misfit.key for misfit in misfits("1f1b", 0, -1, 0)] == ["plan.pp", "plan.chunks", "plan.grad_accum"]


# A validator that finds nothing proves nothing: each kind of fault is made once.
def test_a_lost_weight_gradient_is_a_fault():
    orders = (words("0F0 0I0 0W0"), words("1F0 1I0"))
    assert validate(orders, (0, 1)) == ["stage 1 takes microbatch 0 through FI, not FB or FIW"]


@pytest.mark.parametrize("text", ["0F0 0B0 0B0", "0B0 0F0", "0F0 0W0 0I0", "0F0 0F0 0B0", "0F1 0B1"])
def test_a_wrong_number_or_order_of_passes_is_a_fault(text):
    assert len(validate((words(text),), (0,))) == 1


def test_an_action_on_the_wrong_rank_is_a_fault():
    faults = validate((words("1F0 1B0"), words("0F0 0B0")), (0, 1))
    assert "rank 0 runs 1F0, and stage 1 is on rank 1" in faults


def test_a_deadlock_names_where_each_rank_waits():
    orders = (
        words("0F0 0B0 0F1 0B1"),
        words("1F0 1F1 1B0 1B1"),
    )  # 1 wants the second forward before the first backward
    assert validate(orders, (0, 1)) == ["rank 0 waits forever at 0B0", "rank 1 waits forever at 1F1"]


@some
@given(shapes)
def test_actions_flow_after_the_messages_they_wait_for(shape):
    schedule, pp, chunks, _ = shape
    seen = set()
    for action, message in flow(actions(*shape), stage_ranks(schedule, pp, chunks)):
        assert message is None or message in seen
        seen.add(("F" if action.kind == "F" else action.kind.replace("B", "I"), action.stage, action.microbatch))
        if action.kind == "F":
            assert (message is None) == (action.stage == 0)


# Against torch's own orders: rounds of 4 and of 5, fewer microbatches than ranks, three chunks.
SHARED = [
    (schedule, pp, chunks, microbatches)
    for schedule in ("gpipe", "interleaved", "looped", "zb1p", "zbv", "dualpipev")
    for pp, chunks, microbatches in ((4, 1, 8), (2, 2, 4), (4, 2, 8), (4, 2, 10), (4, 2, 3), (4, 3, 8), (8, 2, 16))
    if legal(schedule, pp, chunks, microbatches) is None and (schedule == "gpipe" or chunks > 1)  # torch's zb1p has two
]


@pytest.mark.parametrize(("schedule", "pp", "chunks", "microbatches"), SHARED)
def test_orders_are_those_of_torch(schedule, pp, chunks, microbatches):
    assert named(actions(schedule, pp, chunks, microbatches)) == torch_orders(schedule, pp, chunks, microbatches)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 8), (3, 7)])
def test_1f1b_is_that_of_torch_but_for_its_last_rank(pp, microbatches):
    ours, theirs = actions("1f1b", pp, 1, microbatches), torch_orders("1f1b", pp, 1, microbatches)
    assert named(ours[:-1]) == theirs[:-1]
    # Torch runs its last rank rightly but lists its forwards from 1; where that is mended, they are equal.
    shifted = [Action(pp - 1, action.kind, action.microbatch + (action.kind == "F")) for action in ours[-1]]
    assert theirs[-1:] in (named(ours[-1:]), named([shifted]))


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 2), (2, 5), (4, 9), (4, 8)])
def test_torch_reads_the_file_and_finds_room_for_its_sends_and_receives(schedule, pp, microbatches):
    chunks = default_chunks(schedule)
    placement = stage_ranks(schedule, pp, chunks)
    lines = to_csv(actions(schedule, pp, chunks, microbatches)).splitlines()
    read = {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(lines)
    }
    found = torch_schedules._validate_schedule(read, pp, pp * chunks, microbatches)
    assert [found[stage] for stage in range(pp * chunks)] == list(placement)
    sent = torch_schedules._add_send_recv(read, stage_to_rank=lambda stage: placement[stage], num_stages=pp * chunks)
    hops = sum(here != there for here, there in pairwise(placement))
    sends = [action for rank in sent.values() for action in rank if "SEND" in str(action)]
    assert len(sends) == 2 * hops * microbatches  # an activation forth and a gradient back
