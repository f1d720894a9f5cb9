"""Worked examples of the literature and of the notes, to the digit."""

import math

import pytest

from meshwright.config import presets
from meshwright.cost import textbook as forms
from meshwright.spec.params import count

GB, GIB = 1e9, 2**30
GPT1 = (512, 1, 768, 12)  # sequence, microbatch, hidden, heads of the notes' example; 12 layers


def test_the_notes_gpt_has_147_million_parameters_only_with_an_untied_output():
    gpt1 = presets.preset("gpt1")
    assert count(gpt1) == 147_675_648
    assert forms.untied_parameters(gpt1.layers, gpt1.hidden, gpt1.vocab, gpt1.context) == 147_675_648
    tied = count(gpt1) - gpt1.vocab * gpt1.hidden
    assert round(tied / 1e6, 1) == 116.6


def test_a_sample_of_the_notes_gpt_keeps_349175808_bytes_and_needs_the_10():
    assert 12 * forms.activation_bytes(GPT1) == 349_175_808
    without = 12 * (forms.activation_bytes(GPT1) - 10 * 512 * 768)
    assert without == 301_989_888


def test_the_notes_total_is_25_287_and_with_a_fifth_more_30_345_gigabytes():
    """The notes round the parameters to 147 million; the exact count gives 25.301 and 30.361."""
    activations = 64 * 12 * forms.activation_bytes(GPT1)
    total = forms.states_bytes(147e6, "notes") + activations
    assert round(total / GB, 3) == 25.287
    assert round(1.2 * total / GB, 3) == 30.345
    exact = forms.states_bytes(147_675_648, "notes") + activations
    assert (round(exact / GB, 3), round(1.2 * exact / GB, 3)) == (25.301, 30.361)


def test_the_master_copy_counted_twice_hides_behind_activations():
    activations = 64 * 12 * forms.activation_bytes(GPT1)
    totals = {name: forms.states_bytes(147e6, name) + activations for name in ("notes", "exact", "megatron")}
    rounded = {name: round(total / GB, 2) for name, total in totals.items()}
    assert rounded == {"notes": 25.29, "exact": 24.70, "megatron": 24.99}


def test_ten_billion_parameters_all_in_bf16_fill_80_gigabytes():
    assert forms.states_bytes(1e9, "bf16") == 8e9
    assert forms.states_bytes(10e9, "bf16") == 80e9


def test_the_feed_forward_of_llama_3_405b_is_63_gib_at_4_times_hidden_and_51_at_its_real_width():
    llama = presets.preset("llama3-405b")
    literal = forms.feed_forward_bytes(llama.layers, 4 * llama.hidden, 4096)
    assert literal == 67_645_734_912
    assert round(literal / GIB, 1) == 63.0
    real = forms.feed_forward_bytes(llama.layers, llama.ffn, 4096)
    assert llama.ffn == 53_248
    assert round(real / GIB, 1) == 51.2


@pytest.mark.parametrize(
    ("layers", "hidden", "parameters"),
    [(16, 1024, 194_103_296), (32, 1024, 336_742_400), (32, 4096, 4_769_521_664), (32, 2048, 1_243_910_144)],
)
def test_the_notes_parameter_counts_fit_one_closed_form(layers, hidden, parameters):
    assert forms.notes_parameters(layers, hidden, 50_257) == parameters


def test_the_notes_formula_prints_its_model_line_and_its_whole():
    parameters = forms.notes_parameters(32, 4096, 50_257)
    model = forms.notes_memory(parameters, 0, (1024, 4096, 32, 32), 50_257)
    assert model == 8 * parameters
    assert (round(model / GB, 1), round(model / GIB, 1)) == (38.2, 35.5)
    whole = forms.notes_memory(194_103_296, 1, (1024, 1024, 8, 16), 50_257)
    assert whole == (4 * 194_103_296 + 2 * 1024 * (2 * 50_257 + 16 * (6 * 1024 + 8 * 1024))) * 2


def test_the_notes_samples_a_second_are_tokens():
    """As tokens they need 0.56 PFLOP/s, an H100's; as samples of a thousand tokens a thousand times more."""
    assert round(forms.training_flops(194_103_296, 482_427) / 1e15, 2) == 0.56


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_s_own_figure_7_5_billion_parameters_on_64_ranks(stage, gigabytes):
    """Rajbhandari et al. 2020, figure 1."""
    assert round(forms.zero_bytes(7.5e9, 64, stage) / GB, 1) == gigabytes


def test_zero_saves_four_and_eight_times_only_in_the_limit():
    saved = [forms.zero_bytes(1, 64, 0) / forms.zero_bytes(1, 64, stage) for stage in (1, 2)]
    assert [round(each, 1) for each in saved] == [3.8, 7.2]
    assert forms.zero_bytes(1, 10**9, 0) / forms.zero_bytes(1, 10**9, 1) == pytest.approx(4)


def test_activations_per_layer_of_korthikanti_are_its_table_2():
    """Korthikanti et al. 2022, table 2, for the 22-billion model: s 2048, b 4, h 6144, a 64, t 8."""
    shape, tokens = (2048, 4, 6144, 64), 2048 * 4 * 6144
    assert forms.activation_bytes(shape) == tokens * (34 + 5 * 64 * 2048 / 6144)
    assert forms.activation_bytes(shape, 8) == tokens * (10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8))
    assert forms.activation_bytes(shape, 8, "sequence") == tokens / 8 * (34 + 5 * 64 * 2048 / 6144)
    assert forms.activation_bytes(shape, 8, "selective") == tokens * 34 / 8
    assert forms.activation_bytes(shape, 8, "full") == 2 * tokens


def test_the_bubble_shrinks_with_microbatches_and_with_stages_of_a_rank():
    assert forms.bubble(4, 8) == 3 / 11
    assert forms.bubble_over_ideal(4, 8) == 3 / 8
    assert forms.bubble_over_ideal(4, 8, 2) == 3 / 16
    assert forms.bubble(4, 8, 2) == 3 / 19


@pytest.mark.parametrize("layers", [4, 16, 64, 100, 144])
def test_recomputing_by_the_root_keeps_the_least_of_all_segment_counts(layers):
    best = min(forms.segment_memory(layers, segments) for segments in range(1, layers + 1))
    assert forms.segment_memory(layers, forms.sqrt_segments(layers)) == best
    assert best <= 2 * math.sqrt(layers)


def test_two_models_of_recomputation_differ_by_what_a_segment_keeps():
    assert forms.recompute_layers(64, 8, keeps_segment=True) == 64
    each = forms.recompute_layers(64, 8, keeps_segment=False)
    assert each == 64 * (8 + 1) / 2  # N²/(2C) and a half step more
    assert each == pytest.approx(64 * math.sqrt(64) / 2, rel=0.13)


@pytest.mark.parametrize(
    ("tokens", "parameters", "gpus", "teraflops", "days"),
    [(300e9, 175e9, 1024, 140, 34), (450e9, 1.008e12, 3072, 163, 84)],
)
def test_megatron_s_training_times_in_days(tokens, parameters, gpus, teraflops, days):
    """Narayanan et al. 2021, section 5.1: 34 days for GPT-3, about three months (84 days) for a trillion."""
    seconds = forms.training_seconds(tokens, parameters, gpus, teraflops * 1e12)
    assert round(seconds / 86_400) == days


@pytest.mark.parametrize(
    ("layers", "hidden", "billions"), [(24, 2304, 1.7), (48, 8192, 39.1), (105, 20480, 529.6), (128, 25600, 1008.0)]
)
def test_megatron_s_parameter_formula_gives_table_1(layers, hidden, billions):
    """Narayanan et al. 2021, table 1, with its vocabulary of 51,200 and sequences of 2,048."""
    found = forms.gpt_parameters(layers, hidden, 51_200, 2048) / 1e9
    assert found == pytest.approx(billions, abs=0.06)


def test_megatron_s_flops_give_table_1_s_rate():
    """The trillion row: 3,072 GPUs, batch 3,072, 163 TFLOP/s a GPU."""
    step = forms.megatron_flops((3072, 2048, 128, 25_600, 51_200))
    seconds = step / (3072 * 163e12)
    assert seconds == pytest.approx(102.6, abs=0.1)


def test_attention_adds_to_six_n_d_as_palm_counts_it():
    assert forms.palm_flops_per_token(1e9, 24, 2048, 0) == forms.training_flops(1e9, 1)
    assert forms.palm_flops_per_token(1e9, 24, 2048, 2048) == 6e9 + 12 * 24 * 2048 * 2048


def test_the_best_interval_between_saves_is_where_their_two_costs_meet():
    best = forms.checkpoint_interval(60, 50_000)
    chosen = forms.goodput(best, 60, 600, 50_000)
    assert chosen > forms.goodput(best * 1.3, 60, 600, 50_000)
    assert chosen > forms.goodput(best / 1.3, 60, 600, 50_000)
    assert 60 / best == pytest.approx(best / 2 / 50_000)


def test_a_ring_sends_twice_the_buffer_less_one_share():
    assert forms.ring_bytes(8.0, 1) == 0
    assert forms.ring_bytes(8.0, 4) == 12.0
