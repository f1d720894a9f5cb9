import math
import random
import statistics
from collections.abc import Iterable

import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.memory import worst
from meshwright.hardware.cluster import cluster
from meshwright.search import space
from meshwright.search.best_first import (
    ALIKE,
    KINDS,
    SLOWEST,
    TOLD_APART,
    Candidate,
    Rank,
    kind,
    notch,
    priced,
    rank,
    search,
)
from meshwright.search.bounds import MemoryBound, PlanGroup, bound, bound_with_weights, frugal_split, groups, in_flight
from meshwright.search.explain import why
from meshwright.search.question import Question
from meshwright.search.space import AxesChoice, PipelineChoice, Policy, plans
from meshwright.spec.params import count
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import actions
from search.questions import question

ROUNDING = 1 + 1e-9  # the same sums in another order


def every(asked: Question) -> list[Candidate]:
    """All plans of a question, priced one by one."""
    return [priced(asked.job(plan)) for plan in plans(asked)]


def with_memory(asked: Question, size: float) -> Question:
    gpu = msgspec.structs.replace(asked.cluster.gpu, memory_bytes=float(int(size)))
    return msgspec.structs.replace(asked, cluster=msgspec.structs.replace(asked.cluster, gpu=gpu))


def with_margin(asked: Question, margin: float) -> Question:
    holds = msgspec.structs.replace(asked.stack.holds, high=1 + margin)
    return msgspec.structs.replace(asked, stack=msgspec.structs.replace(asked.stack, holds=holds))


def refitted(found: Candidate, asked: Question) -> Candidate:
    """The same plan on cards with another memory."""
    headroom = int(asked.cluster.gpu.memory_bytes) - found.peak_bytes
    fit = msgspec.structs.replace(found.fit, fits=headroom >= 0, headroom_bytes=headroom)
    return msgspec.structs.replace(found, fit=fit, job=msgspec.structs.replace(found.job, cluster=asked.cluster))


def plainer(asked: Question, plan: Plan) -> Plan:
    """The plan that does less to hold less."""
    names = Policy._fields
    chosen = space.policies(asked, layout_of(plan), PipelineChoice(plan.schedule, plan.chunks))
    mine = Policy(**{name: getattr(plan, name) for name in names})
    return msgspec.structs.replace(plan, **space.plainer(chosen).get(mine, mine)._asdict())


def layout_of(plan: Plan) -> AxesChoice:
    return AxesChoice(**{name: getattr(plan, name) for name in AxesChoice._fields})


SMALL = [
    ("tiny", "4xh100", 2, 64),
    ("tiny", "2xh100", 6, 64),
    ("tiny-moe", "2xh100", 4, 64),
    ("gpt2", "2xh100", 2, 1024),
    ("gpt2", "1xh100", 4, 1024),
]
SLOW = [("tiny", "2x2xh100", 4, 64), ("tiny-moe", "2x1xh100", 4, 64), ("gpt2", "2x1xh100", 2, 1024)]


@pytest.mark.parametrize(("model", "machines", "batch", "sequence"), SMALL)
def test_the_search_finds_what_trying_everything_finds(model, machines, batch, sequence):
    assert_found(question(model, machines, sequence=sequence, batch=batch))


def test_what_rounds_weights_and_states_is_not_chosen_for_nothing():
    asked = msgspec.structs.replace(question("gpt2", "8xh100", sequence=1024, batch=64), vary=("optimizer",))
    first = search(asked, top=1).found[0]
    assert (first.job.master_weights, first.job.state_dtype) == ("fp32", "fp32")
    narrow = msgspec.structs.replace(asked, master_weights="none", state_dtype="bf16", vary=())
    said = why(search(narrow, top=1).found[0])
    assert "weights in bf16 without master weights, rounded stochastically" in said
    assert "with fp32 this plan would need" in said
    assert "Numerics changed" not in why(first)


@pytest.mark.parametrize(("model", "machines", "batch", "sequence"), SLOW)
def test_it_does_over_a_slow_network_too(model, machines, batch, sequence):
    assert_found(over(question(model, machines, sequence=sequence, batch=batch), machines, "10gbe"))


def over(asked: Question, machines: str, network: str) -> Question:
    return msgspec.structs.replace(asked, cluster=cluster(machines, network=network))


def fastest(found: Iterable[Candidate]) -> float:
    return min((each.seconds_per_token for each in found), default=math.inf)


def ranks(found: Iterable[Candidate], among: Iterable[Candidate]) -> list[Rank]:
    """The places of some plans among others."""
    least = fastest(among)
    return [rank(each, least) for each in found]


def assert_found(asked: Question) -> None:
    """The best few of a search are those of trying everything, whatever the cards' memory."""
    everything = every(asked)
    peaks = sorted(found.peak_bytes for found in everything)
    for share in (0.1, 0.5, 1.0):
        tight = with_memory(asked, peaks[int(share * (len(peaks) - 1))])
        ours = search(tight, top=3)
        fitting = {each.plan: each for each in (refitted(found, tight) for found in everything) if each.fit.fits}
        # What is sent away to hold less is looked at where it must: kept on the device it is never slower.
        safe = {plan for plan, each in fitting.items() if not each.is_tight}
        kept = [each for plan, each in fitting.items() if (less := plainer(asked, plan)) == plan or less not in safe]
        assert places(ours.found, kept) == sorted(places(kept, kept))[:3]
        sure = [each for each in kept if not each.is_tight]
        assert ours.found[0].seconds_per_token == pytest.approx(fastest(sure or kept), rel=ALIKE)
        assert ours.counts.legal == len(peaks)
        if sure:
            assert_kinds(tight, sure)


def places(found: Iterable[Candidate], among: Iterable[Candidate]) -> list[tuple[bool, Rank]]:
    """Their order among others: plans that fit for sure, then those that may not, each by their rank."""
    least = {tight: fastest(each for each in among if each.is_tight is tight) for tight in (False, True)}
    return [(each.is_tight, rank(each, least[each.is_tight])) for each in found]


def assert_kinds(asked: Question, sure: list[Candidate]) -> None:
    """Of each kind the best plan of trying everything, unless it is far slower than the fastest."""
    ours = search(asked, top=20, kinds=True)
    theirs: dict[str, tuple[bool, Rank]] = {}
    quick = [each for each in sure if each.seconds_per_token <= SLOWEST * fastest(sure)]
    for each, place in sorted(zip(quick, places(quick, sure), strict=True), key=lambda pair: pair[1]):
        theirs.setdefault(kind(each.plan), place)
    found = {kind(each.plan): each for each in ours.found if not each.is_tight}
    assert set(found) | {"offload"} == set(theirs) | {"offload"}  # which is looked for where its axes have no other
    for name in set(found) - {"offload"}:
        assert places([found[name]], sure) == [theirs[name]]
    assert not set(ours.left_out) & {kind(each.plan) for each in ours.found}
    too_large = {name for name, why in ours.left_out.items() if why == "does not fit"}
    assert not too_large & {kind(each.plan) for each in sure}


def test_the_counts_add_up():
    counts = search(question("llama3-8b", "8xh100", sequence=4096, batch=32)).counts
    assert counts.legal == counts.does_not_fit + counts.slower + counts.priced
    assert min(counts.does_not_fit, counts.slower, counts.priced) > 0


def test_the_answer_is_always_the_same():
    asked = question("llama3-8b", "8xh100", sequence=4096, batch=32)
    assert [found.plan for found in search(asked).found] == [found.plan for found in search(asked).found]


def test_more_plans_begin_with_the_same_ones():
    asked = question("llama3-8b", "8xh100", sequence=4096, batch=32)
    few, many = search(asked, top=2).found, search(asked, top=8).found
    assert ranks(few, many) == ranks(many[:2], many)


def test_of_equal_times_the_simpler_plan_is_first():
    found = search(question("llama3-8b", "8xh100", sequence=4096, batch=32), top=20).found
    assert ranks(found, found) == sorted(ranks(found, found))
    assert len({step for step, *_ in ranks(found, found)}) < len(found), "some times are alike"


def test_a_small_model_is_replicated_where_that_is_as_fast():
    """Plain data parallelism, as people would and as `advise` says."""
    best = search(question("gpt2", "8xa100-80g", sequence=1024, batch=512)).found[0]
    assert (best.plan.replicate, best.plan.zero, best.plan.shard) == (8, 0, 1)


def test_a_plan_that_fits_for_sure_is_before_a_faster_one_that_may_not():
    asked = question("llama3-8b", "8xh100", sequence=8192, batch=64)
    found = search(asked, top=1).found[0]
    trusting = search(with_margin(asked, 0.0), top=40).found
    assert not found.is_tight
    risky = [each for each in trusting if each.peak_bytes * 1.05 > asked.cluster.gpu.memory_bytes]
    assert fastest(risky) < found.seconds_per_token, "some are faster"
    assert all(each.is_tight is False for each in trusting), "without a margin the estimate is enough"


def test_where_nothing_fits_for_sure_the_estimate_is_enough():
    asked = question("gpt2", "1xh100", sequence=1024, batch=4)
    least = min(each.peak_bytes for each in every(asked))
    (found,) = search(with_memory(asked, least * 1.01), top=1).found
    assert found.is_tight


def test_times_that_cannot_be_told_apart_are_on_one_step():
    assert notch(1.0, 1.0) == notch(1.0 + ALIKE * 0.9, 1.0) == 0
    assert notch(1.0 + ALIKE * 1.1, 1.0) == 1
    assert notch(1.0 + TOLD_APART * 1.1, 1.0, TOLD_APART) == 1
    assert notch(1.0 + 2.2 * ALIKE, 1.0) == 2


@pytest.mark.parametrize(
    ("model", "machines", "sequence", "batch"),
    [
        ("gpt2", "2xrtx-4090", 1024, 64),
        ("gpt2", "4xrtx-4090", 1024, 512),
        ("gpt2-xl", "8xh100", 1024, 512),
        ("llama3.2-1b", "8xh100", 8192, 64),
        ("llama3.2-1b", "8xa100-80g", 2048, 256),
    ],
)
def test_small_jobs_are_replicated(model, machines, sequence, batch):
    best = search(question(model, machines, sequence=sequence, batch=batch), kinds=True).found[0]
    assert kind(best.plan) == "DDP"


def test_the_kinds_are_different_and_the_first_is_the_best():
    asked = question("llama3-8b", "8xh100", sequence=8192, batch=64)
    answer = search(asked, kinds=True)
    kinds = [kind(each.plan) for each in answer.found]
    assert len(set(kinds)) == len(kinds) == 5
    assert answer.found[0].plan == search(asked, top=1).found[0].plan
    assert answer.left_out == {
        "DDP": "does not fit",
        "offload": "slower, if it fits",
    }
    assert set(kinds) | set(answer.left_out) <= set(KINDS)


def test_a_kind_that_fits_and_is_slower_is_not_said_not_to_fit():
    asked = question("gpt2", "4xrtx4090", sequence=1024, batch=8)  # one small microbatch a step: the network decides
    alone = search(asked.with_fixed({"zero": 0, "pp": 1, "tp": 1, "cp": 1}), top=1).found[0]
    assert (kind(alone.plan), alone.fits) == ("DDP", True)
    assert search(asked, kinds=True).left_out == {"DDP": "slower, if it fits"}


def test_a_batch_that_may_vary_is_judged_by_tokens():
    asked = msgspec.structs.replace(question("llama3-8b", "8xh100", sequence=4096, batch=8), vary=("batch",))
    found = search(asked, top=1).found[0]
    fixed = search(msgspec.structs.replace(asked, vary=()), top=1).found[0]
    assert found.plan.batch in (4, 8, 16)
    assert found.seconds_per_token <= fixed.seconds_per_token


def sample(count: int, network: str = "") -> list[tuple[Question, PlanGroup]]:
    """Groups of one schedule and policy, of several models, with the random choice repeatable."""
    choose = random.Random(7)
    chosen = []
    for model, machines, sequence, batch in (
        ("llama3-70b", "64xh100", 8192, 64),
        ("tiny", "8xh100", 64, 24),
        ("mixtral-8x7b", "32xh100", 4096, 32),
        ("gpt2", "8xa100-80g", 1024, 64),
    ):
        asked = over(question(model, machines, sequence=sequence, batch=batch), machines, network)
        some = choose.choices(groups(asked), k=count)
        chosen += [(asked, choose.choice(choose.choice(group.parts()).parts())) for group in some]
    return chosen


def test_the_closed_forms_are_never_above_the_ledger():
    for asked, group in sample(40):
        plan = group.plan(frugal_split(group))
        assert MemoryBound(asked).least(group) <= worst(asked.job(plan)).allocated * ROUNDING, plan


@pytest.mark.parametrize("schedule", ["interleaved", "looped", "zb1p"])
def test_the_closed_form_of_many_chunks_counts_all_of_them_short_of_zero_3(schedule):
    least = {}
    fixed = {"pp": 4, "tp": 4, "cp": 1, "shard": 4, "schedule": schedule, "chunks": 8, "microbatch": 1}
    for zero in (1, 2, 3):
        asked = question("llama3-70b", "64xh100", sequence=8192, batch=64, zero=zero, **fixed)
        (group,) = (part.parts()[0] for each in groups(asked) for part in each.parts())
        least[zero] = MemoryBound(asked).least(group)
        assert least[zero] <= worst(asked.job(group.plan(group.splits[0]))).allocated * ROUNDING
    weights = 2 * count(preset("llama3-70b")) / (4 * 4)
    assert least[1] - least[3] == least[2] - least[3] == pytest.approx(weights * (1 - 3 / 8))


def test_no_split_of_the_data_axes_holds_less_than_the_frugal_one():
    for asked, group in sample(15):
        least = worst(asked.job(group.plan(frugal_split(group)))).shown
        for layout in group.splits:
            # Uneven parts are filled up: a shard may be larger by the filling.
            assert worst(asked.job(group.plan(layout))).shown >= least * 0.999, group.plan(layout)


def test_bounds_are_nested_and_never_above_the_price():
    for asked, group in [*sample(30), *sample(30, "10gbe")]:
        whole = group._replace(order=None, policy=None)
        seconds = priced(asked.job(group.plan(group.splits[0]))).seconds_per_token
        assert bound(whole) <= bound(group._replace(policy=None)) * ROUNDING
        assert bound(group._replace(policy=None)) <= bound(group) * ROUNDING
        assert bound(group) <= seconds * ROUNDING, group.plan(group.splits[0])


def test_bounds_with_weights_are_never_above_the_price_of_any_split():
    for asked, group in [*sample(15), *sample(15, "10gbe")]:
        cheapest = min(priced(asked.job(group.plan(layout))).seconds_per_token for layout in group.splits)
        before, after = bound(group._replace(policy=None)), bound_with_weights(group._replace(policy=None), 0.0)
        assert before <= after * ROUNDING
        assert after <= cheapest * ROUNDING, group


def test_a_slow_network_is_seen_by_the_bound():
    asked = over(question("gpt2", "16xh100", sequence=1024, batch=64, pp=1, tp=1, cp=1), "16xh100", "10gbe")
    group = next(group for group in groups(asked) if group.each.grad_accum == 1).parts()[0]
    assert bound_with_weights(group, 0.0) > 2 * bound(group)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "looped", "zb1p", "zbv", "dualpipev"])
def test_what_is_in_flight_on_the_first_rank_is_not_overstated(schedule):
    for pp in (2, 3, 4, 8):
        for microbatches in (2 * pp, 2 * pp + 1, 5 * pp):
            chunks = 1 if schedule in ("naive", "gpipe", "1f1b") else 2
            held = most = 0
            for action in actions(schedule, pp, chunks, microbatches)[0]:
                held += (action.kind == "F") - (action.kind in ("B", "W"))
                most = max(most, held)
            assert in_flight(schedule, pp, chunks, microbatches) <= most


def test_a_larger_microbatch_never_needs_less():
    asked = question("llama3-8b", "8xh100", sequence=4096, batch=64, tp=1, cp=1)
    by_choice: dict[object, list[tuple[int, int]]] = {}
    for group in groups(asked):
        for order in group.parts():
            for part in order.parts():
                if (
                    part.splits[0].pp in (1, 2)
                    and part.policy in (Policy(), Policy("full"))
                    and part.decided_order.chunks < 3
                ):
                    size = worst(asked.job(part.plan(frugal_split(part)))).shown
                    key = (part.splits[0].pp, part.splits[0].cpu_offload, part.order, part.policy)
                    by_choice.setdefault(key, []).append((part.each.microbatch, size))
    assert by_choice
    for sizes in by_choice.values():
        ordered = [size for _, size in sorted(sizes)]
        assert ordered == sorted(ordered)
        assert statistics.median(ordered) > 0
