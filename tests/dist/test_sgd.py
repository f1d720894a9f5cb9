"""SGD with momentum under every axis and in every form: as one device, through checkpoints, and never mixed up."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trials import (
    CPU,
    alone,
    assert_all_forms_learn,
    assert_offload_changes_no_bit,
    corpus_file,
    deviation,
    digest_before_the_cut,
    drive,
    made,
    make_corpus,
    make_run,
    mesh_of,
)
from worlds import world

from meshwright.checkpoint.model_folder import save_native
from meshwright.spec.problem import InputError
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.saving import digest_of, restore
from meshwright.train.state import weights

SGD = ("optim.name=sgd", "optim.nesterov=true", "optim.lr=5e-2", "data.pack=documents")
# float64 sums in another order: a few hundred terms of relative error 1e-16 each, through four updates.
TOLERANCE = 1e-12
TWO = (
    ("plan.replicate=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=1"),
    ("plan.shard=2", "plan.zero=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=3", "plan.cpu_offload=true"),
    ("plan.tp=2",),
    ("plan.cp=2",),
    ("plan.pp=2", "plan.grad_accum=4"),
    ("plan.replicate=2", "plan.deterministic=true"),
)
FOUR = (
    ("plan.pp=2", "plan.grad_accum=4", "plan.shard=2", "plan.zero=3"),
    ("plan.shard=2", "plan.zero=3", "plan.tp=2"),
)


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


def compare(folder: Path, plans: tuple[tuple[str, ...], ...], arch: str = "tiny") -> None:
    """Plans beside one process over the same mathematics."""
    corpus = make_corpus(make_run(folder, *SGD, arch=arch), folder)
    reference = make_run(folder, *SGD, "plan.replicate=1", arch=arch)
    one = drive(reference, corpus, alone()) if dist.get_rank() == 0 else None
    for plan in plans:
        run = make_run(folder, *SGD, *plan, arch=arch)
        mine = drive(run, corpus, mesh_of(run.plan))
        assert tuple(mine.state.optimizer.states()) == ("momentum",)
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, f"{run.plan}: losses {mine.losses} beside {one.losses}"
            assert one.losses[-1] < one.losses[0]


@world(2)
def test_two_ranks_are_one_device(folder):
    compare(folder, TWO)


@world(4)
def test_four_ranks_are_one_device(folder):
    compare(folder, FOUR)
    compare(folder, (("plan.shard=4", "plan.zero=2", "plan.ep=2", "plan.grad_accum=2"),), arch="tiny-moe")


@pytest.mark.parametrize(("place", "update"), [("host", "device"), ("disk", "host")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_states_change_no_bit(folder, place, update, precision, monkeypatch):
    monkeypatch.setattr("meshwright.optim.host_memory.PIECE", 4096)
    assert_offload_changes_no_bit(folder, (*SGD, "plan.replicate=1", f"plan.precision={precision}"), place, update)


def test_every_precision_of_weights_and_states_learns_as_fp32_does(folder):
    assert_all_forms_learn(folder, (*SGD, "plan.replicate=1", "steps=12"))


SAVED = (*SGD, "steps=6", "checkpoint.every=4", "plan.precision=fp64")


@world(2)
def test_a_checkpoint_resumes_under_another_plan_and_never_under_another_optimizer(folder):
    run, mesh, state = made(make_run(folder, *SAVED, "plan.shard=2", "plan.zero=3"), folder, CPU)
    digest = digest_before_the_cut(run, mesh, state, folder / "run")
    dist.barrier()
    for plan in (("plan.pp=2", "plan.grad_accum=4"), ("plan.tp=2",)):
        run, mesh, state = made(make_run(folder, *SAVED, *plan), folder, CPU)
        restored = restore(state, run, mesh, folder / "run", lambda text: None)
        assert restored is not None
        assert (restored.step, digest_of(state, run, mesh)) == (4, digest)
        assert all(momentum.any() for momentum in state.optimizer.states()["momentum"])
        state.loader.close()
    other = [word for word in SAVED if not word.startswith("optim.n")]
    run, mesh, state = made(make_run(folder, *other, "plan.tp=2"), folder, CPU)
    with pytest.raises(InputError, match="was saved by SGD with momentum, whose states AdamW cannot use"):
        restore(state, run, mesh, folder / "run", lambda text: None)
    state.loader.close()


def test_momentum_follows_into_a_new_phase(folder):
    run = make_run(folder, *SAVED, "steps=4", "plan.replicate=1")
    state = build(run, make_corpus(run, folder), alone())
    list(train(run, state, alone(), folder / "first"))
    state.loader.close()
    corpus = make_corpus(run, folder)
    save_native(folder / "first" / "model", run.arch, weights(state.chunks, run, alone()), corpus.tokenizer)
    words = (f"init.from={folder}/first", "init.optimizer_state=true", "sequence=64", "plan.replicate=1")
    later = make_run(folder, *SAVED, *words)
    after = build(later, make_corpus(later, folder), alone())
    said: list[str] = []
    assert restore(after, later, alone(), folder / "second", said.append) is None
    after.loader.close()
    assert said == [f"optimizer state from step 4 of {folder}/first"]
    pairs = zip(after.optimizer.states()["momentum"], state.optimizer.states()["momentum"], strict=True)
    assert all(torch.equal(one, other) and other.any() for one, other in pairs)
    adamw = make_run(folder, *(word for word in SAVED if not word.startswith("optim.n")), *words)
    fresh = build(adamw, make_corpus(adamw, folder), alone())
    with pytest.raises(InputError, match="was saved by SGD with momentum, whose states AdamW cannot use"):
        restore(fresh, adamw, alone(), folder / "third", said.append)
    fresh.loader.close()
