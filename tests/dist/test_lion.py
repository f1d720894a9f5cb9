"""Lion in every form of states and weights: it is by elements, so it comes with all of them."""

import pytest
import torch
from trials import alone, corpus_file, drive, make_corpus, make_run

LION = ("optim.name=lion", "optim.lr=2e-3", "data.pack=documents", "plan.replicate=1")


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("place", "update"), [("host", "device"), ("disk", "host")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_states_change_no_bit(folder, place, update, precision, monkeypatch):
    monkeypatch.setattr("meshwright.optim.host_memory.PIECE", 4096)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in tests/dist/test_sgd.py
    words = (*LION, f"plan.precision={precision}")
    offload = (f"plan.optimizer_offload={place}", f"plan.optimizer_offload_update={update}")
    runs = [make_run(folder, *words), make_run(folder, *words, *offload, f"plan.optimizer_offload_folder={folder}")]
    plain, moved = (drive(run, make_corpus(run, folder), alone()) for run in runs)
    torch.set_num_threads(threads)
    moved.state.optimizer.close()
    assert (moved.losses, moved.norms) == (plain.losses, plain.norms)
    assert all(torch.equal(moved.weights[name], weight) for name, weight in plain.weights.items())


FORMS = (
    ("plan.precision=bf16", "optim.master_weights=split"),
    ("plan.precision=bf16", "optim.master_weights=none", "optim.stochastic_rounding=true"),
    ("plan.precision=bf16", "optim.master_weights=split", "optim.state_dtype=bf16"),
    ("plan.precision=bf16", "plan.optimizer_offload=host", "optim.state_dtype=bf16"),
    ("plan.precision=fp16",),
)


def test_every_precision_of_weights_and_states_learns_as_fp32_does(folder):
    run = make_run(folder, *LION, "steps=12", "plan.precision=fp32")
    wide = drive(run, make_corpus(run, folder), alone())
    fallen = wide.losses[0] - wide.losses[-1]
    assert fallen > 0.1
    for words in FORMS:
        run = make_run(folder, *LION, "steps=12", *words)
        low = drive(run, make_corpus(run, folder), alone())
        low.state.optimizer.close()
        # Weights or states of bf16 are off by 2⁻⁸ of themselves at random: the loss must follow by a tenth of its fall.
        assert low.losses[-1] == pytest.approx(wide.losses[-1], abs=0.1 * fallen), words
