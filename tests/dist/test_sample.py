"""The text at the end of a run: one sampler with a KV cache, the same text under every plan."""

from pathlib import Path

import pytest
from trials import GPT, alone, corpus_file, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.config.check import missing
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan
from meshwright.train.build import build
from meshwright.train.sample import closing_sample, continued

# From 9 tokens to 27, where a sequence has 16: the text outgrows its window, and then once more.
SAMPLE = ("sequence=16", "eval.sample_tokens=18", "eval.prompt=word1 and 4 word2", "arch.layers=2")
PLANS = {
    "tiny": [("plan.shard=4", "plan.zero=3"), ("plan.tp=2", "plan.cp=2"), ("plan.pp=2", "plan.tp=2"), ("plan.tp=4",)],
    "tiny-moe": [("plan.tp=2", "plan.cp=2"), ("plan.shard=4", "plan.ep=2", "plan.zero=2")],
}


if not any(missing(Plan(microbatch=1, compile=True))):  # nothing is compiled for a sample: its shapes are its own
    PLANS["tiny"].append(("plan.tp=2", "plan.replicate=2", "plan.compile=true"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample")
    corpus_file(path)
    make_corpus(make_run(path), path)
    return path


def written(folder: Path, mesh: Mesh | None, arch: str, *words: str) -> tuple[str, list[list[int]]]:
    """The text at the end of a run, and what follows prompts of 3, 20 and 9 tokens, one longer than a sequence."""
    run = make_run(folder, *SAMPLE, *words, arch=arch)
    corpus, mesh = make_corpus(run, folder), mesh or mesh_of(run.plan)
    state = build(run, corpus, mesh)
    prompts = [[7, 8, 9], list(range(40, 60)), list(range(3, 12))]
    try:
        opening = state.loader.held(0).microbatches[0].tokens[0][:16]
        text = closing_sample(state.chunks, run, corpus, opening, mesh)
        return text, continued(state.chunks, run, prompts, frozenset({0}), mesh)
    finally:
        state.loader.close()


@pytest.mark.parametrize(
    ("arch", "shape"), [("tiny", ()), ("tiny", GPT), ("tiny-moe", ())], ids=["llama", "gpt", "moe"]
)
@world(4)
def test_every_plan_writes_the_text_of_one_device(folder, arch, shape):
    expected, together = written(folder, alone(), arch, *shape)
    assert expected.startswith("word1 and 4 word2")
    assert len(expected) > 2 * len("word1 and 4 word2"), expected  # no end of a document was drawn early
    assert all(len(each) == 18 or each[-1] == 0 for each in together)
    for plan in PLANS[arch]:
        assert written(folder, None, arch, *shape, *plan) == (expected, together), plan


def text(folder: Path, *words: str) -> str:
    """What one process writes at the end of a run that nobody prompts."""
    run = make_run(folder, *SAMPLE, "eval.prompt=", *words)
    corpus = make_corpus(run, folder)
    state = build(run, corpus, alone())
    try:
        return closing_sample(state.chunks, run, corpus, state.loader.held(0).microbatches[0].tokens[0][:16], alone())
    finally:
        state.loader.close()


def test_a_text_that_nobody_prompts_goes_on_from_the_data(folder):
    expected = text(folder)
    assert len(expected) > 40, expected
    assert expected != text(folder, "seed=2")
    greedy = [text(folder, "eval.temperature=0.0", f"eval.sample_tokens={count}") for count in (5, 40)]
    assert greedy[1].startswith(greedy[0])
