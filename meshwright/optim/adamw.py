"""AdamW: decoupled weight decay (Loshchilov and Hutter 2019).

m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  w ← (1 − ηλ)w − η · m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.kernels.adamw import AdamWGroup, AdamWStep, BF16Group
from meshwright.kernels.adamw_quantized import QuantizedGroup, QuantizedMoments
from meshwright.optim.interface import Arithmetic, Tensors, Update, UpdateRule, UpdateTerms, scaled
from meshwright.optim.master_weights import given, is_contiguous, low_bits, rounded, rounding_draws
from meshwright.optim.quantized import agree, update_quantized
from meshwright.parallel import precision
from meshwright.parallel.mesh import local

if TYPE_CHECKING:
    from meshwright.optim.resident import ResidentOptimizer

KINDS = 3  # of weights with quantized states: whole blocks, the rows' last ones shorter, blocks that ranks share
GROUPS = 8  # that are remembered; there are two, unless a model leaves out other parameters in every step


class AdamWRule(UpdateRule):
    """The update of AdamW."""

    def fused(self, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], terms: UpdateTerms) -> None:
        """By torch's kernel."""
        first, second = states
        gradients, divisor = scaled(gradients, terms)
        torch._fused_adamw_(
            list(weights), list(gradients), list(first), list(second), [], [terms.count] * len(weights),
            lr=terms.rate, beta1=self.optim.beta1, beta2=self.optim.beta2, weight_decay=terms.decay,
            eps=self.optim.eps, amsgrad=False, maximize=False,
            grad_scale=divisor, found_inf=(1.0 - terms.finite).float(),
        )  # fmt: skip

    def arithmetic(self, terms: UpdateTerms, dtype: torch.dtype) -> Arithmetic:
        """By operations that round once each."""
        beta1, beta2, eps, count = self.optim.beta1, self.optim.beta2, self.optim.eps, terms.count.double()
        factor, bias1, bias2 = (scalar.to(dtype) for scalar in (terms.factor, 1 - beta1**count, 1 - beta2**count))

        def updated(weight: Tensor, gradient: Tensor, states: Tensors) -> tuple[Tensor, Tensors]:
            gradient = gradient * factor
            first = states[0] * beta1 + gradient * (1 - beta1)
            second = states[1] * beta2 + gradient.square() * (1 - beta2)
            move = first / bias1 / ((second / bias2).sqrt() + eps)
            return weight * (1 - terms.rate * terms.decay) - move * terms.rate, (first, second)

        return updated

    def one_pass(self, optimizer: "ResidentOptimizer") -> Update | None:
        """By kernels/adamw.py; bf16 weights that are not contiguous, whose draws have no step, by plain operations."""
        groups: dict[tuple[int, ...], AdamWGroup] = {}
        optim = self.optim

        def by_kernel(indices: list[int], terms: UpdateTerms) -> None:
            """One launch; the group of these weights is made once."""
            key = tuple(indices)
            if key not in groups:
                if len(groups) == GROUPS:
                    groups.clear()
                groups[key] = _group(optimizer, indices)
            gradients = [local(given(optimizer.weights[i])) for i in indices]
            step = AdamWStep(terms.rate, optim.beta1, optim.beta2, optim.eps, terms.count, terms.factor, terms.finite)
            groups[key].update(gradients, terms.decay, step)

        if optim.master_weights == "fp32":
            return by_kernel
        plain, contiguous = rounded(optimizer, self), [is_contiguous(weight) for weight in optimizer.weights]

        def update(indices: list[int], terms: UpdateTerms) -> None:
            for run, wanted in ((by_kernel, True), (plain, False)):
                if chosen := [i for i in indices if contiguous[i] is wanted]:
                    run(chosen, terms)

        return update

    def one_pass_quantized(self, optimizer: "ResidentOptimizer") -> Update:
        """By kernels/adamw_quantized.py, of weights whose states are quantized; what is not contiguous as above."""
        groups: dict[tuple[int, ...], QuantizedGroup] = {}
        optim, plain = self.optim, update_quantized(optimizer, self)

        def by_kernel(indices: list[int], terms: UpdateTerms) -> None:
            key = tuple(indices)
            if key not in groups:
                if len(groups) == KINDS * GROUPS:
                    groups.clear()
                groups[key] = _quantized_group(optimizer, indices)
            group, parts = groups[key], [optimizer.quantized[i] for i in indices]
            gradients = [local(given(optimizer.weights[i])) for i in indices]
            step = AdamWStep(terms.rate, optim.beta1, optim.beta2, optim.eps, terms.count, terms.factor, terms.finite)
            if not parts[0].shared:
                group.update(gradients, terms.decay, step)
                return
            scales = group.measured(gradients, terms.decay, step)
            agreed = agree(dict(enumerate(zip(parts, scales, strict=True)))).values()
            group.update_with(gradients, terms.decay, step, list(agreed))

        def update(indices: list[int], terms: UpdateTerms) -> None:
            kinds: dict[str, list[int]] = {}
            for i in indices:
                kind = optimizer.quantized[i].kind if is_contiguous(optimizer.weights[i]) else "plain"
                kinds.setdefault(kind, []).append(i)
            for kind, chosen in kinds.items():
                (plain if kind == "plain" else by_kernel)(chosen, terms)

        return update


def _quantized_group(optimizer: "ResidentOptimizer", indices: list[int]) -> QuantizedGroup:
    """Some weights of one kind, their quantized moments, and what their form has beside them."""
    weights, masters = ([held[i] for i in indices] for held in (optimizer.weights, optimizer.masters))
    moments = [QuantizedMoments(*optimizer.states_of(i), lead=optimizer.quantized[i].lead) for i in indices]
    state_dtype = optimizer.optim.state_dtype
    if optimizer.optim.master_weights == "split":
        return QuantizedGroup(state_dtype, "split", masters, moments, [low_bits(weight) for weight in weights])
    if optimizer.optim.master_weights == "none":
        draws = [rounding_draws(weight, "draws") for weight in weights]
        return QuantizedGroup(state_dtype, "stochastic", masters, moments, draws=draws)
    copies = [weight.detach() for weight in weights] if precision.has_master(weights[0]) else []
    return QuantizedGroup(state_dtype, "fp32", masters, moments, copies)


def _group(optimizer: "ResidentOptimizer", indices: list[int]) -> AdamWGroup:
    """Some weights as they are updated, their moments, and what their form has beside them."""
    weights = [optimizer.weights[i] for i in indices]
    masters = [optimizer.masters[i] for i in indices]
    first, second = (list(states) for states in zip(*(optimizer.states_of(i) for i in indices), strict=True))
    is_low = first[0].dtype == torch.bfloat16
    state_draws = [rounding_draws(weight, "state_draws") for weight in weights] if is_low else []
    if optimizer.optim.master_weights == "split":
        low = [low_bits(weight) for weight in weights]
        return BF16Group(masters, first, second, low=low, state_draws=state_draws)
    if optimizer.optim.master_weights == "none":
        draws = [rounding_draws(weight, "draws") for weight in weights]
        return BF16Group(masters, first, second, draws=draws, state_draws=state_draws)
    copies = [weight.detach() for weight in weights] if precision.has_master(weights[0]) else []
    return AdamWGroup(masters, first, second, copies)
