"""The outer loop among live replicas: local SGD, SlowMo and DiLoCo with whoever is there.

Replicas part and meet as in optim/outer.py. One that was lost since the last sync is left out of the next outer step:
the mean is over those present, each with the same weight. One that comes back gets weights, outer states and inner
states of a peer where the others sync; if that is before they have, it is a guest of that sync, with weight zero.
Nobody moves its weights before all present have said that they have the sums.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.optim.outer import Meeting, OuterLoop
from meshwright.parallel.mesh import Mesh
from meshwright.train.state import MovedError, State

if TYPE_CHECKING:
    from meshwright.train.survivors import Survivors

CALLED = 1024.0  # in the number that carries wishes to stop and words on saves, above these: somebody is to be let in


class LiveOuterLoop(OuterLoop):
    """The replicas of a plan that sync rarely, of which each can do without the others."""

    def __init__(self, run: Run, state: State, mesh: Mesh, live: "Survivors") -> None:
        super().__init__(run, state.chunks, state.optimizer, state.scale, mesh)
        self.state, self.live = state, live

    @torch.no_grad()
    def meet(self, step: int, loss: Tensor, tokens: int, votes: Tensor) -> Meeting | None:
        """After the update of a step: sync if that is due. MovedError: the others did so without this replica."""
        if not self._counted(step, loss, tokens):
            return None
        self.live.met = False
        return self.sync(votes, self.live.generation.number)

    def forget(self) -> None:
        """What was counted since the last sync, by a replica whose state is a peer's now."""
        self.loss, self.tokens = torch.zeros_like(self.loss), 0
        self.checksum = torch.zeros_like(self.checksum)

    @torch.no_grad()
    def sync(self, votes: Tensor, cast_in: int) -> Meeting:
        """Move to where the mean of those present leads, whether this replica brings something or is a guest.

        `cast_in`: the generation of the votes. Who was to be let in is there already if groups were made again since.
        """
        found: tuple[Tensor, list[Tensor]] | None = None
        while found is None:
            try:
                found = self.live.attempt(lambda: self._exchange(votes))
            except MovedError:
                if self.live.met:
                    raise
        rows, means = found
        self._compare_last(rows)
        called = bool(rows[:, 2].sum() >= CALLED) and self.live.generation.number == cast_in
        rows = rows.to(self.mesh.device)
        met = self._agree(rows, self.state.step)
        for bucket, flat in zip(self.buckets, means, strict=True):
            self._move(bucket.masters, bucket.anchor, bucket.momentum, flat.to(self.mesh.device))
        self._note_synced(self.calendar.due(self.state.step))
        self.live.called, self.live.met, self.live.is_guest = called, True, False
        assert met.votes is not None
        return Meeting(met.votes % CALLED, met.loss)

    def _exchange(self, votes: Tensor) -> tuple[Tensor, list[Tensor]]:
        """All tallies, and of each bucket the mean of deltas (or of weights, where no anchor is kept)."""
        live, own = self.live, self._tally(votes).double().cpu()
        weight = 0.0 if live.is_guest else 1.0
        own[:2] *= weight  # the loss and the tokens that it was counted over
        rows = live.group.gather(torch.cat([own, torch.tensor([weight], dtype=torch.float64)]))
        weights = rows[:, -1]
        if not weights.any():  # all who brought something are gone: guests hold what one of them had
            weight, weights = 1.0, torch.ones_like(weights)
        share = weight / float(weights.sum())
        means = [live.group.summed(self._brought(bucket.masters, bucket.anchor) * share) for bucket in self.buckets]
        live.group.gather(torch.zeros(1))  # nobody moves before all have the sums
        return rows, means

    @staticmethod
    def _brought(masters: list[Tensor], anchor: list[Tensor]) -> Tensor:
        delta = torch._foreach_sub(anchor, masters) if anchor else masters
        return torch.cat([tensor.reshape(-1) for tensor in delta]).cpu()

    def _move(self, masters: list[Tensor], anchor: list[Tensor], momentum: list[Tensor], flat: Tensor) -> None:
        parts = flat.split([tensor.numel() for tensor in masters])
        mean = [part.view(tensor.shape) for part, tensor in zip(parts, masters, strict=True)]
        if anchor:
            self.update(anchor, momentum, mean, self._rate(self.state.step, 0))
        torch._foreach_copy_(masters, anchor or mean)

    def _compare_last(self, rows: Tensor) -> None:
        """Replicas left their last sync with the same weights; who was not there has nothing to compare."""
        sums = zip(self.live.generation.members, rows[:, 6:8].tolist(), strict=True)
        told = [(member, sum_) for member, sum_ in sums if any(sum_)]
        if told:
            self.live.compare([sum_ for _, sum_ in told], [member for member, _ in told])
