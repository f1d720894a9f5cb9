"""SIGTERM, heard between steps: the run saves at the step it is in, and ends."""

import signal
from types import FrameType


class Stop:
    """Whether somebody has asked this rank to save and end."""

    def __init__(self) -> None:
        self.asked = False
        self.saved = True  # what was done until the end is on the disk

    def listen(self) -> "Stop":
        """Let SIGTERM ask. A second one asks the same: a save that has begun is never cut short."""
        signal.signal(signal.SIGTERM, self._hear)
        return self

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
