"""States off the device train the same model: to the bit in full width, closely in 16 bits, and through checkpoints."""

import pytest
import torch
from trials import alone, corpus_file, drive, make_corpus, make_run

from meshwright.spec.problem import InputError
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.saving import digest_of, restore

ONE = ("plan.replicate=1",)
WHERE = [("host", "host"), ("host", "device"), ("disk", "host"), ("disk", "device")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a kernel shared by threads takes the ends of their shares through other instructions
    monkeypatch.setattr("meshwright.optim.host_memory.PIECE", 4096)
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    yield tmp_path
    torch.set_num_threads(threads)


def trial(folder, *words, arch="tiny"):
    run = make_run(folder, *ONE, *words, f"plan.optimizer_offload_folder={folder}", arch=arch)
    result = drive(run, make_corpus(run, folder), alone())
    result.state.optimizer.settle()
    return result


def offloaded(place, update):
    return (f"plan.optimizer_offload={place}", f"plan.optimizer_offload_update={update}")


@pytest.mark.parametrize(("place", "update"), WHERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_states_change_no_bit(folder, place, update, precision):
    words = (f"plan.precision={precision}",)
    plain, moved = trial(folder, *words), trial(folder, *words, *offloaded(place, update))
    assert moved.losses == plain.losses
    assert moved.norms == plain.norms
    assert moved.held == plain.held
    for name, weight in plain.weights.items():
        assert torch.equal(moved.weights[name], weight), name
    moved.state.optimizer.close()


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("tiny", ("plan.precision=fp64",)),
        ("tiny", ("plan.precision=bf16", "plan.grad_accum=2")),
        ("tiny", ("plan.precision=fp16",)),
        ("tiny", ("plan.precision=bf16", "plan.recompute=full")),
        ("tiny", ("plan.precision=bf16", "plan.recompute=every-2")),
        ("tiny", ("plan.precision=bf16", "arch.tied=true")),
        ("tiny-moe", ("plan.precision=bf16",)),
        ("tiny-moe", ("plan.precision=bf16", "adapter.kind=lora", "adapter.rank=4", "arch.layers=2")),
        ("tiny", ("plan.precision=bf16", "plan.grad_accum=2", "adapter.kind=lora", "adapter.base=fp8")),
    ],
)
def test_every_kind_of_step_can_be_offloaded(folder, arch, words):
    plain, moved = (trial(folder, *words, *more, arch=arch) for more in ((), offloaded("host", "host")))
    assert moved.losses == plain.losses
    assert moved.held == plain.held
    assert all(torch.equal(moved.weights[name], weight) for name, weight in plain.weights.items())


@pytest.mark.parametrize(("place", "update"), WHERE)
def test_states_of_16_bits_learn_as_wide_ones_do(folder, place, update):
    # At three times this rate a loss moves by 0.02 when its terms are added in another order.
    words = ("plan.precision=bf16", "steps=30", "optim.lr=1e-3")
    wide = trial(folder, *words, *offloaded("host", "host"))
    halves = trial(folder, *words, *offloaded(place, update), "optim.state_dtype=bf16")
    # Narrow weights that lie halfway between two numbers are rounded otherwise: one in 2¹⁶.
    assert halves.losses[0] == pytest.approx(wide.losses[0], rel=1e-5)
    assert wide.losses[-1] < wide.losses[0] - 1
    # A moment of 16 bits is off by at most 2⁻⁷ of itself, at random: the loss, which has fallen by more than one, must
    # follow by a hundredth of it.
    assert halves.losses[-1] == pytest.approx(wide.losses[-1], abs=0.02)


def test_some_states_stay_in_memory_beside_a_disk(folder):
    words = ("plan.precision=bf16",)
    plain = trial(folder, *words)
    mixed = trial(folder, *words, *offloaded("disk", "host"), "plan.optimizer_offload_host_bytes=1000000")
    optimizer = mixed.state.optimizer
    assert {home.staged for home in optimizer.locations} == {True, False}
    assert sum(array.nbytes for home in optimizer.locations if not home.staged for array in home.arrays) <= 1_000_000
    assert all(torch.equal(mixed.weights[name], weight) for name, weight in plain.weights.items())


def test_a_gradient_that_is_not_finite_moves_nothing(folder):
    run = make_run(folder, *ONE, "plan.precision=bf16", *offloaded("host", "host"), "optim.state_dtype=bf16", "steps=2")
    state = build(run, make_corpus(run, folder), alone())
    before = digest_of(state, run, alone())
    weight = state.optimizer.weights[3]
    weight.register_hook(lambda gradient: gradient * float("nan"))
    results = [result for result in train(run, state, alone()) if isinstance(result, StepResult)]
    state.loader.close()
    assert [result.finite.item() for result in results] == [0.0, 0.0]
    state.step = 0
    assert digest_of(state, run, alone()) == before


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "in-place"])
@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_a_run_that_was_cut_short_goes_on_to_the_same_end(folder, place, states, copied, monkeypatch):
    words = (*ONE, "plan.precision=bf16", *offloaded(place, "host"), f"optim.state_dtype={states}", "steps=6")
    run = make_run(
        folder, *words, "checkpoint.every=2", "data.eval_fraction=0.0", f"plan.optimizer_offload_folder={folder}"
    )
    corpus, mesh = make_corpus(run, folder), alone()
    whole = build(run, corpus, mesh)
    list(train(run, whole, mesh))
    whole.loader.close()
    cut, said = build(run, corpus, mesh), []
    cut.say = said.append
    with monkeypatch.context() as small:
        if not copied:
            small.setattr("meshwright.optim.host_memory.free_host_bytes", lambda: 1000)
        for result in train(run, cut, mesh, folder / "run"):
            if result.step == 5:
                break
    cut.loader.close()
    assert [text.split(",")[0] for text in said] == (
        [] if copied else ["checkpoints are written straight from the states"]
    )
    again = build(run, corpus, mesh)
    restored = restore(again, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 4
    list(train(run, again, mesh))
    again.loader.close()
    assert digest_of(again, run, mesh) == digest_of(whole, run, mesh)


def test_nothing_is_left_on_the_disk(folder):
    states = folder / "states"
    states.mkdir()
    run = make_run(
        folder, *ONE, "plan.precision=bf16", *offloaded("disk", "host"), f"plan.optimizer_offload_folder={states}"
    )
    trial_state = build(run, make_corpus(run, folder), alone())
    assert trial_state.optimizer.files.bytes >= 12 * sum(trial_state.optimizer.sizes)
    assert list(states.iterdir()) == []  # from the first moment: a kill leaves nothing either
    trial_state.loader.close()


def test_a_failing_disk_is_told_by_the_next_step(folder, monkeypatch):
    run = make_run(
        folder, *ONE, "plan.precision=bf16", *offloaded("disk", "host"), f"plan.optimizer_offload_folder={folder}"
    )
    state = build(run, make_corpus(run, folder), alone())

    def full(*args):
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr("os.pwritev", full)
    with pytest.raises(OSError, match="the disk is gone"):
        list(train(run, state, alone()))
    state.loader.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plan.optimizer_offload=host",), r"needs [\d,]+ bytes of RAM; 1,000 free"),
        (("plan.optimizer_offload=disk",), r"needs [\d,]+ bytes on the disk, and \S+ has 2,000 free"),
    ],
)
def test_too_little_room_is_refused_before_the_first_step(folder, monkeypatch, words, told):
    monkeypatch.setattr("meshwright.optim.host_memory.free_host_bytes", lambda: 1000)
    monkeypatch.setattr("meshwright.optim.host_memory.free_disk_bytes", lambda folder: 2000)
    run = make_run(folder, *ONE, "plan.precision=bf16", *words)
    with pytest.raises(InputError, match=told):
        build(run, make_corpus(run, folder), alone())
