"""The decoder: one module for GPT, Llama and mixture-of-experts shapes."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.dropout import dropout
from meshwright.models.layers import Block, Mlp, accum_dtype, norm, rope_table, weighted_loss
from meshwright.models.moe import MoELayer
from meshwright.spec.arch import Arch

# From the documents of all positions to the mask that every layer's attention gets.
BuildMask = Callable[[Tensor], Any]
# From hidden states, a projection, targets and a weight to the sum of losses: times the weight, and unweighted.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Decoder(nn.Module):
    """A decoder-only transformer, or a run of its layers.

    A part of the model is the model with `embed`, `positions`, `norm` or `head` set to None and blocks deleted: what is
    missing is passed through. Blocks are keyed by their layer, so every name stays the same in every part. A tied model
    has no `head`; a part that ends one keeps `embed` to project with.
    """

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.embed: nn.Embedding | None = nn.Embedding(arch.vocab, arch.hidden)
        self.positions: nn.Embedding | None = None
        if arch.positions == "learned":
            self.positions = nn.Embedding(arch.context, arch.hidden)
        self.embed_dropout = dropout(arch.dropout)
        self.blocks = nn.ModuleDict({str(layer): Block(arch, _mlp(arch, layer)) for layer in range(arch.layers)})
        self.norm: nn.Module | None = norm(arch) if arch.norm_position == "pre" else nn.Identity()
        self.head: nn.Linear | None = None if arch.tied else nn.Linear(arch.hidden, arch.vocab, bias=False)
        self.loss: Loss = weighted_loss  # transforms may put other functions here
        self.build_mask: BuildMask = _document_ids
        self.tied_across_stages: frozenset[str] = frozenset()  # weights that another pipeline stage holds too

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        index: Tensor | None = None,
        wanted: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits (b, s, vocab) of the next token, or the hidden states of a part that does not end the model.

        All arguments are (b, s) integers: tokens, their positions within their documents, which document they are of
        (None: one), and their index in the run (None: routers and dropout draw nothing). Where a sequence is split
        over ranks, documents are those of all its positions. A part that does not begin the model is given hidden
        states (b, s, hidden) for tokens.

        `wanted`, targets and a weight, asks for the sum of the token losses instead, times the weight and unweighted:
        logits then need not all exist at one time.
        """
        x = self.hidden(tokens, positions, documents, index)
        return self.project(x) if wanted is None else self.loss(x, self.projection, *wanted)

    @property
    def projection(self) -> Tensor:
        """The output projection, from hidden states to logits, of the whole model or its last part."""
        owner = self.head if self.head is not None else self.embed
        assert owner is not None, "a part that does not end the model has none"
        return owner.weight

    def hidden(
        self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None, index: Tensor | None = None
    ) -> Tensor:
        """The hidden states before the output projection."""
        x = self._begin(tokens, positions, index)
        rope = rope_table(self.arch, positions, accum_dtype(x)) if self.arch.positions == "rope" else None
        mask = None if documents is None else self.build_mask(documents)
        for block in self.blocks.values():
            x = block(x, rope, mask, index)
        return x if self.norm is None else self.norm(x)

    def project(self, x: Tensor) -> Tensor:
        """The logits of hidden states; a part that does not end the model passes them through."""
        if self.norm is None:  # the end of a part, not of the model
            return x
        if self.head is not None:
            return self.head(x)
        return x if self.embed is None else F.linear(x, self.embed.weight)

    def _begin(self, tokens: Tensor, positions: Tensor, index: Tensor | None) -> Tensor:
        # The last part of a tied model holds an embedding too, so the input says what it is: hidden states are floats.
        if self.embed is None or tokens.is_floating_point():
            return tokens
        x = self.embed(tokens)
        return self.embed_dropout(x if self.positions is None else x + self.positions(positions), index)


def _mlp(arch: Arch, layer: int) -> nn.Module:
    return MoELayer(arch, layer) if arch.is_mixture(layer) else Mlp(arch, arch.ffn)


def _document_ids(documents: Tensor) -> Tensor:
    return documents
