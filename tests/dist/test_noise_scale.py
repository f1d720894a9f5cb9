"""The gradient noise scale beside gradients taken one by one, and AdaScale under every plan and through checkpoints."""

import msgspec
import pytest
import torch
import torch.distributed as dist
from trials import alone, corpus_file, deviation, drive, made, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.config import check
from meshwright.cost.traffic import traffic
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.saving import restore
from meshwright.train.step import losses

NOISE = ("arch.layers=4", "log.noise_scale=true", "data.pack=documents", "batch=8", "plan.microbatch=2")
ADASCALE = ("optim.adascale=true", "optim.adascale_batch=1", "data.pack=documents", "batch=8", "plan.microbatch=2")
TOLERANCE = 1e-12  # float64 sums in another order, as for any plan
TWO = (
    ("plan.replicate=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=1", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=3", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=3", "plan.grad_accum=2", "plan.recompute=full"),
    ("plan.pp=2", "plan.grad_accum=4"),
    ("plan.pp=2", "plan.grad_accum=4", "plan.schedule=zb1p"),
)


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


def one_by_one(run, corpus, names=None):
    """p and q of the first step, by the gradient of each microbatch alone."""
    state = build(
        msgspec.structs.replace(run, log=msgspec.structs.replace(run.log, noise_scale=False)), corpus, alone()
    )
    model, batch = state.chunks[0], state.loader.take(0)
    chosen = [weight for name, weight in model.named_parameters() if names is None or name in names]
    weight = torch.tensor(1.0 / batch.tokens, dtype=torch.float64)
    each = []
    for microbatch in batch.microbatches:
        weighed, _ = losses(model, run.plan, alone(), weight, microbatch)
        each.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(weighed, chosen)]))
    state.loader.close()
    count = len(each)
    return sum((count * grad).square().sum() for grad in each).item() / count, sum(each).square().sum().item()


def first_step(run, corpus, mesh):
    state = build(run, corpus, mesh)
    result = next(iter(train(run, state, mesh)))
    state.loader.close()
    assert isinstance(result, StepResult)
    assert result.noise is not None
    names = {name for chunk in state.meter.names for name in chunk}
    return (result.noise.parts.item(), result.noise.whole.item()), names


@world(2)
def test_both_norms_are_those_of_gradients_taken_one_by_one(folder):
    reference = make_run(folder, *NOISE, "plan.replicate=1", "plan.grad_accum=4")
    corpus = make_corpus(reference, folder)
    expected = one_by_one(reference, corpus)
    found, names = first_step(reference, corpus, alone())
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert len(names) == len(list(build(reference, corpus, alone()).chunks[0].named_parameters()))
    assert expected[0] > 1.01 * expected[1], "microbatches differ"
    for plan in TWO:
        run = make_run(folder, *NOISE, *plan)
        found, _ = first_step(run, corpus, mesh_of(run.plan))
        assert found == pytest.approx(expected, rel=TOLERANCE), str(run.plan)


@world(2)
def test_under_tp_the_weights_that_it_shards_are_measured(folder):
    run = make_run(folder, *NOISE, "plan.tp=2", "plan.grad_accum=4")
    corpus = make_corpus(run, folder)
    found, names = first_step(run, corpus, mesh_of(run.plan))
    assert "blocks.0.attn.q.weight" in names
    assert not any("norm" in name for name in names)
    reference = make_run(folder, *NOISE, "plan.replicate=1", "plan.grad_accum=4")
    assert found == pytest.approx(one_by_one(reference, corpus, names), rel=TOLERANCE)


@world(2)
def test_with_ep_the_weights_that_are_no_expert_s_are_measured(folder):
    words = (*NOISE, "arch.balance_loss=0.0", "arch.z_loss=0.0")  # which the step's own loop weighs
    run = make_run(folder, *words, "plan.shard=2", "plan.zero=3", "plan.ep=2", "plan.grad_accum=2", arch="tiny-moe")
    corpus = make_corpus(run, folder)
    found, names = first_step(run, corpus, mesh_of(run.plan))
    assert {"blocks.0.attn.q.weight", "blocks.0.mlp.router.weight"} <= names
    assert not any("experts" in name for name in names)
    reference = make_run(folder, *words, "plan.replicate=1", "plan.grad_accum=4", arch="tiny-moe")
    assert found == pytest.approx(one_by_one(reference, corpus, names), rel=TOLERANCE)


@world(2)
def test_adascale_trains_like_one_device(folder):
    reference = make_run(folder, *ADASCALE, "plan.replicate=1", "plan.grad_accum=4")
    corpus = make_corpus(reference, folder)
    one = drive(reference, corpus, alone()) if dist.get_rank() == 0 else None
    for plan in TWO[:1] + TWO[3:4] + TWO[5:6]:
        run = make_run(folder, *ADASCALE, *plan)
        mine = drive(run, corpus, mesh_of(run.plan))
        assert run.steps < mine.state.adascale.kept.tau < 8 * run.steps  # each is worth 1 to 8 of the base batch
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, str(run.plan)
            assert mine.state.adascale.kept == pytest.approx(one.state.adascale.kept, rel=1e-9)


@world(2)
def test_adascale_resumes_where_it_was(folder):
    words = (*ADASCALE, "plan.shard=2", "plan.zero=3", "plan.grad_accum=2", "steps=6", "checkpoint.every=2")
    run, mesh, state = made(make_run(folder, *words), folder, torch.device("cpu"))
    rates = [result.rate for result in train(run, state, mesh, folder / "run") if isinstance(result, StepResult)]
    state.loader.close()
    if dist.get_rank() == 0:  # as if it had been killed before its last save
        for step in (folder / "run" / "checkpoints").glob("step-6*"):
            step.rename(folder / step.name)
    dist.barrier()
    run, mesh, again = made(run, folder, torch.device("cpu"))
    restored = restore(again, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 4
    later = [result.rate for result in train(run, again, mesh) if isinstance(result, StepResult)]
    again.loader.close()
    assert later == rates[4:], "to the bit: the averages and the newest norms were saved"


def test_the_traffic_has_the_two_numbers_of_the_meter(tmp_path):
    corpus_file(tmp_path)
    run = make_run(tmp_path, *NOISE, "plan.replicate=2", "plan.grad_accum=2")
    plain = set(traffic(run.arch, run.plan, run.sequence))
    (more,) = set(traffic(run.arch, run.plan, run.sequence, noise=True)) - plain
    assert (more.kind, more.axis, more.count, more.bytes) == ("all_reduce", "world", 1, 16)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("log.noise_scale=true", "plan.replicate=1", "plan.microbatch=8"), "there is one"),
        ((*NOISE, "plan.cp=2", "plan.grad_accum=4"), "whole sequences"),
        ((*ADASCALE, "plan.replicate=2", "plan.grad_accum=2", "plan.deterministic=true"), "plan.deterministic"),
        (("optim.adascale_batch=4", "plan.replicate=1"), "is for AdaScale"),
        ((*ADASCALE, "plan.tp=2", "plan.grad_accum=4"), "plan.tp = 2 has some weights' only in parts"),
        ((*ADASCALE, "plan.replicate=2", "plan.grad_accum=2", "optim.adascale_batch=9"), "no part of a batch"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, words, said):
    corpus_file(tmp_path)
    with pytest.raises(Exception, match=said):
        check.problems(make_run(tmp_path, *words))
