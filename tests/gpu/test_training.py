"""Training on a real GPU: it learns in every precision, and recording makes the host wait for nothing."""

import io

import pytest
import torch
from trials import make_corpus, make_run

from meshwright.parallel import mesh as meshes
from meshwright.train.build import build
from meshwright.train.log import PlainLines, Recorder
from meshwright.train.loop import StepResult, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_falls(folder, precision):
    run = make_run(folder, f"plan.precision={precision}", "steps=20", "plan.grad_accum=2")
    mesh = meshes.make(run.plan, torch.device("cuda", 0))
    state = build(run, make_corpus(run, folder), mesh)
    losses = [result.loss.item() for result in train(run, state, mesh) if isinstance(result, StepResult)]
    state.loader.close()
    assert losses[-1] < losses[0] - 0.5
    assert {each.dtype for each in state.optimizer.masters} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_recording_a_step_makes_the_host_wait_for_nothing(folder, precision):
    wide = ("arch.heads=4", "arch.kv_heads=2")  # heads for which there is attention within documents
    run = make_run(
        folder, *wide, f"plan.precision={precision}", "steps=12", "data.eval_fraction=0.0", "data.mask_documents=true"
    )
    mesh = meshes.make(run.plan, torch.device("cuda", 0))
    state = build(run, make_corpus(run, folder), mesh)
    recorder = Recorder(run, mesh, folder, PlainLines(io.StringIO(), every=1))
    for result in train(run, state, mesh):
        recorder.add(result)
        if isinstance(result, StepResult) and result.step == 4:
            torch.cuda.set_sync_debug_mode("error")  # from here on any hidden synchronisation raises
    torch.cuda.set_sync_debug_mode("default")
    recorder.close()
    state.loader.close()
    assert [record.step for record in recorder.records] == list(range(1, 13))
    assert all(record.seconds > 0 for record in recorder.records)
