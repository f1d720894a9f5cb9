import pytest

from meshwright.cost.simulate import even_cost, play
from meshwright.report import plan_charts
from meshwright.report.plan_charts import (
    NAMES,
    WIDEST,
    ChartEntry,
    Pictures,
    PipelineChart,
    Point,
    StackedBar,
    Terminal,
    bar,
    cascade,
    charts,
    plans,
)
from meshwright.spec.schedule import actions, stage_ranks

MEMORY = StackedBar(
    title="Memory",
    unit="GiB",
    entries=(ChartEntry(name="weights", value=20.0), ChartEntry(name="moments", value=40.0)),
    limit=80.0,
    limit_name="the device",
)
POINTS = (
    Point(label="one", gib=10.0, seconds=4.0, front=True),
    Point(label="other", gib=60.0, seconds=2.0, front=True),
    Point(label="slow", gib=70.0, seconds=3.0),
)


def pictures() -> Pictures:
    timeline = play(actions("1f1b", 4, 1, 8), stage_ranks("1f1b", 4, 1), even_cost(4))
    pipeline = PipelineChart(title="The pipeline", timeline=timeline, shown=8, microbatches=8)
    return Pictures(
        title="t", heading=("h",), memory=MEMORY, time=MEMORY, points=POINTS, limit_gib=80.0, pipeline=pipeline
    )


def test_a_bar_is_as_long_as_its_value_to_an_eighth():
    assert bar(0, 3) == "███"
    assert bar(0, 2.5) == "██▌"
    assert bar(2, 4) == "  ██"
    assert bar(0, 0.01) == "▏"  # something is never nothing


def test_parts_begin_where_the_one_before_ended_and_the_sum_is_as_long_as_all():
    _, weights, moments, total = cascade(MEMORY, Terminal(columns=117))
    room = 117 - NAMES - 16  # 80 columns for 80 GiB
    assert (weights.count("█"), moments.count("█"), total.count("█")) == (20, 40, 60)
    assert moments[NAMES : NAMES + 21] == " " * 20 + "█"
    assert total.index("▕") == NAMES + room - 1
    assert "60 of 80" in total


def test_what_does_not_fit_goes_beyond_the_limit():
    full = StackedBar(title="", unit="GiB", entries=(ChartEntry(name="weights", value=100.0),), limit=80.0)
    _, _, total = cascade(full, Terminal(columns=117))
    assert total.count("█") == 80
    assert "100 of 80" in total


def test_something_taken_off_is_drawn_back():
    whole = StackedBar(
        title="", unit="s", entries=(ChartEntry(name="ideal", value=8.0), ChartEntry(name="saved", value=-4.0))
    )
    _, ideal, saved, total = cascade(whole, Terminal(columns=117))
    assert (ideal.count("█"), saved.count("█"), total.count("█")) == (80, 40, 40)
    assert "-4" in saved


def test_plain_text_has_no_escapes_and_colour_has_them_closed():
    plain = "\n".join(charts(pictures(), Terminal(columns=100)))
    assert "\x1b" not in plain
    coloured = "\n".join(charts(pictures(), Terminal(columns=100, colour=True)))
    assert coloured.count("\x1b[0m") == coloured.count("\x1b[") / 2 > 0


def test_no_drawn_line_is_wider_than_the_screen():
    for columns in (60, 80, 120, 500):
        lines = [line for line in charts(pictures(), Terminal(columns=columns)) if any(sign in line for sign in "█┤└·")]
        assert len(lines) > 20
        assert max(map(len, lines)) <= min(columns, WIDEST)


def test_plans_that_nothing_beats_are_numbered_and_named():
    text = "\n".join(plans(POINTS, 80.0, Terminal(columns=100)))
    assert "   1      10 GiB        4 s  one" in text
    assert "   2      60 GiB        2 s  other" in text
    assert "slow" not in text
    assert text.count("│") >= 10  # the device's memory


def test_a_pipeline_has_a_lane_for_each_rank():
    text = "\n".join(charts(pictures(), Terminal(columns=100)))
    assert all(f"rank {rank}" in text for rank in range(4))
    assert "27.3% idle" in text  # (p − 1) ÷ (m + p − 1)


@pytest.mark.parametrize(
    ("value", "short", "in_column"),
    [
        (0.3, "0.3", "0.300"),
        (0.0000123, "0.0000123", "0.0000123"),
        (91.0, "91", "91.0"),
        (100.2, "100", "100"),
        (999.7, "1000", "1000"),
        (-1234.5, "-1234", "-1234"),
        (0.0, "0", "0.00"),
    ],
)
def test_three_digits_are_never_a_power_of_ten(value, short, in_column):
    assert plan_charts.short(value) == short
    assert plan_charts.in_column(value) == in_column
