"""The gradient noise scale: by how much a step's batch could grow before larger steps stop paying (McCandlish 2018).

A step's gradient is a sum over n microbatches. With p the mean square norm of a microbatch's own gradient, taken as a
mean over its tokens, and q that of the whole step's,

    variance of a microbatch's   σ² = n (p − q) / (n − 1)
    square of the true gradient  μ² = (n q − p) / (n − 1)
    noise scale, in tokens       B  = σ² · tokens of a microbatch ÷ μ²

A batch far beneath B takes hardly more tokens to a loss than any smaller one, one far above it hardly fewer steps than
any larger one; a batch of B needs twice the tokens of the smallest and twice the steps of the largest.
"""

from collections.abc import Sequence

import msgspec

from meshwright.runtime.records import StepRecord

STEPS = 100  # that are averaged, at most: the noise scale grows as the loss falls


class NoiseScale(msgspec.Struct, frozen=True, kw_only=True):
    """What the last steps of a run say."""

    tokens: float  # B
    sequences: float  # the same in sequences of the run's length
    steps: int  # that were averaged


def estimate(parts: float, whole: float, count: int) -> tuple[float, float]:
    """σ² of a microbatch's gradient, and μ², by the two square norms; either may be negative by chance."""
    return count * (parts - whole) / (count - 1), (count * whole - parts) / (count - 1)


def noise_scale(records: Sequence[StepRecord], batch: int) -> NoiseScale | None:
    """Of a run that measured it; None where it did not, or where chance leaves no gradient beside the noise.

    Both parts of the ratio are averaged by themselves: a mean of ratios would be far off.
    """
    measured = [record for record in records if record.gradient_square is not None and not record.skipped][-STEPS:]
    square = sum(record.gradient_square or 0.0 for record in measured)
    variance = sum(record.gradient_variance or 0.0 for record in measured)
    if not measured or square <= 0 or variance <= 0:
        return None
    tokens = variance / square
    each = sum(record.tokens for record in measured) / len(measured) / batch  # of a sequence
    return NoiseScale(tokens=tokens, sequences=tokens / each, steps=len(measured))
