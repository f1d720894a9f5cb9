"""What training holds on a GPU is what its benchmark holds and what was planned, without Python's collector."""

import gc
import io

import pytest
import torch
from trials import make_corpus, make_run

from meshwright.cost.memory import worst
from meshwright.hardware.cluster import catalogue, recognised
from meshwright.parallel import mesh as meshes
from meshwright.train import oom
from meshwright.train.build import build
from meshwright.train.faults import FaultWatch
from meshwright.train.heartbeat import Heartbeat
from meshwright.train.log import PlainLines, Recorder
from meshwright.train.loop import StepResult, train
from meshwright.train.rank import phase_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WITHIN = 0.03
SHAPE = (
    "arch.layers=8", "arch.hidden=1024", "arch.heads=16", "arch.kv_heads=16", "arch.ffn=4096", "arch.vocab=32000",
    "arch.context=1024", "sequence=1024", "batch=16", "plan.precision=bf16", "data.eval_fraction=0.0",
)  # fmt: skip


@pytest.fixture
def no_collector():
    gc.collect()
    torch.cuda.empty_cache()
    gc.disable()
    yield
    gc.enable()


def peak(run, folder, device, *, watched):
    """The most that was allocated above what there was before: of the loop alone, or with all that watches a rank."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    mesh = meshes.make(run.plan, device)
    state = build(run, make_corpus(run, folder), mesh)
    results, here = train(run, state, mesh), (lambda result: None)
    if watched:
        recorder = Recorder(run, mesh, folder, PlainLines(io.StringIO(), every=100))
        heartbeat = Heartbeat(folder / "beats", 0, phase_table())
        faults = FaultWatch(run, state, mesh, recorder, heartbeat)

        def here(result):
            recorder.add(result)
            heartbeat.did(result.step) if isinstance(result, StepResult) else heartbeat.looked()
            faults.look()

    for result in results:
        here(result)
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated(device) - before
    if watched:
        recorder.close()
        heartbeat.close()
    state.loader.close()
    state.optimizer.close()
    return most


def test_training_holds_what_a_benchmark_of_it_does_and_what_is_predicted(folder, no_collector):
    device = torch.device("cuda", 0)
    alone = peak(make_run(folder, *SHAPE, "steps=4"), folder, device, watched=False)
    gc.collect()
    run = make_run(folder, *SHAPE, "steps=40")  # of which the heartbeat looks into many
    trained = peak(run, folder, device, watched=True)
    assert abs(trained / alone - 1) < WITHIN
    name = torch.cuda.get_device_name(device)
    if recognised(name, catalogue().cards) is None:
        return  # no prediction
    predicted = worst(oom.question_of(run, name).job(run.plan)).allocated
    assert abs(trained / predicted - 1) < WITHIN
