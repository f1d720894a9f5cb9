"""Learning rates, as pure functions of the step."""

import math

from meshwright.config.run import Optim


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The rate of step 0 … steps − 1."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / (optim.warmup + 1)
    return optim.lr * _shape(optim, step, steps)


def _shape(optim: Optim, step: int, steps: int) -> float:
    """The rate ÷ the highest rate, once warm."""
    if optim.schedule == "constant":
        return 1.0
    start = optim.warmup
    if optim.schedule == "wsd":  # warm-up, stable, decay
        start = max(start, steps - math.ceil(optim.decay_fraction * steps))
    done = _clamp((step - start) / max(steps - 1 - start, 1))
    remaining = (1 + math.cos(math.pi * done)) / 2 if optim.schedule == "cosine" else 1 - done
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * remaining


def _clamp(share: float) -> float:
    return min(max(share, 0.0), 1.0)
