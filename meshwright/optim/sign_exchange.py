"""A mean over replicas in one bit an element each way, with error feedback at the worker and at the server.

    worker i    c_i = C(x_i + e_i)      e_i ← x_i + e_i − c_i       all-to-all: to every server its chunk of c_i
    server s    c = C(mean of c_i + e)  e ← mean of c_i + e − c     all-gather: of its chunk of c

C keeps the signs of a chunk and one scale, the mean of its magnitudes (EF-signSGD, Karimireddy et al. 2019): whatever
the numbers, what C leaves out is then shorter than what it was given. A root mean square, which the code of 1-bit
Adam's authors takes, is longer where most numbers are near zero, as the momenta of an embedding are. Each weight has
scales of its own, so that weights whose momenta differ by orders of magnitude can travel together.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.mesh import all_gather
from meshwright.spec.communication import SCALE_BYTES, chunk_length

BITS = 8  # in a byte


class SignExchange:
    """The replicas of a plan, of which this rank is one: a worker, and the server of one chunk of every weight."""

    def __init__(self, group: dist.ProcessGroup | None, replicas: int = 1, number: int = 0) -> None:
        self.group, self.replicas, self.number = group, replicas, number

    def mean(
        self, values: Sequence[Tensor], worker: Sequence[Tensor], server: Sequence[Tensor], finite: Tensor
    ) -> list[Tensor]:
        """The mean of some tensors as all replicas receive it; errors are written, unless something is not finite."""
        sizes = [value.numel() for value in values]
        wanted = [value + error for value, error in zip(values, worker, strict=True)]
        message = self._encoded(self._rows(wanted), sizes, range(self.replicas))
        sent = self._tensors(self._decoded(message, wanted[0].dtype, sizes), values)
        for whole, kept, error in zip(wanted, sent, worker, strict=True):
            error.copy_(torch.where(finite, whole.sub_(kept), error))
        del wanted, sent
        received = torch.empty_like(message)
        if self.group is None:
            received.copy_(message)
        else:
            dist.all_to_all_single(received, message, group=self.group)
        chunk = self._decoded(received, values[0].dtype, sizes).mean(0, keepdim=True)
        self._clear_padding(chunk, sizes)
        chunk.add_(torch.cat(list(server)))
        message = self._encoded(chunk, sizes, range(self.number, self.number + 1))
        left = chunk.sub_(self._decoded(message, chunk.dtype, sizes))
        self._clear_padding(left, sizes)
        for error, new in zip(server, left[0].split(self._lengths(sizes)), strict=True):
            error.copy_(torch.where(finite, new, error))
        del chunk, left
        gathered = message.new_empty(self.replicas, message.shape[1])
        if self.group is None:
            gathered.copy_(message)
        else:
            all_gather(gathered, message, group=self.group)
        return self._tensors(self._decoded(gathered, values[0].dtype, sizes), values)

    def _lengths(self, sizes: Sequence[int]) -> list[int]:
        return [chunk_length(size, self.replicas) for size in sizes]

    def _rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """A row for each server: its chunks of all tensors, one after another."""
        lengths = self._lengths([tensor.numel() for tensor in tensors])
        rows = tensors[0].new_zeros(self.replicas, sum(lengths))
        for part, tensor, length in zip(rows.split(lengths, 1), tensors, lengths, strict=True):
            whole = tensor.reshape(-1)
            full = tensor.numel() // length
            part[:full].copy_(whole[: full * length].view(full, length))
            if full < self.replicas:
                part[full, : tensor.numel() - full * length].copy_(whole[full * length :])
        return rows

    def _tensors(self, rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors whose chunks the servers' rows have."""
        lengths = self._lengths([tensor.numel() for tensor in like])
        parts = zip(rows.split(lengths, 1), like, strict=True)
        return [part.reshape(-1)[: tensor.numel()].view(tensor.shape) for part, tensor in parts]

    def _encoded(self, rows: Tensor, sizes: Sequence[int], servers: range) -> Tensor:
        """Bytes of each row, which is of one server: a scale for each tensor, and the signs of all."""
        lengths = self._lengths(sizes)
        sums = [part.abs().sum(1) for part in rows.split(lengths, 1)]
        counts = [
            [max(min(size - server * length, length), 1) for server in servers]
            for size, length in zip(sizes, lengths, strict=True)
        ]
        scales = torch.stack(sums, 1) / torch.tensor(counts, dtype=rows.dtype, device=rows.device).T
        weights = 2 ** torch.arange(BITS, dtype=torch.uint8, device=rows.device)
        bits = (rows >= 0).view(len(rows), -1, BITS).to(torch.uint8).mul_(weights).sum(2, dtype=torch.uint8)
        return torch.cat([scales.float().contiguous().view(torch.uint8), bits], 1)

    def _decoded(self, message: Tensor, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
        """The rows that bytes stand for."""
        lengths, width = self._lengths(sizes), SCALE_BYTES * len(sizes)
        scales = message[:, :width].clone(memory_format=torch.contiguous_format).view(torch.float32).to(dtype)
        shifts = torch.arange(BITS, dtype=torch.uint8, device=message.device)
        signs = (message[:, width:, None] >> shifts).bitwise_and_(1).view(len(message), -1).to(dtype)
        signs.mul_(2).sub_(1)
        for number, part in enumerate(signs.split(lengths, 1)):
            part.mul_(scales[:, number : number + 1])
        return signs

    def _clear_padding(self, chunk: Tensor, sizes: Sequence[int]) -> None:
        """Zero what fills up this server's chunks: it has a sign too."""
        for part, size in zip(chunk.split(self._lengths(sizes), 1), sizes, strict=True):
            part[:, max(size - self.number * part.shape[1], 0) :] = 0
