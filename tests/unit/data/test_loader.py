import threading
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from meshwright.config.run import Data, Run, Source
from meshwright.data.loader import Batch, Loader, StepBatch
from meshwright.data.pack import IGNORE
from meshwright.data.prepare import Corpus, prepare
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

CPU = torch.device("cpu")
VOCAB = 60_000
ENDS = 7  # in ragged corpora, tokens that divide by a number are turned into this end token
# The same global batch of eight, split over ranks and microbatches in every way worth trying.
PLANS = [
    Plan(microbatch=8),
    Plan(microbatch=2, grad_accum=4),
    Plan(microbatch=4, replicate=2),
    Plan(microbatch=1, grad_accum=4, replicate=2),
    Plan(microbatch=2, replicate=2, shard=2, zero=3),
    Plan(microbatch=1, grad_accum=2, shard=4, zero=1),
]


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def mixture(make_tokens) -> Data:
    first, second = make_tokens("a.bin", 3000), make_tokens("b.bin", 1500, 30_000)
    return Data(mix=(Source(source=str(first), weight=3.0), Source(source=str(second))), eval_fraction=0.1)


@pytest.fixture
def ragged(tmp_path) -> Data:
    """Documents of about thirteen tokens in two shards."""
    stream = np.random.default_rng(1).integers(10, VOCAB, 4000).astype("<u2")
    stream[stream % 13 == 0] = ENDS
    stream[:1700].tofile(tmp_path / "a.bin")
    stream[1700:].tofile(tmp_path / "b.bin")
    return Data(source=f"{tmp_path}/*.bin", end_token=ENDS, eval_fraction=0.1)


def corpus_of(run: Run, cache: Path) -> Corpus:
    return prepare(run, cache, lambda _: None)


def loaded(run: Run, corpus: Corpus, steps: range) -> list[list[StepBatch]]:
    """What every rank takes, step by step."""
    taken = []
    for rank in range(run.plan.data):
        loader = Loader(corpus, run, rank, CPU, start=steps.start)
        taken.append([loader.take(step) for step in steps])
        loader.close()
    return [list(step) for step in zip(*taken, strict=True)]


def rows(step: list[StepBatch]) -> list[tuple[list[int], ...]]:
    """Every sample of a step in global order, whatever rank and microbatch it came in."""

    def row(batch: Batch, number: int) -> tuple[list[int], ...]:
        fields = (batch.tokens, batch.targets, batch.positions, batch.documents, batch.index)
        return tuple(field[number].tolist() for field in fields if field is not None)

    batches = [batch for rank in step for batch in rank.microbatches]
    return [row(batch, number) for batch in batches for number in range(len(batch.tokens))]


def test_a_first_look(make_run, make_tokens, cache):
    run = make_run(Data(source=str(make_tokens("a.bin", 1000))), vocab=VOCAB, plan=Plan(microbatch=2, grad_accum=2))
    ((step,),) = loaded(run, corpus_of(run, cache), range(5, 6))
    assert step.tokens == 4 * 16
    assert len(step.microbatches) == 2
    batch = step.microbatches[1]
    assert {each.dtype for each in (batch.tokens, batch.targets, batch.positions, batch.index)} == {torch.int64}
    assert torch.equal(batch.targets, batch.tokens + 1)  # these tokens count
    assert torch.equal(batch.positions, torch.arange(16).expand(2, 16))
    assert batch.documents is None
    assert batch.index[:, 0].tolist() == [(5 * 4 + 2) * 16, (5 * 4 + 3) * 16]
    assert batch.tokens.is_contiguous()
    assert batch.targets.is_contiguous()


CASES = [{}, {"mask_documents": True}, {"pack": "documents"}]


@pytest.mark.parametrize("case", CASES)
def test_every_split_of_a_step_holds_the_same_samples(make_run, ragged, cache, case):
    data = msgspec.structs.replace(ragged, **case)
    expected = None
    for plan in PLANS:
        run = make_run(data, vocab=VOCAB, plan=plan)
        steps = loaded(run, corpus_of(run, cache), range(0, 3))
        seen = [rows(step) for step in steps], [step[0].tokens for step in steps]
        expected = expected or seen
        assert seen == expected
        assert all(len({rank.tokens for rank in step}) == 1 for step in steps)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_knows_the_valid_tokens_of_all(make_run, ragged, cache, case):
    run = make_run(msgspec.structs.replace(ragged, **case), vocab=VOCAB, plan=PLANS[3])
    for step in loaded(run, corpus_of(run, cache), range(4)):
        counted = sum(int((batch.targets != IGNORE).sum()) for rank in step for batch in rank.microbatches)
        assert [rank.tokens for rank in step] == [counted] * run.plan.data
        assert counted < run.tokens or not case


def test_every_split_of_a_mixture_holds_the_same_samples(make_run, mixture, cache):
    seen = []
    for plan in PLANS:
        run = make_run(mixture, vocab=VOCAB, plan=plan)
        seen.append([rows(step) for step in loaded(run, corpus_of(run, cache), range(3))])
    assert all(each == seen[0] for each in seen)


def test_a_mixture_keeps_its_proportions(make_run, mixture, cache):
    run = make_run(mixture, vocab=VOCAB, plan=Plan(microbatch=64))
    steps = loaded(run, corpus_of(run, cache), range(16))
    second = sum(int((step[0].microbatches[0].tokens[:, 0] >= 30_000).sum()) for step in steps)
    assert abs(second - 256) < 70  # 1024 draws of one in four: 256, with a deviation of 14


def test_resuming_equals_an_uninterrupted_run(make_run, mixture, cache):
    run = make_run(mixture, vocab=VOCAB, plan=PLANS[3])
    corpus = corpus_of(run, cache)
    whole = [rows(step) for step in loaded(run, corpus, range(0, 8))]
    for start in (1, 5, 7):
        assert [rows(step) for step in loaded(run, corpus, range(start, 8))] == whole[start:]


def test_steps_may_be_taken_in_any_order(make_run, mixture, cache):
    run = make_run(mixture, vocab=VOCAB)
    corpus = corpus_of(run, cache)
    loader = Loader(corpus, run, 0, CPU)
    seen = {step: rows([loader.take(step)]) for step in (0, 1, 9, 3, 2, 1_000_000, 0)}
    loader.close()
    for step, expected in seen.items():
        assert rows(loaded(run, corpus, range(step, step + 1))[0]) == expected


def test_an_epoch_sees_every_training_sample_once_and_no_held_out_one(make_run, make_tokens, cache):
    run = make_run(Data(source=str(make_tokens("a.bin", 1601)), eval_fraction=0.2), vocab=VOCAB)
    steps = loaded(run, corpus_of(run, cache), range(40))  # 80 training samples, two epochs in batches of 4
    first = [int(batch.tokens[row, 0]) for step in steps for batch in step[0].microbatches for row in range(4)]
    assert Counter(first[:80]) == Counter(range(0, 80 * 16, 16))
    assert Counter(first[80:]) == Counter(range(0, 80 * 16, 16))
    assert first[:80] != first[80:]


def test_token_indices_are_unique_in_all_of_training(make_run, make_tokens, cache):
    run = make_run(Data(source=str(make_tokens("a.bin", 200))), vocab=VOCAB, plan=PLANS[3])
    steps = loaded(run, corpus_of(run, cache), range(6))
    index = torch.cat([batch.index.flatten() for step in steps for rank in step for batch in rank.microbatches])
    assert torch.equal(index, torch.arange(6 * run.tokens))


def test_held_out_batches_come_in_order_and_again(make_run, make_tokens, cache):
    run = make_run(Data(source=str(make_tokens("a.bin", 1601)), eval_fraction=0.06), vocab=VOCAB, plan=PLANS[2])
    corpus = corpus_of(run, cache)
    loaders = [Loader(corpus, run, rank, CPU) for rank in range(2)]
    held = [[row[0][0] // 16 for row in rows([loader.held(batch) for loader in loaders])] for batch in range(2)]
    # Samples 94 to 99 of 100 are held out: a batch of eight takes two of them twice.
    assert held == [[94, 95, 96, 97, 98, 99, 94, 95], [96, 97, 98, 99, 94, 95, 96, 97]]
    assert loaders[0].held(1).tokens == run.tokens
    for loader in loaders:
        loader.close()


def test_held_out_tokens_are_counted_over_all_ranks(make_run, ragged, cache):
    run = make_run(msgspec.structs.replace(ragged, pack="documents"), vocab=VOCAB, plan=PLANS[2])
    corpus = corpus_of(run, cache)
    loaders = [Loader(corpus, run, rank, CPU) for rank in range(2)]
    held = [loader.held(30) for loader in loaders]
    counted = sum(int((batch.targets != IGNORE).sum()) for each in held for batch in each.microbatches)
    assert [each.tokens for each in held] == [counted, counted]
    for loader in loaders:
        loader.close()


def test_a_held_out_batch_of_a_mixture_has_something_of_each(make_run, mixture, cache):
    run = make_run(mixture, vocab=VOCAB, plan=Plan(microbatch=64))
    loader = Loader(corpus_of(run, cache), run, 0, CPU)
    first = loader.held(0).microbatches[0].tokens[:, 0]
    loader.close()
    assert 5 < int((first >= 30_000).sum()) < 30  # 16 expected, with a deviation of 3.5
    assert first[first < 30_000].min() >= 168 * 16  # of 187 samples 19 are held out


def test_nothing_held_out_is_an_input_error(make_run, make_tokens, cache):
    run = make_run(Data(source=str(make_tokens("a.bin", 200)), eval_fraction=0.0), vocab=VOCAB)
    loader = Loader(corpus_of(run, cache), run, 0, CPU)
    assert not loader.holds_out
    with pytest.raises(InputError, match=r"data\.eval_fraction"):
        loader.held(0)
    loader.close()


def test_a_token_that_the_model_does_not_know_is_named_when_it_is_taken(make_run, tmp_path, cache):
    tokens = np.arange(70_000) % 100
    tokens[69_000] = 400  # behind what is looked at before the run
    tokens.astype("<u2").tofile(tmp_path / "a.bin")
    run = make_run(Data(source=str(tmp_path / "a.bin"), eval_fraction=0.0), sequence=1000, plan=Plan(microbatch=69))
    loader = Loader(corpus_of(run, cache), run, 0, CPU)
    for _ in range(2):  # again and again, never a hang
        with pytest.raises(InputError, match=r"a\.bin holds token 400 at position 69000, and arch\.vocab is 300"):
            loader.take(0)
    loader.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gets_what_a_processor_gets(make_run, ragged, cache, case):
    run = make_run(msgspec.structs.replace(ragged, **case), vocab=VOCAB, plan=PLANS[1])
    corpus = corpus_of(run, cache)
    loaders = [Loader(corpus, run, 0, device) for device in (CPU, torch.device("cuda"))]
    for step in range(20):
        first, second = (loader.take(step) for loader in loaders)
        assert second.microbatches[0].tokens.is_cuda
        assert rows([first]) == rows([second])
    for loader in loaders:
        loader.close()


def test_closing_ends_the_thread(make_run, mixture, cache):
    before = threading.active_count()
    run = make_run(mixture, vocab=VOCAB)
    loader = Loader(corpus_of(run, cache), run, 0, CPU)
    loader.take(0)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before


def test_only_a_few_steps_are_read_ahead(make_run, mixture, cache):
    run = make_run(mixture, vocab=VOCAB)
    loader = Loader(corpus_of(run, cache), run, 0, CPU)
    for step in (0, 1, 2, 50, 51):
        taken = loader.take(step)
        assert 0 <= taken.wait_seconds < 10
        assert sorted(loader.ahead) == [step + 1, step + 2]
    loader.close()
