import math

from folders import attempt, step, usual

from meshwright.cost.goodput import kept
from meshwright.report.run_data import summed
from meshwright.report.run_summary import losses, steady, steps, validation
from meshwright.runtime.records import EvalRecord, EventRecord, StepRecord


def of(records):
    made = [record for record in records if isinstance(record, StepRecord)]
    return steps(records, kept(records), [summed(0, made)])


def test_the_first_steps_after_every_start_do_not_count():
    records = [attempt(0.0), *(step(n, n, seconds=9.0 if n <= 5 else 1.0) for n in range(1, 21))]
    found = of(records)
    assert (found.counted, found.left_out, found.seconds, found.slowest) == (15, 5, 1.0, 1.0)
    again = [*records, attempt(30.0, step=20), *(step(n, n, seconds=9.0 if n <= 25 else 1.0) for n in range(21, 41))]
    assert (of(again).counted, of(again).slowest) == (30, 1.0)


def test_short_runs_leave_out_fewer():
    for many, counted in ((1, 1), (2, 1), (3, 2), (9, 8), (10, 5)):
        records = [attempt(0.0), *(step(n, n) for n in range(1, many + 1))]
        assert len(steady(records, kept(records))) == counted
    assert of([attempt(0.0)]) is None


def test_the_median_is_what_a_step_takes_and_the_most_loaded_rank_is_named():
    records = [attempt(0.0), *(step(n, n, seconds=s) for n, s in enumerate((1.0, 2.0, 4.0, 9.0), 1))]
    found = steps(records, kept(records), [summed(0, []), summed(3, [step(1, 1.0, memory_bytes=7)])])
    assert (found.seconds, found.quickest, found.slowest) == (4.0, 2.0, 9.0)
    assert found.tokens_per_second == 128 / 4.0
    assert (found.peak_bytes, found.peak_rank) == (7, 3)


def test_losses_are_those_of_the_steps_that_were_kept():
    records = [
        attempt(0.0),
        step(1, 1.0),
        step(2, 2.0, loss=99.0),
        EvalRecord(step=2, loss=88.0, tokens=1, seconds=1.0),
        attempt(5.0, step=1, number=2),
        step(2, 6.0, loss=math.nan, skipped=True),
        step(3, 7.0, loss=2.0),
        EvalRecord(step=3, loss=1.5, tokens=1, seconds=1.0),
        EventRecord(step=3, what="spike", text="high"),
    ]
    found = losses(records, kept(records))
    assert (found.first, found.last, found.last_step, found.skipped, found.spikes) == (6.0, 2.0, 3, 1, 1)
    assert [(each.step, each.loss) for each in found.validation] == [(3, 1.5)]
    assert losses([], []) is None


def test_a_run_that_ends_in_no_number_has_no_mean():
    records = [attempt(0.0), step(1, 1.0, loss=math.nan)]
    found = losses(records, kept(records))
    assert math.isnan(found.last)
    assert math.isnan(found.mean)
    assert found.mean_of == 0


def test_the_validation_loss_of_a_whole_run():
    assert [each.loss for each in validation(usual())] == [0.75]


def test_the_histogram_of_staleness_is_of_all_ranks():
    ages = ((0, 1, 1, 2), (0, 0, 1, 1))
    ranks = [
        summed(rank, [step(n, n, staleness=age) for n, age in enumerate(each, 1)]) for rank, each in enumerate(ages)
    ]
    records = [attempt(0.0), *(step(n, n, staleness=age) for n, age in enumerate(ages[0], 1))]
    assert steps(records, kept(records), ranks).staleness == {0: 3, 1: 4, 2: 1}
    plain = [step(n, n) for n in range(1, 5)]
    assert steps([attempt(0.0), *plain], plain, [summed(0, plain)]).staleness == {}
