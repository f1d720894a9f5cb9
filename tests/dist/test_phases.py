"""A new phase of a run, with a longer sequence: the weights follow, and the moments if they are asked to."""

import pytest
import torch
from trials import alone, corpus_file, make_corpus, make_run

from meshwright.checkpoint.model_folder import save_native
from meshwright.parallel.mesh import local
from meshwright.spec.problem import InputError
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.saving import restore
from meshwright.train.state import weights

FIRST = ("steps=4", "checkpoint.every=2", "plan.replicate=1", "data.eval_fraction=0.0")


@pytest.fixture
def phase(tmp_path):
    """A folder with a finished first phase of 32 tokens, and its last state."""
    corpus_file(tmp_path)
    run = make_run(tmp_path, *FIRST)
    corpus = make_corpus(run, tmp_path)
    state = build(run, corpus, alone())
    list(train(run, state, alone(), tmp_path / "first"))
    state.loader.close()
    save_native(tmp_path / "first" / "model", run.arch, weights(state.chunks, run, alone()), corpus.tokenizer)
    return tmp_path, state


def begun(folder, *words):
    run = make_run(folder, *FIRST, "sequence=64", "batch=4", f"init.from={folder}/first", *words)
    state = build(run, make_corpus(run, folder), alone())
    said = []
    assert restore(state, run, alone(), folder / "second", said.append) is None
    return run, state, said


def test_the_moments_follow_into_a_longer_sequence(phase):
    folder, before = phase
    run, after, said = begun(folder, "init.optimizer_state=true")
    assert said == [f"optimizer state from step 4 of {folder}/first"]
    assert after.step == 0
    assert after.optimizer.count.item() == 4.0
    for kind in ("first", "second"):
        pairs = zip(after.optimizer.states()[kind], before.optimizer.states()[kind], strict=True)
        assert all(torch.equal(one, other) and other.any() for one, other in pairs)
    pairs = zip(after.optimizer.weights, before.optimizer.weights, strict=True)
    assert all(torch.equal(local(one.detach()), local(other.detach())) for one, other in pairs)
    results = list(train(run, after, alone(), folder / "second"))
    after.loader.close()
    assert [result.step for result in results] == [1, 2, 3, 4]
    again = build(run, make_corpus(run, folder), alone())
    restored = restore(again, run, alone(), folder / "second", lambda text: None)
    assert restored is not None
    assert (restored.step, again.optimizer.count.item()) == (4, 8.0)  # its own state, not the first phase's
    again.loader.close()


def test_unless_they_are_asked_to_they_begin_anew(phase):
    folder, _ = phase
    _, after, said = begun(folder)
    assert said == []
    assert after.optimizer.count.item() == 0.0
    assert not any(moment.any() for moment in after.optimizer.states()["first"])
    after.loader.close()


def test_without_a_checkpoint_the_wish_is_refused(phase):
    folder, _ = phase
    (folder / "first" / "checkpoints").rename(folder / "elsewhere")
    with pytest.raises(InputError, match="holds no checkpoint to take the optimizer state from"):
        begun(folder, "init.optimizer_state=true")


@pytest.mark.parametrize(("step", "fits"), [(4, True), (5, False)])
def test_moments_are_of_the_same_step_as_the_weights(phase, step, fits):
    folder, _ = phase
    (folder / "first" / "summary.json").write_text(f'{{"step": {step}, "loss": null}}')
    if fits:
        begun(folder, "init.optimizer_state=true")[1].loader.close()
        return
    with pytest.raises(InputError, match="are of step 5, and its newest optimizer state of 4"):
        begun(folder, "init.optimizer_state=true")


def test_moments_of_no_run_are_refused(tmp_path):
    corpus_file(tmp_path)
    with pytest.raises(InputError, match="none is named"):
        make_run(tmp_path, "init.optimizer_state=true")


def test_a_run_that_does_not_ask_keeps_its_name(tmp_path):
    from meshwright.config.run import mathematics

    corpus_file(tmp_path)
    assert "optimizer_state" not in mathematics(make_run(tmp_path))["init"]
