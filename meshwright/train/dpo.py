"""Direct preference optimization: chosen answers made likelier than rejected ones, beside what a reference says.

    loss = −log σ(β ((log π(c) − log ρ(c)) − (log π(r) − log ρ(r)))), the mean over pairs (Rafailov 2023)

log π(a) is the sum of the log-probabilities of an answer's tokens. The reference ρ is the same model without its
adapter, or, where all weights are trained, a frozen copy of what they were; it is computed in the same step without
gradients. A row has pairs as documents 2k (chosen) and 2k + 1 (rejected).

Ranks of cp have parts of every answer. What is in the brackets is a sum over tokens, so that each makes its part of it,
and one all-reduce the whole; the loss is then the same on all of them, and counts once. Stages of a pipeline hand on
the reference's hidden states first; the last has the log-probabilities, and the loss.
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
from meshwright.models.lora import AdaptedExperts, LoraLinear
from meshwright.parallel import context, fsdp, tensor
from meshwright.parallel.mesh import Mesh, local, sum_once
from meshwright.parallel.pipeline import Pipeline, stage_input, tied_group
from meshwright.spec.tuning import pair_slots
from meshwright.train.state import State
from meshwright.train.step import accumulated, arguments, forward_only, joined, share_weight, through_stages


def preference(logits: Tensor, targets: Tensor, documents: Tensor, slots: int) -> Tensor:
    """How much likelier the chosen answer of every pair is, in logarithms, by the tokens that are here: (b, slots)."""
    flat = F.log_softmax(logits.flatten(0, -2), dim=-1, dtype=accum_dtype(logits))
    losses = local(F.nll_loss(flat, targets.flatten(), ignore_index=IGNORE, reduction="none"))
    answers = _by_document(-losses.view(targets.shape), documents, slots)
    return answers[:, 0::2] - answers[:, 1::2]


def _by_document(values: Tensor, documents: Tensor, slots: int) -> Tensor:
    return values.new_zeros(values.shape[0], 2 * slots).scatter_add(1, documents, values)


def there(batch: Batch) -> Tensor:
    """Which of the pairs that a row could have it has: a rejected answer has trained tokens."""
    assert batch.documents is not None, "preferences are packed"
    trained, slots = (batch.targets != IGNORE).long(), pair_slots(batch.targets.shape[1])
    return _by_document(trained, batch.documents, slots)[:, 1::2] > 0


def preference_loss(rewards: Tensor, pairs: Tensor) -> Tensor:
    """The sum of the losses of pairs, from their margins times beta."""
    return -F.logsigmoid(rewards).where(pairs, 0.0).sum()


@contextmanager
def without_adapter(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """The base, without gradients or draws. What is gathered for it stays, for the forward that follows."""
    modules = (module for chunk in chunks for module in chunk.modules())
    layers = [module for module in modules if isinstance(module, LoraLinear | AdaptedExperts)]
    were_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    for layer in layers:
        layer.off = True
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.off = False
        for chunk, was_training in zip(chunks, were_training, strict=True):
            chunk.train(was_training)


@contextmanager
def frozen(copy: Sequence[nn.Module]) -> Iterator[None]:
    """The frozen copy, of which nothing stays gathered."""
    with torch.no_grad():
        yield
    for chunk in copy:
        fsdp.release(chunk)


class PreferenceStep:
    """Forward and backward of one step over pairs of answers."""

    def __init__(self, run: Run, state: State, mesh: Mesh) -> None:
        self.run, self.chunks, self.mesh = run, state.chunks, mesh
        self.reference = state.reference or state.chunks
        self.referring = partial(frozen if state.reference else without_adapter, self.reference)
        self.alike = run.plan.tp * run.plan.cp  # ranks that each have the whole loss of a microbatch
        self.seen = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # of this rank: rewards, and pairs ahead
        self.pairs: list[tuple[Batch, Tensor | None]] = []  # the step's microbatches, and what the reference says
        self.pipeline: Pipeline | None = None

    def __call__(self, batch: StepBatch, scale: Tensor) -> Tensor:
        """Returns this rank's sum of losses."""
        self.seen.zero_()
        with self.referring(), tensor.loss_context(self.run.plan):
            told = [self.preferences(self.reference, each) for each in batch.microbatches]
        self.pairs = list(zip(batch.microbatches, told, strict=True))
        plan, weight = self.run.plan, scale / batch.tokens
        # Routers have positions, not pairs: their own losses are means over all of the step's.
        share_weight(self.chunks, scale / (self.run.batch * self.run.sequence))
        if plan.pp == 1:
            total = accumulated(self.chunks[0], plan, self.pairs, partial(self._losses, weight))
        else:
            total = self._in_pipeline(weight)
        self.pairs = []
        return total / plan.cp

    def _losses(self, weight: Tensor, one: tuple[Batch, Tensor | None]) -> tuple[Tensor, Tensor]:
        loss = self._loss(self.preferences(self.chunks, one[0]), *one)
        return loss * weight.to(loss.dtype), loss

    def _in_pipeline(self, weight: Tensor) -> Tensor:
        run, mesh = self.run, self.mesh
        if self.pipeline is None:
            streams = partial(stage_input, run.arch, run.plan)
            tied = tied_group(run.arch, run.plan, mesh)
            self.pipeline = Pipeline(self.chunks, run.plan, mesh, self._stage_loss, streams, tied)
        whole = joined([batch for batch, _ in self.pairs])
        numbers = torch.arange(len(self.pairs))  # on the host, which reads them: torch hands a loss one tensor
        return through_stages(self.pipeline, run.plan, arguments(run.plan, mesh, whole), numbers, weight)

    def _stage_loss(self, logits: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        batch, reference = self.pairs[int(number)]
        return (loss := self._loss(self._preference(logits, batch), batch, reference)), loss

    def preferences(self, chunks: Sequence[nn.Module], batch: Batch) -> Tensor | None:
        """What a model prefers, this rank's part of it; None where another stage has it."""
        logits = forward_only(chunks, self.run, self.mesh, batch)
        return None if logits is None else self._preference(logits, batch)

    def _preference(self, logits: Tensor, batch: Batch) -> Tensor:
        assert batch.documents is not None, "preferences are packed"
        cut, slots = context.cut(self.run.plan, self.mesh), pair_slots(batch.targets.shape[1])
        return preference(logits, cut(batch.targets), cut(batch.documents), slots)

    def _loss(self, preferred: Tensor | None, batch: Batch, reference: Tensor | None) -> Tensor:
        """The sum of the losses of a microbatch's pairs, whole on every rank of tp and cp."""
        assert preferred is not None, "asked of the last stage"
        assert reference is not None, "which has both"
        ahead, pairs = preferred - reference, there(batch)
        rewards = self.run.dpo.beta * (ahead if self.run.plan.cp == 1 else sum_once(ahead, self.mesh.group("cp")))
        with torch.no_grad():
            told = rewards.double().where(pairs, 0.0)
            self.seen += torch.stack([told.sum(), (told > 0).double().sum()]) / self.alike
        return preference_loss(rewards, pairs)

    def told(self, pairs: int) -> Tensor:
        """The mean reward margin of the step's pairs, and the share of them whose chosen answer is ahead."""
        numbers = self.seen.clone()
        if self.mesh.world > 1:
            dist.all_reduce(numbers)
        return numbers / pairs

    @torch.no_grad()
    def held(self, batch: Batch) -> Tensor:
        """This rank's share over cp of the losses of pairs that are not trained on; zero on ranks of other stages."""
        with tensor.loss_context(self.run.plan):
            with self.referring():
                reference = self.preferences(self.reference, batch)
            preferred = self.preferences(self.chunks, batch)
            if preferred is None:
                return torch.zeros((), device=self.mesh.device)
            return self._loss(preferred, batch, reference) / self.run.plan.cp


def step_of(run: Run, state: State, mesh: Mesh) -> PreferenceStep | None:
    """The step of a run that compares answers; None of others."""
    return PreferenceStep(run, state, mesh) if run.objective == "dpo" else None
