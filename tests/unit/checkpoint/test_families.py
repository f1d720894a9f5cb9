"""Every family of Hugging Face beside transformers' own tiny random models: logits, gradients, folders."""

import copy
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor

from meshwright.checkpoint.convert import convert, probe_tokens
from meshwright.checkpoint.model_folder import open_folder
from meshwright.config.families import FAMILIES
from meshwright.config.huggingface import arch_of
from meshwright.models.decoder import Decoder
from meshwright.models.generate import Sampling
from meshwright.spec.params import buffers
from meshwright.train.sample import load_decoder, written

TOKENS = 24
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
PLAIN = {key: value for key, value in SIZES.items() if key != "head_dim"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROUTED = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
V2 = ROUTED | {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 10, "v_head_dim": 6}
MLA = PLAIN | LATENT | {"num_key_value_heads": 4}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.5, 3.0, 9.0]}
PHI3_LONG = PLAIN | {"pad_token_id": None, "rope_scaling": LONG, "partial_rotary_factor": 0.75}
MODELS = {
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "llama": PLAIN | {"attention_bias": True, "mlp_bias": True},
    "mistral": SIZES | {"sliding_window": 5},
    "mixtral": PLAIN | {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 7},
    "qwen2": PLAIN | {"rope_scaling": YARN | {"rope_theta": 500.0}},
    "qwen3": SIZES | {"use_sliding_window": True, "sliding_window": 6, "layer_types": LAYERS},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 5, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen3_moe windows": SIZES | EXPERTS | {"num_experts": 4, "use_sliding_window": True, "sliding_window": 6},
    "gemma": SIZES,
    "gemma2": SIZES | {"sliding_window": 5, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 3.0},
    "gemma2 whole": SIZES | {"sliding_window": 64},  # as long as the context
    "gemma3_text whole": SIZES
    | {"sliding_window": 5, "layer_types": ["full_attention"] * 3, "final_logit_softcapping": 2.0},
    "gemma3_text": SIZES | {"sliding_window": 5, "layer_types": LAYERS, "query_pre_attn_scalar": 10},
    "olmo2": PLAIN,
    "olmo3": PLAIN | {"sliding_window": 5, "layer_types": LAYERS, "rope_scaling": YARN, "pad_token_id": None},
    "phi3": PLAIN | {"sliding_window": 9, "pad_token_id": None},
    "phi3 long": PHI3_LONG | {"original_max_position_embeddings": 16},  # for which TOKENS are too many
    "phi3 short": PHI3_LONG | {"original_max_position_embeddings": 32},
    "gpt_oss": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "gpt_oss plain": SIZES
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "rope_scaling": {"rope_type": "default"}},
    # More experts than groups are chosen: as many of each would be the same experts without groups.
    "deepseek_v2": MLA | V2 | {"topk_method": "group_limited_greedy"},
    "deepseek_v2 greedy": MLA | V2 | {"topk_method": "greedy"},
    "deepseek_v3": MLA
    | ROUTED
    | GROUPS
    | {"q_lora_rank": 14, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "glm4_moe": SIZES | ROUTED | {"use_qk_norm": True, "attention_bias": True},
    "glm": SIZES | {"pad_token_id": None},
    "glm4": SIZES | {"pad_token_id": None, "partial_rotary_factor": 0.34},
    "olmoe": PLAIN | {"num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": None},
    "gpt_neox": PLAIN | {"rotary_pct": 0.5},
    "cohere": PLAIN | {"logit_scale": 0.25, "pad_token_id": None},
    "cohere plus": PLAIN | {"use_qk_norm": True, "pad_token_id": None},
    "granite": PLAIN
    | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "starcoder2": PLAIN | {"sliding_window": 5},
    "smollm3": PLAIN | {"no_rope_layer_interval": 2, "pad_token_id": None},
}


@pytest.fixture(scope="module", params=MODELS)
def stock(request, transformers, tmp_path_factory):
    """A random model of transformers with its folder, saved by transformers."""
    torch.manual_seed(3)
    name = FAMILIES[request.param.split()[0]].model
    config = getattr(transformers, name).config_class(
        **MODELS[request.param], bos_token_id=None, eos_token_id=None, attn_implementation="eager"
    )
    config._experts_implementation = "eager"  # its grouped matmuls know no float64
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():  # its own start leaves norms at one, biases at zero and logits too small to tell
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
        for tensor in (*model.parameters(), *biases):
            tensor.add_(0.1 * torch.randn_like(tensor))
    path = tmp_path_factory.mktemp(name) / "stock"
    model.save_pretrained(path)
    return path, model


def ours_of(folder, dtype: torch.dtype) -> Decoder:
    arch = msgspec.structs.replace(folder.arch, balance_loss=0.0)  # whose gradient the backward adds
    model = Decoder(arch).to(dtype).eval()
    names = [*(name for name, _ in model.named_parameters()), *(param.name for param in buffers(folder.arch))]
    model.load_state_dict({name: folder.tensor(name).to(dtype) for name in names}, strict=False)
    return model


def results(model, logits: Tensor, targets: Tensor) -> Tensor:
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    return logits.detach()


@contextmanager
def without_float32():
    """Transformers' own casts to float32, and its constants, lifted to float64."""
    wide = torch.float64
    with (
        mock.patch.object(torch, "tensor", partial(torch.tensor, dtype=wide)),
        mock.patch.object(torch, "float32", wide),
        mock.patch.object(torch, "float", wide),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def compare(path, model, place, dtype: torch.dtype, tolerance: float, lifted=nullcontext):
    folder = open_folder(path)
    tokens = probe_tokens(folder.arch, TOKENS)
    targets = tokens.roll(-1, 1)
    mine = ours_of(folder, dtype)
    found = results(mine, mine(tokens, torch.arange(TOKENS)[None]), targets)
    with lifted():
        wanted = results(model, model(tokens).logits, targets)
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
    largest = max(float(weight.grad.abs().max()) for weight in model.parameters())
    for weight in model.parameters():  # their gradients under their names, by their own code
        weight.data = weight.grad
    model.save_pretrained(place)
    theirs = open_folder(place)
    assert theirs.dtype == dtype
    for name, weight in mine.named_parameters():
        assert (weight.grad - theirs.tensor(name)).abs().max() <= tolerance * largest, name


def test_logits_and_gradients_are_those_of_transformers_in_float32(stock, tmp_path):
    path, model = stock
    compare(path, copy.deepcopy(model), tmp_path, torch.float32, 1e-5)


def test_logits_and_gradients_are_those_of_transformers_in_float64(stock, tmp_path):
    path, model = stock
    with without_float32():
        wide = type(model)(copy.deepcopy(model.config)).double().eval()
    wide.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    compare(path, wide, tmp_path, torch.float64, 1e-10, without_float32)


def test_a_folder_goes_there_and_back_bit_for_bit(stock, tmp_path):
    path, _ = stock
    convert(path, tmp_path / "ours", lambda text: None)
    convert(tmp_path / "ours", tmp_path / "back", lambda text: None)
    first, last = open_folder(path), open_folder(tmp_path / "back")
    assert first.arch == last.arch
    assert all(torch.equal(first.tensor(name), last.tensor(name)) for name in first.shapes)


def test_greedy_text_is_that_of_transformers(stock):
    path, model = stock
    arch = open_folder(path).arch
    if arch.rope_scaling == "longrope":
        pytest.skip("transformers takes other factors as a text grows beyond the original context")
    decoder = load_decoder(open_folder(path), torch.device("cpu"), None)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [5]]
    options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    *_, texts = written(decoder, prompts, 16, Sampling(), frozenset())
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.tensor([prompt])
        wanted = copy.deepcopy(model).generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        assert text == wanted[0, len(prompt) :].tolist()


# What every file states: enough layers for each pattern, and a context beyond each window.
STATED = {
    **{"vocab_size": 61, "hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 12},
    **{"num_attention_heads": 32, "max_position_embeddings": 8192},
}
LATENT_ROUTED = LATENT | EXPERTS | {"n_routed_experts": 16}
ALSO_STATED = {
    "deepseek_v2": LATENT_ROUTED,
    "deepseek_v3": LATENT_ROUTED | {"num_experts_per_tok": 4},
    "glm4_moe": EXPERTS | {"n_routed_experts": 16},
    "gpt_neox": {"hidden_size": 256},  # of whose heads a quarter is rotated
}


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - {"kimi_k2"}))
def test_what_a_file_leaves_out_is_what_transformers_assumes(kind, transformers):
    stated = MODELS["gpt2"] if kind == "gpt2" else STATED | ALSO_STATED.get(kind, {})
    theirs = getattr(transformers, FAMILIES[kind].model).config_class(**stated).to_dict()
    assert arch_of({"model_type": kind} | stated) == arch_of(theirs)


def test_the_original_context_of_longrope_is_that_of_transformers(transformers):
    factors = {key: [1.0] * 2 for key in ("short_factor", "long_factor")}
    for inside in ({}, {"original_max_position_embeddings": 2048}, {"factor": 4.0}):
        stated = STATED | {"rope_scaling": {"type": "longrope"} | factors | inside}
        theirs = transformers.Phi3Config(**copy.deepcopy(stated)).to_dict()
        assert arch_of({"model_type": "phi3"} | stated) == arch_of(theirs)


def test_gelu_of_the_first_gemma_is_that_of_transformers(transformers):
    stated = {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None} | STATED
    assert arch_of(stated) == arch_of(transformers.GemmaConfig(**stated).to_dict())
    assert arch_of(stated).mlp == "geglu_tanh"
