"""Which weights of a decoder are trained: all, all but some that are frozen, or low-rank adapters beside frozen ones.

LoRA (Hu 2021) adds s · B A to the matrix W of a linear layer, y = W x + s · B (A x), and trains A (rank, in) and B
(out, rank) alone; s is alpha ÷ rank, or alpha ÷ √rank (rsLoRA, Kalajdzievski 2023). B begins as zeros, so that training
begins at W. Every expert of a stack has an A and a B of its own, in stacks of their own.

DoRA (Liu 2024) trains beside them a magnitude m for every output: y = m ÷ n · (W x + s · B (A x)), where n are the
norms of the rows of W + s · B A, which the gradient takes as constants. m begins as the norms of the rows of W.
"""

import math
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from meshwright.spec.quantized import Held

ALL_LINEAR = "all-linear"  # every linear layer of the blocks, as peft names them
DOWN, UP = "lora_a", "lora_b"  # the names of A and B beside the weight of their layer
MAGNITUDE = "magnitude"  # and of m
# What Hugging Face's families call our linear layers: of experts apart, as Mixtral's, or gate and up as one.
ALIASES = {
    "q_proj": ("attn.q",),
    "k_proj": ("attn.k",),
    "v_proj": ("attn.v",),
    "o_proj": ("attn.out",),
    "gate_proj": ("mlp.gate", "mlp.shared.gate", "mlp.experts.gate"),
    "up_proj": ("mlp.up", "mlp.shared.up", "mlp.experts.up"),
    "down_proj": ("mlp.down", "mlp.shared.down", "mlp.experts.down"),
    "gate_up_proj": ("mlp.experts.gate", "mlp.experts.up"),
    "w1": ("mlp.experts.gate",),
    "w2": ("mlp.experts.down",),
    "w3": ("mlp.experts.up",),
}


class Adapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank weights that are trained in the place of all others."""

    kind: Literal["none", "lora", "dora", "qlora"] = "none"  # none: the weights themselves are trained
    rank: int = 16  # of A and B: rows of the one, columns of the other
    alpha: float = 32.0  # the adapter's output is multiplied by alpha ÷ rank
    rslora: bool = False  # by alpha ÷ √rank
    dropout: float = 0.0  # of what A reads, in training
    targets: tuple[str, ...] = (ALL_LINEAR,)  # linear layers by name: q_proj or attn.q, …, or "all-linear"
    base: Held = "bf16"  # how frozen matrices of blocks are held; bf16: as arithmetic reads them; of qlora nf4

    @property
    def held(self) -> Held:
        """How the frozen matrices of blocks are held: QLoRA is LoRA beside NF4 unless it says otherwise."""
        return "nf4" if self.kind == "qlora" and self.base == "bf16" else self.base

    @property
    def scale(self) -> float:
        """What B A x is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def drops_rows(self) -> bool:
        """Whether frozen matrices are multiplied with what dropout leaves as well: DoRA changes their rows."""
        return self.kind == "dora" and self.dropout > 0

    def takes(self, layer: str) -> bool:
        """Whether a linear layer of a block, named without its block, has an adapter."""
        return self.kind != "none" and any(matches(layer, target) for target in self.targets)


def matches(layer: str, target: str) -> bool:
    """Whether a target means a linear layer: all do, or one by our name or by Hugging Face's, * standing for any."""
    if target == ALL_LINEAR:
        return True
    names = ALIASES.get(target, (target,))
    return any(fnmatchcase(layer, name) or fnmatchcase(layer, f"*.{name}") for name in names)


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a decoder is trained."""

    adapter: Adapter = Adapter()
    freeze: tuple[str, ...] = ()  # patterns of weights, or of modules with all of theirs
    compared: bool = False  # every step computes the reference of DPO too: without the adapter, or a frozen copy

    def trains(self, name: str) -> bool:
        """Whether a weight is trained."""
        if self.adapter.kind != "none":
            return is_adapter(name)
        return not any(freezes(pattern, name) for pattern in self.freeze)


def pair_slots(sequence: int) -> int:
    """Pairs of answers, two documents each, that a row of so many tokens has numbers for; the last one is padding."""
    return sequence // 2 + sequence % 2 + 1


FROZEN = Tuning(freeze=("*",))  # nothing is trained


def is_adapter(name: str) -> bool:
    """Whether a weight is an adapter's."""
    return name.endswith((DOWN, UP, MAGNITUDE))


def companion(weight: str, part: str) -> str:
    """The name of what is beside a weight: `q.lora_a` of the layer `q.weight`, `up_lora_a` of the stack `up`."""
    layer = weight.removesuffix("weight")
    return layer + part if layer.endswith(".") else f"{weight}_{part}"


def freezes(pattern: str, name: str) -> bool:
    """Whether a pattern of `optim.freeze` means a weight."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
