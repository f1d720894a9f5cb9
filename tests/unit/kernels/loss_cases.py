"""The loss of logits, whole or from parts of the vocabulary, beside torch's in float64: for tests here and on a GPU."""

from collections.abc import Callable, Sequence

import kernel_cases
import torch
import torch.nn.functional as F
from kernel_cases import STEP, assert_near
from torch import Tensor

from meshwright.kernels.cross_entropy import IGNORE, VocabShard, softmax_gradient
from meshwright.kernels.dispatch import Kernels

WEIGHT = torch.tensor(0.25, dtype=torch.float64)
ROUNDING = 1e-12  # float64 sums of some hundred terms, in another order


def some_targets(rows: int, vocab: int, seed: int = 5) -> Tensor:
    """Entries of the vocabulary, every third of them not predicted, the first and the last among them."""
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    targets[0], targets[-1] = vocab - 1, 0
    targets[1::3] = IGNORE
    return targets.to(kernel_cases.DEVICE)


def exact(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's loss and its gradient times the weight, by torch in float64."""
    leaf = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(leaf, targets, ignore_index=IGNORE, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum() * WEIGHT, leaf)
    return losses.detach(), gradient


def in_parts(logits: Tensor, targets: Tensor, cuts: Sequence[int], kernels: Kernels) -> tuple[Tensor, Tensor]:
    """The same from parts of the vocabulary, one by one: what ranks would tell each other is heard beforehand."""
    bounds = list(zip([0, *cuts], [*cuts, logits.shape[1]], strict=True))
    told: list[Tensor] = []  # maxima, sums and targets' logits over all parts, as far as they are known
    for among in (torch.amax, torch.sum, torch.sum, None):
        heard: list[list[Tensor]] = []
        pieces, losses = [], None
        for first, end in bounds:
            said: list[Tensor] = []
            pieces.append(_copy(logits)[:, first:end])
            answer = answering(told, said)
            part = VocabShard(first=first, largest=logits.shape[1], ranks=len(bounds), max=answer, sum=answer)
            losses = gradient_over(pieces[-1], targets, part, kernels)
            heard.append(said)
        if among is not None:
            told.append(among(torch.stack([said[len(told)] for said in heard]), 0))
    assert losses is not None
    return losses, torch.cat(pieces, 1)


def gradient_over(logits: Tensor, targets: Tensor, part: VocabShard, kernels: Kernels) -> Tensor:
    """Each row's loss; over its logits the whole gradient, its factor brought in."""
    losses, factors = softmax_gradient(logits, targets, WEIGHT.to(logits.device), part, kernels)
    if factors is not None:
        logits *= factors
    return losses


def answering(told: list[Tensor], said: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """What a rank asks in turn, answered where the answer is known."""

    def answer(mine: Tensor) -> Tensor:
        said.append(mine)
        return told[len(said) - 1].clone() if len(said) <= len(told) else mine

    return answer


def assert_exact(found: tuple[Tensor, Tensor], logits: Tensor, targets: Tensor) -> None:
    losses, gradient = exact(logits, targets)
    assert_near(found[0], losses, STEP.get(found[0].dtype, ROUNDING))
    assert_near(found[1], gradient, STEP.get(logits.dtype, ROUNDING))
    assert not found[1][targets == IGNORE].any()


def _copy(x: Tensor) -> Tensor:
    """With the same strides; `clone` would close gaps."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
