import os
import sys

import pytest

from meshwright.launch import local
from meshwright.launch.local import Failure, Ranks


def python(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def ranks(tmp_path):
    made = Ranks(tmp_path)
    yield made
    made.end()


def test_ranks_know_their_place_and_end_well(ranks, tmp_path):
    code = "import os; open(os.environ['OUT'] + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    with open(os.devnull, "w") as nowhere:
        ranks.start(python(code), 3, {**os.environ, "OUT": f"{tmp_path}/out"}, nowhere.fileno())
        assert ranks.wait() is None
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(3)] == ["3", "3", "3"]


def test_the_first_failure_ends_all_and_is_the_one_told(ranks, tmp_path):
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('broken on purpose')\ntime.sleep(60)"
    with open(os.devnull, "w") as nowhere:
        ranks.start(python(code), 2, os.environ, nowhere.fileno())
        failure = ranks.wait()
    assert failure is not None
    assert (failure.rank, failure.code) == (1, 1)
    assert "broken on purpose" in failure.text
    assert all(process.poll() is not None for process in ranks.processes)


def test_the_earliest_words_are_the_cause(ranks, tmp_path):
    for rank, at in ((0, 5.0), (1, 3.0)):
        local.write_failure(tmp_path, Failure(rank=rank, at=at, code=1, text=f"words of {rank}"))
    with open(os.devnull, "w") as nowhere:
        ranks.start(python("raise SystemExit(1)"), 2, os.environ, nowhere.fileno())
        failure = ranks.wait()
    assert failure is not None
    assert failure.text == "words of 1"


def test_cores_are_shared_and_the_users_word_wins(ranks, tmp_path):
    code = "import os; open(os.environ['OUT'], 'w').write(os.environ['OMP_NUM_THREADS'])"
    with open(os.devnull, "w") as nowhere:
        environment = {**os.environ, "OUT": f"{tmp_path}/out", "OMP_NUM_THREADS": "7"}
        ranks.start(python(code), 1, environment, nowhere.fileno())
        assert ranks.wait() is None
    assert (tmp_path / "out").read_text() == "7"
    assert int(local.defaults(1)["OMP_NUM_THREADS"]) >= int(local.defaults(64)["OMP_NUM_THREADS"]) == 1


def test_visible_gpus_are_counted_without_torch():
    assert local.gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert local.gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert local.gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
