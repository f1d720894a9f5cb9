"""Muon on a GPU: its kernels move weights as plain operations do, and its update makes the host wait for nothing."""

import pytest
import torch
from trials import make_corpus, make_run

from meshwright.parallel import mesh as meshes
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WORDS = ("optim.name=muon", "plan.replicate=1", "plan.precision=bf16", "data.eval_fraction=0.0")


def losses(folder, *words: str, quiet_from: int = 0) -> list[float]:
    """Those of a run; from a step on any hidden synchronisation raises."""
    run = make_run(folder, *WORDS, *words)
    mesh = meshes.make(run.plan, torch.device("cuda", 0))
    state = build(run, make_corpus(run, folder), mesh)
    found = []
    for result in train(run, state, mesh):
        if isinstance(result, StepResult):
            found.append(result.loss)
            if result.step == quiet_from:
                torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    state.loader.close()
    return [loss.item() for loss in found]


@pytest.mark.parametrize("form", [(), ("optim.master_weights=split",)])
def test_kernels_learn_as_plain_operations_do(folder, form):
    fused, plain = (losses(folder, "steps=4", *form, f"plan.kernels={kernels}") for kernels in ("fused", "plain"))
    assert fused[-1] < fused[0]
    # bf16 activations by other kernels: 2⁻⁸ of a logit, through four updates.
    assert fused == pytest.approx(plain, rel=2e-2)


def test_the_host_waits_for_nothing(folder):
    assert len(losses(folder, "steps=6", quiet_from=3)) == 6
