"""Which replica computes which part of the batch, and whose place a spare takes."""

import pytest

from meshwright.runtime.failure import Exit, Failure
from meshwright.runtime.records import EndRecord, StepRecord, shifted
from meshwright.runtime.supervise import Supervisor
from meshwright.train.survivors import owners


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((0, 1, 2, 3), [0, 1, 2, 3]),
        ((0, 2, 3), [0, 0, 2, 3]),
        ((3,), [3, 3, 3, 3]),
        ((0, 1, 2, 4), [0, 1, 2, 4]),  # a spare does what nobody else does
        ((1, 4, 5), [4, 1, 5, 1]),
        ((4, 5, 6, 7), [4, 5, 6, 7]),
    ],
)
def test_every_part_has_an_owner_who_is_there(members, expected):
    assert owners(members, 4) == expected
    assert set(expected) == set(members)  # and none is idle


def faulty(**about):
    return Failure(**{"kind": "matmul", "code": Exit.HARDWARE, "what": "wrong", "rank": 3} | about)


def test_a_faulty_replica_is_replaced_as_long_as_there_are_spares(monkeypatch):
    from meshwright.config import load

    words = ["arch.preset=tiny", "batch=6", "plan.replicate=3", "plan.shard=2", "plan.zero=3", "plan.microbatch=1"]
    run = load.load(None, [*words, "faults.live=true", "faults.spares=1"]).run
    monkeypatch.setattr(Supervisor, "__post_init__", lambda self: None)
    one = Supervisor(run, None, None, None, print)
    assert one._condemn(faulty(kind="killed", code=Exit.RESUMABLE)) is None
    assert one._condemn(faulty(kind="replicas", suspects=(0, 1))) is None  # of two nobody knows
    assert one._condemn(faulty()) == 1  # whose ranks are 2 and 3
    assert one._condemn(faulty(rank=0)) is None
    assert one.condemned == {1}


def test_records_of_another_machine_are_told_by_the_own_clock():
    step = StepRecord(
        step=1, loss=1.0, norm=1.0, rate=1.0, tokens=1, seconds=1.0, data_seconds=0.0, memory_bytes=0, flops=1.0,
        began=10.0, ended=11.0, at=12.0,
    )  # fmt: skip
    moved = shifted(step, 100.0)
    assert (moved.began, moved.ended, moved.at, moved.seconds) == (110.0, 111.0, 112.0, 1.0)
    assert shifted(step, 0.0) == step
    assert shifted(EndRecord(step=1, at=5.0), -1.0).at == 4.0
