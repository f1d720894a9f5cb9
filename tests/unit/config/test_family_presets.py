"""Published models by their exact parameter counts, as their configurations and transformers' meta models have them.

Router biases and layers of multi-token prediction are not counted.
"""

import pytest

from meshwright.config.huggingface import arch_of, config_of, family, is_exportable
from meshwright.config.presets import preset, preset_names
from meshwright.spec.params import active, buffers, count

COUNTS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "olmoe-1b-7b": 6_919_161_856,
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi4": 14_659_507_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "moonlight-16b": 15_960_108_544,
    "kimi-k2": 1_026_408_209_408,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.5": 352_797_814_784,
    "glm4-9b": 9_400_279_040,
    "glm4-32b": 32_566_081_536,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "command-r": 34_980_831_232,
    "granite3-2b": 2_533_531_648,
    "granite3-8b": 8_170_848_256,
    "smollm3-3b": 3_075_098_624,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "llama3.2-1b": 1_235_814_400,
    "phi4-mini": 3_836_021_760,
    "starcoder2-15b": 15_957_889_024,
    "command-r-08-2024": 32_296_476_672,
    "command-r-plus": 103_810_674_688,
    "aya-23-8b": 8_028_033_024,
    "gemma3-270m": 268_098_176,
    "pythia-14m": 14_067_712,
    "pythia-31m": 30_494_720,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "codestral-22b": 22_247_282_688,
    "mistral-large-123b": 122_610_069_504,
    "llama-33b": 32_528_943_616,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
}
TINY = {
    "tiny-mistral": "mistral",
    "tiny-qwen2": "qwen2",
    "tiny-qwen3": "qwen3",
    "tiny-qwen3-moe": "qwen3_moe",
    "tiny-gemma": "gemma",
    "tiny-gemma2": "gemma2",
    "tiny-gemma3": "gemma3_text",
    "tiny-olmo2": "olmo2",
    "tiny-olmo3": "olmo3",
    "tiny-olmoe": "olmoe",
    "tiny-gpt-oss": "gpt_oss",
    "tiny-deepseek-v2": "deepseek_v2",
    "tiny-deepseek-v3": "deepseek_v3",
    "tiny-glm4-moe": "glm4_moe",
    "tiny-glm4": "glm4",
    "tiny-neox": "gpt_neox",
    "tiny-cohere": "cohere",
    "tiny-granite": "granite",
    "tiny-smollm3": "smollm3",
    "tiny-starcoder2": "starcoder2",
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_published_model_has_its_parameters(name):
    assert count(preset(name)) == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
def test_a_published_model_has_words_in_transformers(name):
    arch = preset(name)
    assert is_exportable(arch)
    assert count(arch_of(config_of(arch))) == COUNTS[name]


def test_router_biases_are_counted_apart():
    assert sum(param.numel for param in buffers(preset("deepseek-v3"))) == 14_848
    assert not buffers(preset("deepseek-v2"))


def test_of_a_mixture_few_parameters_work_on_a_token():
    assert active(preset("qwen3-30b-a3b")) == 3_353_032_704  # published as 3.3 B
    assert active(preset("deepseek-v3")) == 37_552_282_624  # and 37 B


SMALL_TEXT = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
PHI3 = {
    **{
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "hidden_act": "silu",
    },
    **{"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 262_144, "vocab_size": 32_064},
    **{"rope_theta": 10_000.0, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # A folder with pictures states of its text what differs from transformers' defaults.
        (
            {
                **{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}},
                "text_config": SMALL_TEXT
                | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
            },
            COUNTS["gemma3-4b"],
        ),
        # Phi-3 with 128k, by the name of today and of its first files; a window beyond the context is none.
        (PHI3 | {"rope_scaling": FACTORS | {"type": "longrope"}}, COUNTS["phi3-mini"]),
        (PHI3 | {"rope_scaling": FACTORS | {"type": "su"}}, COUNTS["phi3-mini"]),
        # Phi-4-mini.
        (
            PHI3
            | {"num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200_064, "tie_word_embeddings": True}
            | {"partial_rotary_factor": 0.75, "rope_scaling": FACTORS | {"type": "longrope"}},
            3_836_021_760,
        ),
    ],
    ids=["gemma3", "longrope", "su", "phi4-mini"],
)
def test_files_as_they_are_published_are_read(config, parameters):
    arch = arch_of(config)
    assert count(arch) == parameters
    assert arch.window == (1024 if config["model_type"] == "gemma3" else 0)
    assert is_exportable(arch)


@pytest.mark.parametrize(
    ("change", "window", "local"),
    [
        ({"sliding_window": 512, "max_position_embeddings": 512}, 512, 10_000.0),  # which still has its own RoPE
        ({"sliding_window": None, "layer_types": ["full_attention"] * 34}, 0, 0.0),
        ({"rope_theta": 10_000.0}, 4096, 0.0),  # all layers have the same
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, 4096, 10_000.0),
    ],
)
def test_a_base_of_layers_with_a_window_is_there_as_long_as_they_are(change, window, local):
    arch = arch_of(SMALL_TEXT | change)
    assert (arch.window, arch.rope_local_theta) == (window, local)
    assert arch_of(config_of(arch)) == arch


def test_olmo3_scales_layers_without_a_window_alone():
    arch = preset("olmo3-7b")
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    flat = config_of(arch) | {"rope_theta": 500_000.0, "rope_scaling": yarn}  # as published, for transformers 4
    bases = [{"rope_theta": 500_000.0, "rope_type": "default"}, {"rope_theta": 500_000.0} | yarn]
    nested = flat | {"rope_parameters": dict(zip(("sliding_attention", "full_attention"), bases, strict=True))}
    del flat["rope_parameters"], nested["rope_scaling"], nested["rope_theta"]
    assert arch_of(flat) == arch_of(nested) == arch


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_preset_is_of_its_family(name):
    assert name in preset_names()
    assert family(preset(name)) == TINY[name]
