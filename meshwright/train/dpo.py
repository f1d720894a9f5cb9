"""Direct preference optimization: chosen answers made likelier than rejected ones, beside what the base says of both.

    loss = −log σ(β ((log π(c) − log ρ(c)) − (log π(r) − log ρ(r)))), the mean over pairs (Rafailov 2023)

log π(a) is the sum of the log-probabilities of an answer's tokens. The reference ρ is the same model without its
adapter, computed in the same step without gradients. A row has pairs as documents 2k (chosen) and 2k + 1 (rejected).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.run import Run
from meshwright.data.loader import Batch, StepBatch
from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.layers import accum_dtype
from meshwright.models.lora import LoraLinear
from meshwright.parallel import tensor
from meshwright.parallel.mesh import Mesh, local
from meshwright.train.step import accumulated, arguments


def answer_log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """The log-probability of every document's trained tokens, (b, s + 1); documents that are not there have 0."""
    assert batch.documents is not None, "preferences are packed"
    flat = F.log_softmax(logits.flatten(0, -2), dim=-1, dtype=accum_dtype(logits))
    losses = local(F.nll_loss(flat, batch.targets.flatten(), ignore_index=IGNORE, reduction="none"))
    return _by_document(-losses.view(batch.targets.shape), batch.documents)


def _by_document(values: Tensor, documents: Tensor) -> Tensor:
    sums = values.new_zeros(values.shape[0], values.shape[1] + values.shape[1] % 2 + 2)
    return sums.scatter_add(1, documents, values)


def margins(log_probs: Tensor, reference: Tensor) -> Tensor:
    """How much more the model prefers the chosen answer of a pair than the reference does."""
    more = log_probs - reference
    return more[:, 0::2] - more[:, 1::2]


def there(batch: Batch) -> Tensor:
    """Which of the pairs that a row could have it has: a rejected answer has trained tokens."""
    assert batch.documents is not None
    return _by_document((batch.targets != IGNORE).long(), batch.documents)[:, 1::2] > 0


def preference_loss(rewards: Tensor, pairs: Tensor) -> Tensor:
    """The sum of the losses of pairs, from their margins times beta."""
    return -F.logsigmoid(rewards).where(pairs, 0.0).sum()


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The base, without gradients or draws. What is gathered for it stays, for the forward that follows."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    scales = [layer.scale for layer in layers]
    was_training = model.training
    model.eval()
    for layer in layers:
        layer.scale = 0.0
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scale = scale
        model.train(was_training)


class PreferenceStep:
    """Forward and backward of one step over pairs of answers."""

    def __init__(self, run: Run, model: nn.Module, mesh: Mesh) -> None:
        self.run, self.model, self.mesh = run, model, mesh
        self.seen = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # of this rank: rewards, and pairs ahead

    def __call__(self, batch: StepBatch, scale: Tensor) -> Tensor:
        """Returns this rank's sum of losses."""
        self.seen.zero_()
        with without_adapter(self.model), tensor.loss_context(self.run.plan):
            told = [self._log_probs(each) for each in batch.microbatches]
        pairs = list(zip(batch.microbatches, told, strict=True))
        return accumulated(self.model, self.run.plan, pairs, partial(self._losses, scale / batch.tokens))

    def _log_probs(self, batch: Batch) -> Tensor:
        return answer_log_probs(self.model(**arguments(self.run.plan, self.mesh, batch)), batch)

    def _losses(self, weight: Tensor, one: tuple[Batch, Tensor]) -> tuple[Tensor, Tensor]:
        batch, reference = one
        rewards, pairs = self.run.dpo.beta * margins(self._log_probs(batch), reference), there(batch)
        loss = preference_loss(rewards, pairs)
        with torch.no_grad():
            told = rewards.double().where(pairs, 0.0)
            self.seen += torch.stack([told.sum(), (told > 0).double().sum()]) / self.run.plan.tp  # every rank has it
        return loss * weight.to(loss.dtype), loss

    def told(self, pairs: int) -> Tensor:
        """The mean reward margin of the step's pairs, and the share of them whose chosen answer is ahead."""
        numbers = self.seen.clone()
        if self.mesh.world > 1:
            dist.all_reduce(numbers)
        return numbers / pairs

    @torch.no_grad()
    def held(self, batch: Batch) -> Tensor:
        """The sum of losses of pairs that are not trained on."""
        with tensor.loss_context(self.run.plan):
            with without_adapter(self.model):
                reference = self._log_probs(batch)
            log_probs = self._log_probs(batch)
        return preference_loss(self.run.dpo.beta * margins(log_probs, reference), there(batch))


def step_of(run: Run, chunks: Sequence[nn.Module], mesh: Mesh) -> PreferenceStep | None:
    """The step of a run that compares answers; None of others."""
    return PreferenceStep(run, chunks[0], mesh) if run.objective == "dpo" else None
