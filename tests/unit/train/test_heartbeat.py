"""A real heartbeat runs here, beside a thread that does what ranks do."""

import threading
import time

import msgspec
import pytest
from waiting import HANG, until

from meshwright.runtime import heartbeat as beats
from meshwright.runtime.heartbeat import Beat, Frame, HeartbeatReader
from meshwright.train.heartbeat import Heartbeat
from meshwright.train.rank import phase_table

LOADER = Frame("/x/meshwright/data/loader.py", 75, "take")
LOOP = Frame("/x/meshwright/train/loop.py", 70, "steps")
STEP = Frame("/x/meshwright/train/step.py", 50, "accumulated")
BACKWARD = Frame("/t/torch/autograd/graph.py", 9, "_engine_run_backward")
ALL_REDUCE = Frame("/t/torch/distributed/distributed_c10d.py", 3000, "all_reduce")
CLIP = Frame("/x/meshwright/optim/clip.py", 40, "measured")
EVALUATE = Frame("/x/meshwright/train/loop.py", 100, "evaluate")
SAVE = Frame("/x/meshwright/checkpoint/write.py", 60, "save")
ARRIVED = Frame("/x/meshwright/parallel/context.py", 205, "arrived")
DISPATCH = Frame("/t/torch/distributed/tensor/_dispatch.py", 150, "dispatch")


@pytest.fixture
def heartbeat(tmp_path):
    beating = Heartbeat(tmp_path, 0, phase_table())
    yield beating
    beating.close()


def test_a_record_comes_back_as_it_was_packed():
    beat = Beat(
        pid=7,
        tick=1.5,
        moved=0.5,
        step=9,
        restored=-1,
        phase="save",
        waiting=True,
        novel=True,
        steps_here=2,
        counts=(3, 4),
    )
    assert beats.unpack(beats.pack(beat)) == beat


def test_a_validation_loss_may_come_before_any_step(heartbeat):
    heartbeat.begins(4)
    heartbeat.looked()  # the run had been saved after its last step, and lacked only its ending
    assert not heartbeat.step_ends_ns


def test_a_reader_sees_the_heartbeat_and_the_steps_go_by(heartbeat, tmp_path):
    pulse = HeartbeatReader(tmp_path, [0, 1])
    heartbeat.begins(4)
    heartbeat.did(5)
    (seen,) = pulse.look()  # rank 1 has not spoken
    assert (seen.beat.step, seen.beat.restored) == (5, 4)
    until(lambda: pulse.look()[0].beat.tick > seen.beat.tick, "there is no heartbeat")
    until(lambda: not pulse.look()[0].silent, "a running heartbeat is called silent")
    pulse.close()


def test_standing_still_is_seen_and_so_is_moving_on(heartbeat, tmp_path):
    pulse = HeartbeatReader(tmp_path, [0])
    time.sleep(0.5)  # the main thread stands on this line
    still = pulse.look()[0]
    assert still.now - still.still_since > 0.2
    until(lambda: pulse.look()[0].beat.moved > still.beat.moved, "moving on is not seen")
    pulse.close()


def test_the_stack_is_written_by_a_signal(heartbeat, tmp_path):
    pulse = HeartbeatReader(tmp_path, [0])
    words = beats.capture(pulse, pulse.look())
    assert "capture" in [frame.name for frame in beats.frames(words[0])]
    pulse.close()


def test_a_reader_learns_from_the_rank_what_its_frames_mean(heartbeat, tmp_path):
    table = HeartbeatReader(tmp_path, [0]).phase_table(0)
    assert table == phase_table()
    assert beats.doing([ARRIVED, STEP, LOOP], table).waiting  # the ring's own wait, which torch's files do not show


def test_time_at_work_is_kept_by_phase(heartbeat):
    until(lambda: sum(heartbeat.spent()[0]) > 0.2, "no time was spent")
    assert sum(heartbeat.spent()[1]) == 0.0  # it has waited for nobody


@pytest.mark.parametrize(
    ("stack", "phase", "waiting"),
    [
        ([LOADER, LOOP], "data", False),
        ([STEP, LOOP], "forward", False),
        ([BACKWARD, STEP, LOOP], "backward", False),
        ([ALL_REDUCE, BACKWARD, STEP, LOOP], "backward", True),
        ([ALL_REDUCE, CLIP, LOOP], "optimizer", True),
        ([STEP, EVALUATE, LOOP], "eval", False),
        ([SAVE, LOOP], "save", False),
        ([DISPATCH, STEP, LOOP], "forward", False),
        ([], "eval", False),
    ],
)
def test_a_stack_tells_the_phase_and_whether_it_waits(stack, phase, waiting):
    seen = beats.doing(stack, phase_table(), before="eval")
    assert (seen.phase, seen.waiting) == (phase, waiting)


def test_the_supervisor_can_ask_a_process_to_leave(tmp_path):
    import os

    pid = os.fork()
    if pid == 0:
        Heartbeat(tmp_path, 0, phase_table())
        threading.Event().wait(HANG)
        os._exit(0)
    pulse = HeartbeatReader(tmp_path, [0])
    until(pulse.look, "there is no heartbeat")
    pulse.ask_to_leave()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11
    pulse.close()


def test_a_beat_that_never_came_is_nobody(tmp_path):
    assert HeartbeatReader(tmp_path, [0]).look() == []
    (tmp_path / "rank0.beat").write_bytes(b"")
    assert HeartbeatReader(tmp_path, [0]).look() == []
    assert msgspec.structs.replace(Beat(), step=1).pid == 0
