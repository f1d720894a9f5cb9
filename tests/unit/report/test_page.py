import itertools
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.simulate import even_cost, play
from meshwright.report import html
from meshwright.report.html import LETTER, fitted, page, uncovered
from meshwright.report.plan_charts import ChartEntry, Pictures, PipelineChart, Point, StackedBar
from meshwright.spec.schedule import actions, default_chunks, stage_ranks

EVIL = '<script>alert("1")</script>'
MEMORY = StackedBar(
    title="Memory",
    unit="GiB",
    entries=(ChartEntry(name="weights", value=20.0, why="fp32"), ChartEntry(name="moments", value=41.5)),
    limit=80.0,
    limit_name="the device",
)
SECONDS = StackedBar(
    title="Time", unit="s", entries=(ChartEntry(name="ideal", value=3.0), ChartEntry(name="skipped", value=-0.5))
)
POINTS = tuple(Point(label=f"plan {n}", gib=10.0 + n, seconds=9.0 - n, front=True) for n in range(4))


def timeline(schedule: str, pp: int = 4):
    chunks = default_chunks(schedule)
    return play(actions(schedule, pp, chunks, 8), stage_ranks(schedule, pp, chunks), even_cost(pp * chunks, chunks))


def pictures(**changes) -> Pictures:
    pipeline = PipelineChart(title="The pipeline", timeline=timeline("zbv"), shown=8, microbatches=8)
    made = Pictures(
        title="llama on 8xh100",
        heading=("a batch",),
        memory=MEMORY,
        time=SECONDS,
        points=POINTS,
        limit_gib=80.0,
        pipeline=pipeline,
    )
    return msgspec.structs.replace(made, **changes)


class Tags(HTMLParser):
    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        self.addresses += [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags(text: str) -> Tags:
    found = Tags()
    found.feed(text)
    assert not found.open
    return found


def shapes(text: str, name: str) -> list[dict[str, str]]:
    return [element.attrib for element in ElementTree.fromstring(text).iter() if element.tag == name]


def test_a_page_stands_alone():
    text = page(pictures())
    found = tags(text)
    assert "script" not in found.names
    assert found.addresses == []
    assert not re.search(r"https?://|url\(|@import", text)


def test_what_a_user_wrote_is_shown_as_text():
    evil = ChartEntry(name=EVIL, value=1.0, why=EVIL)
    whole = StackedBar(title=EVIL, unit=EVIL, entries=(evil,), limit=2.0, limit_name=EVIL)
    points = tuple(Point(label=EVIL, gib=gib, seconds=3.0 - gib, front=True) for gib in (1.0, 2.0))
    text = page(pictures(title=EVIL, heading=(EVIL,), memory=whole, time=whole, points=points))
    assert "script" not in tags(text).names
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 8


def test_pictures_tell_what_they_show_to_those_who_cannot_see():
    text = page(pictures())
    assert text.count('role="img"') == 4
    assert "weights 20, moments 41.5; total 61.5 GiB; there is room for 80" in text
    assert "prefers-color-scheme: dark" in text
    assert 'lang="en"' in text


def test_the_stack_is_as_wide_as_its_parts_and_ends_where_the_sum_does():
    rects = shapes(html.whole(MEMORY), "rect")
    stack = [rect for rect in rects if float(rect["y"]) == 4]
    rows = [rect for rect in rects if float(rect["y"]) != 4]
    scale = (html.WIDTH - html.LEFT - html.RIGHT) / 80.0
    for parts in (stack, rows):
        widths = [float(part["width"]) for part in parts]
        assert sum(widths) == pytest.approx(61.5 * scale, abs=0.05)  # two digits are written
        ends = [float(part["x"]) + width for part, width in zip(parts, widths, strict=True)]
        starts = [float(part["x"]) for part in parts]
        assert starts[1:] == pytest.approx(ends[:-1], abs=0.02)
    (limit,) = shapes(html.whole(MEMORY), "line")
    assert float(limit["x1"]) == pytest.approx(html.LEFT + 80 * scale, abs=0.01)


def test_something_taken_off_lies_on_what_was_before():
    assert SECONDS.spans == [(0.0, 3.0), (2.5, 3.0)]


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "looped", "zb1p", "zbv", "dualpipev"])
def test_no_two_actions_of_a_rank_overlap(schedule):
    drawn = html.gantt(PipelineChart(title="x", timeline=timeline(schedule), shown=8, microbatches=8))
    lanes: dict[float, list[tuple[float, float]]] = {}
    for rect in shapes(drawn, "rect"):
        if rect["class"].startswith("action"):
            lanes.setdefault(float(rect["y"]), []).append((float(rect["x"]), float(rect["width"])))
    assert len(lanes) == 4
    for lane in lanes.values():
        lane.sort()
        for (left, width), (right, _) in itertools.pairwise(lane):
            assert left + width <= right + 0.02  # two digits are written
        assert lane[-1][0] + lane[-1][1] <= html.WIDTH - 110 + 0.02


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(70, 800), st.floats(30, 290)), min_size=1, max_size=12))
def test_no_number_lies_on_another(places):
    boxes = [(x, y, len(name) * LETTER) for name, x, y in html.labels(places, 300.0)]
    for one, (x, y, width) in enumerate(boxes):
        assert 0 < y <= 300
        for left, top, other in boxes[:one]:
            assert abs(y - top) >= 13.0 or x >= left + other or left >= x + width


def test_long_words_are_cut_with_a_sign():
    assert fitted("activations", 200) == "activations"
    assert fitted("activations", 5 * LETTER) == "acti…"
    assert uncovered(0, 50, 10, [], 13.0, 300) == 50


def test_a_page_without_a_pipeline_or_a_choice_has_two_pictures():
    assert page(pictures(pipeline=None, points=POINTS[:1])).count("<svg") == 2
