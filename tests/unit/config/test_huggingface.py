import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright.config
from meshwright.config.huggingface import CONFIG_BYTES, arch_of, arch_problems, config_of, family, read_config
from meshwright.spec.arch import Arch
from meshwright.spec.problem import InputError

GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def preset(name: str) -> Arch:
    table = tomllib.loads((Path(meshwright.config.__file__).parent / "presets.toml").read_text())
    values = table[name]
    while (parent := values.get("preset")) is not None:
        values = table[parent] | {key: value for key, value in values.items() if key != "preset"}
    heads = values["heads"]
    return Arch(**{"kv_heads": heads, "head_dim": values["hidden"] // heads} | values)


def refused(config: dict) -> str:
    with pytest.raises(InputError) as caught:
        arch_of(config)
    return str(caught.value)


def test_the_published_files_give_the_presets():
    assert arch_of(GPT2) == preset("gpt2")
    assert arch_of(LLAMA | {"max_position_embeddings": 8192}) == preset("llama3-8b")
    assert arch_of(LLAMA | {"rope_scaling": SCALING}) == preset("llama3.1-8b")
    mixtral = {"vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1e6, "router_aux_loss_coef": 0.02}
    assert arch_of(MIXTRAL | mixtral) == preset("mixtral-8x7b")


def test_both_spellings_of_rotary_scaling_are_read():
    old = arch_of(LLAMA | {"rope_scaling": SCALING})
    without = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert arch_of(without | {"rope_parameters": SCALING | {"rope_theta": 500000.0}}) == old
    assert arch_of(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}}).rope_factor == 4.0


def test_what_old_files_leave_out_is_what_transformers_assumes():
    sizes = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "rms_norm_eps", "rope_theta")}
    arch = arch_of(sizes)
    assert (arch.kv_heads, arch.norm_eps, arch.rope_theta, arch.tied) == (32, 1e-6, 10_000.0, False)
    assert arch_of(GPT2).tied


def test_mistral_is_llama_unless_its_window_is_short():
    mistral = LLAMA | {"model_type": "mistral"}
    assert arch_of(mistral | {"sliding_window": None}) == arch_of(LLAMA)
    assert arch_of(mistral | {"sliding_window": 131072}) == arch_of(LLAMA)
    assert "sliding_window" in refused(mistral | {"sliding_window": 131073})
    assert arch_of(mistral | {"sliding_window": 2048}).window == 2048
    assert arch_of(mistral).window == 4096  # transformers assumes it
    assert arch_of(mistral | {"layer_types": ["sliding_attention"] * 32}).window == 4096


def test_older_files_of_qwen_say_in_which_layer_windows_begin():
    qwen = LLAMA | {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 2048}
    assert arch_of(qwen | {"max_window_layers": 0}).window == 2048
    assert arch_of(qwen | {"max_window_layers": 32}).window == 0
    assert "max_window_layers = 28" in refused(qwen)  # transformers assumes it
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    mixture = arch_of(qwen | experts | {"max_window_layers": 32})
    assert (mixture.window, mixture.full_every) == (2048, 0)  # whatever that key, or a list of layers, says
    every_second = msgspec.structs.replace(mixture, full_every=2)
    with pytest.raises(InputError, match="full_every"):
        config_of(every_second)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "falcon"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"mlp_bias": "no"}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_scaling": {"full_attention": SCALING}}, "rope_scaling"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": SCALING | {"factor": -1}}, "factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),  # which transformers does not look at in a Llama
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.31}, "partial_rotary_factor"),  # 39 of 128
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 32}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": [[]] * 32}, "layer_types"),
        ({"model_type": "mistral", "sliding_window": 4096, "layer_types": ["full_attention"] * 32}, "layer_types"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window = 0"),
        ({"model_type": "mistral", "sliding_window": -1}, "null for no window"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": SCALING}},
            "sliding_attention.rope_type",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 4096.0}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "kv_heads"),
        ({"num_attention_heads": 33}, "heads"),
        ({"head_dim": 127}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": {}}, "rms_norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_an_arch_cannot_say_is_refused_by_name(change, key):
    assert key in refused(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"activation_function": "relu"}, "activation_function"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"n_inner": "wide"}, "n_inner"),
        ({"n_head": 7}, "heads"),
    ],
)
def test_an_unusual_gpt2_is_refused_by_name(change, key):
    assert key in refused(GPT2 | change)


def test_a_mixture_must_have_its_experts():
    assert "top_k" in refused(MIXTRAL | {"num_experts_per_tok": 9})
    assert "num_local_experts" in refused(MIXTRAL | {"num_local_experts": 0})
    assert "experts in all layers" in refused(MIXTRAL | {"num_local_experts": 9000})


def test_every_mistake_is_told_at_once():
    text = refused({"model_type": "llama", "hidden_act": "relu", "rope_scaling": {"rope_type": "dynamic"}})
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "dynamic"):
        assert key in text


def test_keys_that_are_not_the_model_are_ignored():
    extra = {"use_cache": True, "eos_token_id": [1, 2], "attention_dropout": 0.1, "initializer_range": 1, "x": {}}
    assert arch_of(LLAMA | extra) == arch_of(LLAMA)
    gemma = LLAMA | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
    assert arch_of(gemma | {"use_bidirectional_attention": None}) == arch_of(gemma)


words = st.text(max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
KEYS = [*LLAMA, *GPT2, "rope_scaling", "rope_parameters", "head_dim", "sliding_window", "layer_types", "n_inner"]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.sampled_from([GPT2, LLAMA, MIXTRAL]), st.dictionaries(st.sampled_from(KEYS), values, max_size=4))
def test_a_hostile_config_never_breaks_the_reader(config, damage):
    with suppress(InputError):  # anything else is a traceback on somebody's screen
        assert not arch_problems(arch_of(config | damage))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}x"], ids=range(6)
)
def test_a_file_that_is_no_config_is_refused(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(file)


def test_a_missing_or_huge_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b" " * (CONFIG_BYTES + 1))
    with pytest.raises(InputError, match="bytes"):
        read_config(tmp_path / "config.json")


@st.composite
def archs(draw) -> Arch:
    """Any architecture that transformers has a word for."""
    kind = draw(st.sampled_from(["gpt2", "llama", "mixtral"]))
    kv_heads, group, head_dim = draw(st.integers(1, 8)), draw(st.integers(1, 4)), 2 * draw(st.integers(1, 64))
    heads = kv_heads if kind == "gpt2" else kv_heads * group
    sizes = {
        "vocab": draw(st.integers(1, 200_000)),
        "layers": draw(st.integers(1, 200)),
        "hidden": heads * (head_dim if kind == "gpt2" else draw(st.integers(1, 500))),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": draw(st.integers(1, 50_000)),
        "context": draw(st.integers(1, 10**6)),
        "norm_eps": draw(st.floats(1e-8, 1e-3)),
        "tied": draw(st.booleans()),
    }
    if kind == "gpt2":
        mlp = draw(st.sampled_from(["gelu", "gelu_tanh"]))
        return Arch(**sizes, norm="layer", positions="learned", bias=True, mlp=mlp)
    sizes |= draw(ropes)
    if kind == "mixtral":
        experts = draw(st.integers(1, 64))
        sizes |= {"experts": experts, "expert_ffn": sizes["ffn"], "top_k": draw(st.integers(1, experts))}
        sizes |= {"balance_loss": draw(st.floats(0, 1)), "z_loss": draw(st.floats(0, 1))}
    return Arch(**sizes)


theta, factor = st.floats(100, 1e7), st.floats(1, 64)
ropes = st.one_of(
    st.fixed_dictionaries({"rope_theta": theta}),
    st.fixed_dictionaries({"rope_theta": theta, "rope_scaling": st.just("linear"), "rope_factor": factor}),
    st.fixed_dictionaries(
        {
            "rope_theta": theta,
            "rope_scaling": st.just("llama3"),
            "rope_factor": factor,
            "rope_low": st.floats(0.5, 2),
            "rope_high": st.floats(3, 8),
            "rope_original": st.integers(1, 10**5),
        }
    ),
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(archs())
def test_there_and_back_is_the_same_architecture(arch):
    assert arch_of(config_of(arch)) == arch


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("mixtral-8x7b", {"shared_experts": 1}, "shared_experts"),
        ("mixtral-8x7b", {"router": "switch", "top_k": 1}, "router"),
        ("mixtral-8x7b", {"capacity": 1.25}, "capacity"),
        ("mixtral-8x7b", {"moe_every": 2}, "moe_every"),
        ("llama3-8b", {"bias": True}, "bias"),
        ("llama3-8b", {"positions": "none"}, "positions"),
        ("llama3-8b", {"mlp": "gelu"}, "mlp"),
        ("llama3-8b", {"qk_norm": "head", "mlp": "geglu"}, "mlp"),
        ("gpt2", {"positions": "none"}, "positions"),
        ("gpt2", {"kv_heads": 4}, "kv_heads"),
        ("gpt2", {"head_dim": 32}, "head_dim"),
        ("gpt2", {"bias": False}, "bias"),
        ("pythia-70m", {"rope_share": 0.46}, "rope_share"),  # 30 of 64 here, where transformers takes 29
    ],
)
def test_what_transformers_cannot_say_is_refused_by_field(name, change, field):
    with pytest.raises(InputError) as caught:
        config_of(msgspec.structs.replace(preset(name), **change))
    assert [problem.key for problem in caught.value.problems] == [f"arch.{field}"]


def test_a_partial_rotation_is_written_where_transformers_reads_it():
    partial = msgspec.structs.replace(preset("tiny-phi3"), rope_share=0.5)
    written = config_of(partial)
    assert (written["model_type"], written["partial_rotary_factor"]) == ("phi3", 0.5)
    assert arch_of(written) == partial
    whole = msgspec.structs.replace(preset("tiny-glm4-moe"), rope_share=1.0)  # where half is assumed
    assert arch_of(config_of(whole)).rope_share == 1.0
    for name in ("tiny-qwen3", "tiny-olmo2", "tiny-granite", "tiny-gemma"):
        with pytest.raises(InputError, match="rope_share"):
            config_of(msgspec.structs.replace(preset(name), rope_share=0.5))


def test_the_family_follows_from_the_numbers():
    assert family(preset("gpt1")) == "gpt2"
    assert family(preset("llama-7b")) == "llama"
    assert family(preset("tiny-moe")) == "mixtral"


def test_reading_a_config_needs_neither_torch_nor_numpy():
    script = "import sys, meshwright.config.huggingface; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    root = Path(meshwright.config.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=root).returncode == 0
