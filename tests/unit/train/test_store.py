"""Ranks that meet in a store that outlives them, as torchrun's does: no word of an earlier start is taken for now."""

import threading

import pytest
import torch.distributed as dist

from meshwright.spec.problem import InputError
from meshwright.train import world
from meshwright.train.world import StoppedError, agree, fresh_name


def together(*works):
    """Do works in threads; what each returned or raised."""
    found = [None] * len(works)

    def do(number, work):
        try:
            found[number] = work()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=do, args=one) for one in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ranks(store, count):
    return [lambda rank=rank: fresh_name(store, rank, count, lambda: False) for rank in range(count)]


def test_each_start_has_a_name_of_its_own_whoever_comes_first():
    store = dist.HashStore()
    first = together(*ranks(store, 3))
    second = together(*reversed(ranks(store, 3)))  # the store has the name of the first start
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_who_is_asked_to_end_while_it_waits_does():
    store = dist.HashStore()
    with pytest.raises(StoppedError):
        fresh_name(store, 0, 2, lambda: True)
    with pytest.raises(StoppedError):
        fresh_name(dist.HashStore(), 1, 2, lambda: True)


def test_who_says_nothing_is_named(monkeypatch):
    monkeypatch.setattr(world.wait, "__defaults__", (0.2,))
    with pytest.raises(InputError, match="rank 1 met the others and then said nothing"):
        agree(None, dist.HashStore(), 0, 2, {"seed": "1"})  # type: ignore[arg-type]


def test_all_ranks_read_why_they_may_not_begin():
    store = dist.HashStore()
    works = [lambda rank=rank: agree(None, store, rank, 3, {"seed": str(rank // 2)}) for rank in range(3)]
    found = together(*works)
    assert {str(error) for error in found} == {str(found[0])}
    assert "rank 2 has seed = 1, the others 0" in str(found[0])


def test_another_run_folder_is_seen_by_what_rank_0_put_there(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "SHOWN_SECONDS", 0.2)
    store = dist.HashStore()
    (tmp_path / "other").mkdir()
    folders = [tmp_path, tmp_path, tmp_path / "other"]
    works = [
        lambda rank=rank, folder=folder: world._seen_folder(store, rank, folder, lambda: False)
        for rank, folder in enumerate(folders)
    ]
    found = together(*works)
    assert found[:2] == [str(tmp_path)] * 2
    assert found[2] == f"{tmp_path / 'other'}, which is another"
