"""Who has which GPU, told by the ranks of a machine to each other."""

import torch.distributed as dist

from meshwright.runtime.place import Place
from meshwright.train import world
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


def test_the_source_has_another_name_when_it_has_changed(tmp_path):
    (tmp_path / "module.py").write_text("one = 1\n")
    before = world.code_digest(tmp_path)
    (tmp_path / "module.py").write_text("one = 2\n")
    assert world.code_digest(tmp_path) != before


def test_a_rank_names_its_source_once(monkeypatch):
    monkeypatch.setattr(world, "code_digest", lambda package: next(names))
    names = iter(("then", "now"))
    world.code.cache_clear()
    try:
        assert (world.code(), world.code()) == ("then", "then")  # files may have changed: what runs has not
    finally:
        world.code.cache_clear()
