"""Bytes of one parameter's states: on the device, and away from it."""

import msgspec

from meshwright.cost.job import Rounding, States
from meshwright.cost.traffic_held import ITEM_BYTES
from meshwright.spec.plan import Plan

MOMENTS = 2  # AdamW keeps a mean and a mean square of every gradient
HALVES = 6  # states of 16 bits: what the narrow weight lacks, and both moments
PIECE, SLOTS = 1 << 24, 4  # elements that are moved together, and pieces on their way, as in optim/piece.py
WIDE = 4  # bytes of a number in which updates are computed
# Wide tensors of one piece alive at once while it is rounded: the gradient, the weight, both moments, what an update is
# made of, and the draws. Counted in optim/rounding.py and optim/moves.py.
ROUNDING_COPIES = 8


class Widths(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one parameter has of each kind."""

    weight: int  # on the device, where the optimizer or the arithmetic reads it
    gradient: int  # the sum over microbatches
    moments: int  # both
    low: int = 0  # the bits that a weight in bf16 leaves out, beside it
    away: int = 0  # off the device: wide weight and moments, or all of it


def widths(plan: Plan, rounding: Rounding = "master", states: States = "fp32") -> Widths:
    """Of our own trainer."""
    if plan.offload_weights:
        # Sums over copies stay on the device until the last microbatch; nothing else does.
        near = widths(msgspec.structs.replace(plan, offload_weights=False), rounding, states)
        summed = (8 if plan.precision == "fp64" else WIDE) if plan.copies > 1 and plan.accumulate > 1 else 0
        away = near.weight + near.gradient + near.moments + near.low
        return Widths(weight=0, gradient=summed, moments=0, away=away)
    narrow, wide = ITEM_BYTES[plan.precision], 8 if plan.precision == "fp64" else WIDE
    once = plan.accumulate == 1
    if plan.offload != "none":
        away = HALVES if states == "bf16" else (1 + MOMENTS) * wide
        return Widths(weight=narrow, gradient=narrow if once else wide, moments=0, away=away)
    if rounding != "master":
        summed_wide = plan.shadow and not once  # a lone rank adds up wide; sharded gradients are as their weights
        low = 2 if rounding == "compensated" else 0
        return Widths(weight=narrow, gradient=wide if summed_wide else narrow, moments=MOMENTS * wide, low=low)
    return Widths(weight=wide, gradient=narrow if plan.shadow and once else wide, moments=MOMENTS * wide)


def shares_weights(plan: Plan, rounding: Rounding = "master") -> bool:
    """Whether a lone rank computes with the very weights that it holds, narrow as they are."""
    return plan.world == 1 and plan.shadow and (plan.offload != "none" or rounding != "master")


def slot_bytes(plan: Plan, largest: int, states: States) -> int:
    """Device memory for pieces of states on their way to an update there; none larger than the largest weight."""
    if plan.offload == "none" or plan.offload_update == "host":
        return 0
    return SLOTS * min(PIECE, largest) * widths(plan, states=states).away


def update_bytes(plan: Plan, largest: int, rounding: Rounding, states: States) -> int:
    """What rounding makes on the device while it goes through the pieces of a weight."""
    if plan.offload_weights:
        return 0  # the host's affair
    halves = plan.offload != "none" and plan.offload_update == "device" and states == "bf16"
    return ROUNDING_COPIES * WIDE * min(PIECE, largest) if halves or rounding != "master" else 0
