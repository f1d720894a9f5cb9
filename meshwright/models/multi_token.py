"""Multi-token prediction (DeepSeek-V3): one block more that predicts the token after the next, in training alone.

At position i it reads the hidden state of the model and the embedding of token i + 1, each normed, side by side and
projected to one width; what a block and a norm make of that is projected as the model's own hidden states are, and
predicts token i + 2. Embedding and projection are the model's. The last position of a sequence predicts nothing.
"""

import torch
from torch import Tensor, nn

from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.layers import Block, Rope, norm
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
