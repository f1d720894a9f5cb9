"""One rank of a world that is not there: its mesh, and tensors that have shapes but no memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import _redistribute, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.parallel import mesh
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan


@contextmanager
def fake_world(plan: Plan, rank: int) -> Iterator[Mesh]:
    """The mesh of one rank; its collectives return at once, and no other rank exists."""
    assert not dist.is_initialized(), "a real world would be taken for the fake one"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world)
    try:
        yield mesh.make(plan, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        _forget()


def _forget() -> None:
    """Empty what DTensor remembers of meshes: an equal one of the next world has other groups under the same names."""
    debug._clear_sharding_prop_cache()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # which torch 2.11 may not have


def fake_tensors() -> FakeTensorMode:
    """While it lasts, tensors take no memory. The mesh and a model on meta, which hold none either, are let in."""
    return FakeTensorMode(allow_non_fake_inputs=True)
