"""AdamW over the parts of the weights that this rank holds."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshwright.config.run import Optim
from meshwright.kernels.adamw import AdamWGroup
from meshwright.kernels.dispatch import settle
from meshwright.models.layers import accum_dtype
from meshwright.optim.clip import GradStats
from meshwright.optim.master_weights import Update, at_once, beside, given, grouped, rounded
from meshwright.parallel import precision
from meshwright.parallel.mesh import local
from meshwright.spec.plan import Plan


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter 2019), by torch's fused kernel.

    torch.optim.AdamW reaches the same kernel, but its construction imports torch's compiler: two seconds on a small
    machine before the first step.
    """

    is_one_pass = False  # whether one kernel of ours makes the update

    def __init__(self, optim: Optim, weights: Iterable[nn.Parameter], plan: Plan) -> None:
        self.optim = optim
        self.weights = list(weights)
        self.wide = [precision.master(weight) for weight in self.weights]
        self.first = [torch.zeros_like(weight, dtype=accum_dtype(weight)) for weight in self.wide]
        self.second = [torch.zeros_like(moment) for moment in self.first]
        self.count = torch.zeros((), dtype=torch.float32, device=self.first[0].device)  # updates made, skips left out
        self.missed = [0] * len(self.weights)  # of these, how many each weight had no gradient for
        self.update = self._choose(plan)

    def _choose(self, plan: Plan) -> Update:
        masters = self.optim.master_weights == "fp32"
        if plan.deterministic:
            return self._plain if masters else rounded(self)
        if settle(plan.kernels, self.wide[0].device, self.wide[0].dtype).kind == "fused":
            self.is_one_pass = True
            return one_pass(self) if masters else at_once(self)
        return self._fused if masters else rounded(self)

    def zero_grad(self) -> None:
        """Forget the gradient, and its memory."""
        for weight in self.weights:
            weight.grad = None

    def held(self) -> dict[int, dict[str, Tensor]]:
        """The state of every weight, by its id and by kind: what a checkpoint saves from and restores into."""
        parts = zip(self.weights, self.wide, self.first, self.second, strict=True)
        return {
            id(weight): {"weight": wide, **beside(weight), "first": one, "second": two}
            for weight, wide, one, two in parts
        }

    def settle(self) -> None:
        """Wait until no update is on its way; here none ever is."""

    def stall_seconds(self) -> float:
        """How long the device has waited for states that are elsewhere."""
        return 0.0

    def close(self) -> None:
        """Give back what the optimizer has beside memory."""

    @torch.no_grad()
    def step(self, rate: float, verdict: GradStats) -> None:
        """Update every weight that has a gradient, or none when the verdict says the gradient is not finite.

        One without is as if this step had not been: it does not decay, nor do its moments.
        """
        self.count += verdict.finite
        for (decay, missed), indices in self._groups().items():
            self.update(indices, rate, decay, self.count - missed if missed else self.count, verdict)
        idle = [i for i, weight in enumerate(self.weights) if weight.grad is None and weight.requires_grad]
        if idle and verdict.finite:  # the host waits, but not for models that use all of their parameters
            for i in idle:
                self.missed[i] += 1

    def _fused(self, indices: list[int], rate: float, decay: float, count: Tensor, verdict: GradStats) -> None:
        gradients = [self._gradient(i) for i in indices]
        divisor = verdict.factor.reciprocal().float()
        if gradients[0].dtype == torch.float64:
            # The kernel reads its divisor in fp32, too coarse for a proof: the factor is multiplied in beforehand.
            gradients, divisor = list(torch._foreach_mul(gradients, verdict.factor)), None
        torch._fused_adamw_(
            [self.wide[i] for i in indices],
            gradients,
            [self.first[i] for i in indices],
            [self.second[i] for i in indices],
            [],
            [count] * len(indices),
            lr=rate,
            beta1=self.optim.beta1,
            beta2=self.optim.beta2,
            weight_decay=decay,
            eps=self.optim.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=(1.0 - verdict.finite).float(),
        )
        for i, gradient in zip(indices, gradients, strict=True):
            weight = self.weights[i]
            if precision.has_master(weight):
                weight.copy_(self.wide[i])
                if weight.grad is not None:  # the kernel leaves gradients clipped, and this one was widened for it
                    weight.grad.copy_(gradient)

    def _plain(self, indices: list[int], rate: float, decay: float, count: Tensor, verdict: GradStats) -> None:
        """The same by operations that round once each, so that an element's bits do not depend on its neighbours.

        The fused kernel takes the ends of a tensor, which sharding moves, through other instructions than its middle.
        """
        beta1, beta2, count = self.optim.beta1, self.optim.beta2, count.double()
        finite = verdict.finite > 0
        for i in indices:
            weight = self.wide[i]
            factor, bias1, bias2 = (
                number.to(weight.dtype) for number in (verdict.factor, 1 - beta1**count, 1 - beta2**count)
            )
            gradient = self._gradient(i) * factor
            first = self.first[i] * beta1 + gradient * (1 - beta1)
            second = self.second[i] * beta2 + gradient.square() * (1 - beta2)
            move = first / bias1 / ((second / bias2).sqrt() + self.optim.eps)
            moved = weight * (1 - rate * decay) - move * rate
            for held, new in ((weight, moved), (self.first[i], first), (self.second[i], second)):
                held.copy_(torch.where(finite, new, held))

    def _gradient(self, index: int) -> Tensor:
        return local(given(self.weights[index])).to(self.first[index].dtype)

    def _groups(self) -> dict[tuple[float, int], list[int]]:
        """Weights with a gradient, by their decay (matrices decay, vectors do not) and the updates they missed."""
        groups: dict[tuple[float, int], list[int]] = {}
        for index, weight in enumerate(self.weights):
            if weight.grad is not None:
                decay = self.optim.weight_decay if weight.ndim >= 2 else 0.0
                groups.setdefault((decay, self.missed[index]), []).append(index)
        return groups


def one_pass(optimizer: AdamW) -> Update:
    """The update by one kernel that also writes the narrow copies."""

    def group(indices: list[int]) -> AdamWGroup:
        weights = [optimizer.weights[i] for i in indices]
        copies = [weight.detach() for weight in weights] if precision.has_master(weights[0]) else []
        wide, first, second = (
            [held[i] for i in indices] for held in (optimizer.wide, optimizer.first, optimizer.second)
        )
        return AdamWGroup(wide, first, second, copies)

    return grouped(optimizer, group)
