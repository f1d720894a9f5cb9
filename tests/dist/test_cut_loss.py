"""The loss over a cut vocabulary in several chunks: one device's numbers, the calls and the bytes that are planned."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_data_parallel import compare, folder  # noqa: F401
from test_memory import SMALL, saved_for_backward
from test_traffic import surprises
from trials import make_run, mesh_of
from worlds import world

from meshwright.cost.activations import microbatch_shape, saved_activations
from meshwright.cost.job import Job
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stacks
from meshwright.spec import plan as spec

ROWS = 48  # of 8 · 32: five chunks and a rest


@contextmanager
def small_chunks() -> Iterator[None]:
    """The trainer's chunks and the planner's, both of a few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "LOGIT_ROWS", ROWS)
        patch.setattr(spec, "LOGIT_BYTES", 1)
        yield


@pytest.mark.parametrize("shape", [(), ("arch.tied=true",)], ids=["llama", "tied"])
@world(2)
def test_several_chunks_are_one_device(folder, shape):  # noqa: F811
    with small_chunks():
        compare(folder, shape, ("plan.tp=2",))


@world(2)
def test_every_chunk_sends_what_is_planned(folder):  # noqa: F811
    with small_chunks():
        for words in ((), ("plan.precision=bf16", "plan.grad_accum=2", "arch.tied=true")):
            assert surprises(folder, ("plan.tp=2", *words)) == []


@world(2)
def test_a_forward_keeps_the_gradients_of_the_loss_and_no_logits(folder):  # noqa: F811
    for words in ((), ("plan.precision=bf16",), ("arch.tied=true",)):
        run = make_run(folder, *SMALL, "plan.tp=2", *words)
        ours = stacks()["meshwright"]
        job = Job(arch=run.arch, plan=run.plan, sequence=run.sequence, cluster=cluster("8xh100"), stack=ours)
        work = microbatch_shape(job, fused_norm=False)
        said = saved_activations(work, (False,) * run.arch.layers, True, "none")
        # Of an odd vocabulary one rank has half an entry more than the mean, the other half an entry less.
        odd = run.arch.hidden * work.compute_bytes / 2
        seen = saved_for_backward(run, mesh_of(run.plan), folder)
        assert abs(seen - said.activations - said.logits) == odd, words
