import pytest

from meshwright.config.presets import preset
from meshwright.spec.plan import balanced_stages


@pytest.mark.parametrize(("name", "stages"), [("tiny", 3), ("gpt2", 4), ("llama3-8b", 8), ("llama3-405b", 16)])
def test_every_layer_has_one_stage_and_no_stage_is_empty(name, stages):
    cut = balanced_stages(preset(name), stages)
    assert len(cut) == stages
    assert sum(cut) == preset(name).layers
    assert min(cut) >= 1


def test_the_output_projection_counts_to_the_last_stage():
    # 525 M weights of the head beside 218 M of a layer: the last stage holds fewer layers, the others are even.
    assert balanced_stages(preset("llama3-8b"), 4) == (9, 9, 8, 6)
    assert balanced_stages(preset("llama3-8b"), 8) == (5, 5, 4, 4, 4, 4, 4, 2)


def test_a_small_vocabulary_leaves_the_cut_even():
    assert balanced_stages(preset("tiny"), 2) == (3, 3)
    assert balanced_stages(preset("tiny"), 6) == (1,) * 6


def test_more_stages_than_layers_have_no_cut():
    assert balanced_stages(preset("tiny"), 7) == (0,) * 7
