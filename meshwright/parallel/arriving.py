"""Numbers on their way from a device to the host: whoever reads them waits for no work that was launched after them."""

import torch
from torch import Tensor


class ArrivingNumbers:
    """A small tensor that is being copied to the host; one that is there already is taken as it is."""

    def __init__(self, numbers: Tensor, *, sleeps: bool = False) -> None:
        """`sleeps`: whoever waits leaves its core to others meanwhile."""
        self.host, self.ready = numbers, None
        if numbers.is_cuda:
            self.host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.host.copy_(numbers, non_blocking=True)
            self.ready = torch.cuda.Event(blocking=sleeps)
            self.ready.record()

    def read(self) -> list[float]:
        """They, once they have arrived."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.host.tolist()
