"""The model families of Hugging Face, as data: the words of their config.json and the names of their tensors.

A family is what it says about every model (`says`), the words in which its config.json says the rest, what transformers
assumes where a file says nothing (`absent`), and how it calls our parameters (`names`). config/huggingface.py reads and
writes by these; checkpoint/model_folder.py finds tensors by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.config.config_words import (
    PARTIAL,
    Choice,
    Count,
    CountOr,
    DenseLayers,
    ExpertGroups,
    Flag,
    Latent,
    NoRope,
    Number,
    NumberOrNone,
    Plain,
    Rope,
    Same,
    Windows,
    Word,
)
from meshwright.config.rules.arch import LAYER_LIMIT

SILU = (("silu", "swiglu"), ("swish", "swiglu"))
TANH = (("gelu_pytorch_tanh", "geglu_tanh"), ("gelu", "geglu"))
FIRST_TANH = (("gelu_pytorch_tanh", "geglu_tanh"), ("gelu", "geglu_tanh"))  # what Gemma's first files mean by gelu
GELU = (
    ("gelu", "gelu"),
    ("gelu_python", "gelu"),
    ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("gelu_python_tanh", "gelu_tanh"),
    ("gelu_fast", "gelu_tanh"),
)
ALL = ("none", "all")  # of a bias on attention's matrices
SIZES: tuple[Word, ...] = (
    Count("vocab_size", "vocab"),
    Count("num_hidden_layers", "layers", high=LAYER_LIMIT),
    Count("hidden_size", "hidden"),
    Count("num_attention_heads", "heads"),
    CountOr("num_key_value_heads", "kv_heads", "heads"),
    CountOr("head_dim", "head_dim", "hidden / heads"),
    Count("intermediate_size", "ffn"),
    Count("max_position_embeddings", "context"),
    Flag("tie_word_embeddings", "tied"),
)
EPS = Number("rms_norm_eps", "norm_eps")
SWIGLU = Choice("hidden_act", "mlp", SILU)
ATTENTION_BIAS = Flag("attention_bias", "attention_bias", ALL)
QKV_BIAS = Flag("attention_bias", "attention_bias", ("none", "qkv"))
BIASES: tuple[Word, ...] = (ATTENTION_BIAS, Flag("mlp_bias", "mlp_bias"))
WINDOWS = Windows(listed=False)
BALANCE = Number("router_aux_loss_coef", "balance_loss", low=0.0)
TOP_K = Count("num_experts_per_tok", "top_k")
ROUTED: tuple[Word, ...] = (  # of DeepSeek and those that follow it
    Count("n_routed_experts", "experts", high=LAYER_LIMIT),
    TOP_K,
    Count("moe_intermediate_size", "expert_ffn"),
    CountOr("n_shared_experts", "shared_experts", ""),
    Count("first_k_dense_replace", "dense_layers", low=0),
    Number("routed_scaling_factor", "router_scale"),
    Plain("moe_layer_freq", 1),
)
AHEAD = Count("num_nextn_predict_layers", "mtp_layers", low=0, high=LAYER_LIMIT)
GROUPS: tuple[Word, ...] = (Count("n_group", "router_groups"), Count("topk_group", "router_top_groups"))

# Our modules by the names of Llama, on which most families build. Weights and biases keep their last word.
LLAMA = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.sinks": "self_attn.sinks",
    "mlp_norm": "post_attention_layernorm",
    "embed_norm": "enorm",  # of multi-token prediction, like the next three
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "end_norm": "shared_head.norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.load_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "mlp.experts.gate": "mlp.experts.*.gate_proj.weight",  # * is the expert
    "mlp.experts.up": "mlp.experts.*.up_proj.weight",
    "mlp.experts.down": "mlp.experts.*.down_proj.weight",
}
LATENT = LLAMA | {
    "attn.q_down": "self_attn.q_a_proj",
    "attn.q_down_norm": "self_attn.q_a_layernorm",
    "attn.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_down_norm": "self_attn.kv_a_layernorm",
    "attn.q_up": "self_attn.q_b_proj",
    "attn.kv_up": "self_attn.kv_b_proj",
}
MIXTRAL = LLAMA | {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.*.w1.weight",
    "mlp.experts.up": "block_sparse_moe.experts.*.w3.weight",
    "mlp.experts.down": "block_sparse_moe.experts.*.w2.weight",
}
AFTER = LLAMA | {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
FOUR_NORMS = LLAMA | {
    "attn_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "blocks": "transformer.h",
    "attn_norm": "ln_1",
    "attn.q": "attn.c_attn",
    "attn.k": "attn.c_attn",
    "attn.v": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
NEOX = {
    "embed": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "blocks": "gpt_neox.layers",
    "attn_norm": "input_layernorm",
    "attn.q": "attention.query_key_value",
    "attn.k": "attention.query_key_value",
    "attn.v": "attention.query_key_value",
    "attn.out": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
GLM = LLAMA | dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj")
GLM4 = GLM | {
    "attn_output_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}
PHI3 = GLM | dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attn.qkv_proj")
GPT_OSS = LLAMA | {
    "mlp.router": "mlp.router",
    **dict.fromkeys(("mlp.experts.gate", "mlp.experts.up"), "mlp.experts.gate_up_proj"),
    "mlp.experts.down": "mlp.experts.down_proj",
    **dict.fromkeys(("mlp.experts.gate_bias", "mlp.experts.up_bias"), "mlp.experts.gate_up_proj_bias"),
    "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What transformers' models of one model_type have in common."""

    model: str  # the class of transformers
    words: tuple[Word, ...]
    says: Mapping[str, Any] = field(default_factory=dict)  # fields that every model of it has
    absent: Mapping[str, Any] = field(
        default_factory=dict
    )  # what transformers assumes where a config.json says nothing
    spelled: Mapping[str, str] = field(default_factory=dict)  # other spellings of keys, and the words' own
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    transposed: tuple[str, ...] = ()  # names of matrices that multiply from the other side
    by_head: tuple[str, ...] = ()  # names of vectors that are stored as matrices, a row for each head
    # Joined tensors whose parts take turns: every row, or every "head".
    alternate: Mapping[str, str] = field(default_factory=dict)
    own_code: bool = False  # published files also name code of their own, which transformers has since
    long_windows: bool = False  # published files state windows beyond the context, which hide nothing


NO_WINDOW = {"sliding_window": None}
LATE = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}  # what most assume
PLAIN_SCALE = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
DEEPSEEK = LATE | PLAIN_SCALE | {
    "num_key_value_heads": None,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "rope_interleave": True,
    "num_nextn_predict_layers": 0,
    "n_shared_experts": 1,
}  # fmt: skip
QWEN: tuple[Word, ...] = (*SIZES, EPS, SWIGLU, Windows(switch=True, first="max_window_layers"), Rope())
QWEN_ABSENT = LATE | PLAIN_SCALE | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GEMMA: tuple[Word, ...] = (
    *SIZES, EPS, Same("embed_scale", "hidden", 0.5), ATTENTION_BIAS, Plain("use_bidirectional_attention", False),
)  # fmt: skip
GEMMA_SAYS = {"norm_offset": True}
GEMMA_ABSENT = LATE | {"tie_word_embeddings": True, "attention_bias": False, "head_dim": 256}
GLM_WORDS: tuple[Word, ...] = (*SIZES, EPS, SWIGLU, Rope(share=PARTIAL), QKV_BIAS)
GLM_ABSENT = LATE | {
    "rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
    "attention_bias": True, "partial_rotary_factor": 0.5,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(
        model="LlamaForCausalLM",
        words=(*SIZES, EPS, SWIGLU, Rope(), *BIASES, Plain("sliding_window", None), Plain("layer_types", None)),
        absent=LATE | PLAIN_SCALE,
    ),
    "mistral": Family(
        model="MistralForCausalLM",
        words=(*SIZES, EPS, SWIGLU, WINDOWS, Rope(), Plain("attention_bias", False), Plain("mlp_bias", False)),
        absent=LATE | PLAIN_SCALE | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "mixtral": Family(
        model="MixtralForCausalLM",
        words=(
            *SIZES, EPS, SWIGLU, WINDOWS, Rope(), Count("num_local_experts", "experts", high=LAYER_LIMIT), TOP_K,
            Same("expert_ffn", "ffn"), BALANCE, Number("router_z_loss_coef", "z_loss", low=0.0),  # ours: transformers
            Plain("attention_bias", False), Plain("mlp_bias", False),  # keeps it and ignores it
        ),
        absent=LATE | NO_WINDOW | PLAIN_SCALE | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
            "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "router_z_loss_coef": 0.0,
        },
        names=MIXTRAL,
    ),
    "gpt2": Family(
        model="GPT2LMHeadModel",
        words=(
            Count("vocab_size", "vocab"), Count("n_layer", "layers", high=LAYER_LIMIT), Count("n_embd", "hidden"),
            Count("n_head", "heads"), Same("kv_heads", "heads"), CountOr("", "head_dim", "hidden / heads"),
            CountOr("n_inner", "ffn", "4 * hidden"), Count("n_positions", "context"),
            Number("layer_norm_epsilon", "norm_eps"), Choice("activation_function", "mlp", GELU),
            Flag("tie_word_embeddings", "tied"), Plain("scale_attn_weights", True),
            Plain("scale_attn_by_inverse_layer_idx", False), Plain("add_cross_attention", False),
        ),
        says={"norm": "layer", "positions": "learned", "bias": True},
        absent={"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
        names=GPT2,
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
    "qwen2": Family(
        model="Qwen2ForCausalLM", words=QWEN, says={"attention_bias": "qkv"},
        absent=QWEN_ABSENT | {"num_key_value_heads": 32},
    ),
    "qwen3": Family(
        model="Qwen3ForCausalLM", words=(*QWEN, ATTENTION_BIAS), says={"qk_norm": "head"},
        absent=QWEN_ABSENT | {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        model="Qwen3MoeForCausalLM",
        words=(
            *SIZES, EPS, SWIGLU, Windows(switch=True, listed=False), Rope(), ATTENTION_BIAS,
            Count("num_experts", "experts", high=LAYER_LIMIT), TOP_K,
            Count("moe_intermediate_size", "expert_ffn"), Count("decoder_sparse_step", "moe_every"), DenseLayers(),
            Flag("norm_topk_prob", "router_renormalise"), BALANCE,
        ),
        says={"qk_norm": "head"},
        absent=QWEN_ABSENT | {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "decoder_sparse_step": 1, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
        },
        spelled={"num_local_experts": "num_experts"},
    ),
    "gemma": Family(
        model="GemmaForCausalLM",
        words=(*GEMMA, Choice("hidden_act", "mlp", FIRST_TANH), Rope()),
        says=GEMMA_SAYS,
        absent=GEMMA_ABSENT | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma2": Family(
        model="Gemma2ForCausalLM",
        words=(
            *GEMMA, Choice("hidden_activation", "mlp", TANH), Rope(), Windows(full_every=2),
            Number("query_pre_attn_scalar", "attention_scale", power=-0.5),
            NumberOrNone("attn_logit_softcapping", "attention_softcap"),
            NumberOrNone("final_logit_softcapping", "logit_softcap"),
        ),
        says=GEMMA_SAYS | {"norm_position": "both"},
        absent=GEMMA_ABSENT | {
            "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
            "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        names=FOUR_NORMS,
    ),
    "gemma3_text": Family(
        model="Gemma3ForCausalLM",
        words=(
            *GEMMA, Choice("hidden_activation", "mlp", TANH), Rope(local="rope_local_base_freq"),
            Windows(full_every=6, pattern="sliding_window_pattern"),
            Number("query_pre_attn_scalar", "attention_scale", power=-0.5),
            Plain("attn_logit_softcapping", None),  # which transformers reads and does not apply
            NumberOrNone("final_logit_softcapping", "logit_softcap"),
        ),
        says=GEMMA_SAYS | {"norm_position": "both", "qk_norm": "head"},
        absent=GEMMA_ABSENT | {
            "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "rope_theta": 1e6,
            "rope_local_base_freq": 10_000.0, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
            "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256,
        },
        names=FOUR_NORMS,
    ),
    "olmo2": Family(
        model="Olmo2ForCausalLM",
        words=(*SIZES, EPS, SWIGLU, Rope(), ATTENTION_BIAS),
        says={"qk_norm": "full", "norm_position": "output"},
        absent=LATE | PLAIN_SCALE | {"rms_norm_eps": 1e-5, "num_key_value_heads": None},
        names=AFTER,
    ),
    "olmo3": Family(
        model="Olmo3ForCausalLM",
        words=(*SIZES, EPS, SWIGLU, Rope(local="rope_theta"), Windows(full_every=4), ATTENTION_BIAS),
        says={"qk_norm": "full", "norm_position": "output"},
        absent=LATE | PLAIN_SCALE | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": None, "rope_theta": 500_000.0, "sliding_window": 4096,
        },
        names=AFTER,
    ),
    "phi3": Family(
        model="Phi3ForCausalLM",
        words=(
            *SIZES, EPS, SWIGLU, WINDOWS,
            # The older names are those of Phi-3's own code.
            Rope(share=PARTIAL, kinds=("longrope",), older=(("su", "longrope"), ("yarn", "longrope"))),
        ),
        absent=LATE | NO_WINDOW | PLAIN_SCALE | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": None, "original_max_position_embeddings": 4096,
        },
        names=PHI3,
        own_code=True,
        long_windows=True,
    ),
    "gpt_oss": Family(
        model="GptOssForCausalLM",
        words=(
            *SIZES, EPS, Windows(full_every=2), Rope(aloud=True), ATTENTION_BIAS, Same("expert_ffn", "ffn"),
            Count("num_local_experts", "experts", high=LAYER_LIMIT), TOP_K, BALANCE, Plain("hidden_act", "silu"),
            Plain("swiglu_limit", 7.0), Plain("swiglu_alpha", 1.702),
        ),
        says={"sinks": True, "mlp": "swiglu_clamped", "moe_bias": True},
        absent=LATE | {
            "rms_norm_eps": 1e-5, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128,
            "rope_theta": 150_000.0, "attention_bias": True, "num_experts_per_tok": 4, "num_local_experts": 128,
            "router_aux_loss_coef": 0.001,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        names=GPT_OSS,
        transposed=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        alternate={"mlp.experts.gate_up_proj": "row", "mlp.experts.gate_up_proj_bias": "row"},
    ),
    "deepseek_v2": Family(
        model="DeepseekV2ForCausalLM",
        words=(
            *SIZES, Same("kv_heads", "heads"), EPS, SWIGLU, Rope(), Latent(), ATTENTION_BIAS, *ROUTED,
            ExpertGroups(),
            Plain("norm_topk_prob", False), Plain("scoring_func", "softmax"), Plain("mlp_bias", False),
        ),
        says={"rope_interleaved": True, "router_renormalise": False},
        absent=DEEPSEEK | {"norm_topk_prob": False, "q_lora_rank": 1536, "n_shared_experts": 2},
        names=LATENT,
        own_code=True,
    ),
    "deepseek_v3": Family(
        model="DeepseekV3ForCausalLM",
        words=(
            *SIZES, Same("kv_heads", "heads"), EPS, SWIGLU, Rope(), Latent(), ATTENTION_BIAS, *ROUTED, *GROUPS,
            Flag("norm_topk_prob", "router_renormalise"), Flag("rope_interleave", "rope_interleaved"),
            Plain("scoring_func", "sigmoid"), Plain("topk_method", "noaux_tc"), AHEAD,
        ),
        says={"router_score": "sigmoid", "router_load_bias": True},
        absent=DEEPSEEK | {
            "q_lora_rank": 1536, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
        },
        names=LATENT,
        own_code=True,
    ),
    "glm4_moe": Family(
        model="Glm4MoeForCausalLM",
        words=(
            *SIZES, EPS, SWIGLU, Rope(share=PARTIAL), *ROUTED, *GROUPS,
            QKV_BIAS, Flag("use_qk_norm", "qk_norm", ("none", "head")), Flag("norm_topk_prob", "router_renormalise"),
            AHEAD,
        ),
        says={"router_score": "sigmoid", "router_load_bias": True},
        absent=DEEPSEEK | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "first_k_dense_replace": 1, "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt_neox": Family(
        model="GPTNeoXForCausalLM",
        words=(
            *SIZES, Same("kv_heads", "heads"), CountOr("", "head_dim", "hidden / heads"),
            Number("layer_norm_eps", "norm_eps"), Choice("hidden_act", "mlp", GELU),
            Rope(theta="rotary_emb_base", share="rotary_pct"), Plain("attention_bias", True),
            Flag("use_parallel_residual", "parallel_residual", ("none", "two_norms")),
        ),
        says={"norm": "layer", "bias": True},
        absent={
            "hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True, "rotary_pct": 0.25,
            "rotary_emb_base": 10_000.0, "tie_word_embeddings": False, "num_key_value_heads": None,
        },
        names=NEOX,
        alternate={"attention.query_key_value": "head"},
    ),
    "cohere": Family(
        model="CohereForCausalLM",
        words=(
            *SIZES, Number("layer_norm_eps", "norm_eps"), SWIGLU, Rope(), ATTENTION_BIAS,
            Number("logit_scale", "logit_scale"), Flag("use_qk_norm", "qk_norm", ("none", "layer")),
        ),
        says={"norm": "layer", "norm_bias": False, "parallel_residual": "one_norm", "rope_interleaved": True},
        absent=LATE | PLAIN_SCALE | {
            "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500_000.0, "num_key_value_heads": None,
            "tie_word_embeddings": True, "use_qk_norm": False,
        },
        by_head=("self_attn.q_norm", "self_attn.k_norm"),
    ),
    "granite": Family(
        model="GraniteForCausalLM",
        words=(
            *SIZES, EPS, SWIGLU, Rope(), *BIASES, Number("embedding_multiplier", "embed_scale"),
            Number("residual_multiplier", "residual_scale"), Number("logits_scaling", "logit_scale", power=-1),
            Number("attention_multiplier", "attention_scale"),
        ),
        absent=LATE | PLAIN_SCALE | {
            "num_key_value_heads": None, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0, "attention_multiplier": 1.0,
        },
    ),
    "smollm3": Family(
        model="SmolLM3ForCausalLM",
        words=(*SIZES, EPS, SWIGLU, Windows(switch=True), Rope(), *BIASES, NoRope()),
        absent=LATE | NO_WINDOW | PLAIN_SCALE | {
            "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4, "use_sliding_window": False,
        },
    ),
    "starcoder2": Family(
        model="Starcoder2ForCausalLM",
        words=(
            *SIZES, Number("norm_epsilon", "norm_eps"), Choice("hidden_act", "mlp", GELU), WINDOWS, Rope(),
            Flag("use_bias", "bias"),
        ),
        says={"norm": "layer"},
        absent=LATE | {
            "num_key_value_heads": 2, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "sliding_window": None,
            "use_bias": True, "tie_word_embeddings": True,
        },
        names=LLAMA | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    ),
    "glm": Family(
        model="GlmForCausalLM", words=GLM_WORDS, says={"rope_interleaved": True}, absent=GLM_ABSENT, names=GLM,
    ),
    "glm4": Family(
        model="Glm4ForCausalLM", words=GLM_WORDS, says={"rope_interleaved": True, "norm_position": "both"},
        absent=GLM_ABSENT, names=GLM4,
    ),
    "olmoe": Family(
        model="OlmoeForCausalLM",
        words=(
            *SIZES, EPS, SWIGLU, Rope(), ATTENTION_BIAS, Count("num_experts", "experts", high=LAYER_LIMIT), TOP_K,
            Same("expert_ffn", "ffn"), Flag("norm_topk_prob", "router_renormalise"), BALANCE, Plain("clip_qkv", None),
        ),
        says={"qk_norm": "full"},
        absent=LATE | PLAIN_SCALE | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": None, "num_experts": 64, "num_experts_per_tok": 8,
            "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
        },
        spelled={"num_local_experts": "num_experts"},
    ),
}  # fmt: skip
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]  # as Kimi's own files call it
