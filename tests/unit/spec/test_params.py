import pytest

from meshwright.config.presets import preset, preset_names
from meshwright.spec.params import Split, active, count, params

# Published counts; the last three are the only thing known of those models.
PUBLISHED = {
    "gpt1": 147_675_648,
    "gpt1-published": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mixtral-8x7b": 46_702_792_704,
    "notes-194m": 194_103_296,
    "notes-337m": 336_742_400,
    "notes-4.8b": 4_769_521_664,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_preset_has_its_published_count(name, parameters):
    assert count(preset(name)) == parameters


def test_a_family_name_and_its_size_are_one_model():
    for name, size in (("gpt2", "124m"), ("gpt2-medium", "355m"), ("gpt2-large", "774m"), ("gpt2-xl", "1.5b")):
        assert preset(name) == preset(f"gpt2-{size}")


def test_only_chosen_experts_are_active():
    assert active(preset("mixtral-8x7b")) == 12_879_925_248  # the "13B active" of its paper
    assert active(preset("llama3-8b")) == count(preset("llama3-8b"))


@pytest.mark.parametrize("name", preset_names())
def test_names_are_unique_and_vectors_start_at_one_or_zero(name):
    table = params(preset(name))
    assert len({param.name for param in table}) == len(table)
    for param in table:
        assert (not param.is_matrix) == (param.init in ("ones", "zeros"))  # of experts, each has a vector


def test_attention_and_feed_forward_are_cut_column_then_row():
    splits = {param.name: param.split for param in params(preset("gpt2")) if param.layer == 0}
    assert splits["blocks.0.attn.q.weight"] is splits["blocks.0.mlp.up.bias"] is Split.COLUMN
    assert splits["blocks.0.attn.out.weight"] is splits["blocks.0.mlp.down.weight"] is Split.ROW
    assert splits["blocks.0.attn.out.bias"] is Split.NONE  # added once, after the sum
