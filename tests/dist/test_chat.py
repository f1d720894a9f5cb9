"""Conversations packed and one a sample give the same losses and weights under every plan."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from chats import byte_level, ragged, write_lines
from trials import Trial, alone, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.data.loader import Loader
from meshwright.data.pack import packing

# float64 sums in another order: a few hundred terms of relative error 1e-16 each, through three steps of SGD.
TOLERANCE = 1e-12
SIZES = {"documents": (16, 128), "best_fit": (4, 320)}  # rows and sequence of one step, which has every sample
WORDS = (
    "data.format=chat",
    "data.template=chatml",
    "data.eval_fraction=0",
    "arch.vocab=336",
    "steps=3",
    "optim.name=sgd",
    "optim.schedule=constant",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("chat")
    byte_level().save(str(made / "tokenizer.json"))
    write_lines(made / "chat.jsonl", ragged(SIZES["documents"][0]))
    for pack in SIZES:
        make_corpus(a_run(made, pack), made)  # before the ranks ask
    return made


def a_run(folder: Path, pack: str, *words: str):
    rows, sequence = SIZES[pack]
    own = (f"data.source={folder}/chat.jsonl", f"data.tokenizer={folder}/tokenizer.json", f"data.pack={pack}")
    return make_run(folder, *WORDS, *own, f"batch={rows}", f"sequence={sequence}", *words)


@functools.cache
def unpacked(folder: Path) -> Trial:
    run = a_run(folder, "documents", "plan.replicate=1")
    return drive(run, make_corpus(run, folder), alone())


def compare(folder: Path, *plan: str) -> None:
    run = a_run(folder, "best_fit", *plan)
    corpus = make_corpus(run, folder)
    assert packing(corpus.sources[0], run, corpus.end_token).count == run.batch
    mine = drive(run, corpus, mesh_of(run.plan))
    if dist.get_rank() > 0:
        return
    theirs = unpacked(folder)
    apart = [abs(one - other) for one, other in zip(mine.losses, theirs.losses, strict=True)]
    apart += [abs(one - other) for one, other in zip(mine.norms, theirs.norms, strict=True)]
    apart += [(mine.weights[name] - weight).abs().max().item() for name, weight in theirs.weights.items()]
    assert max(apart) < TOLERANCE
    assert theirs.losses[-1] < theirs.losses[0]


@pytest.mark.parametrize(
    "plan",
    [
        ("plan.replicate=2", "plan.grad_accum=2"),
        ("plan.shard=2", "plan.zero=3", "plan.grad_accum=2"),
        ("plan.cp=2",),
        ("plan.cp=2", "plan.cp_kind=ulysses"),
        ("plan.pp=2", "plan.grad_accum=4"),
    ],
    ids=["replicate", "zero3", "ring", "ulysses", "pp"],
)
@world(2)
def test_packed_conversations_train_as_each_alone(folder, plan):
    compare(folder, *plan)


@world(2)
def test_the_divisor_is_the_trained_tokens_of_all_ranks(folder):
    run = a_run(folder, "best_fit", "plan.replicate=2")
    corpus = make_corpus(run, folder)
    loader = Loader(corpus, run, dist.get_rank(), torch.device("cpu"))
    batch = loader.take(0)
    loader.close()
    (report,) = corpus.chats
    assert report is not None
    assert batch.job_tokens == report.trained < report.tokens
