"""What a rank does for matrices that are orthogonalized whole (Muon): whom it exchanges them with, and the memory.

Who makes which is `spec/matrices.py`'s plan; here it is made from a rank's view of the model, as `optim/muon.py` makes
it from the weights themselves. Tests hold the two to each other, by the collectives and by the bytes that are alive.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from meshwright.cost.rank_view import ParamGroup, RankView, grid, groups, local_shape, shard_dim, share
from meshwright.spec.matrices import MatrixBatch, MatrixCut, owned_flops, share_out
from meshwright.spec.optimizers import is_hidden
from meshwright.spec.params import Param, Split

# Some of those in cost/traffic.py. That of a matrix which is whole on a rank, or has no copies, is none of them.
MatrixAxis = Literal["shard", "expert_shard", "tp", "shard_tp", "expert_shard_tp", "replicate", "expert_replicate"]


# By whether shard and tp cut inside matrices, and whether ep shares them out.
MEMBERS: Mapping[tuple[bool, bool, bool], MatrixAxis | None] = {
    (False, False, False): None, (False, False, True): None,
    (True, False, False): "shard", (True, False, True): "expert_shard",
    (False, True, False): "tp", (False, True, True): "tp",
    (True, True, False): "shard_tp", (True, True, True): "expert_shard_tp",
}  # fmt: skip


class MatrixTeam(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices that the same ranks hold, and which of these ranks this is."""

    batches: tuple[MatrixBatch, ...]
    members: MatrixAxis | None  # over which one copy is cut; None: it is whole on a rank
    copies: MatrixAxis  # over which copies are held, if there are several
    member: int
    replica: int

    @property
    def flops(self) -> int:
        """Operations of this rank."""
        ranks = self.batches[0].cut.ranks
        return owned_flops(self.batches, self.replica * ranks + self.member)

    def exchanged(self) -> Iterator[tuple[Literal["all_to_all", "all_gather"], MatrixAxis, int]]:
        """Every collective: its kind, its axis and the elements where the tensor is whole."""
        for batch in self.batches:
            mine, piece = batch.of_replica(self.replica), math.prod(batch.cut.piece(self.member))
            if self.members is not None:
                yield "all_to_all", self.members, sum(mine) * piece
                yield "all_to_all", self.members, mine[self.member] * batch.cut.elements
            for part in batch.copies(self.member):
                yield "all_gather", self.copies, batch.replicas * (part.stop - part.start) * piece

    def peak_elements(self, alone: bool) -> int:
        """The most elements that gathered matrices and the work on them take at a time; `alone`: one by one.

        While a batch is made, the next is on its way here and the last one on its way back.
        """
        sizes = [_BatchElements.of(self, batch, alone) for batch in self.batches]
        nothing = _BatchElements(0, 0, 0, 0, 0)
        moments = zip([*sizes, nothing, nothing], [nothing, *sizes, nothing], [nothing, nothing, *sizes], strict=True)
        most = 0
        for following, now, last in moments:
            most = max(
                most,
                following.coming + now.coming + last.returning,
                following.coming + now.made + last.returning,
                following.coming + now.returning + last.pieces + last.copied,
            )
        return most


class _BatchElements(msgspec.Struct, frozen=True):
    """Elements that a batch takes on a rank at one time or another."""

    coming: int  # the pieces that leave, and the matrices that arrive
    made: int  # those in work and what they are multiplied with
    returning: int  # the matrices that leave, and the pieces that arrive
    pieces: int  # those alone
    copied: int  # what goes to other replicas, and comes from all

    @classmethod
    def of(cls, team: MatrixTeam, batch: MatrixBatch, alone: bool) -> "_BatchElements":
        cut, mine = batch.cut, batch.of_replica(team.replica)
        piece, square = math.prod(cut.piece(team.member)), min(cut.rows, cut.columns) ** 2
        owned, pieces = mine[team.member], sum(mine) * piece
        whole = owned * cut.elements
        travels = team.members is not None
        work = 2 * (whole + owned * square)  # before and after a step, and two polynomials of the shorter side
        if alone:
            work = whole + 2 * (cut.elements + square) if owned else 0
        copies = [part.stop - part.start for part in batch.copies(team.member)]
        return cls(
            coming=pieces + whole if travels else whole,
            made=max(work, whole + pieces) if travels else work,
            returning=whole + pieces if travels else whole,
            pieces=pieces,
            copied=max((count * piece * (1 + batch.replicas) for count in copies), default=0),
        )


def matrix_teams(view: RankView) -> tuple[MatrixTeam, ...]:
    """The matrices of a rank's blocks, by who holds them together; what another optimizer updates is left out."""
    held: dict[tuple[bool, int, int], Counter[MatrixCut]] = {}
    for group in groups(view):
        for param in group.trained.params:
            if is_hidden(param.name, len(param.shape)):
                cut, count = _held(param, group, view)
                held.setdefault((group.shared_by_ep, cut.shard, cut.tp), Counter())[cut] += group.count * count
    return tuple(_team(expert, cuts, view) for (expert, _, _), cuts in held.items())


def _held(param: Param, group: ParamGroup, view: RankView) -> tuple[MatrixCut, int]:
    """How a weight's matrices are cut, and how many of them the ranks that share these have."""
    plan, (_, shards) = view.plan, grid(group, view.plan)
    shape = local_shape(param, view)  # what is sharded
    stacked = len(shape) - 2
    dim = shard_dim(shape, shards, view.cuts_rows_only)
    count, inside = math.prod(shape[:stacked]), dim >= stacked
    if not inside:
        count = share(shape[0], shards, _shard_rank(view, group.shared_by_ep))
    by_tp = plan.tp if param.split is not Split.NONE else 1
    cut = MatrixCut(
        rows=param.shape[-2],
        columns=param.shape[-1],
        tp=by_tp,
        tp_dim=int(param.split is Split.ROW and by_tp > 1),
        shard=shards if inside else 1,
        shard_dim=dim - stacked if inside and shards > 1 else 0,
    )
    return cut, count


def _shard_rank(view: RankView, expert: bool) -> int:
    """This rank among those that shard weights, or stacks of experts that ep shares out."""
    plan = view.plan
    rank = view.at("shard") * plan.cp + view.at("cp") if plan.zero else 0
    return rank // plan.ep if expert else rank


def _team(expert: bool, held: Counter[MatrixCut], view: RankView) -> MatrixTeam:
    plan, one = view.plan, next(iter(held))
    copies = plan.copies if plan.zero or not expert else plan.copies // plan.ep
    replica = view.at("replicate") if plan.zero else view.at("replicate") * plan.cp + view.at("cp")
    if expert and not plan.zero:
        replica //= plan.ep
    sharded = _shard_rank(view, expert) if one.shard > 1 else 0
    return MatrixTeam(
        batches=shared_out(tuple(held.items()), copies),
        members=MEMBERS[one.shard > 1, one.tp > 1, expert],
        copies="expert_replicate" if expert else "replicate",
        member=sharded * one.tp + (view.at("tp") if one.tp > 1 else 0),
        replica=replica,
    )


@lru_cache(maxsize=1024)
def shared_out(held: tuple[tuple[MatrixCut, int], ...], replicas: int) -> tuple[MatrixBatch, ...]:
    """The plan of `share_out`, made once for the same matrices."""
    return share_out(dict(held), replicas)
