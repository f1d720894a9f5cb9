"""An optimizer whose states are beside the weights: the usual form."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from meshwright.config.run import Optim
from meshwright.kernels.dispatch import settle
from meshwright.models.layers import accum_dtype
from meshwright.optim.clip import GradStats
from meshwright.optim.interface import Optimizer, Update, UpdateTerms
from meshwright.optim.master_weights import beside, given, rounded
from meshwright.optim.rules import rule_of
from meshwright.parallel import precision
from meshwright.parallel.mesh import local
from meshwright.spec.plan import Plan


class ResidentOptimizer(Optimizer):
    """By torch's fused kernel, by one of ours, or by plain operations, as the plan says.

    torch.optim reaches the same kernels, but its construction imports torch's compiler: two seconds on a small machine
    before the first step.
    """

    def __init__(self, optim: Optim, weights: Iterable[nn.Parameter], plan: Plan) -> None:
        super().__init__(optim)
        self.rule = rule_of(optim)
        self.weights = list(weights)
        self.wide = [precision.master(weight) for weight in self.weights]
        self._states = {
            name: [torch.zeros_like(weight, dtype=accum_dtype(weight)) for weight in self.wide]
            for name in self.spec.state_names
        }
        self._count = torch.zeros((), dtype=torch.float32, device=self.wide[0].device)
        self.missed = [0] * len(self.weights)  # updates for which each weight had no gradient
        self.update = self._choose(plan)

    def _choose(self, plan: Plan) -> Update:
        masters = self.optim.master_weights == "fp32"
        if plan.deterministic:
            return self._plain if masters else rounded(self)
        if settle(plan.kernels, self.wide[0].device, self.wide[0].dtype).kind == "fused":
            one_pass = self.rule.one_pass(self)
            if one_pass is not None:
                self.is_one_pass = True
                return one_pass
        return self._fused if masters else rounded(self)

    @property
    def count(self) -> Tensor:
        """Updates made, skipped ones left out."""
        return self._count

    def states(self) -> Mapping[str, list[Tensor]]:
        """Its state tensors by name, each in the order of the weights."""
        return self._states

    def states_of(self, index: int) -> list[Tensor]:
        """The state tensors of one weight, in the order of the rule."""
        return [tensors[index] for tensors in self._states.values()]

    def held(self) -> dict[int, dict[str, Tensor]]:
        """The state of every weight, by its id and by kind."""
        return {
            id(weight): {
                "weight": wide,
                **beside(weight),
                **dict(zip(self._states, self.states_of(index), strict=True)),
            }
            for index, (weight, wide) in enumerate(zip(self.weights, self.wide, strict=True))
        }

    @torch.no_grad()
    def step(self, rate: float, verdict: GradStats) -> None:
        """Update every weight that has a gradient, or none when the verdict says the gradient is not finite.

        One without is as if this step had not been: it does not decay, nor do its states.
        """
        self._count += verdict.finite
        for (decay, missed), indices in self._groups().items():
            count = self._count - missed if missed else self._count
            self.update(indices, UpdateTerms(rate, decay, count, verdict.factor, verdict.finite))
        idle = [i for i, weight in enumerate(self.weights) if weight.grad is None and weight.requires_grad]
        if idle and verdict.finite:  # the host waits, but not for models that use all of their parameters
            for i in idle:
                self.missed[i] += 1

    def _fused(self, indices: list[int], terms: UpdateTerms) -> None:
        weights, wide = ([held[i] for i in indices] for held in (self.weights, self.wide))
        gradients = [local(given(weight)) for weight in weights]
        states = [[tensors[i] for i in indices] for tensors in self._states.values()]
        widened = gradients
        if any(each.dtype != accum_dtype(held) for each, held in zip(gradients, wide, strict=True)):
            # Together: a few launches, however many weights there are.
            widened = [torch.empty_like(each, dtype=accum_dtype(each)) for each in wide]
            torch._foreach_copy_(widened, gradients)
        self.rule.fused(wide, widened, states, terms)
        if precision.has_master(weights[0]):  # all weights have a bf16 copy, or none has
            torch._foreach_copy_(weights, wide)
            if widened is not gradients:  # the kernel leaves its gradients clipped
                torch._foreach_copy_(gradients, widened)

    def _plain(self, indices: list[int], terms: UpdateTerms) -> None:
        finite = terms.finite > 0
        rules = {dtype: self.rule.arithmetic(terms, dtype) for dtype in {self.wide[i].dtype for i in indices}}
        for i in indices:
            weight, states = self.wide[i], self.states_of(i)
            moved, updated = rules[weight.dtype](weight, self._gradient(i), states)
            for held, new in ((weight, moved), *zip(states, updated, strict=True)):
                held.copy_(torch.where(finite, new, held))

    def _gradient(self, index: int) -> Tensor:
        return local(given(self.weights[index])).to(accum_dtype(self.wide[index]))

    def _groups(self) -> dict[tuple[float, int], list[int]]:
        """Weights with a gradient, by their decay and the updates they missed."""
        groups: dict[tuple[float, int], list[int]] = {}
        for index, weight in enumerate(self.weights):
            if weight.grad is not None:
                groups.setdefault((self.decay_of(weight), self.missed[index]), []).append(index)
        return groups
