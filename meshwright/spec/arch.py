"""What a decoder is made of, as one flat frozen value."""

import math
from typing import Literal

import msgspec

Router = Literal["topk", "noisy_topk", "switch", "gshard", "expert_choice"]


class Arch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    norm_position: Literal["pre", "post"] = "pre"  # before each sub-layer, and one at the end; or after its sum
    positions: Literal["rope", "learned", "none"] = "rope"
    mlp: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    bias: bool = False
    tied: bool = False  # the output projection is the embedding
    dropout: float = 0.0  # of the embedding and of what is added to the residual stream, in training
    attention_dropout: float = 0.0  # refused: attention's kernels cannot draw by token index

    rope_theta: float = 10_000.0
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    rope_factor: float = 1.0
    rope_low: float = 1.0  # llama3: wavelengths longer than original / low are divided by the factor
    rope_high: float = 4.0  # llama3: wavelengths shorter than original / high are kept
    rope_original: int = 8192  # llama3: the context before scaling

    experts: int = 0  # 0: every feed-forward layer is dense
    moe_every: int = 1  # layer i is an MoE layer when this divides i + 1
    expert_ffn: int = 0  # width inside one expert
    shared_experts: int = 0  # experts that every token passes through, beside the routed ones
    top_k: int = 0
    router: Router = "topk"
    capacity: float = 0.0  # slots per expert ÷ a fair share of one sequence's tokens; 0 drops no token
    balance_loss: float = 0.0  # weight of the load-balancing loss
    z_loss: float = 0.0  # weight of the squared log-sum-exp of the router's logits

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer routes its tokens to experts."""
        return self.experts > 0 and (layer + 1) % self.moe_every == 0

    def expert_slots(self, sequence: int) -> int:
        """Tokens that one expert may take of a sequence; all of them when no capacity is set."""
        if self.capacity == 0:
            return sequence
        choices = 1 if self.router == "expert_choice" else self.top_k
        return min(sequence, math.ceil(self.capacity * choices * sequence / self.experts))

    @property
    def mixture_layers(self) -> int:
        return sum(self.is_mixture(layer) for layer in range(self.layers))

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim
