"""What a decoder is made of, as one flat frozen value."""

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from meshwright.spec.tuning import FROZEN, Adapter, Tuning

Router = Literal["topk", "noisy_topk", "switch", "gshard", "expert_choice"]
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")  # feed-forward layers of three matrices


class Arch(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer: GPT, Llama and mixture-of-experts families by their numbers alone."""

    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # fewer than heads: grouped-query attention
    head_dim: int
    ffn: int  # width inside a dense feed-forward layer
    context: int  # longest sequence the model was made for; the rows of a learned position table

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    # Before each sub-layer, and one at the end; after its sum; of what it returns (OLMo-2); before and of it (Gemma).
    norm_position: Literal["pre", "post", "output", "both"] = "pre"
    norm_offset: bool = False  # a norm multiplies by 1 + its weight (Gemma)
    norm_bias: bool = True  # layer only: false of Cohere
    positions: Literal["rope", "learned", "none"] = "rope"
    mlp: Literal["swiglu", "geglu", "geglu_tanh", "swiglu_clamped", "gelu", "gelu_tanh"] = "swiglu"
    bias: bool = False  # of every matrix outside the experts
    attention_bias: Literal["none", "qkv", "all"] = "none"  # of queries, keys and values (Qwen2), or of the output too
    mlp_bias: bool = False  # of dense feed-forward layers and shared experts
    moe_bias: bool = False  # of the router and of the experts (gpt-oss)
    tied: bool = False  # the output projection is the embedding
    dropout: float = 0.0  # of the embedding and of what is added to the residual stream, in training
    attention_dropout: float = 0.0  # refused: attention's kernels cannot draw by token index

    embed_scale: float = 1.0  # of what the embedding returns: √hidden of Gemma
    residual_scale: float = 1.0  # of what a sub-layer adds (Granite)
    logit_scale: float = 1.0  # of the logits (Cohere, Granite)
    logit_softcap: float = 0.0  # c · tanh(logit ÷ c), above 0 (Gemma 2)
    # A block adds both sub-layers of its own input (GPT-NeoX), which may read one norm (Cohere).
    parallel_residual: Literal["none", "two_norms", "one_norm"] = "none"

    attention_scale: float = 0.0  # of the scores; 0: 1 ÷ √head_dim
    attention_softcap: float = 0.0  # c · tanh(score ÷ c), above 0 (Gemma 2)
    # RMSNorm of each head (Qwen3) or of all together (OLMo-2); LayerNorm of each, with weights of its own (Cohere).
    qk_norm: Literal["none", "head", "full", "layer"] = "none"
    sinks: bool = False  # a learned score of each head that takes part of the softmax and adds nothing (gpt-oss)
    window: int = 0  # keys that a query sees, itself among them; 0: all earlier ones
    full_every: int = 0  # of layers with a window, layer i has none when this divides i + 1; 0: every layer has it

    # Multi-head latent attention (DeepSeek): keys and values are made of kv_rank numbers a token.
    kv_rank: int = 0  # MLA: the rank that keys and values are made of; 0: every head has its own projection
    q_rank: int = 0  # MLA: that of queries; 0: they are projected directly
    rope_dim: int = 0  # of head_dim, what is rotated; its keys are one for all heads
    v_dim: int = 0  # of a head's values; 0: head_dim

    rope_theta: float = 10_000.0
    rope_local_theta: float = 0.0  # of layers with a window, which are not scaled (Gemma 3); 0: as all others
    rope_share: float = 1.0  # of a head's dimensions, the first ones, that are rotated (GPT-NeoX, GLM)
    rope_interleaved: bool = False  # pairs are neighbours (2i, 2i + 1) (Cohere, DeepSeek), and not halves
    no_rope_every: int = 0  # layer i rotates nothing when this divides i + 1 (SmolLM3)
    rope_scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    rope_factor: float = 1.0
    rope_low: float = 1.0  # llama3: wavelengths longer than original / low are divided by the factor
    rope_high: float = 4.0  # llama3: wavelengths shorter than original / high are kept
    rope_original: int = 8192  # llama3, yarn, longrope: the context before scaling
    rope_beta_fast: float = 32.0  # yarn: pairs that turn so often over the original context are kept
    rope_beta_slow: float = 1.0  # yarn: those that turn no oftener are divided by the factor
    rope_truncate: bool = True  # yarn: the ends of the ramp between them are whole pairs
    # Of yarn and longrope, what cosines and sines are multiplied by; 0: 0.1 · ln(rope_factor) + 1, or of longrope
    # √(1 + ln(context ÷ rope_original) ÷ ln(rope_original)).
    rope_attention: float = 0.0
    rope_short: tuple[float, ...] = ()  # longrope (Phi-3): what each pair's frequency is divided by
    rope_long: tuple[float, ...] = ()  # the same in sequences that are longer than rope_original

    experts: int = 0  # 0: every feed-forward layer is dense
    moe_every: int = 1  # layer i is an MoE layer when this divides i + 1
    dense_layers: int = 0  # the first so many are dense all the same (DeepSeek)
    expert_ffn: int = 0  # width inside one expert
    shared_experts: int = 0  # experts that every token passes through, beside the routed ones
    top_k: int = 0
    router: Router = "topk"
    router_score: Literal["softmax", "sigmoid"] = "softmax"  # topk only, like the next six
    router_load_bias: bool = False  # added to scores when experts are chosen; learned from their load, not by gradients
    router_load_rate: float = 0.001  # its step: up for experts below the mean load, down for those above (DeepSeek-V3)
    router_groups: int = 1  # groups of experts, of which router_top_groups are chosen from
    router_top_groups: int = 1  # of these groups, those with the best experts
    router_renormalise: bool = True  # the chosen scores sum to 1
    router_scale: float = 1.0  # and are multiplied by this
    capacity: float = 0.0  # slots per expert ÷ a fair share of one sequence's tokens; 0 drops no token
    balance_loss: float = 0.0  # weight of the load-balancing loss
    z_loss: float = 0.0  # weight of the squared log-sum-exp of the router's logits

    # Multi-token prediction (DeepSeek-V3): a block more that also predicts the token after the next, in training alone.
    mtp_layers: int = 0  # such blocks after the others: 0 or 1
    mtp_loss_weight: float = 0.3  # of their loss beside that of the next token

    # What of it is trained, where that is not all of it: of a run, whose [adapter] and optim.freeze say so.
    tuning: Tuning | msgspec.UnsetType = msgspec.UNSET

    @property
    def adapter(self) -> Adapter:
        """The low-rank weights beside its own; of the kind "none" where there are none."""
        return Adapter() if self.tuning is msgspec.UNSET else self.tuning.adapter

    @property
    def compared(self) -> bool:
        """Whether every step computes the reference of DPO as well."""
        return self.tuning is not msgspec.UNSET and self.tuning.compared

    @property
    def copies_reference(self) -> bool:
        """Whether that is a frozen copy of all weights: without an adapter there is none to be left out."""
        return self.compared and self.adapter.kind == "none"

    @property
    def reference(self) -> "Arch":
        """The copy."""
        return msgspec.structs.replace(self, tuning=FROZEN)

    def trains(self, name: str) -> bool:
        """Whether a weight is trained."""
        return self.tuning is msgspec.UNSET or self.tuning.trains(name)

    @property
    def blocks(self) -> int:
        """Blocks that a step of training computes: the layers, and those of multi-token prediction."""
        return self.layers + self.mtp_layers

    def looks_ahead(self, layer: int) -> bool:
        """Whether a block is one of multi-token prediction."""
        return layer >= self.layers

    @property
    def embeds_at_both_ends(self) -> bool:
        """Whether the end of the model reads the embedding too: to project, or to predict several tokens ahead."""
        return self.tied or self.mtp_layers > 0

    def is_moe(self, layer: int) -> bool:
        """Whether a layer routes its tokens to experts."""
        return self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.moe_every == 0

    def window_of(self, layer: int) -> int:
        """Keys that a layer's queries see; 0: all earlier ones."""
        is_full = self.full_every > 0 and (layer + 1) % self.full_every == 0
        return 0 if is_full else self.window

    def mean_over_layers(self, of: Callable[[int], float]) -> float:
        """The mean of something that depends on a layer's window."""
        if not self.window:
            return of(0)
        return sum(of(self.window_of(layer)) for layer in range(self.layers)) / self.layers

    def is_rotated(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys."""
        skipped = self.no_rope_every > 0 and (layer + 1) % self.no_rope_every == 0
        return self.positions == "rope" and not skipped

    @property
    def gated(self) -> bool:
        """Whether feed-forward layers have three matrices."""
        return self.mlp in GATED

    @property
    def ends_in_norm(self) -> bool:
        """Whether a norm reads what a block's last matmul returns, so that its backward needs that."""
        return self.norm_position != "pre"

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention (MLA)."""
        return self.kv_rank > 0

    @property
    def scores_plainly(self) -> bool:
        """Whether attention's scores are dot products and nothing more: what every kernel computes."""
        return self.attention_softcap == 0 and not self.sinks

    @property
    def v_head(self) -> int:
        """Elements of a head's values."""
        return self.v_dim or self.head_dim

    def expert_slots(self, sequence: int) -> int:
        """Tokens that one expert may take of a sequence; all of them when no capacity is set."""
        if self.capacity == 0:
            return sequence
        choices = 1 if self.router == "expert_choice" else self.top_k
        return min(sequence, math.ceil(self.capacity * choices * sequence / self.experts))

    @property
    def moe_layers(self) -> int:
        return sum(self.is_moe(layer) for layer in range(self.layers))

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def v_width(self) -> int:
        return self.kv_heads * self.v_head

    @property
    def out_width(self) -> int:
        """What the output projection of attention reads."""
        return self.heads * self.v_head

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated."""
        return self.rope_dim or 2 * round(self.head_dim * self.rope_share / 2)
