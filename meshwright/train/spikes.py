"""Loss spikes, by a z-score that earlier spikes cannot spoil."""

import math
from collections import deque
from statistics import median

SCALE = 1.4826  # of the median absolute deviation to the standard deviation, for a normal distribution
WINDOW, ENOUGH = 64, 16  # steps that are looked back on; fewer than enough say nothing
# The least spread that is believed. A loss on a plateau deviates by less than it may jump for no reason; norms, as
# logarithms, jump more.
LEAST_LOSS_SHARE, LEAST_LOG_NORM = 0.02, 0.35


class Spikes:
    """Remembers the last steps and says how far off the newest one is."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)  # as logarithms

    def add(self, loss: float, norm: float) -> str:
        """What is remarkable about a step, or nothing."""
        if not self.limit or not (math.isfinite(loss) and math.isfinite(norm) and norm > 0):
            return ""
        least = LEAST_LOSS_SHARE * abs(median(self.losses or [loss]))
        found = [
            self._words("loss", self.losses, loss, least),
            self._words("logarithm of the gradient norm", self.norms, math.log(norm), LEAST_LOG_NORM),
        ]
        self.losses.append(loss)
        self.norms.append(math.log(norm))
        return "; ".join(words for words in found if words)

    def _words(self, name: str, values: deque[float], new: float, least: float) -> str:
        z = robust_z(list(values), new, least) if len(values) >= ENOUGH else 0.0
        if z <= self.limit:
            return ""
        return f"{name} {new:.4g} is {z:.0f} deviations above the median {median(values):.4g} of {len(values)} steps"


def robust_z(values: list[float], new: float, least: float) -> float:
    """How many deviations `new` lies above the median of `values`."""
    middle = median(values)
    spread = SCALE * median([abs(value - middle) for value in values])
    return (new - middle) / max(spread, least)
