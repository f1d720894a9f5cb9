"""Who has which GPU, told by the ranks of a machine to each other."""

import torch.distributed as dist

from meshwright.runtime.place import Place
from meshwright.train.world import apart


def place(rank: int) -> Place:
    return Place(rank=rank, world=4, local_rank=rank % 2, local_world=2, address="", port=0, launcher="slurm")


def test_ranks_that_are_shown_one_gpu_each_do_not_share_it():
    store = dist.HashStore()
    for rank, gpu in enumerate(("a", "b", "c", "c")):
        store.set(f"gpu{rank}", gpu)
    assert [apart(gpu, place(rank), store) for rank, gpu in enumerate(("a", "b", "c", "c"))] == [
        True,
        True,
        False,
        False,
    ]
