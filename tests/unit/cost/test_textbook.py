"""The table of closed forms: whole for any job, each entry cited, the slips told where a reader meets them."""

import math

import msgspec
import pytest

from meshwright.config import presets
from meshwright.cost import textbook
from meshwright.cost.flops import step_flops
from meshwright.cost.job import Job
from meshwright.cost.textbook import NOTICES
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.spec.params import count
from meshwright.spec.plan import Plan


def job(model: str = "llama3-8b", **plan) -> Job:
    chosen = Plan(**({"microbatch": 1, "precision": "bf16"} | plan))
    return Job(
        arch=presets.preset(model),
        plan=chosen,
        sequence=4096,
        cluster=cluster(f"{chosen.world}xh100"),
        stack=stack_of("meshwright"),
    )


@pytest.mark.parametrize("plan", [{}, {"pp": 4, "stages": (8, 8, 8, 8), "grad_accum": 8}, {"shard": 8, "zero": 3}])
def test_every_entry_is_named_cited_and_finite(plan):
    entries = textbook.table(job(**plan))
    assert len({entry.name for entry in entries}) == len(entries) > 20
    for entry in entries:
        assert entry.formula
        assert entry.source
        assert entry.unit
        assert math.isfinite(entry.value)
        assert entry.value >= 0
        assert textbook.entry(entry.name, job(**plan)) == entry


def test_forms_that_say_nothing_are_left_out():
    names = {entry.name for entry in textbook.table(job())}
    assert "bubble" not in names
    assert "zero-3" not in names
    piped = {entry.name for entry in textbook.table(job(pp=4, stages=(8, 8, 8, 8)))}
    assert piped - names == {"bubble", "bubble-over-ideal"}


def test_values_are_those_of_the_job():
    found = job(shard=8, zero=3, microbatch=2)
    parameters = count(found.arch)
    assert textbook.entry("zero-3", found).value == 2 * parameters
    assert textbook.entry("states-megatron", found).value == 18 * parameters
    assert textbook.entry("6nd", found).value == 6 * parameters * 8 * 2 * 4096
    assert textbook.entry("batch", found).value == 16


def test_what_is_said_of_adams_bytes_is_said_to_be_of_adam():
    shared = job(shard=4, zero=3)
    other = msgspec.structs.replace(shared, optimizer="sgd")
    assert textbook.entry("states-exact", other).value == 12 * count(shared.arch)
    for name in ("states-exact", "states-megatron", "states-bf16", "zero-1", "zero-2", "zero-3"):
        assert textbook.entry(name, other).note == f"With Adam: {textbook.entry(name, shared).note}"


def test_the_closed_form_of_flops_is_near_the_exact_count():
    found = job("gpt2-xl")
    exact = step_flops(found.arch, found.sequence, found.plan.batch)
    # PaLM's counts the position table and the norms, 0.2 % of the weights, and nothing else differs.
    assert textbook.entry("palm-flops", found).value == pytest.approx(exact, rel=0.01)


def test_every_slip_of_the_notes_is_told_at_some_entry():
    told = " ".join(entry.note for entry in textbook.table(job(shard=64, zero=3, pp=2, stages=(16, 16))))
    slips = [
        "master copy twice", "leaves out the 10", "untied", "belongs to 4096", "must be tokens",
        "8 (all bf16), 16 and 20",
        "Nothing is kept inside a segment", "all-gathered where the notes say broadcast", "53,248",
        "backward runs for every microbatch", "no_sync", "MiCS", "activations halve", "3.8 ×", "7.2 ×",
    ]  # fmt: skip
    assert [slip for slip in slips if slip not in told] == []
    assert set(NOTICES) <= set(textbook.FORMS)


def test_the_notes_gpt_shows_its_147_7_million_parameters():
    gpt1 = job("gpt1")
    untied = textbook.entry("gpt-parameters-untied", gpt1)
    assert (untied.value, untied.amount, untied.misfit) == (147_675_648, "147,675,648 parameters", "")
    assert "this model has 147,675,648 parameters" in textbook.entry("gpt-parameters", gpt1).misfit
    assert textbook.entry("gpt-parameters", job("gpt2")).misfit == ""
    assert textbook.entry("notes-parameters", job("notes-194m")).misfit == ""


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        ("llama3-8b", "feed-forward", "14,336 wide"),
        ("llama3-8b", "activations", "gated"),
        ("llama3-8b", "activations-selective", "8 heads of keys and values, not 32"),
        ("mixtral-8x7b", "notes-memory", "MoE"),
        ("llama3-8b", "notes-parameters", "8,030,261,248"),
        ("llama3.1-8b", "gpt-parameters-untied", "8,030,261,248"),  # by chance within a five-thousandth
    ],
)
def test_a_form_for_another_architecture_is_marked(model, name, reason):
    assert reason in textbook.entry(name, job(model)).misfit


def test_forms_that_ask_nothing_of_the_architecture_are_never_marked():
    marked = {entry.name for entry in textbook.table(job("mixtral-8x7b", shard=8, zero=3)) if entry.misfit}
    counts = {"gpt-parameters", "gpt-parameters-untied", "notes-parameters"}
    assert marked == counts | set(textbook.ASSUMES)
    assert {entry.name for entry in textbook.table(job("gpt2")) if entry.misfit} == counts - {"gpt-parameters"}
