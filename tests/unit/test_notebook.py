"""What a notebook shows: tables, made without torch, in which other people's words are text."""

import subprocess
import sys
from html.parser import HTMLParser

import msgspec
import pytest
from folders import H100, run_folder

import meshwright
from meshwright.spec.units import html_table

EVIL = "<script>alert(1)</script>"
WORDS = ("arch.preset=gpt2", "sequence=1024", "batch=8", "plan.shard=8", "plan.zero=3", "plan.precision=bf16")


class Cells(HTMLParser):
    """The rows of every table of a page, its caption first."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        if tag in ("caption", "tr"):
            self.rows.append([])

    def handle_data(self, data):
        self.rows[-1].append(data)


def shown(value) -> Cells:
    found = Cells(value._repr_html_())
    assert found.names <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    return found


@pytest.fixture(scope="module")
def priced():
    return meshwright.price(meshwright.load(None, *WORDS, ranks=8), "8xh100")


def test_a_plan_is_a_table_of_what_it_uses(priced):
    rows = shown(priced.plan).rows
    assert rows[0] == ["plan of 8 ranks"]
    assert {row[0]: row[1] for row in rows[2:]} == {
        "shard": "8", "zero": "3", "microbatch": "1", "grad_accum": "1", "precision": "bf16",
    }  # fmt: skip


def test_a_ledger_is_a_table_that_adds_up(priced):
    rows = shown(priced.ledger).rows
    *parts, total = [float(row[1]) for row in rows[2:]]
    assert sum(parts) == pytest.approx(total, abs=0.005 * (len(parts) + 1))  # each is rounded to 0.01 GiB
    assert total == pytest.approx(priced.peak_bytes / 2**30, abs=0.005)


def test_search_results_are_a_table_and_still_a_tuple(priced):
    found = meshwright.search("gpt2", "8xh100", "plan.precision=bf16", sequence=1024, batch=64, top=3)
    assert isinstance(found, tuple)
    rows = shown(found).rows
    assert rows[0] == ["3 plans"]
    assert [row[0] for row in rows[2:]] == [str(each.plan) for each in found]
    assert [row[-1] for row in rows[2:]] == ["yes"] * 3
    assert len(shown(priced).rows) > len(shown(priced.ledger).rows)


def test_a_plan_on_an_unknown_host_is_a_question_in_a_table_too():
    found = meshwright.search("llama3-8b", "1xrtx4090", "plan.precision=bf16", sequence=2048, batch=8, top=1)
    assert shown(found).rows[2][-1] == found[0].fit.host_question


def test_a_report_is_a_table_of_its_figures(tmp_path):
    report = meshwright.report(run_folder(tmp_path / "<script>x", None, f"name='{EVIL}'", device=H100))
    assert report.ran.name == EVIL
    rows = {row[0]: row[1:] for row in shown(report).rows[1:] if row}
    assert rows["steps"] == ["12 of 12"]
    assert rows["s/step"][0].startswith("0.5 (predicted ")
    assert rows["state"] == ["finished"]


def test_other_peoples_words_are_text(priced):
    text = html_table(EVIL, (EVIL,), [(EVIL, "a & b")])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 3
    hostile = msgspec.structs.replace(priced.ledger, moment=EVIL)
    assert "script" not in shown(hostile).names


def test_tables_are_made_without_torch(tmp_path):
    folder = run_folder(tmp_path / "run")
    code = f"""
import sys, meshwright
found = meshwright.search("gpt2", "8xh100", sequence=1024, batch=64, top=2)
for value in (found, found[0], found[0].plan, found[0].ledger, meshwright.report({str(folder)!r})):
    assert value._repr_html_().startswith("<table>")
assert not {{"torch", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
