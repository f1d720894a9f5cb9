"""Text from a decoder, token by token, with a KV cache: a new token costs one position, whatever went before it.

The decoder stays as it is trained: a cache stands where attention's own function stands. Column c of it belongs to
position c, and a query at position p sees columns 0 to p. So prompts of different lengths lie side by side, padded at
their ends: what pads them is never seen, because the tokens that follow overwrite it first.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.attention import PLAIN, Scoring, scored_attention
from meshwright.models.decoder import Decoder
from meshwright.models.layers import Attention, causal_attention
from meshwright.spec.arch import Arch

# On a GPU prompts and caches are padded to a multiple of this: its libraries plan attention anew for every shape, which
# takes longer than the attention.
COLUMNS = 128


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0  # 0: the likeliest token (greedy)
    top_k: int = 0  # only the k likeliest; 0: all
    top_p: float = 1.0  # only the likeliest that together have this probability
    seed: int = 1


class Visible(NamedTuple):
    """What queries of new tokens see of the cache."""

    columns: Tensor  # (b, s) where their own keys and values go
    mask: Tensor  # (b, 1, s, all columns)


class KVCache:
    """An attention function that keeps the keys and values of all positions so far, of one layer."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.keys = self.values = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible | None, how: Scoring = PLAIN) -> Tensor:
        """Attention of new tokens to the cache; of a whole prompt, which begins one, to itself."""
        if visible is None:
            self.keys, self.values = (F.pad(x, (0, 0, 0, self.columns - x.shape[2])) for x in (k, v))
            return causal_attention(q, k, v, None, how)
        places = visible.columns[:, None, :, None]
        self.keys.scatter_(2, places.expand_as(k), k)
        self.values.scatter_(2, places.expand_as(v), v)
        if not how.is_plain:
            return scored_attention(q, self.keys, self.values, visible.mask, how)
        # The query heads that share a key head become rows of it: no copy of the cache for each of them.
        sharing = q.shape[1] // k.shape[1]
        rows = q.unflatten(1, (-1, sharing)).flatten(2, 3)
        mask = visible.mask.repeat(1, 1, sharing, 1)
        y = F.scaled_dot_product_attention(rows, self.keys, self.values, attn_mask=mask, scale=how.scale)
        return y.unflatten(2, (sharing, -1)).flatten(1, 2)


@contextmanager
def caching(chunks: Sequence[nn.Module], columns: int) -> Iterator[None]:
    """A context where a model, or the parts of one, attends through caches."""

    def visible(positions: Tensor | None, window: int, _: Tensor) -> Visible | None:
        if positions is None:
            return None
        behind = positions[:, None, :, None] - torch.arange(columns, device=positions.device)
        return Visible(positions, (behind >= 0) & (behind < window) if window else behind >= 0)

    modules = [module for chunk in chunks for module in chunk.modules()]
    attentions = [(module, module.attend) for module in modules if isinstance(module, Attention)]
    decoders = [(module, module.build_mask, module.length) for module in modules if isinstance(module, Decoder)]
    try:
        for attention, _ in attentions:
            attention.attend = KVCache(columns)
        for decoder, _, _ in decoders:
            decoder.build_mask, decoder.length = visible, columns  # all tokens of a text are rotated alike
        yield
    finally:
        for attention, attend in attentions:
            attention.attend = attend
        for decoder, build_mask, length in decoders:
            decoder.build_mask, decoder.length = build_mask, length


Logits = TypeVar("Logits")  # (b, vocab); whoever computes under a plan may leave them to another rank
# From tokens (b, s), their positions, the columns of new tokens (None: a whole prompt) and which of the s is asked
# about, (b,), to the logits of the token that follows it.
Forward = Callable[[Tensor, Tensor, Tensor | None, Tensor], Logits]


def forward(model: Decoder) -> Forward[Tensor]:
    """A whole model; of a long prompt's logits only those that are asked for are computed."""

    def compute(tokens: Tensor, positions: Tensor, columns: Tensor | None, last: Tensor) -> Tensor:
        x = model.hidden(tokens, positions, documents=columns)
        return model.project(x[torch.arange(len(x), device=x.device), last])

    return compute


def columns_for(arch: Arch, device: torch.device, tokens: int, width: int = 1) -> int:
    """Columns for so many tokens of which new ones come `width` at a time, padded as the device likes it."""
    # Experts with a capacity count the tokens of a sequence, so padding would change what they take.
    step = math.lcm(width, COLUMNS if device.type == "cuda" and not arch.capacity else 1)
    return -(-tokens // step) * step


def continuations(
    compute: Forward[Logits],
    choose: Callable[[Logits], Tensor],
    arch: Arch,
    device: torch.device,
    prompts: Sequence[Sequence[int]],
    width: int = 1,
) -> Iterator[list[int]]:
    """The next token of every prompt, again and again: whoever iterates, within `caching`, decides when to stop.

    New tokens are computed in groups of `width`, all but the first of a group being padding: a plan that shards the
    sequence over ranks cannot compute fewer.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    size = columns_for(arch, device, int(lengths.max()), width)
    tokens = torch.tensor([[*prompt, *[0] * (size - len(prompt))] for prompt in prompts], device=device)
    columns, at, last = torch.arange(size, device=device).expand_as(tokens), None, lengths - 1
    group = torch.arange(width, device=device)
    while True:
        # Padding may lie behind the last position that a model knows.
        chosen = choose(compute(tokens, columns.clamp(max=arch.context - 1), at, last))
        yield chosen.tolist()
        tokens = F.pad(chosen[:, None], (0, width - 1))
        columns = at = lengths[:, None] + group
        last, lengths = torch.zeros_like(lengths), lengths + 1


def chooser(sampling: Sampling, device: torch.device, count: int) -> Callable[[Tensor], Tensor]:
    """Chooses the tokens of so many prompts; each has its draws to itself, the same ones as alone."""
    generators = [torch.Generator().manual_seed(sampling.seed) for _ in range(count)]

    def choose(logits: Tensor) -> Tensor:
        rows = zip(logits.float().cpu(), generators, strict=True)
        return torch.cat([draw(row, sampling, generator) for row, generator in rows]).to(device)

    return choose


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token: the likeliest at temperature 0, or so near to it that no probabilities can be had, else by its own."""
    scaled = logits / sampling.temperature if sampling.temperature else logits
    if sampling.temperature == 0 or not scaled.isfinite().all():
        return logits.argmax(keepdim=True)
    if sampling.top_k:
        scaled = scaled.where(scaled >= scaled.topk(min(sampling.top_k, len(scaled))).values[-1], -math.inf)
    if sampling.top_p < 1:
        likeliest, order = scaled.softmax(-1).sort(descending=True, stable=True)
        beyond = likeliest.cumsum(-1) - likeliest >= sampling.top_p  # what comes before it is enough already
        scaled = scaled.index_fill(0, order[beyond], -math.inf)
    return torch.multinomial(scaled.softmax(-1), 1, generator=generator)
