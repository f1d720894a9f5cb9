"""The model of a published row. Names and launcher arguments say what the columns cannot."""

import math
import re
from typing import Literal

import msgspec

from meshwright.hardware.stacks import Stack
from meshwright.published.cells import Cells, RefusalError, holds
from meshwright.spec.arch import Arch
from meshwright.spec.params import count

GATED = ("llama", "mistral", "mixtral", "qwen", "deepseek", "gemma", "yi-", "olmo", "phi-3", "grok", "kimi", "gpt-oss")
PLAIN = ("gpt", "mpt", "bloom", "opt", "turing", "mt-nlg", "megatron", "nemotron", "neox")
# Vocabularies of models whose rows leave it out, the more special names first; the rest is GPT-2's.
VOCABULARIES = {
    "llama 3": 128_256, "llama3": 128_256, "llama-3": 128_256, "llama 4": 202_048, "llama4": 202_048,
    "llama": 32_000, "mixtral": 32_000, "mistral": 32_000, "qwen": 151_936, "deepseek": 129_280,
    "nemotron": 256_000, "gemma": 256_000, "bloom": 250_880, "mpt": 50_368, "gpt-oss": 201_088,
}  # fmt: skip
GPT2_VOCABULARY = 50_257
HEADS = {"qwen3": 128, "qwen 3": 128, "deepseek": 128, "kimi": 128, "gpt-oss": 64, "gpt oss": 64}  # not hidden ÷ heads
ASPECT = 128  # hidden ÷ layers where only a parameter count is given, as in the GPT-3 family
NEAR = 0.15  # a parameter count that far from the cell's means that a width was the other kind of width


def arch_of(cells: Cells, stack: Stack, tp: int) -> Arch:
    """The architecture that a row describes, its vocabulary filled up as the stack does."""
    gated = is_gated(cells)
    layers, hidden = _shape(cells)
    heads = cells.whole_or("heads", max(hidden // 128, 1), "hidden ÷ 128")
    kv_heads = _kv_heads(cells, heads)
    sequence = sequence_of(cells)
    ffn = cells.whole("ffn_hidden") or cells.assume(
        "ffn_hidden", llama_width(hidden) if gated else 4 * hidden, "Llama's rule" if gated else "4 × hidden"
    )
    arch = Arch(
        vocab=padded(_vocabulary(cells), _multiple(cells, stack), tp),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(cells, hidden, heads),
        ffn=ffn,
        context=sequence,
        norm=_norm(cells, gated),
        positions=_positions(cells, gated),
        mlp="swiglu" if gated else "gelu",
        bias=_bias(cells, gated),
        tied=_tied(cells, gated),
    )
    return _with_count(cells, _with_experts(cells, arch))


def is_gated(cells: Cells) -> bool:
    """Whether the feed-forward has a gate (Llama) or not (GPT): by argument, name, framework, then its width."""
    if _has_arguments(cells):
        return cells.argument("swiglu") is not None
    name = cells.text("model_name")
    if holds(name, GATED):
        return True
    if holds(name, PLAIN):
        return False
    if holds(cells.text("framework"), ("nanotron", "torchtitan", "torchtune", "kempner")):
        return True
    hidden, ffn = cells.whole("hidden"), cells.whole("ffn_hidden")
    return bool(hidden and ffn and ffn != 4 * hidden)


def sequence_of(cells: Cells) -> int:
    """Tokens of a sequence; 8k is 8,192."""
    found = cells.needed("seq_len", "the sequence length")
    return found * 1024 // 1000 if re.search(r"\d\s?k", cells.text("seq_len")) else found


def llama_width(hidden: int) -> int:
    """Two thirds of 4 × hidden, up to a multiple of 256."""
    return -(-8 * hidden // (3 * 256)) * 256


def padded(vocab: int, multiple: int, tp: int) -> int:
    """A vocabulary filled up so that every rank's part is a multiple."""
    step = multiple * tp
    return -(-vocab // step) * step


def _has_arguments(cells: Cells) -> bool:
    """Whether the notes list a launcher's arguments, whose absence then says something too."""
    return "args:" in cells.text("notes")


def _shape(cells: Cells) -> tuple[int, int]:
    layers, hidden = cells.whole("layers"), cells.whole("hidden")
    if layers and hidden:
        return layers, hidden
    parameters = cells.number("params") or cells.number("model_name")
    if not parameters or parameters < 1e6:
        raise RefusalError("neither layers and hidden nor a parameter count is given")
    layers = layers or max(round((parameters / (12 * ASPECT**2)) ** (1 / 3) / 2) * 2, 1)
    hidden = max(round(math.sqrt(parameters / (12 * layers)) / 128), 1) * 128
    cells.note(f"layers = {layers}, hidden = {hidden} (a GPT of that many parameters, hidden = {ASPECT} × layers)")
    return layers, hidden


def _kv_heads(cells: Cells, heads: int) -> int:
    if cells.argument("multi-latent-attention") is not None or "deepseek" in cells.text("model_name"):
        cells.note("latent attention priced as grouped-query attention with one pair of keys and values")
        return 1
    return cells.whole_or("kv_heads", heads, "heads")


def _head_dim(cells: Cells, hidden: int, heads: int) -> int:
    stated = cells.argument("kv-channels")
    if stated and stated.isdigit():
        return int(stated)
    for word, width in HEADS.items():
        if word in cells.text("model_name"):
            cells.note(f"heads of {width} (as models named {word} have)")
            return width
    return max(hidden // heads, 1)


def _vocabulary(cells: Cells) -> int:
    found = cells.whole("vocab")
    if found:
        return found
    name = cells.text("model_name")
    for word, vocab in VOCABULARIES.items():
        if word in name:
            return cells.assume("vocab", vocab, f"as models named {word} have")
    return cells.assume("vocab", GPT2_VOCABULARY, "GPT-2's")


def _multiple(cells: Cells, stack: Stack) -> int:
    stated = cells.argument("make-vocab-size-divisible-by")
    return int(stated) if stated and stated.isdigit() else stack.vocab_multiple


def _norm(cells: Cells, gated: bool) -> Literal["rms", "layer"]:
    if _has_arguments(cells):
        return "rms" if cells.argument("normalization") == "rmsnorm" else "layer"
    return "rms" if gated else "layer"


def _positions(cells: Cells, gated: bool) -> Literal["rope", "learned", "none"]:
    if _has_arguments(cells):
        kind = cells.argument("position-embedding-type")
        return "rope" if kind == "rope" else "none" if kind == "none" else "learned"
    if holds(cells.text("model_name"), ("bloom",)):
        return "none"  # a bias on the scores, which has no weights
    return "rope" if gated or "nemotron" in cells.text("model_name") else "learned"


def _bias(cells: Cells, gated: bool) -> bool:
    if _has_arguments(cells):
        return cells.argument("disable-bias-linear") is None
    return not gated and "nemotron" not in cells.text("model_name")


def _tied(cells: Cells, gated: bool) -> bool:
    if _has_arguments(cells):
        return cells.argument("untie-embeddings-and-output-weights") is None
    notes = cells.text("notes")
    if "untied" in notes:
        return False
    if "tied embedding" in notes or "gemma" in cells.text("model_name"):
        return True
    return not gated and "nemotron" not in cells.text("model_name")


def _with_experts(cells: Cells, arch: Arch) -> Arch:
    experts = cells.whole("experts") or 0
    if experts < 2:
        return arch
    stated = cells.argument("moe-ffn-hidden-size")
    width = int(stated) if stated and stated.isdigit() else arch.ffn
    shared = cells.argument("moe-shared-expert-intermediate-size")
    dense_first = re.match(r"\(\[0\]\*(\d+)", cells.argument("moe-layer-freq") or "")
    if dense_first:
        cells.note(f"the first {dense_first[1]} layers, dense in the source, priced as mixtures too")
    if cells.argument("mtp-num-layers") is not None:
        cells.note("the layer that predicts further tokens left out")
    return msgspec.structs.replace(
        arch,
        experts=experts,
        top_k=min(cells.whole_or("top_k", 2, "the usual number"), experts),
        expert_ffn=width,
        shared_experts=round(int(shared) / width) if shared and shared.isdigit() else 0,
        balance_loss=0.01,
    )


def _with_count(cells: Cells, arch: Arch) -> Arch:
    """The same architecture, made to agree with the stated parameter count where a choice was open."""
    stated = cells.number("params")
    if not stated or stated < 1e6:
        return arch
    off = abs(count(arch) / stated - 1)
    if arch.experts and off > NEAR:
        return _with_expert_width(cells, arch, stated)
    if not _has_arguments(cells) and "tied" not in cells.text("notes"):
        other = msgspec.structs.replace(arch, tied=not arch.tied)
        if abs(count(other) / stated - 1) < min(off, 0.02) and off > 0.01:
            cells.note(f"{'tied' if other.tied else 'untied'} output projection (agrees with the parameter count)")
            return other
    return arch


def _with_expert_width(cells: Cells, arch: Arch, stated: float) -> Arch:
    """The width of an expert, where the column holds the dense layers' width."""
    matrices = 3 if arch.mlp == "swiglu" else 2
    per_width = matrices * arch.hidden * (arch.experts + arch.shared_experts) * arch.mixture_layers
    rest = count(arch) - per_width * arch.expert_ffn
    width = round((stated - rest) / per_width / 64) * 64
    if width < 64 or width > arch.ffn:
        return arch
    cells.note(f"expert width {width} (from the parameter count; the column gives {arch.ffn})")
    return msgspec.structs.replace(arch, expert_ffn=width)
