"""The decoder: one module for GPT, Llama and mixture-of-experts shapes."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.layers import Block, Mlp, norm, rotation, weighed_loss, wide
from meshwright.models.moe import MoELayer
from meshwright.spec.arch import Arch

# From the documents of all positions to what every layer's attention is told of them.
Tell = Callable[[Tensor], Any]
# From hidden states, a projection, targets and a weight to the sum of losses: times the weight, and as it is.
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
        self.blocks = nn.ModuleDict({str(layer): Block(arch, _mlp(arch, layer)) for layer in range(arch.layers)})
        self.norm: nn.Module | None = norm(arch)
        self.head: nn.Linear | None = None if arch.tied else nn.Linear(arch.hidden, arch.vocab, bias=False)
        self.loss: Loss = weighed_loss  # another function may be put here
        self.tell: Tell = _as_they_are  # and here
        self.also_elsewhere: frozenset[str] = frozenset()  # of a part: weights that another part holds too

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
        (None: one), and their index in the run (None: routers draw nothing). Where a sequence is split over ranks,
        documents are those of all its positions. A part that does not begin the model is given hidden states
        (b, s, hidden) for tokens.

        `wanted`, targets and a weight, asks for the sum of the token losses instead, times the weight and as it is:
        logits then need not all exist at one time.
        """
        x = self.hidden(tokens, positions, documents, index)
        return self.project(x) if wanted is None else self.loss(x, self.projection, *wanted)

    @property
    def projection(self) -> Tensor:
        """The matrix that turns hidden states into logits; of the whole model, or its last part."""
        owner = self.head if self.head is not None else self.embed
        assert owner is not None, "a part that does not end the model has none"
        return owner.weight

    def hidden(
        self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None, index: Tensor | None = None
    ) -> Tensor:
        """Everything before the output projection."""
        x = self._begin(tokens, positions)
        turn = rotation(self.arch, positions, wide(x)) if self.arch.positions == "rope" else None
        told = None if documents is None else self.tell(documents)
        for block in self.blocks.values():
            x = block(x, turn, told, index)
        return x if self.norm is None else self.norm(x)

    def project(self, x: Tensor) -> Tensor:
        """The output projection."""
        if self.norm is None:  # the end of a part, not of the model
            return x
        if self.head is not None:
            return self.head(x)
        return x if self.embed is None else F.linear(x, self.embed.weight)

    def _begin(self, tokens: Tensor, positions: Tensor) -> Tensor:
        # The last part of a tied model holds an embedding too, so the input says what it is: hidden states are floats.
        if self.embed is None or tokens.is_floating_point():
            return tokens
        x = self.embed(tokens)
        return x if self.positions is None else x + self.positions(positions)


def _mlp(arch: Arch, layer: int) -> nn.Module:
    return MoELayer(arch, layer) if arch.is_mixture(layer) else Mlp(arch, arch.ffn)


def _as_they_are(documents: Tensor) -> Tensor:
    return documents
