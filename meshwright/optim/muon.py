"""Muon (Jordan 2024): momentum whose matrices are orthogonalized, with Moonlight's scale and weight decay (Liu 2025).

    b ← μb + g,  u ← g + μb,  w ← (1 − ηλ)w − η · 0.2 √max(r, c) · NS(u)

NS is five steps of a quintic Newton–Schulz iteration: it brings all singular values of u near one and leaves its
singular vectors as they are, so it needs whole matrices. Which rank makes which of them is in `spec/matrices.py`; here
they are gathered, made and given back, the next batch travelling while one is made. In a stack each matrix is one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.kernels import muon as elements
from meshwright.kernels.dispatch import settle
from meshwright.kernels.muon import MuonStep
from meshwright.models.layers import accum_dtype
from meshwright.optim.interface import UpdateTerms
from meshwright.optim.master_weights import STORES, given, low_bits, widened
from meshwright.parallel import precision
from meshwright.parallel.mesh import Mesh, all_gather, local
from meshwright.spec.matrices import STEPS, MatrixBatch, MatrixCut, share_out
from meshwright.spec.plan import Plan

if TYPE_CHECKING:
    from meshwright.optim.resident import ResidentOptimizer

# Jordan's: singular values are driven towards one as fast as five steps can, to within some 0.7 to 1.2 of it.
A, B, C = 3.4445, -4.7750, 2.0315
LEAST_NORM = 1e-7  # that a matrix is divided by: one of zeros stays so
RMS = 0.2  # of an update's elements, as AdamW's are, so that one learning rate serves both (Moonlight)


def orthogonalize(x: Tensor) -> Tensor:
    """Newton–Schulz of every matrix of x (n, r, c), which is overwritten; in the dtype of x, its norms in fp32."""
    x = x.mul_(_inverse_norm(x))
    tall = x.shape[-2] > x.shape[-1]  # then its columns are multiplied with each other, which are fewer than its rows
    for _ in range(STEPS):
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)
        # A·x is added to the product below: on the polynomial's diagonal bf16 would round it twice as coarsely.
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, *((x, polynomial) if tall else (polynomial, x)), beta=A)
    return x


def one_by_one(x: Tensor) -> Tensor:
    """The same, each matrix by itself: its bits then do not depend on those beside it, which differ by plan."""
    for number in range(len(x)):
        matrix = x[number : number + 1]
        matrix.copy_(orthogonalize(matrix))
    return x


def _inverse_norm(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=accum_dtype(x))
    return norm.clamp(min=LEAST_NORM).reciprocal().to(x.dtype)


def scale(cut: MatrixCut) -> float:
    """What an orthogonalized matrix is multiplied with, so that its elements have the RMS of AdamW's."""
    return RMS * math.sqrt(max(cut.rows, cut.columns))


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that hold some weights, as one of them sees it."""

    members: dist.ProcessGroup | None  # with whom it holds one copy; None: it has matrices whole
    replicas: dist.ProcessGroup | None  # that hold the same pieces; None: nobody else does
    member: int = 0
    replica: int = 0


@dataclass(frozen=True, slots=True)
class HeldMatrices:
    """A weight as matrices: how ranks cut each of them, and how many there are among those ranks."""

    cut: MatrixCut
    count: int
    expert: bool  # the ranks of ep hold other ones

    @property
    def team(self) -> tuple[bool, int, int]:
        """What is alike for weights that the same ranks hold."""
        return self.expert, self.cut.shard, self.cut.tp


def held_matrices(weight: Tensor) -> HeldMatrices:
    """How a weight of two or more dims is held: what cuts between matrices leaves them whole, on fewer ranks."""
    *stack, rows, columns = weight.shape
    if not isinstance(weight, DTensor):
        return HeldMatrices(MatrixCut(rows=rows, columns=columns), math.prod(stack), False)
    sizes = dict(zip(weight.device_mesh.mesh_dim_names or (), weight.device_mesh.shape, strict=True))
    inside: dict[str, tuple[int, int]] = {}  # ranks and dim of what cuts matrices
    first = len(stack)
    for (name, ranks), placement in zip(sizes.items(), weight.placements, strict=True):
        dim = getattr(placement, "dim", -1)  # -1: every rank of the axis has the same
        if dim >= first and ranks > 1:
            inside[name] = ranks, dim - first
    assert inside.keys() <= {"tp", "shard"}, "other axes do not cut matrices"
    (tp, tp_dim), (shard, shard_dim) = inside.get("tp", (1, 0)), inside.get("shard", (1, 0))
    cut = MatrixCut(rows=rows, columns=columns, tp=tp, tp_dim=tp_dim, shard=shard, shard_dim=shard_dim)
    return HeldMatrices(cut, math.prod(local(weight.detach()).shape[:first]), sizes.get("ep", 1) > 1)


def holders_of(held: HeldMatrices, mesh: Mesh | None) -> Holders:
    """Whom this rank shares such matrices with."""
    if mesh is None or mesh.world == 1:
        return Holders(None, None)
    kind, cut = ("expert" if held.expert else "dense"), held.cut
    grid = mesh.expert if held.expert else mesh.dense
    replicas = grid.get_group("replicate")
    copied = replicas if replicas.size() > 1 else None
    replica = grid.get_local_rank("replicate")
    if cut.ranks == 1:
        return Holders(None, copied, 0, replica)
    if cut.tp > 1 and cut.shard > 1:
        group = mesh.over_shard_and_tp(kind)
    else:
        group = grid.get_group("tp" if cut.tp > 1 else "shard")
    return Holders(group, copied, dist.get_rank(group), replica)


class MuonUpdate:
    """The update of some of an optimizer's weights, all that Muon takes, by their indices."""

    def __init__(self, optimizer: "ResidentOptimizer", plan: Plan, alone: bool) -> None:
        """`alone`: each matrix by itself, and by plain operations, so that bits do not depend on the plan."""
        self.optimizer, self.alone = optimizer, alone
        self.held = {
            index: held_matrices(optimizer.weights[index])
            for index, name in enumerate(optimizer.updaters)
            if name == "muon"
        }
        first = optimizer.masters[next(iter(self.held))]
        # Matrices travel and are multiplied in low precision where the model is; fp16 has too few exponents for it.
        self.dtype = torch.bfloat16 if precision.is_low(plan) else first.dtype
        fused = settle(plan.kernels, first.device, first.dtype).kind == "fused" and not alone
        self.fused = fused and optimizer.optim.master_weights != "none"  # there is no kernel that draws
        self.teams: dict[tuple[int, ...], list[tuple[list[int], Orthogonalizer]]] = {}

    def __call__(self, indices: list[int], terms: UpdateTerms) -> None:
        """Update them; which rank makes which matrix is planned once for the same weights."""
        key = tuple(indices)
        if key not in self.teams:
            self.teams.clear()  # that changes only for models that leave out parameters
            self.teams[key] = self._teams(indices)
        step = MuonStep(self.optimizer.optim.momentum, terms.factor, terms.finite)
        change = (FusedElements if self.fused else PlainElements)(self.optimizer, step, terms)
        for members, orthogonalizer in self.teams[key]:
            held = [self.held[index] for index in members]

            def fill(matrix: Matrix, room: Tensor | None, members: list[int] = members) -> None:
                change.accumulate(members[matrix[0]], matrix[1], room)

            def apply(
                matrix: Matrix, made: Tensor, members: list[int] = members, held: list[HeldMatrices] = held
            ) -> None:
                change.move(members[matrix[0]], matrix[1], made, terms.rate * scale(held[matrix[0]].cut))

            orthogonalizer.run(fill, apply)
        weights = self.optimizer.weights
        if not self.fused and precision.has_master(weights[0]):  # all weights have a bf16 copy, or none has
            torch._foreach_copy_([weights[i] for i in indices], [self.optimizer.masters[i] for i in indices])

    def _teams(self, indices: list[int]) -> list[tuple[list[int], "Orthogonalizer"]]:
        """Weights by who holds them together."""
        by_team: dict[tuple[bool, int, int], list[int]] = {}
        for index in indices:
            by_team.setdefault(self.held[index].team, []).append(index)
        device = self.optimizer.masters[0].device
        return [
            (
                members,
                Orthogonalizer(
                    [self.held[index] for index in members],
                    holders_of(self.held[members[0]], self.optimizer.mesh),
                    self.dtype,
                    device,
                    self.alone,
                ),
            )
            for members in by_team.values()
        ]


class PlainElements:
    """What an update does by elements to one matrix of a weight, by plain operations, in any form of the weights."""

    def __init__(self, optimizer: "ResidentOptimizer", step: MuonStep, terms: UpdateTerms) -> None:
        self.optimizer, self.step, self.terms = optimizer, step, terms
        self.store = STORES[optimizer.optim.master_weights]

    def accumulate(self, index: int, number: int, room: Tensor | None) -> None:
        """Add the gradient to the momentum; write what is to be orthogonalized."""
        gradient, (momentum,) = local(given(self.optimizer.weights[index])), self.optimizer.states_of(index)
        elements.accumulate(_matrix(gradient, number), _matrix(momentum, number), room, self.step)

    def move(self, index: int, number: int, made: Tensor, by: float) -> None:
        """Move the weight by an orthogonalized matrix, after its decay."""
        weight, master = self.optimizer.weights[index], self.optimizer.masters[index]
        part = slice(number * made.numel(), (number + 1) * made.numel())
        held = widened(weight, master, part)
        moved = elements.moved(held, made.reshape(-1), self.stays(index), by, self.step.finite)
        self.store(weight, master, moved, self.terms.count, part.start)

    def stays(self, index: int) -> float:
        """What decay leaves of a weight."""
        return 1 - self.terms.rate * self.optimizer.decay_of(self.optimizer.weights[index])


class FusedElements(PlainElements):
    """The same by one kernel each, of fp32 weights with a bf16 copy or none, or of split ones."""

    def __init__(self, optimizer: "ResidentOptimizer", step: MuonStep, terms: UpdateTerms) -> None:
        super().__init__(optimizer, step, terms)
        self.scalars = step.scalars()

    def accumulate(self, index: int, number: int, room: Tensor | None) -> None:
        """Add the gradient to the momentum; write what is to be orthogonalized."""
        gradient, (momentum,) = local(given(self.optimizer.weights[index])), self.optimizer.states_of(index)
        parts = _matrix(gradient, number), _matrix(momentum, number)
        elements.accumulate_fused(*parts, room, self.scalars, self.step.share)

    def move(self, index: int, number: int, made: Tensor, by: float) -> None:
        """Move the weight by an orthogonalized matrix, after its decay."""
        weight, master = self.optimizer.weights[index], self.optimizer.masters[index]
        beside = None
        if precision.has_master(weight):
            beside = _matrix(local(weight.detach()), number)
        elif self.optimizer.optim.master_weights == "split":
            beside = _matrix(low_bits(weight), number)
        elements.move_fused(_matrix(master, number), beside, made, self.stays(index), by, self.scalars)


def _matrix(part: Tensor, number: int) -> Tensor:
    """This rank's piece of one matrix of a weight."""
    return part if part.dim() == 2 else part.flatten(0, -3)[number]


Matrix = tuple[int, int]  # a weight by its index, and which of its matrices
# Take part with this rank's piece of a matrix, to be written, or only noticed where another replica makes it.
Fill = Callable[[Matrix, Tensor | None], object]
Apply = Callable[[Matrix, Tensor], object]  # take this rank's piece of an orthogonalized one


class Orthogonalizer:
    """The whole matrices of some weights, gathered from the ranks that hold them, orthogonalized and given back."""

    def __init__(
        self, held: Sequence[HeldMatrices], holders: Holders, dtype: torch.dtype, device: torch.device, alone: bool
    ) -> None:
        """`alone`: each matrix by itself."""
        self.holders, self.dtype, self.device = holders, dtype, device
        self.matrices: dict[MatrixCut, list[Matrix]] = {}
        for weight, each in enumerate(held):
            self.matrices.setdefault(each.cut, []).extend((weight, number) for number in range(each.count))
        replicas = holders.replicas.size() if holders.replicas else 1
        self.batches = share_out({cut: len(found) for cut, found in self.matrices.items()}, replicas)
        self.compute = one_by_one if alone else orthogonalize

    def run(self, fill: Fill, apply: Apply) -> None:
        """Orthogonalize all matrices: the next batch travels here, and the last one back, while one is made."""
        coming = returning = None
        for batch in (*self.batches, None):
            following = None if batch is None else (batch, self._gather(batch, fill))
            if coming is not None:
                made = self._make(*coming)
                if returning is not None:
                    self._arrive(*returning, apply)
                returning = coming[0], made
            coming = following
        if returning is not None:
            self._arrive(*returning, apply)

    def _gather(self, batch: MatrixBatch, fill: Fill) -> "PendingTensor":
        """Send the pieces of what this replica makes to their owners."""
        cut, mine = batch.cut, batch.of_replica(self.holders.replica)
        piece, owned = cut.piece(self.holders.member), mine[self.holders.member]
        leaving = torch.empty(sum(mine), *piece, dtype=self.dtype, device=self.device)
        for replica in range(batch.replicas):
            made_here = replica == self.holders.replica
            for place, matrix in enumerate(self._made_by(batch, replica)):
                fill(matrix, leaving[place] if made_here else None)
        if self.holders.members is None:
            return PendingTensor(leaving)
        arriving = leaving.new_empty(owned * cut.elements)
        sent = [count * math.prod(piece) for count in mine]
        received = [owned * math.prod(cut.piece(member)) for member in range(cut.ranks)]
        return PendingTensor.started(arriving, leaving.view(-1), received, sent, self.holders.members)

    def _make(self, batch: MatrixBatch, flight: "PendingTensor") -> "PendingTensor":
        """Orthogonalize what this rank owns, and send the pieces of it to their holders."""
        if self.holders.members is None:
            return PendingTensor(self.compute(flight.landed()))
        cut, mine = batch.cut, batch.of_replica(self.holders.replica)
        owned, each = mine[self.holders.member], math.prod(cut.piece(self.holders.member))
        leaving = parted(self.compute(joined(flight.landed(), cut, owned)), cut)
        arriving = leaving.new_empty(sum(mine) * each)
        received = [count * each for count in mine]
        sent = [owned * math.prod(cut.piece(member)) for member in range(cut.ranks)]
        return PendingTensor.started(arriving, leaving, received, sent, self.holders.members)

    def _arrive(self, batch: MatrixBatch, flight: "PendingTensor", apply: Apply) -> None:
        """Hand on this rank's pieces of a batch, those that other replicas made too."""
        piece, mine = batch.cut.piece(self.holders.member), batch.of_replica(self.holders.replica)
        made = flight.landed().view(sum(mine), *piece)
        if self.holders.replicas is None:
            self._hand_on(self._made_by(batch, 0), made, apply)
        for part in batch.copies(self.holders.member):
            self._copy(batch, part, made, apply)

    def _copy(self, batch: MatrixBatch, part: slice, made: Tensor, apply: Apply) -> None:
        """Exchange some pieces with the other replicas, which made other matrices."""
        filled = made.new_zeros(part.stop - part.start, *made.shape[1:])
        filled[: len(made[part])] = made[part]
        every = filled.new_empty(batch.replicas, *filled.shape)
        all_gather(every.view(-1), filled.view(-1), group=self.holders.replicas)
        for replica in range(batch.replicas):
            self._hand_on(self._made_by(batch, replica)[part], every[replica], apply)

    def _made_by(self, batch: MatrixBatch, replica: int) -> list[Matrix]:
        which = batch.made_by(replica)
        return self.matrices[batch.cut][which.start : which.stop]

    def _hand_on(self, matrices: list[Matrix], pieces: Tensor, apply: Apply) -> None:
        for matrix, piece in zip(matrices, pieces, strict=False):  # what fills up stands for none
            apply(matrix, piece)


@dataclass(slots=True)
class PendingTensor:
    """A tensor that may still be on its way, and what it is made of, which must live as long."""

    result: Tensor | None
    source: Tensor | None = None
    work: dist.Work | None = None

    @classmethod
    def started(
        cls, result: Tensor, source: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> "PendingTensor":
        """An all-to-all that has begun."""
        return cls(result, source, dist.all_to_all_single(result, source, received, sent, group=group, async_op=True))

    def landed(self) -> Tensor:
        """The tensor, once, when it is there; a GPU's stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        result, self.result, self.source, self.work = self.result, None, None, None
        assert result is not None, "it lands once"
        return result


def joined(arrived: Tensor, cut: MatrixCut, count: int) -> Tensor:
    """Whole matrices (count, rows, columns) of the members' pieces, one member's after the other's."""
    if even(cut):
        return (
            arrived.view(cut.shard, cut.tp, count, *cut.piece(0))
            .permute(_order(cut))
            .reshape(count, cut.rows, cut.columns)
        )
    whole = arrived.new_empty(count, cut.rows, cut.columns)
    for (rows, columns), part in _parts(arrived, cut, count):
        whole[:, rows, columns] = part
    return whole


def parted(whole: Tensor, cut: MatrixCut) -> Tensor:
    """The members' pieces of whole matrices, flat, one member's after the other's."""
    count = len(whole)
    if even(cut):
        rows, columns = cut.piece(0)
        order = _order(cut)
        shape = [(cut.shard, cut.tp, count, rows, columns)[place] for place in order]
        back = [order.index(place) for place in range(len(order))]
        return whole.reshape(shape).permute(back).reshape(-1)
    flat = whole.new_empty(whole.numel())
    for (rows, columns), part in _parts(flat, cut, count):
        part.copy_(whole[:, rows, columns])
    return flat


def even(cut: MatrixCut) -> bool:
    """Whether all members' pieces are of one shape."""
    return all(cut.piece(member) == cut.piece(0) for member in range(cut.ranks))


def _order(cut: MatrixCut) -> list[int]:
    """Places of (shard, tp, matrix, row, column) in a matrix: of two axes that cut one dim tp is the outer one."""
    by_dim: list[list[int]] = [[], []]
    by_dim[cut.tp_dim].append(1)
    by_dim[cut.shard_dim].append(0)
    return [2, *by_dim[0], 3, *by_dim[1], 4]


def _parts(flat: Tensor, cut: MatrixCut, count: int) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Every member's region of a matrix, and its pieces in a flat tensor of all members'."""
    start = 0
    for member in range(cut.ranks):
        rows, columns = cut.piece(member)
        end = start + count * rows * columns
        yield cut.region(member), flat[start:end].view(count, rows, columns)
        start = end
