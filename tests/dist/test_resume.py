"""Asked to stop, all ranks save at the same step; what goes on is the run that never stopped."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import meshwright
from trials import CPU, corpus_file, made, make_corpus, make_run
from worlds import world

from meshwright.checkpoint import format
from meshwright.checkpoint.model_folder import save_native
from meshwright.train.loop import EvalResult, Stop, train
from meshwright.train.saving import digest_of, restore
from meshwright.train.state import weights

WORDS = ("steps=6", "checkpoint.every=0", "data.eval_fraction=0.0", "plan.precision=fp32")


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


def make_state(folder: Path, *words: str):
    return made(make_run(folder, *WORDS, *words), folder, CPU)


@pytest.mark.parametrize("plan", ["plan.tp=2", "plan.pp=2 plan.grad_accum=2", "plan.shard=2 plan.zero=2"])
@world(2)
def test_one_rank_is_asked_and_all_save_and_go_on_bit_for_bit(folder, plan):
    words = plan.split()
    run, mesh, state = make_state(folder, *words)
    list(train(run, state, mesh))
    state.loader.close()
    whole = digest_of(state, run, mesh)

    run, mesh, state = make_state(folder, *words)
    stop, seen = Stop(), []
    for result in train(run, state, mesh, folder / "run", stop):
        seen.append(result.step)
        stop.asked = dist.get_rank() == 1 and result.step == 2  # so step 3 is the last
        if state.stopped:  # whoever looks at the last result finds the save committed
            assert format.pointed(folder / "run" / "checkpoints")[0] == 3
            assert result.save_seconds > 0
    assert seen == [1, 2, 3]
    assert state.stopped
    assert state.saved
    state.loader.close()

    run, mesh, state = make_state(folder, *words)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 3
    results = list(train(run, state, mesh, folder / "run"))
    assert [result.step for result in results] == [4, 5, 6]
    assert not state.stopped
    # The same plan, the same order of sums: nothing but the numbers themselves could make a difference.
    assert digest_of(state, run, mesh) == whole
    state.loader.close()


@world(1)
def test_narrow_copies_of_the_weights_are_made_anew(folder):
    words = ("plan.precision=bf16", "plan.bf16_params=true", "checkpoint.every=3", "checkpoint.keep_every=3")
    run, mesh, state = make_state(folder, *words)
    list(train(run, state, mesh, folder / "run"))
    state.loader.close()
    whole = digest_of(state, run, mesh)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-6")
    run, mesh, state = make_state(folder, *words)
    assert restore(state, run, mesh, folder / "run", lambda text: None) is not None
    list(train(run, state, mesh))
    state.loader.close()
    assert digest_of(state, run, mesh) == whole


@world(2)
def test_asked_at_the_last_step_the_run_is_simply_done(folder):
    run, mesh, state = make_state(folder, "steps=2", "plan.replicate=2")
    stop = Stop()
    for result in train(run, state, mesh, folder / "run", stop):
        stop.asked = result.step == 1
    assert not state.stopped
    assert state.step == 2
    state.loader.close()


@world(2)
def test_a_loss_scale_and_its_streak_go_on_too(folder):
    run, mesh, state = make_state(folder, "plan.precision=fp16", "checkpoint.every=3", "plan.replicate=2")
    state.scale.value.fill_(2.0**40)  # overflows for a while
    list(train(run, state, mesh, folder / "run"))
    (value, streak, count) = (state.scale.value.item(), state.scale.streak.item(), state.optimizer.count.item())
    whole = digest_of(state, run, mesh)
    state.loader.close()
    assert count < 6
    run, mesh, state = make_state(folder, "plan.precision=fp16", "checkpoint.every=3", "plan.replicate=2")
    if mesh.rank == 0:
        shutil.rmtree(folder / "run" / "checkpoints" / "step-6")
    dist.barrier()
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 3
    list(train(run, state, mesh))
    assert (state.scale.value.item(), state.scale.streak.item(), state.optimizer.count.item()) == (value, streak, count)
    assert digest_of(state, run, mesh) == whole
    state.loader.close()


@world(2)
def test_gone_on_from_the_last_step_only_the_validation_loss_is_made(folder):
    words = ("checkpoint.every=3", "plan.replicate=2", "data.eval_fraction=0.1", "eval.batches=1")
    run, mesh, state = make_state(folder, *words)
    *_, last = train(run, state, mesh, folder / "run")
    state.loader.close()
    run, mesh, state = make_state(folder, *words)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 6
    (again,) = train(run, state, mesh, folder / "run")
    assert isinstance(again, EvalResult)
    assert again.loss.item() == last.loss.item()
    state.loader.close()


@world(2)
def test_whoever_leaves_in_the_middle_leaves_a_whole_save_and_no_stump(folder):
    run, mesh, state = make_state(folder, "checkpoint.every=1", "plan.replicate=2")
    results = train(run, state, mesh, folder / "run")
    next(results)
    results.close()
    state.loader.close()
    dist.barrier()
    assert sorted(os.listdir(folder / "run" / "checkpoints")) == ["latest", "step-1"]


@world(2)
def test_a_longer_sequence_begins_from_the_weights_of_the_phase_before(folder):
    rope = ("arch.rope_scaling=llama3", "arch.rope_factor=8.0", "arch.rope_original=32", "arch.context=256")
    run, mesh, state = make_state(folder, "plan.replicate=2", "optim.lr=1e-3")
    first = [result.loss.item() for result in train(run, state, mesh)]
    whole = dict(weights(state.chunks, run, mesh))
    if mesh.rank == 0:
        tokenizer = make_corpus(run, folder).tokenizer
        save_native(folder / "phase" / "model", run.arch, whole.items(), tokenizer)
    state.loader.close()
    dist.barrier()
    longer = ("sequence=64", "batch=4", "plan.cp=2", *rope, f"init.from={folder}/phase", "optim.lr=1e-3")
    run, mesh, state = make_state(folder, *longer)
    assert all(torch.equal(weight, whole[name]) for name, weight in weights(state.chunks, run, mesh))
    second = [result.loss.item() for result in train(run, state, mesh)]
    assert second[0] < first[0]  # it has learnt something before
    state.loader.close()


def test_the_verb_proves_it_and_prints_the_digests(folder):
    words = ["tiny", "sequence=32", "batch=4", f"data.source={folder}/text.jsonl"]
    done = meshwright("verify", "--resume", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    digests = {
        line.rsplit(" ", 1)[-1] for line in done.stdout.splitlines() if "gone on" in line or "without a stop: d" in line
    }
    assert len(digests) == 1
    assert done.stdout.count("the same bits") == 4
