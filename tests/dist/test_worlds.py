"""Tests share their ranks, until one of them fails; those of another file find nothing of the last."""

import os

import pytest
import torch.distributed as dist
from worlds import start, world


@world(2)
def leave_number(folder):
    dist.barrier()
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))


@world(2)
def fail():
    assert dist.get_rank() == 0, "broken on purpose"
    dist.barrier()  # for one that never comes


@world(2)
def end():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(("body", "told"), [(fail, r"(?s)rank 1: .*broken on purpose"), (end, "rank 1 ended .* 3")])
def test_ranks_serve_all_bodies_until_one_fails_and_are_then_replaced(tmp_path, body, told):
    def numbers() -> list[str]:
        leave_number(folder=tmp_path)
        return [(tmp_path / str(rank)).read_text() for rank in range(2)]

    first = numbers()
    assert numbers() == first
    with pytest.raises(pytest.fail.Exception, match=told):
        body()
    assert not set(numbers()) & set(first)


OTHER = """
import os, sys
import torch.distributed as dist
from worlds import world

@world(2)
def leave_number(folder):
    assert "test_worlds" not in sys.modules
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
"""


def test_ranks_go_on_to_another_file_and_keep_nothing_of_the_last(tmp_path):
    leave_number(folder=tmp_path)
    first = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    (tmp_path / "test_other.py").write_text(OTHER)
    start(2, tmp_path / "test_other.py", "leave_number", {"folder": tmp_path})
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == first
