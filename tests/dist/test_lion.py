"""Lion in every form of states and weights: it is by elements, so it comes with all of them."""

import pytest
from trials import assert_all_forms_learn, assert_offload_changes_no_bit, corpus_file

LION = ("optim.name=lion", "optim.lr=2e-3", "data.pack=documents", "plan.replicate=1")


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("place", "update"), [("host", "device"), ("disk", "host")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_states_change_no_bit(folder, place, update, precision, monkeypatch):
    monkeypatch.setattr("meshwright.optim.host_memory.PIECE", 4096)
    assert_offload_changes_no_bit(folder, (*LION, f"plan.precision={precision}"), place, update)


def test_every_precision_of_weights_and_states_learns_as_fp32_does(folder):
    assert_all_forms_learn(folder, (*LION, "steps=12"))
