"""The outer loop: replicas that take steps of their own and meet rarely. Local SGD, post-local SGD, SlowMo, DiLoCo.

Each replica trains by itself for `plan.sync_every` steps, with its own samples, gradient norm and optimizer states.
Then they meet. With x the weights as they were last synced, x_r a replica's now, and d the mean of x − x_r:

    average   x ← x − d                                       local SGD (Stich 2018; post-local: Lin et al. 2018)
    slowmo    u ← βu + d/γ;  x ← x − αγu                      Wang et al. 2019; γ: the replicas' own learning rate
    diloco    m ← μm + d;    x ← x − η(d + μm)                Douillard et al. 2023: outer SGD with Nesterov momentum

and every replica goes on from x with its optimizer states as they are. α, η are `optim.outer_lr`, β, μ are
`optim.outer_momentum`. Streaming DiLoCo (Douillard et al. 2025) syncs fragments of the model at staggered steps.

With `plan.outer_quant` deltas travel in eight or four bits. A row of a matrix is cut into blocks of up to 128 elements
of the whole weight, whatever part of it a rank holds: codes do not depend on the plan inside a replica. A block's scale
is its largest absolute value ÷ 127 (int4: ÷ 7). Vectors are sent as they are. Replicas all-gather codes and scales and
add them up in the precision of the weights: no sum is ever made of codes, and all replicas compute the same mean.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.config.run import Optim, Run
from meshwright.kernels.blockwise import as_bytes, as_codes, codes_of
from meshwright.models.lora import trained
from meshwright.optim.clip import LossScale
from meshwright.optim.interface import Optimizer, learning_rate
from meshwright.optim.master_weights import given
from meshwright.parallel.deterministic import bit_sum, odd_ones
from meshwright.parallel.mesh import Mesh, join, local
from meshwright.runtime.failure import Exit, Failure, FailureError
from meshwright.spec.communication import (
    ANCHOR,
    BITS,
    MOMENTUM,
    TALLY,
    block_length,
    calendar_of,
    fragment_of,
    outer_states,
)
from meshwright.spec.params import params
from meshwright.spec.plan import Plan

HALF = 2**32  # checksums travel in two numbers that a double holds exactly

Tensors = list[Tensor]
OuterUpdate = Callable[[Tensors, Tensors, Tensors, float], None]


def average(anchor: Tensors, momentum: Tensors, delta: Tensors, rate: float) -> None:
    """The mean of the replicas."""
    torch._foreach_sub_(anchor, delta)


def slowmo(optim: Optim, anchor: Tensors, momentum: Tensors, delta: Tensors, rate: float) -> None:
    """A step along a slow momentum of the replicas' mean direction, which a learning rate of its own has scaled."""
    torch._foreach_mul_(momentum, optim.outer_momentum)
    torch._foreach_add_(momentum, delta, alpha=1 / rate if rate else 0.0)  # at a rate of zero nothing has moved
    torch._foreach_add_(anchor, momentum, alpha=-optim.outer_lr * rate)


def diloco(optim: Optim, anchor: Tensors, momentum: Tensors, delta: Tensors, rate: float) -> None:
    """SGD with Nesterov momentum, for which the mean delta is the gradient."""
    torch._foreach_mul_(momentum, optim.outer_momentum)
    torch._foreach_add_(momentum, delta)
    torch._foreach_add_(anchor, delta, alpha=-optim.outer_lr)
    torch._foreach_add_(anchor, momentum, alpha=-optim.outer_lr * optim.outer_momentum)


def update_of(run: Run) -> OuterUpdate:
    """The outer update of a plan."""
    rules: dict[str, OuterUpdate] = {
        "average": average,
        "slowmo": partial(slowmo, run.optim),
        "diloco": partial(diloco, run.optim),
    }
    return rules[run.plan.outer]


class Codes:
    """How the deltas of one bucket travel."""

    def __init__(self, plan: Plan, weights: list[nn.Parameter]) -> None:
        self.bits = BITS.get(plan.outer_quant, 0)
        self.blocks = [block_length(weight.shape[-1]) if weight.ndim > 1 else 0 for weight in weights]  # 0: as it is

    def mean(self, deltas: Tensors, group: dist.ProcessGroup) -> Tensors:
        """The mean over the replicas of what each has rounded."""
        received = join(self.encode(deltas)[None], 0, group)
        total = self.decode(received[0], deltas)
        for row in received[1:]:
            torch._foreach_add_(total, self.decode(row, deltas))
        torch._foreach_div_(total, len(received))
        return total

    def encode(self, deltas: Tensors) -> Tensor:
        """Bytes: vectors as they are, then all scales, then all codes."""
        plain, scales, codes = list[Tensor](), list[Tensor](), list[Tensor]()
        for delta, block in zip(deltas, self.blocks, strict=True):
            if not block:
                plain.append(delta.reshape(-1).view(torch.uint8))
                continue
            code, scale = codes_of(delta.reshape(-1, block), self.bits)
            codes.append(code.reshape(-1))
            scales.append(scale.view(torch.uint8))
        return torch.cat([*plain, *scales, *([as_bytes(torch.cat(codes), self.bits)] if codes else [])])

    def decode(self, received: Tensor, like: Tensors) -> Tensors:
        """The deltas that bytes stand for, in the shapes and the precision of others."""
        matrices = [(tensor, block) for tensor, block in zip(like, self.blocks, strict=True) if block]
        sizes = [tensor.nbytes for tensor, block in zip(like, self.blocks, strict=True) if not block]
        sizes += [tensor.numel() // block * 4 for tensor, block in matrices]
        parts = list(received.split([*sizes, received.numel() - sum(sizes)]))
        whole = as_codes(parts.pop(), self.bits, sum(tensor.numel() for tensor, _ in matrices))
        codes = iter(whole.split([tensor.numel() for tensor, _ in matrices]))
        scales = iter(parts[len(like) - len(matrices) :])
        vectors = iter(parts[: len(like) - len(matrices)])
        found = []
        for tensor, block in zip(like, self.blocks, strict=True):
            if block:
                scale = next(scales).clone().view(torch.float32).to(tensor.dtype)
                found.append((next(codes).view(-1, block).to(tensor.dtype) * scale[:, None]).view(tensor.shape))
            else:
                found.append(next(vectors).clone().view(tensor.dtype).view(tensor.shape))
        return found


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights of this rank that are synced by one collective: a block's, as FSDP gathers them."""

    fragment: int
    weights: list[nn.Parameter]
    masters: Tensors  # this rank's parts, as the optimizer updates them
    anchor: Tensors  # empty where the outer update needs none
    momentum: Tensors


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all replicas told each other."""

    votes: Tensor | None  # the sum of what ranks ask for; None: it is not heard in this step
    loss: Tensor  # the mean over all tokens since the meeting before
    at_once: bool = False  # what they ask for must be heard in this step, and not in the next
    norm: Tensor | None = None  # of the gradient of all, where this rank did not know it before
    said: int | None = None  # the step in which they asked; None: this one


class NoOuterLoop:
    """Gradients are summed over all replicas in every step."""

    def __init__(self, run: Run) -> None:
        self.calendar = calendar_of(run.plan, run.optim, run.steps)
        self.staleness: int | None = None  # of the weights of this step, where a parameter server has them

    def begin(self, step: int) -> None:
        return None

    def pull(self, step: int) -> None:
        return None

    def resume(self, step: int, has_states: bool) -> None:
        return None

    def sum_gradients(self, step: int) -> None:
        return None

    def meet(self, step: int, loss: Tensor, tokens: int, votes: Tensor) -> Meeting | None:
        return Meeting(votes, loss / tokens)

    def states(self) -> Mapping[int, Mapping[str, Tensor]]:
        return {}


class OuterLoop(NoOuterLoop):
    """The replicas of a plan that sync rarely, as one rank sees them."""

    def __init__(
        self, run: Run, chunks: Sequence[nn.Module], optimizer: Optimizer, scale: LossScale, mesh: Mesh
    ) -> None:
        super().__init__(run)
        self.run, self.optimizer, self.scale, self.mesh = run, optimizer, scale, mesh
        self.group = mesh.group("replicate")
        self.update = update_of(run)
        self.buckets = list(_buckets(run, chunks, optimizer))
        self.codes = [Codes(run.plan, bucket.weights) for bucket in self.buckets]
        self.met_at = 0
        self.loss, self.tokens = torch.zeros((), dtype=torch.float64, device=mesh.device), 0
        self.checksum = torch.zeros((), dtype=torch.int64, device=mesh.device)

    def begin(self, step: int) -> None:
        """Before a step, counted from 1: replicas part from here when the warm-up is over."""
        if step == self.calendar.warmup + 1:
            self._anchor()

    def resume(self, step: int, has_states: bool) -> None:
        """Go on from a checkpoint; from one without outer states, replicas part from its weights."""
        self.met_at = step
        if not has_states:
            self._anchor()

    @torch.no_grad()
    def _anchor(self) -> None:
        for bucket in self.buckets:
            if bucket.anchor:
                torch._foreach_copy_(bucket.anchor, bucket.masters)

    @torch.no_grad()
    def sum_gradients(self, step: int) -> None:
        """In the warm-up: what plain training does during the backward, here once it is over."""
        if not self.calendar.is_plain(step):
            return
        for bucket in self.buckets:
            gradients = [local(given(weight)) for weight in bucket.weights]
            flat = _flat(gradients)
            dist.all_reduce(flat, group=self.group)
            torch._foreach_copy_(gradients, _like(flat, gradients))

    @torch.no_grad()
    def meet(self, step: int, loss: Tensor, tokens: int, votes: Tensor) -> Meeting | None:
        """After the update of a step: sync what is due. None where replicas do not meet."""
        if not self._counted(step, loss, tokens):
            return None
        due = self.calendar.due(step)
        found = self._tell(step, votes)
        for bucket, codes in zip(self.buckets, self.codes, strict=True):
            if bucket.fragment in due:
                self._sync(bucket, codes, step)
        self._note_synced(due)
        return found

    def _counted(self, step: int, loss: Tensor, tokens: int) -> bool:
        """Count a step's loss for the next meeting; whether that is now."""
        self.loss = self.loss + loss
        self.tokens += tokens
        return self.calendar.meets(step)

    def _note_synced(self, due: tuple[int, ...]) -> None:
        """Keep the checksum of what replicas leave a sync with, for the next one."""
        synced = [tensor for bucket in self.buckets if bucket.fragment in due for tensor in bucket.masters]
        if self.run.faults.compare_every and synced:
            self.checksum = torch.stack([bit_sum(tensor) for tensor in synced]).sum()

    def _sync(self, bucket: Bucket, codes: Codes, step: int) -> None:
        parts, masters = self.mesh.parts, bucket.masters
        if not bucket.anchor:  # an exact mean
            flat = _flat(masters)
            dist.all_reduce(flat, group=self.group)
            torch._foreach_copy_(masters, _like(flat.div_(parts), masters))
            return
        delta = list(torch._foreach_sub(bucket.anchor, masters))
        if codes.bits:
            mean = codes.mean(delta, self.group)
        else:
            flat = _flat(delta)
            dist.all_reduce(flat, group=self.group)
            mean = _like(flat.div_(parts), delta)
        self.update(bucket.anchor, bucket.momentum, mean, self._rate(step, bucket.fragment))
        torch._foreach_copy_(masters, bucket.anchor)

    def _rate(self, step: int, fragment: int) -> float:
        """The learning rate with which the replicas began to part since the last sync of a fragment."""
        first = step
        while first - 1 > self.calendar.warmup and fragment not in self.calendar.due(first - 1):
            first -= 1
        return learning_rate(self.run.optim, first - 1, self.run.steps)

    def _tell(self, step: int, votes: Tensor) -> Meeting:
        """Exchange the few numbers that replicas have in common, and take up what they agree on."""
        rows = join(self._tally(votes)[None], 0, self.group)
        if self.checksum.device.type == "cpu" or self.calendar.due(step):
            _compare(rows[:, 6:].tolist(), self.group, step, self.met_at)
        return self._agree(rows, step)

    def _tally(self, votes: Tensor) -> Tensor:
        """What this rank tells of itself."""
        scale, count = self.scale, self.optimizer.count
        tokens = torch.full_like(self.loss, self.tokens)
        halves = torch.stack([self.checksum >> 32, self.checksum % HALF])
        own = torch.stack([self.loss, tokens, votes, count.double(), scale.value, scale.streak])
        mine = torch.cat([own, halves.double()])
        assert mine.numel() == TALLY, "what the planner counts"
        return mine

    def _agree(self, rows: Tensor, step: int) -> Meeting:
        """Take up what follows from all replicas' tallies.

        One may have skipped an update whose gradient was not finite: the most updates count, and of loss scales the
        smallest is safe for all.
        """
        self.optimizer.count.fill_(rows[:, 3].amax())
        self.scale.value, self.scale.streak = rows[:, 4].amin(), rows[:, 5].amin()
        self.met_at, self.tokens = step, 0
        self.loss = torch.zeros_like(self.loss)
        return Meeting(rows[:, 2].sum(), rows[:, 0].sum() / rows[:, 1].sum())

    def states(self) -> Mapping[int, Mapping[str, Tensor]]:
        """The outer states of every weight, by its id and by kind."""
        kinds = outer_states(self.run.plan)
        found = {}
        for bucket in self.buckets:
            held = {ANCHOR: bucket.anchor, MOMENTUM: bucket.momentum}
            for number, weight in enumerate(bucket.weights):
                found[id(weight)] = {kind: held[kind][number] for kind in kinds}
        return found


def outer_loop(
    run: Run, chunks: Sequence[nn.Module], optimizer: Optimizer, scale: LossScale, mesh: Mesh
) -> NoOuterLoop:
    """The outer loop of a run; without one, what does nothing."""
    return OuterLoop(run, chunks, optimizer, scale, mesh) if run.plan.parts > 1 else NoOuterLoop(run)


def described(run: Run) -> list[str]:
    """A line for the log about what replicas that sync rarely do; none without an outer loop."""
    plan = run.plan
    if plan.parts == 1:
        return []
    warm = f", after {run.optim.sync_warmup} steps of plain training" if run.optim.sync_warmup else ""
    fragments = f" in {plan.outer_fragments} fragments" if plan.outer_fragments > 1 else ""
    return [
        f"outer loop: {plan.parts} replicas sync every {plan.sync_every} steps{fragments} ({plan.outer}){warm}; "
        "in between losses and norms are those of a rank's own replica. "
        "Saves, validation losses and a stop wait for the next sync"
    ]


def _buckets(run: Run, chunks: Sequence[nn.Module], optimizer: Optimizer) -> Iterator[Bucket]:
    """Each block of each chunk, under ep its experts apart, and what is outside the blocks."""
    table = {param.name: param for param in params(run.arch)}
    kinds, held = outer_states(run.plan), optimizer.held()
    for chunk in chunks:
        groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
        for name, weight in trained(chunk):
            key = table[name].layer, table[name].expert and run.plan.ep > 1
            groups.setdefault(key, []).append(weight)
        for (layer, _), weights in groups.items():
            masters = [held[id(weight)]["weight"] for weight in weights]
            yield Bucket(
                fragment_of(layer, run.plan.outer_fragments),
                weights,
                masters,
                anchor=[tensor.clone() for tensor in masters] if ANCHOR in kinds else [],
                momentum=[torch.zeros_like(tensor) for tensor in masters] if MOMENTUM in kinds else [],
            )


def _flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _like(flat: Tensor, tensors: Tensors) -> Tensors:
    """A flat tensor in parts of the shapes of others."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _compare(sums: list[list[float]], group: dist.ProcessGroup, step: int, since: int) -> None:
    """Replicas left their last meeting with the same weights: raise when their checksums say otherwise."""
    if all(each == sums[0] for each in sums):
        return
    odd, ranks = odd_ones(sums), dist.get_process_group_ranks(group)
    who = ", ".join(str(ranks[number]) for number in odd)
    raise FailureError(
        Failure(
            kind="replicas",
            code=Exit.HARDWARE,
            what=f"replicas left step {since} with different weights: ranks {who} of {ranks}",
            where=f"seen at the sync of step {step}",
            since=f"step {since}, when they were synced",
            cause="a bit changed in memory, in arithmetic or on the network: suspect the devices of those ranks",
            remedy="take the device out, and run the same command again; checkpoints in doubt are set aside",
            good_until=max(since - 1, 0),
            rank=ranks[odd[0]],
            step=step,
        )
    )
