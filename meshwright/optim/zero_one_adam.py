"""0/1 Adam (Lu et al. 2022): no warm-up, but a variance that is updated more and more rarely; then local steps.

Until `optim.freeze_step`, in `variance_steps` (spec/communication.py: so many, as many at half the rate, …)
gradients are summed exactly and update both moments; in the others a mean gradient of one bit updates the first. Then:

    m_i ← β₁m_i + (1 − β₁)g_i,  u_i ← u_i + η · m_i,  w_i ← w_i − η · m_i / (√v + ε)          on each worker alone
    at a sync:  u ← mean of u_i in one bit, with error feedback,  m ← u ÷ Ση
                w ← x − u / (√v + ε)  with x the weights as last synced,  u_i ← 0,  x ← w

The steps between two syncs double every `optim.local_step_scaler` steps up to `optim.local_step_clipper`. Errors begin
anew at the freeze, as in the code of its authors, who undo a worker's steps to get x: x is kept here, so that replicas
have the same bits. Moments are divided by their bias, and decay is ηλx, which is the same on all replicas.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.config.run import Optim
from meshwright.optim.interface import UpdateTerms, WeightShard
from meshwright.optim.onebit import CompressingRule, buckets
from meshwright.spec.communication import SERVER_ERROR, WORKER_ERROR, variance_updates


class ZeroOneAdamRule(CompressingRule):
    """The update of 0/1 Adam."""

    writes_always = True  # a sync is one also where this step's gradient is not finite

    def __init__(self, optim: Optim) -> None:
        super().__init__(optim)
        # Since the last sync: the sum of rates, and of rates ÷ the momentum's bias.
        self.rates: Tensor | None = None
        self.paces: Tensor | None = None

    def update(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        """Until the freeze as Adam, with gradients that are exact or of one bit; then local steps and syncs."""
        if self.step <= self.optim.freeze_step:
            self._until_frozen(shards, terms)
            return
        if self.rates is None or self.paces is None:
            self.rates = self.paces = torch.zeros_like(terms.finite)
        bias = self.bias(self.optim.beta1, terms, terms.finite)
        self.rates = self.rates + terms.finite * terms.rate
        self.paces = self.paces + terms.finite * terms.rate / bias
        for bucket in buckets(shards):
            for shard in bucket:
                self._local(shard, bias, terms)
            if self.exchange == "compressed":
                self._sync(bucket, self.rates, self.paces)
        if self.exchange == "compressed":
            self.rates = self.paces = None

    def _until_frozen(self, shards: Sequence[WeightShard], terms: UpdateTerms) -> None:
        for bucket in buckets(shards):
            gradients = [shard.gradient() for shard in bucket]
            if self.exchange == "compressed":
                gradients = self.mean(bucket, gradients, terms.finite > 0)
            for shard, gradient in zip(bucket, gradients, strict=True):
                if self.exchange == "exact":
                    shard.keep({"second": self.variance(shard, gradient)}, terms)
                shard.keep({"first": self.momentum(shard, gradient)}, terms)
                self._move(shard, terms)

    def _move(self, shard: WeightShard, terms: UpdateTerms) -> None:
        optim, finite = self.optim, terms.finite > 0
        made = variance_updates(optim.freeze_step, optim.var_update_scaler, self.step)
        second = shard.states["second"] / (1 - optim.beta2**made)
        first = shard.states["first"] / self.bias(optim.beta1, terms, second)
        move = self.direction(first, second).mul_(terms.rate)
        value = shard.value()
        shard.write(torch.where(finite, value * (1 - terms.rate * shard.decay) - move, value))
        if self.freezes:
            shard.states["second"].copy_(second)
            shard.states["synced"].copy_(shard.value())
            for kind in (WORKER_ERROR, SERVER_ERROR):
                shard.states[kind].zero_()

    def _local(self, shard: WeightShard, bias: Tensor, terms: UpdateTerms) -> None:
        """A step of this worker alone."""
        states = shard.states
        shard.keep({"first": self.momentum(shard, shard.gradient())}, terms)
        scaled = (states["first"] / bias.to(states["first"].dtype)).mul_(
            terms.rate * terms.finite.to(states["first"].dtype)
        )
        states["local"].add_(scaled)
        moved = shard.value() - self.direction(scaled, states["second"])
        decay = (terms.rate * shard.decay * terms.finite).to(moved.dtype)
        shard.write(moved - states["synced"] * decay)

    def _sync(self, bucket: Sequence[WeightShard], rates: Tensor, paces: Tensor) -> None:
        """All workers go on from one weight and one momentum."""
        always = torch.ones_like(rates) > 0
        means = self.mean(bucket, [shard.states["local"] for shard in bucket], always)
        for shard, mean in zip(bucket, means, strict=True):
            states, dtype = shard.states, mean.dtype
            first = torch.where(paces > 0, mean / paces.clamp(min=1e-300).to(dtype), states["first"])
            states["first"].copy_(first)
            kept = (1 - shard.decay * rates).to(dtype)
            states["synced"].mul_(kept).sub_(self.direction(mean, states["second"]))
            states["local"].zero_()
            shard.write(states["synced"])
