"""Name maps: how the tensors in a file are made of the parameters of spec/params.py.

A layout is a list of stored tensors, each of which says what it is made of. Reading and writing are the two directions
of the same list, so they cannot disagree. Hugging Face's rotary layout (the two halves of a head) is also ours, so
queries and keys are never permuted.
"""

from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import Tensor

from meshwright.spec.arch import Arch
from meshwright.spec.huggingface import family
from meshwright.spec.params import params

Load = Callable[[str], Tensor]
Shape = tuple[int, ...]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in a file."""

    name: str
    made_of: tuple[str, ...]  # our parameters, joined along `dim`
    dim: int = 0
    expert: int | None = None  # holds this expert of a stacked parameter alone
    transposed: bool = False  # GPT-2 multiplies from the other side


Layout = tuple[Stored, ...]


def native(arch: Arch) -> Layout:
    """Our own files: every parameter as it is."""
    return tuple(Stored(name=param.name, made_of=(param.name,)) for param in params(arch))


def huggingface(arch: Arch, *, prefix: str | None = None, fused: bool = False) -> Layout:
    """The layout that transformers writes; `fused` experts are those of its version 5 in memory."""
    if family(arch) == "gpt2":
        return tuple(_gpt2(arch, "transformer." if prefix is None else prefix))
    return tuple(_llama(arch, "model." if prefix is None else prefix, fused))


def huggingface_of(arch: Arch, names: frozenset[str]) -> Layout:
    """The layout that a folder uses: files of a bare model lack the prefix, and experts come apart or fused."""
    embed = "wte.weight" if family(arch) == "gpt2" else "embed_tokens.weight"
    prefix = "" if embed in names else None
    fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
    return huggingface(arch, prefix=prefix, fused=fused)


def is_harmless(name: str, tied: bool) -> bool:
    """Whether a tensor beyond the layout changes nothing: masks and frequencies that old versions stored."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")) or (tied and name == HEAD)


HEAD = "lm_head.weight"


def stored_shape(stored: Stored, shapes: dict[str, Shape]) -> Shape:
    """The shape that a stored tensor must have, from those of our parameters."""
    parts = [shapes[name] if stored.expert is None else shapes[name][1:] for name in stored.made_of]
    shape = list(parts[0])
    shape[stored.dim] = sum(part[stored.dim] for part in parts)
    return tuple(reversed(shape)) if stored.transposed else tuple(shape)


def store(stored: Stored, load: Load) -> Tensor:
    """A stored tensor, made of our parameters."""
    parts = [load(name) if stored.expert is None else load(name)[stored.expert] for name in stored.made_of]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=stored.dim)
    return whole.T if stored.transposed else whole


def restore(name: str, layout: Layout, shapes: dict[str, Shape], load: Load) -> Tensor:
    """Our parameter, taken out of the stored tensors that hold it."""
    pieces = [_piece(name, stored, shapes, load) for stored in layout]
    return pieces[0] if layout[0].expert is None else torch.stack(pieces)


def _piece(name: str, stored: Stored, shapes: dict[str, Shape], load: Load) -> Tensor:
    whole = load(stored.name)
    whole = whole.T if stored.transposed else whole
    if len(stored.made_of) == 1:
        return whole
    widths = [shapes[part][stored.dim] for part in stored.made_of]
    return whole.split(widths, dim=stored.dim)[stored.made_of.index(name)]


def _gpt2(arch: Arch, prefix: str) -> Iterator[Stored]:
    yield Stored(name=f"{prefix}wte.weight", made_of=("embed.weight",))
    yield Stored(name=f"{prefix}wpe.weight", made_of=("positions.weight",))
    for layer in range(arch.layers):
        theirs, ours = f"{prefix}h.{layer}", f"blocks.{layer}"
        for kind in ("weight", "bias"):
            qkv = tuple(f"{ours}.attn.{part}.{kind}" for part in "qkv")
            turned = kind == "weight"
            yield Stored(name=f"{theirs}.ln_1.{kind}", made_of=(f"{ours}.attn_norm.{kind}",))
            yield Stored(name=f"{theirs}.attn.c_attn.{kind}", made_of=qkv, transposed=turned)
            yield Stored(name=f"{theirs}.attn.c_proj.{kind}", made_of=(f"{ours}.attn.out.{kind}",), transposed=turned)
            yield Stored(name=f"{theirs}.ln_2.{kind}", made_of=(f"{ours}.mlp_norm.{kind}",))
            yield Stored(name=f"{theirs}.mlp.c_fc.{kind}", made_of=(f"{ours}.mlp.up.{kind}",), transposed=turned)
            yield Stored(name=f"{theirs}.mlp.c_proj.{kind}", made_of=(f"{ours}.mlp.down.{kind}",), transposed=turned)
    for kind in ("weight", "bias"):
        yield Stored(name=f"{prefix}ln_f.{kind}", made_of=(f"norm.{kind}",))
    yield from _head(arch)


def _llama(arch: Arch, prefix: str, fused: bool) -> Iterator[Stored]:
    yield Stored(name=f"{prefix}embed_tokens.weight", made_of=("embed.weight",))
    for layer in range(arch.layers):
        theirs, ours = f"{prefix}layers.{layer}", f"blocks.{layer}"
        yield Stored(name=f"{theirs}.input_layernorm.weight", made_of=(f"{ours}.attn_norm.weight",))
        for their, our in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out")):
            yield Stored(name=f"{theirs}.self_attn.{their}.weight", made_of=(f"{ours}.attn.{our}.weight",))
        yield Stored(name=f"{theirs}.post_attention_layernorm.weight", made_of=(f"{ours}.mlp_norm.weight",))
        yield from _feed_forward(arch, theirs, ours, fused)
    yield Stored(name=f"{prefix}norm.weight", made_of=("norm.weight",))
    yield from _head(arch)


def _feed_forward(arch: Arch, theirs: str, ours: str, fused: bool) -> Iterator[Stored]:
    if arch.experts == 0:
        for part in ("gate", "up", "down"):
            yield Stored(name=f"{theirs}.mlp.{part}_proj.weight", made_of=(f"{ours}.mlp.{part}.weight",))
        return
    router, experts = (f"{ours}.mlp.router.weight",), f"{ours}.mlp.experts"
    if fused:
        yield Stored(name=f"{theirs}.mlp.gate.weight", made_of=router)
        gate_up = (f"{experts}.gate", f"{experts}.up")
        yield Stored(name=f"{theirs}.mlp.experts.gate_up_proj", made_of=gate_up, dim=1)
        yield Stored(name=f"{theirs}.mlp.experts.down_proj", made_of=(f"{experts}.down",))
        return
    yield Stored(name=f"{theirs}.block_sparse_moe.gate.weight", made_of=router)
    for their, our in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        for expert in range(arch.experts):  # inside: a stacked parameter is then read once for all its experts
            name = f"{theirs}.block_sparse_moe.experts.{expert}.{their}.weight"
            yield Stored(name=name, made_of=(f"{experts}.{our}",), expert=expert)


def _head(arch: Arch) -> Iterator[Stored]:
    if not arch.tied:
        yield Stored(name=HEAD, made_of=("head.weight",))
