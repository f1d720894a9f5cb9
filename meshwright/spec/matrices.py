"""Whole matrices whose pieces several ranks hold: who holds what of one, and which rank orthogonalizes it.

Newton–Schulz (Muon) needs whole matrices, and one rank that has one suffices. So the matrices of a model are shared out
over all ranks that hold them, replicas too, balanced by FLOPs and batched by shape. Every rank and the planner make the
same plan, from shapes alone. Of each batch:

    gather   all-to-all among the ranks that hold pieces: each receives whole the matrices that it owns
    compute  each orthogonalizes its own
    scatter  all-to-all: each receives its pieces of what the others made
    copy     all-gathers over replicas, each of which made another share
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

STEPS = 5  # of Newton–Schulz
# Elements of the matrices that a rank orthogonalizes at once, and of what one all-gather over replicas returns: enough
# to fill a GPU, few beside a model. A larger matrix goes alone.
BATCH_ELEMENTS = 1 << 26


class MatrixCut(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One matrix, and how ranks cut it: tp first, then what tp leaves over shard; 1 where an axis leaves it whole."""

    rows: int
    columns: int
    tp: int = 1
    tp_dim: int = 0
    shard: int = 1
    shard_dim: int = 0

    @property
    def ranks(self) -> int:
        """Ranks that together hold it: its members, counted shard by shard."""
        return self.shard * self.tp

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        """Operations of orthogonalizing it: in each step two products along its longer side, and one of the shorter."""
        short, long = sorted((self.rows, self.columns))
        return STEPS * (4 * short * short * long + 2 * short**3)

    def region(self, member: int) -> tuple[slice, slice]:
        """The rows and columns of one member's piece."""
        spans = [(0, self.rows), (0, self.columns)]
        shard, tp = divmod(member, self.tp)
        for dim, ranks, rank in ((self.tp_dim, self.tp, tp), (self.shard_dim, self.shard, shard)):
            first, end = spans[dim]
            most = math.ceil((end - first) / ranks)
            begin = min(first + rank * most, end)
            spans[dim] = begin, min(begin + most, end)
        return slice(*spans[0]), slice(*spans[1])

    def piece(self, member: int) -> tuple[int, int]:
        """Rows and columns of one member's piece."""
        rows, columns = self.region(member)
        return rows.stop - rows.start, columns.stop - columns.start


class MatrixBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of one shape and cut that are exchanged and orthogonalized together."""

    cut: MatrixCut
    replicas: int
    start: int  # its first matrix among all of this cut
    owned: tuple[int, ...]  # by every rank, one after the other: replica by replica, in each by member

    def of_replica(self, replica: int) -> tuple[int, ...]:
        """How many the members of one replica own."""
        return self.owned[replica * self.cut.ranks : (replica + 1) * self.cut.ranks]

    def made_by(self, replica: int) -> range:
        """Which matrices of this cut one replica makes."""
        ranks = self.cut.ranks
        first = self.start + sum(self.owned[: replica * ranks])
        return range(first, first + sum(self.of_replica(replica)))

    @property
    def largest(self) -> int:
        """Matrices that the busiest replica makes; the others fill up to as many when they copy."""
        return max(sum(self.of_replica(replica)) for replica in range(self.replicas))

    def copies(self, member: int) -> Iterator[slice]:
        """Which of those each all-gather over replicas takes."""
        if self.replicas > 1:
            piece = math.prod(self.cut.piece(member))
            each = max(BATCH_ELEMENTS // max(self.replicas * piece, 1), 1)
            for start in range(0, self.largest, each):
                yield slice(start, min(start + each, self.largest))


def share_out(held: Mapping[MatrixCut, int], replicas: int) -> tuple[MatrixBatch, ...]:
    """The batches of so many matrices of each cut, which the same ranks hold.

    The costliest come first. All owners have as many of a batch, but for a rest, which goes to those with the least
    FLOPs before it, to other replicas first.
    """
    found: list[MatrixBatch] = []
    load: Counter[int] = Counter()
    for cut in sorted(held, key=lambda cut: (-cut.flops, cut)):
        owners = range(replicas * cut.ranks)
        together = max(BATCH_ELEMENTS // cut.elements, 1) * len(owners)
        for start in range(0, held[cut], together):
            each, rest = divmod(min(together, held[cut] - start), len(owners))
            eager = set(sorted(owners, key=lambda owner: (load[owner], owner % cut.ranks, owner))[:rest])
            owned = tuple(each + (owner in eager) for owner in owners)
            load.update({owner: count * cut.flops for owner, count in zip(owners, owned, strict=True)})
            found.append(MatrixBatch(cut=cut, replicas=replicas, start=start, owned=owned))
    return tuple(found)


def owned_flops(batches: Iterable[MatrixBatch], owner: int) -> int:
    """Operations of one rank."""
    return sum(batch.owned[owner] * batch.cut.flops for batch in batches)
