"""The parameter table of an Arch: every weight by name, shape, how tensor parallelism cuts it, how it begins.

The table is the model: a test builds the real module and finds exactly these names and shapes.
"""

import math
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from itertools import groupby
from typing import Literal

import msgspec

from meshwright.spec.arch import Arch
from meshwright.spec.quantized import CODES, Held, parts
from meshwright.spec.tuning import DOWN, MAGNITUDE, UP, companion

STD = 0.02  # GPT-2's; projections back into the residual stream shrink by the root of their number

ROUTERS = ("mlp.router", "mlp.noise")  # multiplied in fp32, and never adapted


class Split(Enum):
    """How tensor parallelism cuts a weight."""

    NONE = "none"  # the same on every rank
    COLUMN = "column"  # output features over ranks: dim 0 of a Linear
    ROW = "row"  # input features over ranks: dim 1 of a Linear; its products are summed
    VOCAB = "vocab"  # rows of an embedding over ranks


class Param(msgspec.Struct, frozen=True, kw_only=True):
    """One weight of the model."""

    name: str
    shape: tuple[int, ...]
    split: Split = Split.NONE
    init: Literal["normal", "ones", "zeros", "norms"] = "normal"  # norms: of the rows of the matrix beside it
    std: float = STD
    layer: int = -1  # the block that holds it; -1 outside the blocks
    expert: bool = False  # dim 0 counts routed experts
    trained: bool = True  # else it is frozen: no gradient, no optimizer state, held as the arithmetic reads it
    held: Held = "bf16"  # or in few bits, by the tensors that `stored` lists
    item: int = 0  # bytes of an element of one of those; 0: as the arithmetic reads it

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether something is multiplied with it, or with each of a stack."""
        return len(self.shape) >= 2 and not self.name.endswith(("_bias", f"_{MAGNITUDE}"))


@cache
def params(arch: Arch) -> tuple[Param, ...]:
    """Every parameter, in the order in which the model holds them."""
    return tuple(
        param if arch.trains(param.name) else msgspec.structs.replace(param, trained=False) for param in _decoder(arch)
    )


@cache
def stored(arch: Arch) -> tuple[Param, ...]:
    """Every tensor that the model holds: parameters, of which some are several tensors of bytes."""
    return as_stored(params(arch))


def as_stored(weights: Iterable[Param]) -> tuple[Param, ...]:
    """The same of some of them."""
    return tuple(each for param in weights for each in _stored_parts(param))


def _stored_parts(param: Param) -> Iterator[Param]:
    if param.held == "bf16":
        yield param
        return
    for part, shape, cut in parts(param.held, param.shape, param.split is Split.ROW):
        name, split = stored_name(param.name, part), param.split if cut else Split.NONE
        yield msgspec.structs.replace(param, name=name, shape=shape, split=split, item=1)


def stored_name(weight: str, part: str) -> str:
    """The name of one of the tensors that stand for a weight: codes have its own."""
    return weight if part == CODES else companion(weight, part)


@cache
def frozen_bytes(arch: Arch, param_bytes: int) -> int:
    """Bytes of the weights that are not trained, those of an element in the arithmetic being so many."""
    return sum(param.numel * (param.item or param_bytes) for param in stored(arch) if not param.trained)


@cache
def trained(arch: Arch) -> tuple[Param, ...]:
    """Those that are trained."""
    return tuple(param for param in params(arch) if param.trained)


@cache
def layer_params(arch: Arch, moe: bool) -> tuple[Param, ...]:
    """The parameters of the first block that is an MoE layer, or that is none; nothing without one of that kind."""
    layer = next((layer for layer in range(arch.blocks) if arch.is_moe(layer) == moe), None)
    return tuple(param for param in params(arch) if param.layer == layer)


@cache
def buffers(arch: Arch) -> tuple[Param, ...]:
    """What is learned by other rules than gradients, saved with the parameters and held whole by every rank."""
    layers = [layer for layer in range(arch.blocks) if arch.is_moe(layer)] if arch.router_load_bias else []
    shape = (arch.experts,)
    return tuple(
        Param(name=f"blocks.{layer}.mlp.load_bias", shape=shape, init="zeros", layer=layer) for layer in layers
    )


@cache
def moved(arch: Arch) -> tuple[Param, ...]:
    """Of these what a step moves: beside an adapter they are the base's, and some may be frozen."""
    return tuple(param for param in buffers(arch) if arch.trains(param.name))


@cache
def saved(arch: Arch) -> tuple[Param, ...]:
    """Those that a checkpoint holds: all, or beside a base that is not its own the adapter's."""
    return params(arch) if arch.adapter.kind == "none" else trained(arch)


@cache
def count(arch: Arch) -> int:
    """Parameters held."""
    return sum(param.numel for param in params(arch))


@cache
def active(arch: Arch) -> int:
    """Parameters one token passes through: of the routed experts only the chosen ones."""
    if arch.experts == 0:
        return count(arch)
    routed = sum(param.numel for param in params(arch) if param.expert)
    return count(arch) - routed + routed * arch.top_k // arch.experts


def _decoder(arch: Arch) -> Iterator[Param]:
    yield Param(name="embed.weight", shape=(arch.vocab, arch.hidden), split=Split.VOCAB)
    if arch.positions == "learned":
        yield Param(name="positions.weight", shape=(arch.context, arch.hidden))
    for layer in range(arch.blocks):
        block = _ahead(arch, layer) if arch.looks_ahead(layer) else _block(arch, layer)
        for param in block if arch.tuning is msgspec.UNSET else _adapted(arch, block):
            yield msgspec.structs.replace(param, name=f"blocks.{layer}.{param.name}", layer=layer)
    if arch.norm_position != "post":
        yield from _norm(arch, "norm")
    if not arch.tied:
        yield Param(name="head.weight", shape=(arch.vocab, arch.hidden), split=Split.COLUMN)


def _block(arch: Arch, layer: int) -> Iterator[Param]:
    residual = STD / math.sqrt(2 * arch.layers)
    yield from _norm(arch, "attn_norm")
    yield from _latent_attention(arch, residual) if arch.is_latent else _attention(arch, residual)
    if arch.norm_position == "both":
        yield from _norm(arch, "attn_output_norm")
    if arch.parallel_residual != "one_norm":
        yield from _norm(arch, "mlp_norm")
    if arch.is_moe(layer):
        yield from _moe_layer(arch, residual)
    else:
        yield from _mlp(arch, "mlp", arch.ffn, residual)
    if arch.norm_position == "both":
        yield from _norm(arch, "mlp_output_norm")


def _ahead(arch: Arch, layer: int) -> Iterator[Param]:
    """A block of multi-token prediction: what joins a hidden state and the next token, a block, and a last norm."""
    yield from _block(arch, layer)
    yield from _norm(arch, "embed_norm")
    yield from _norm(arch, "hidden_norm")
    yield from _linear("join", (arch.hidden, 2 * arch.hidden), Split.NONE, False)
    yield from _norm(arch, "end_norm")


def _attention(arch: Arch, residual: float) -> Iterator[Param]:
    qkv = has_bias(arch, "qkv")
    if arch.sinks:
        yield Param(name="attn.sinks", shape=(arch.heads,), split=Split.COLUMN, init="zeros")
    yield from _linear("attn.q", (arch.q_width, arch.hidden), Split.COLUMN, qkv)
    yield from _linear("attn.k", (arch.kv_width, arch.hidden), Split.COLUMN, qkv)
    yield from _linear("attn.v", (arch.v_width, arch.hidden), Split.COLUMN, qkv)
    yield from _linear("attn.out", (arch.hidden, arch.out_width), Split.ROW, has_bias(arch, "out"), residual)
    if arch.qk_norm in ("full", "layer"):
        yield from _scales(arch, "attn.q_norm", arch.q_width, Split.COLUMN)
        yield from _scales(arch, "attn.k_norm", arch.kv_width, Split.COLUMN)
    elif arch.qk_norm == "head":
        yield from _scales(arch, "attn.q_norm", arch.head_dim)
        yield from _scales(arch, "attn.k_norm", arch.head_dim)


def _latent_attention(arch: Arch, residual: float) -> Iterator[Param]:
    """The ways down are whole on every rank, as all heads read what they return."""
    bias = has_bias(arch, "qkv")
    if arch.q_rank:
        yield from _linear("attn.q_down", (arch.q_rank, arch.hidden), Split.NONE, bias)
        yield from _scales(arch, "attn.q_down_norm", arch.q_rank)
    name = "attn.q_up" if arch.q_rank else "attn.q"
    yield from _linear(name, (arch.q_width, arch.q_rank or arch.hidden), Split.COLUMN, False)
    yield from _linear("attn.kv_down", (arch.kv_rank + arch.rope_dim, arch.hidden), Split.NONE, bias)
    yield from _scales(arch, "attn.kv_down_norm", arch.kv_rank)
    inner = arch.heads * (arch.head_dim - arch.rope_dim + arch.v_head)
    yield from _linear("attn.kv_up", (inner, arch.kv_rank), Split.COLUMN, False)
    yield from _linear("attn.out", (arch.hidden, arch.out_width), Split.ROW, has_bias(arch, "out"), residual)


def shares_heads(arch: Arch, tp: int) -> bool:
    """Whether ranks of tp are more than heads of keys and values: then each of them holds these whole."""
    return tp > arch.kv_heads and not arch.is_latent


def kv_part(arch: Arch, tp: int) -> int:
    """Elements of keys and values together that one of so many ranks of tp computes for a token."""
    return arch.head_dim + arch.v_head if shares_heads(arch, tp) else (arch.kv_width + arch.v_width) // tp


def cut_widths(arch: Arch, tp: int) -> dict[str, int]:
    """The fields that so many ranks of tp must divide."""
    widths = {"heads": arch.heads, "kv_heads": arch.kv_heads, "ffn": arch.ffn}
    if arch.experts:
        widths["expert_ffn"] = arch.expert_ffn
    if arch.moe_bias:
        widths["hidden"] = arch.hidden
    if shares_heads(arch, tp) and tp % max(arch.kv_heads, 1) == 0:
        del widths["kv_heads"]  # every rank holds them whole, and computes the one that its queries read
    return widths


def cuts_adapters(arch: Arch, tp: int) -> bool:
    """Whether so many ranks of tp can cut a model's adapters, where it has any."""
    return arch.adapter.kind == "none" or not shares_heads(arch, tp)


def held_split(param: Param, arch: Arch, tp: int) -> Split:
    """How so many ranks of tp cut a weight."""
    shared = shares_heads(arch, tp) and ".attn." in param.name and param.name.split(".")[3] in ("k", "v", "k_norm")
    return Split.NONE if shared else param.split


def has_bias(arch: Arch, matrix: Literal["qkv", "out", "mlp"]) -> bool:
    """Whether some matrices outside the experts have a bias."""
    stated = {"qkv": arch.attention_bias != "none", "out": arch.attention_bias == "all", "mlp": arch.mlp_bias}
    return arch.bias or stated[matrix]


def _mlp(arch: Arch, name: str, width: int, residual: float) -> Iterator[Param]:
    bias = has_bias(arch, "mlp")
    if arch.gated:
        yield from _linear(f"{name}.gate", (width, arch.hidden), Split.COLUMN, bias)
    yield from _linear(f"{name}.up", (width, arch.hidden), Split.COLUMN, bias)
    yield from _linear(f"{name}.down", (arch.hidden, width), Split.ROW, bias, residual)


def _moe_layer(arch: Arch, residual: float) -> Iterator[Param]:
    inward = (arch.experts, arch.expert_ffn, arch.hidden)
    outward = (arch.experts, arch.hidden, arch.expert_ffn)
    yield Param(name="mlp.router.weight", shape=(arch.experts, arch.hidden))
    if arch.moe_bias:
        yield Param(name="mlp.router.bias", shape=(arch.experts,), init="zeros")
    if arch.router == "noisy_topk":
        yield Param(name="mlp.noise.weight", shape=(arch.experts, arch.hidden), init="zeros")
    if arch.gated:
        yield Param(name="mlp.experts.gate", shape=inward, split=Split.COLUMN, expert=True)
    yield Param(name="mlp.experts.up", shape=inward, split=Split.COLUMN, expert=True)
    yield Param(name="mlp.experts.down", shape=outward, split=Split.ROW, std=residual, expert=True)
    if arch.moe_bias:
        biases = {"gate_bias": arch.expert_ffn} if arch.gated else {}
        for name, width in (biases | {"up_bias": arch.expert_ffn, "down_bias": arch.hidden}).items():
            shape = (arch.experts, width)
            yield Param(name=f"mlp.experts.{name}", shape=shape, split=Split.COLUMN, init="zeros", expert=True)
    if arch.shared_experts:
        yield from _mlp(arch, "mlp.shared", arch.shared_experts * arch.expert_ffn, residual)


def _linear(name: str, shape: tuple[int, int], split: Split, bias: bool, std: float = STD) -> Iterator[Param]:
    yield Param(name=f"{name}.weight", shape=shape, split=split, std=std)
    if bias:  # a row split's bias is added once, after the sum, so every rank holds it whole
        bias_split = Split.NONE if split is Split.ROW else split
        yield Param(name=f"{name}.bias", shape=shape[:1], split=bias_split, init="zeros")


def _adapted(arch: Arch, block: Iterator[Param]) -> Iterator[Param]:
    """The weights of a block, those of each linear layer followed by the low-rank ones beside them.

    Of these the one along the dim that tp cuts is cut, and the other is whole.
    """
    for name, together in groupby(block, key=lambda param: param.name.rpartition(".")[0]):
        weights, held = list(together), arch.adapter.held
        layers = [weight for weight in weights if _is_linear(weight)]
        yield from (msgspec.structs.replace(each, held=held) if each in layers else each for each in weights)
        for weight in layers:
            if arch.adapter.takes(weight.name if weight.expert else name):
                yield from _low_rank(arch, weight)


def _is_linear(weight: Param) -> bool:
    """Whether a weight is the matrix of a linear layer, or a stack of them, that may have an adapter."""
    name = weight.name.rpartition(".")
    return weight.is_matrix and (weight.expert or (name[2] == "weight" and name[0] not in ROUTERS))


def _low_rank(arch: Arch, weight: Param) -> Iterator[Param]:
    """The adapter of a matrix, or one for each of a stack."""
    rank, (*stack, outward, inward) = arch.adapter.rank, weight.shape
    down, up = (weight.split, Split.NONE) if weight.split is Split.ROW else (Split.NONE, weight.split)
    # The variance of peft's uniform draws, whose bound is 1 ÷ √in.
    a = Param(
        name=companion(weight.name, DOWN), shape=(*stack, rank, inward), split=down, std=1 / math.sqrt(3 * inward)
    )
    b = Param(name=companion(weight.name, UP), shape=(*stack, outward, rank), split=up, init="zeros")
    m = Param(name=companion(weight.name, MAGNITUDE), shape=(*stack, outward), split=up, init="norms")
    every = (a, b, m) if arch.adapter.kind == "dora" else (a, b)
    yield from (msgspec.structs.replace(each, expert=weight.expert) for each in every)


def _norm(arch: Arch, name: str) -> Iterator[Param]:
    yield from _scales(arch, name, arch.hidden)
    if arch.norm == "layer" and arch.norm_bias:
        yield Param(name=f"{name}.bias", shape=(arch.hidden,), init="zeros")


def _scales(arch: Arch, name: str, width: int, split: Split = Split.NONE) -> Iterator[Param]:
    """The weight of a norm, which begins as the identity."""
    yield Param(name=f"{name}.weight", shape=(width,), split=split, init="zeros" if arch.norm_offset else "ones")
