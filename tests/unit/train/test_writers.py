import threading

import pytest

from meshwright.config import load
from meshwright.runtime.records import EvalRecord, StepRecord
from meshwright.train import log as writers
from meshwright.train.log import Writer, numbers

RUN = load.load(None).run
STEP = StepRecord(
    step=3, loss=5.0, norm=2.0, rate=3e-4, tokens=100, seconds=0.5, data_seconds=0.0, memory_bytes=7, flops=5e11
)


class Kept:
    def __init__(self):
        self.logged = []
        self.finished = False

    def log(self, values, step):
        self.logged.append((values, step))

    def finish(self):
        self.finished = True


class Broken(Kept):
    def log(self, values, step):
        raise ConnectionError("the tracker is down")


@pytest.fixture
def started(monkeypatch, tmp_path):
    def start(tracker):
        said = []
        monkeypatch.setitem(writers.TRACKERS, "test", lambda run, folder: tracker)
        return Writer("test", RUN, tmp_path, said.append), said

    return start


def test_a_tracker_gets_every_record(started):
    tracker = Kept()
    writer, said = started(tracker)
    writer.write(STEP)
    writer.write(EvalRecord(step=3, loss=4.0, tokens=1, seconds=1.0))
    writer.close()
    assert tracker.finished
    assert said == []
    assert tracker.logged[0][0]["loss"] == 5.0
    assert tracker.logged[0][0]["tokens_per_second"] == 200.0
    assert tracker.logged[1] == ({"validation_loss": 4.0}, 3)


def test_a_broken_tracker_says_so_once_and_stops_nobody(started):
    writer, said = started(Broken())
    for _ in range(20):
        writer.write(STEP)
    writer.close()
    assert said == ["test stopped: ConnectionError: the tracker is down. Training continues; records are on disk."]


def test_writing_never_waits_for_a_slow_tracker(started):
    awake = threading.Event()

    class Slow(Kept):
        def log(self, values, step):
            awake.wait()
            super().log(values, step)

    tracker = Slow()
    writer, _ = started(tracker)
    for _ in range(1000):
        writer.write(STEP)  # would never return if it waited: the tracker sleeps until we wake it
    assert tracker.logged == []
    awake.set()
    writer.close()
    assert len(tracker.logged) == 1000


def test_the_numbers_of_a_step_have_no_text():
    assert all(isinstance(value, float) for value in numbers(STEP).values())
    assert "step" not in numbers(STEP)
