"""Time that a run loses is found where it was lost: a short stall in each place, by the records of a real loop."""

import pytest
import torch
import torch.distributed as dist
from stalls import CLASSES, check, stalled_run
from trials import corpus_file

from meshwright.cost.goodput import BADPUT

SECONDS = 2.0
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def quiet(tmp_path_factory, one_rank):
    folder = tmp_path_factory.mktemp("quiet")
    corpus_file(folder)
    with pytest.MonkeyPatch.context() as patch:
        return stalled_run(folder, CPU, "", 0.0, patch)


def test_every_class_but_those_of_other_tests_has_a_stall():
    assert set(BADPUT) - set(CLASSES.values()) == {"lost work", "finish"}


@pytest.mark.parametrize("place", CLASSES)
def test_a_stall_is_found_in_its_class_and_nowhere_else(tmp_path, one_rank, quiet, monkeypatch, place):
    corpus_file(tmp_path)
    check(stalled_run(tmp_path, CPU, place, SECONDS, monkeypatch), place, SECONDS, quiet)
