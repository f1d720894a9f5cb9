"""One rank with a bf16 copy of its weights trains as one that casts them at every use."""

import pytest
import torch
from trials import alone, corpus_file, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.parallel import precision


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


# An MoE model with several microbatches is left out: a router's choice may fall the other way by one unit of rounding.
@pytest.mark.parametrize(("arch", "accumulate"), [("tiny", 1), ("tiny", 2), ("tiny-moe", 1)])
@world(1)
def test_a_shadow_changes_no_number(folder, arch, accumulate):
    words = ("plan.replicate=1", "plan.precision=bf16", f"plan.grad_accum={accumulate}")
    with_shadow, without = (
        make_run(folder, *words, f"plan.bf16_params={value}", arch=arch) for value in ("true", "false")
    )
    corpus = make_corpus(with_shadow, folder)
    mine, theirs = (drive(run, corpus, mesh_of(run.plan)) for run in (with_shadow, without))
    # Both paths make the same bf16 products, and sum and update in fp32, in another order. Adam divides a gradient by
    # its own size, so an element whose gradient nearly vanishes moves visibly; a whole weight by far less than one bf16
    # unit.
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)
    for name, weight in theirs.weights.items():
        assert (mine.weights[name] - weight).norm() <= 2**-10 * weight.norm(), name


def test_the_narrow_copy_follows_the_wide_weights(folder):
    run = make_run(folder, "plan.replicate=1", "plan.precision=bf16")
    assert run.plan.bf16_params, "one rank in low precision has one unless told otherwise"
    trial = drive(run, make_corpus(run, folder), alone())
    for weight in trial.state.chunks[0].parameters():
        assert weight.dtype == torch.bfloat16
        assert precision.master(weight).dtype == torch.float32
        assert torch.equal(weight, precision.master(weight).bfloat16())
