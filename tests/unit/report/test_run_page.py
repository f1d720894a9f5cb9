import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
from folders import H100, attempt, run_folder, step

from meshwright.report import run_charts, run_summary
from meshwright.report.plan_charts import Terminal
from meshwright.report.run_charts import run_page
from meshwright.report.run_data import facts
from meshwright.report.run_summary import (
    PredictedFigures,
    PredictedUtilization,
    Prediction,
    losses,
    report,
    steps_of,
)
from meshwright.report.run_text import losses as chart
from meshwright.runtime.records import EvalRecord, EventRecord

EVIL = '<script>alert("1")</script>'
PREDICTION = Prediction(
    source="the catalogue's h100",
    seconds=0.4,
    low_seconds=0.3,
    high_seconds=0.5,
    tokens_per_second=320.0,
    mfu=0.5,
    peak_bytes=2**30,
)
PREDICTED = PredictedFigures(prediction=PREDICTION, utilized=PredictedUtilization(mfu=0.4, of="the data sheet's peak"))
KILLED = [
    attempt(101.0),
    *(step(n, 101.0 + n) for n in range(1, 7)),
    EventRecord(step=6, what="spike", text=EVIL, at=107.5),
    attempt(110.0, step=4, number=2),
    *(step(n, 106.0 + n, loss=math.nan if n == 9 else 6.0 / n) for n in range(5, 13)),
]


class Names(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)


def told(folder, predicted=PREDICTED):
    found = facts(folder)
    return found, report(found, steps_of(found), predicted)


def names(text: str) -> list[str]:
    found = Names()
    found.feed(text)
    return found.names


def test_a_page_stands_alone_and_shows_all_pictures(tmp_path):
    text = run_page([told(run_folder(tmp_path / "run", device=H100))])
    assert text.startswith("<!doctype html>")
    assert "script" not in names(text)
    assert not re.search(r"https?://|url\(|@import|src=|href=", text)
    assert text.count('role="img"') == 4
    assert "s/step: 0.4 predicted, 0.5 measured" in text
    assert "validation: 0.75" in text


def test_what_a_user_wrote_is_shown_as_text(tmp_path):
    folder = run_folder(tmp_path / "<script>x", KILLED, f"name='{EVIL}'", device=f"2 × {EVIL}, nccl")
    text = run_page([told(folder)])
    assert "<script" not in text
    assert "script" not in names(text)
    assert "&lt;script&gt;" in text
    both = run_page([told(folder), told(folder)])
    assert "<script" not in both


def test_a_fault_is_marked_at_its_step(tmp_path):
    text = run_page([told(run_folder(tmp_path / "run", KILLED))])
    assert "step 6: a rank was killed or failed" in text
    assert text.count('class="limit"') == 4  # the restart and the event, on both curves


def test_several_runs_begin_with_a_table(tmp_path):
    runs = [told(run_folder(tmp_path / name)) for name in ("first", "second")]
    text = run_page(runs)
    assert "the runs side by side" in text
    assert text.count('role="img"') == 9  # four of each run, and the losses of both on one


def test_losses_of_several_runs_are_one_chart_smoothed_over_what_was_measured(tmp_path):
    runs = [told(run_folder(tmp_path / name)) for name in ("first", "second", "third")]
    overlay = run_page(runs, 0.5).partition("<h2>Loss</h2>")[2].partition("</section>")[0]
    assert overlay.count('class="faint"') == overlay.count('class="front"') == 3
    assert {f"stroke: var(--s{number})" for number in range(3)} <= set(re.findall(r'style="([^"]+)"', overlay))
    assert re.findall(r"</i>(\w+)</li>", overlay) == ["first", "second", "third"]
    assert "faint: as measured; strong: its moving average (--smooth 0.5)" in overlay
    assert overlay.count("<circle") == 3
    assert 'class="faint"' not in run_page(runs, 0.0)


def test_more_runs_than_colours_are_told_apart_by_dashes(tmp_path):
    kept = [step(n, n) for n in range(1, 5)]
    drawn = run_charts.chart([run_summary.loss_curve(kept, None)] * 21)
    styles = re.findall(r'style="([^"]+)"', drawn)
    assert len(styles) == len(set(styles)) == 21
    ElementTree.fromstring(drawn)


def test_a_moving_average_begins_at_the_first_value_and_keeps_a_constant():
    assert run_summary.smoothed([(1.0, 4.0), (2.0, 1.0)], 0.5) == [(1.0, 4.0), (2.0, 2.0)]  # (4 · 0.5 + 1) ÷ 1.5
    assert run_summary.smoothed([(float(n), 2.0) for n in range(9)], 0.9)[-1][1] == pytest.approx(2.0)


def test_the_run_file_and_the_sample_are_on_the_page_and_speak_to_nobody(tmp_path):
    folder = run_folder(tmp_path / "run", None, f"name='{EVIL}'")
    said = {"state": "done", "sample": "def f():\n\treturn \x1b[31m<b>\x00\ud7ff"}
    (folder / "summary.json").write_text(json.dumps(said))
    text = run_page([told(folder)])
    assert "<pre>def f():\n\treturn \\x1b[31m&lt;b&gt;\\x00" in text
    assert "[optim]" in text
    assert "<script" not in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


def test_a_run_without_steps_has_a_page_without_pictures(tmp_path):
    text = run_page(
        [told(run_folder(tmp_path / "run", [], finished=False), PredictedFigures(why_not="nothing is known"))]
    )
    assert 'role="img"' not in text
    assert "0 of 12" in text


def test_curves_leave_out_what_is_no_number():
    kept = [step(n, n, loss=math.nan if n == 2 else 1.0) for n in range(1, 5)]
    drawn = run_summary.loss_curve(kept, losses([EvalRecord(step=4, loss=math.inf, tokens=1, seconds=1.0)], kept))
    assert [at for at, _ in drawn.line] == [1.0, 3.0, 4.0]
    assert drawn.points == ()
    ElementTree.fromstring(run_charts.chart([drawn]))


def test_a_million_steps_are_a_few_hundred_points():
    kept = [step(n, n, seconds=9.0 if n == 5000 else 0.5) for n in range(1, 10_001)]
    drawn = run_summary.seconds(kept)
    assert len(drawn.line) <= run_summary.MOST
    assert max(value for _, value in drawn.points) == 9.0  # the slowest is never lost
    assert {value for _, value in drawn.line} == {0.5}


def test_one_step_can_be_drawn():
    ElementTree.fromstring(run_charts.chart([run_summary.seconds([step(1, 1.0)])]))
    low, high = run_charts.limits([0.0])
    assert low < high


def test_the_terminals_curve_is_as_wide_as_it_and_falls():
    kept = [step(n, n) for n in range(1, 500)]
    evals = [EvalRecord(step=400, loss=1.0, tokens=1, seconds=1.0)]
    curve = run_summary.loss_curve(kept, losses(evals, kept))
    lines = list(chart([curve], Terminal(columns=80)))
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].rstrip().endswith("┤·")
    assert sum("o" in line for line in lines[:-1]) == 1
    assert lines[-1].endswith("499 (o: validation)")
    assert list(chart([run_summary.loss_curve(kept[:2], None)], Terminal())) == []


def test_the_terminal_draws_several_runs_with_a_letter_each():
    curves = [run_summary.loss_curve([step(n, n, loss=loss) for n in range(1, 50)], None) for loss in (4.0, 2.0)]
    named = [
        msgspec.structs.replace(curve, line_name=name) for curve, name in zip(curves, ("high", "low"), strict=True)
    ]
    lines = list(chart(named, Terminal(columns=80), 0.5))
    assert set(lines[0].split("┤")[1]) - {" "} == {"a"}
    assert set(lines[7].split("┤")[1]) - {" "} == {"b"}
    assert lines[-1] == "loss, smoothed: a high  b low"
    assert all(len(line) <= 80 for line in lines)


def test_a_report_is_json_without_nan(tmp_path):
    _, found = told(run_folder(tmp_path / "run", KILLED))
    text = msgspec.json.encode(msgspec.structs.replace(found, wall_seconds=math.nan)).decode()
    assert "NaN" not in text
    assert msgspec.json.decode(text)["wall_seconds"] is None
