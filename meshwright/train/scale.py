"""Dynamic loss scaling for fp16: the scale lives on the device and every rank moves it alike."""

import torch
from torch import Tensor

from meshwright.spec.plan import Plan

FIRST = 2.0**16
GROW_AFTER = 1000  # finite steps in a row before the scale doubles
LOWEST = 1.0


class LossScale:
    """What the loss is multiplied with so that small gradients survive fp16. One, always, in other precisions.

    The only overflow test is the global gradient norm, which all ranks see; a test per process would let ranks that
    hold different shards skip different steps.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.moves = plan.precision == "fp16"
        self.value = torch.tensor(FIRST if self.moves else 1.0, dtype=torch.float64, device=device)
        self.streak = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, finite: Tensor) -> None:
        """Halve after an overflow, double after a long streak without one. Nothing waits for the device."""
        if not self.moves:
            return
        self.streak = (self.streak + 1) * finite
        grown = self.streak >= GROW_AFTER
        factor = torch.where(finite > 0, torch.where(grown, 2.0, 1.0), 0.5)
        self.value = (self.value * factor).clamp(min=LOWEST)
        self.streak = torch.where(grown, 0.0, self.streak)
