"""What ranks tell each other about a save or a load: a number from the first, or the words of whoever failed."""

import torch
import torch.distributed as dist

from meshwright.parallel.mesh import Mesh

MOST_BYTES = 2000  # of somebody's words


def number_of_first(number: int, mesh: Mesh) -> int:
    """Rank 0's number, on every rank."""
    if mesh.world == 1:
        return number
    told = torch.tensor(number, dtype=torch.int64, device=mesh.device)
    dist.broadcast(told, src=0)
    return int(told.item())


def first_words(text: str | None, mesh: Mesh) -> str | None:
    """The words of the first rank that has any, on every rank; None when all are silent. Every rank must ask."""
    if mesh.world == 1:
        return text
    speaker = torch.tensor(mesh.world if text is None else mesh.rank, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(speaker, dist.ReduceOp.MIN)
    rank = int(speaker.item())
    if rank == mesh.world:
        return None
    words = torch.zeros(MOST_BYTES, dtype=torch.uint8, device=mesh.device)
    if rank == mesh.rank:
        mine = (text or "").encode()[:MOST_BYTES]
        words[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(mesh.device) if mine else 0
    dist.broadcast(words, src=rank)
    return f"rank {rank}: " + bytes(words.tolist()).rstrip(b"\0").decode(errors="replace")
