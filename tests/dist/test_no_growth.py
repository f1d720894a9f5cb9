"""Training holds the tensors of one step and no more, also where Python's collector never runs."""

import gc
import io
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from trials import corpus_file, make_corpus, make_run

from meshwright.parallel import mesh as meshes
from meshwright.train.build import build
from meshwright.train.faults import FaultWatch
from meshwright.train.heartbeat import SECONDS, Heartbeat
from meshwright.train.log import PlainLines, Recorder
from meshwright.train.loop import StepResult, train
from meshwright.train.rank import phase_table


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_look_at_other_threads_keeps_none_of_their_tensors(tmp_path, no_collector):
    heartbeat = Heartbeat(tmp_path, 0, phase_table())
    looked, there, seen = threading.Event(), threading.Event(), []

    def work():
        tensor = torch.zeros(8)
        seen.append(weakref.ref(tensor))
        there.set()
        looked.wait()

    thread = threading.Thread(target=work)
    thread.start()
    there.wait()
    look = threading.Thread(target=heartbeat._device_thread_waits)  # from a thread of its own, as a heartbeat does
    look.start()
    look.join()
    looked.set()
    thread.join()
    heartbeat.close()
    assert seen[0]() is None


@pytest.mark.parametrize("words", [(), ("data.mask_documents=true", "plan.recompute=full", "plan.grad_accum=2")])
def test_steps_leave_no_tensors_behind(tmp_path, one_rank, no_collector, words):
    corpus_file(tmp_path)
    run = make_run(tmp_path, "steps=24", "plan.precision=fp32", "eval.every=6", "checkpoint.every=6", *words)
    mesh = meshes.make(run.plan, torch.device("cpu"))
    state = build(run, make_corpus(run, tmp_path), mesh)
    recorder = Recorder(run, mesh, tmp_path, PlainLines(io.StringIO(), every=100))
    heartbeat = Heartbeat(tmp_path / "beats", 0, phase_table())
    faults, bytes_at = FaultWatch(run, state, mesh, recorder, heartbeat), {}
    for result in train(run, state, mesh, tmp_path):
        recorder.add(result)
        heartbeat.did(result.step) if isinstance(result, StepResult) else heartbeat.looked()
        faults.look()
        heartbeat.closed.wait(SECONDS)  # at least one look at every step
        if isinstance(result, StepResult):
            bytes_at[result.step] = live_bytes()
    heartbeat.close()
    recorder.close()
    state.loader.close()
    assert bytes_at[23] <= bytes_at[11]  # both just before a save and a validation loss, with as many behind them


def live_bytes():
    """Of all tensors that something holds, views counted once; those in cycles are among them."""
    held = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]  # asks no module
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}.values())
