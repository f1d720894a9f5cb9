"""Saving from a real GPU: the copy is of the step it was taken after, a stop is heard, and nothing else waits."""

import pytest
import torch
from trials import made, make_run

from meshwright.train.loop import Stop, train
from meshwright.train.saving import digest_of, restore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_state(folder, *words):
    run = make_run(folder, "steps=8", "data.eval_fraction=0.0", "checkpoint.every=3", *words)
    return made(run, folder, torch.device("cuda", 0))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stopped_and_gone_on_with_it_is_the_same_run(folder, precision):
    words = (f"plan.precision={precision}", "plan.deterministic=true", "plan.microbatch=4")
    run, mesh, state = make_state(folder, *words)
    list(train(run, state, mesh))
    state.loader.close()
    whole = digest_of(state, run, mesh)
    run, mesh, state = make_state(folder, *words)
    stop, seen = Stop(), []
    for result in train(run, state, mesh, folder / "run", stop):
        seen.append(result.step)
        stop.asked = result.step >= 3
    assert seen == [1, 2, 3, 4, 5]  # asked in step 4, heard one step later
    assert state.stopped
    assert state.saved
    state.loader.close()
    run, mesh, state = make_state(folder, *words)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 5
    list(train(run, state, mesh, folder / "run"))
    state.loader.close()
    assert digest_of(state, run, mesh) == whole


def test_listening_for_a_stop_makes_the_host_wait_for_nothing(folder):
    run, mesh, state = make_state(folder, "plan.precision=bf16")
    for result in train(run, state, mesh, folder / "run", Stop()):
        if result.step in (3, 5):  # between two saves any hidden synchronisation raises
            torch.cuda.set_sync_debug_mode("error" if result.step == 3 else "default")
    state.loader.close()
