"""The decoder: one module for every family, each by the numbers of its Arch.

**Multi-token prediction (DeepSeek-V3)**: one block more that predicts the token after the next, in training alone.
At position i it reads the hidden state of the model and the embedding of token i + 1, each normed, side by side and
projected to one width; what a block and a norm make of that is projected as the model's own hidden states are, and
predicts token i + 2. Embedding and projection are the model's. The last position of a sequence predicts nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.dropout import dropout
from meshwright.models.layers import Block, Mlp, Rope, accum_dtype, norm, rope_table, softcapped, weighted_loss
from meshwright.models.lora import adapt
from meshwright.models.moe import MoELayer
from meshwright.spec.arch import Arch


class AheadBlock(Block):
    """A block that begins with a hidden state and the token after it, and ends with a norm."""

    def __init__(self, arch: Arch, mlp: nn.Module, layer: int) -> None:
        super().__init__(arch, mlp, layer)
        self.embed_norm, self.hidden_norm = norm(arch), norm(arch)
        self.join = nn.Linear(2 * arch.hidden, arch.hidden, bias=False)
        self.end_norm = norm(arch)

    def forward(
        self, x: Tensor, rope: Rope | None, mask: object, index: Tensor | None, following: Tensor | None = None
    ) -> Tensor:
        """What is projected to logits, of hidden states and the embeddings of the tokens that follow them."""
        assert following is not None, "a block of multi-token prediction is given the tokens that follow"
        # The order of published weights, whose name for the projection is eh_proj.
        joined = self.join(torch.cat((self.embed_norm(following), self.hidden_norm(x)), dim=-1))
        return self.end_norm(super().forward(joined, rope, mask, index))


def one_ahead(tokens: Tensor, targets: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tokens that follow those of whole sequences (b, s), and targets (b, s, 2): the next tokens, and those after.

    There is none after where a document ends between.
    """
    following, later = tokens.roll(-1, 1), targets.roll(-1, 1)
    following[:, -1], later[:, -1] = tokens[:, -1], IGNORE  # what follows the last is not seen by any other
    if documents is not None:
        later = later.where(documents.roll(-1, 1) == documents, IGNORE)
    return following, torch.stack((targets, later), dim=-1)


# From the documents of all positions (None: one), a window (0: none) and this rank's positions (b, s) to the mask that
# attention gets.
BuildMask = Callable[[Tensor | None, int, Tensor], Any]
# From hidden states, a projection, targets and a weight to the sum of losses: times the weight, and unweighted.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Decoder(nn.Module):
    """A decoder-only transformer, or a run of its layers.

    A part of the model is the model with `embed`, `positions`, `norm` or `head` set to None and blocks deleted: what is
    missing is passed through. Blocks are keyed by their layer, so every name stays the same in every part. A tied model
    has no `head`; a part that ends one keeps `embed` to project with, and one with multi-token prediction to look up.
    """

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.embed: nn.Embedding | None = nn.Embedding(arch.vocab, arch.hidden)
        self.positions: nn.Embedding | None = None
        if arch.positions == "learned":
            self.positions = nn.Embedding(arch.context, arch.hidden)
        self.embed_dropout = dropout(arch.dropout)
        self.blocks = nn.ModuleDict({str(layer): _block(arch, layer) for layer in range(arch.blocks)})
        self.norm: nn.Module | None = norm(arch) if arch.norm_position != "post" else nn.Identity()
        self.head: nn.Linear | None = None if arch.tied else nn.Linear(arch.hidden, arch.vocab, bias=False)
        adapt(self, arch)
        # Transforms may put other functions here.
        self.loss: Loss = partial(weighted_loss, softcap=arch.logit_softcap) if arch.logit_softcap else weighted_loss
        self.build_mask: BuildMask = _document_ids
        self.length = 0  # positions of whole sequences, of which a rank may have a part; 0: as many as are given
        self.tied_across_stages: frozenset[str] = frozenset()  # weights that another pipeline stage holds too

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        index: Tensor | None = None,
        wanted: tuple[Tensor, Tensor] | None = None,
        following: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits (b, s, vocab) of the next token, or the hidden states of a part that does not end the model.

        All arguments are (b, s) integers: tokens, their positions within their documents, which document they are of
        (None: one), and their index in the run (None: routers and dropout draw nothing). Where a sequence is split
        over ranks, documents are those of all its positions. A part that does not begin the model is given hidden
        states (b, s, hidden) for tokens.

        `wanted`, targets and a weight, asks for the sum of the token losses instead, times the weight and unweighted:
        logits then need not all exist at one time.

        `following`, the tokens (b, s) that follow, asks the end of the model for multi-token prediction too: its logits
        beside those of the next token, or, of targets (b, s, 2), its loss added to the weighted one.
        """
        x = self._begin(tokens, positions, index)
        given = self._given(x, positions, documents)
        x = self._through(x, given, index)
        if following is None or self.norm is None:
            return self.project(x) if wanted is None else self.loss(x, self.projection, *wanted)
        last = str(self.arch.layers)
        y = self._scaled(self.blocks[last](x, *given[last], index, self._begin(following, positions, index)))
        if wanted is None:
            return self.project(x), self.project(y)
        (targets, later), weight = wanted[0].unbind(-1), wanted[1]
        weighed, total = self.loss(x, self.projection, targets, weight)
        further, _ = self.loss(y, self.projection, later, weight * self.arch.mtp_loss_weight)
        return weighed + further, total

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
        return self._through(x, self._given(x, positions, documents), index)

    def _given(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> dict[str, tuple[Rope | None, Any]]:
        """What attention of each layer is given beside hidden states: rotations, and a mask."""
        arch = self.arch
        windows = {layer: arch.window_of(int(layer)) for layer in self.blocks}
        masks = {window: self.build_mask(documents, window, positions) for window in set(windows.values())}
        ropes = {
            is_local: rope_table(arch, positions, accum_dtype(x), is_local, self.length or positions.shape[1])
            for is_local in {arch.rope_local_theta > 0 and windows[layer] > 0 for layer in self.blocks}
            if arch.positions == "rope"
        }
        given = {}
        for layer, window in windows.items():
            is_local = arch.rope_local_theta > 0 and window > 0
            given[layer] = ropes[is_local] if arch.is_rotated(int(layer)) else None, masks[window]
        return given

    def _through(self, x: Tensor, given: dict[str, tuple[Rope | None, Any]], index: Tensor | None) -> Tensor:
        """Hidden states after the layers, and of the end of the model after its norm."""
        for layer, block in self.blocks.items():
            if not self.arch.looks_ahead(int(layer)):
                x = block(x, *given[layer], index)
        return x if self.norm is None else self._scaled(self.norm(x))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.arch.logit_scale == 1 else x * self.arch.logit_scale

    def project(self, x: Tensor) -> Tensor:
        """The logits of hidden states; a part that does not end the model passes them through."""
        if self.norm is None:  # the end of a part, not of the model
            return x
        if self.head is not None:
            return softcapped(self.head(x), self.arch.logit_softcap)
        return x if self.embed is None else softcapped(F.linear(x, self.embed.weight), self.arch.logit_softcap)

    def _begin(self, tokens: Tensor, positions: Tensor, index: Tensor | None) -> Tensor:
        # The last part of a tied model holds an embedding too, so the input says what it is: hidden states are floats.
        if self.embed is None or tokens.is_floating_point():
            return tokens
        x = self.embed(tokens)
        x = x if self.arch.embed_scale == 1 else x * self.arch.embed_scale
        return self.embed_dropout(x if self.positions is None else x + self.positions(positions), index)


def _block(arch: Arch, layer: int) -> Block:
    return (AheadBlock if arch.looks_ahead(layer) else Block)(arch, _mlp(arch, layer), layer)


def _mlp(arch: Arch, layer: int) -> nn.Module:
    return MoELayer(arch, layer) if arch.is_moe(layer) else Mlp(arch, arch.ffn)


def _document_ids(documents: Tensor | None, window: int, positions: Tensor) -> Tensor | None:
    return documents
