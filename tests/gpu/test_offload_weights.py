"""Weights in host memory on a real GPU: the same training, none of them on the device, copies by the GPU itself."""

import gc
from itertools import chain

import pytest
import torch
from trials import assert_it_goes_on, digest_before_the_cut, losses_of, made, make_run

from meshwright.optim.resident import CpuOffloadOptimizer
from meshwright.parallel.mesh import local
from meshwright.train.loop import train
from meshwright.train.state import weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda", 0)
BASE = ("plan.replicate=1", "plan.zero=3", "plan.bf16_params=false", "data.eval_fraction=0.0", "optim.lr=1e-3")
HOSTED = "plan.cpu_offload=true"
WIDE = ("arch.hidden=512", "arch.ffn=1536", "arch.head_dim=64", "arch.layers=8")


def make_state(folder, *words):
    return made(make_run(folder, *BASE, *words), folder, DEVICE)


def losses(folder, *words):
    return losses_of(*make_state(folder, *words))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hosted_weights_train_the_same_model(folder, accumulate):
    words = ("plan.precision=bf16", "steps=30", f"plan.grad_accum={accumulate}")
    plain, moved = losses(folder, *words), losses(folder, *words, HOSTED)
    assert plain[-1] < plain[0] - 1
    # The first loss is of the same weights: they are made on the device either way. Afterwards attention's backward
    # adds in no fixed order and the CPU's update rounds the last bit otherwise, which bf16 copies show now and then,
    # and training carries it on: at three times this rate by 0.08 on an H200.
    assert moved[0] == pytest.approx(plain[0], rel=1e-3)
    assert moved == pytest.approx(plain, abs=0.05)


def test_in_full_width_they_differ_by_the_order_of_sums(folder):
    words = ("plan.precision=fp32", "plan.kernels=plain", "steps=6")
    plain, moved = losses(folder, *words), losses(folder, *words, HOSTED)
    # Sums of a few thousand fp32 terms, off by 1e-6 of themselves, through six small updates, which AdamW scales to
    # one rate each however small the gradient was.
    assert moved == pytest.approx(plain, rel=1e-3)


def test_after_it_is_built_the_device_holds_no_weights(folder):
    held = {}
    for hosted in ("false", "true"):
        gc.collect()  # what earlier tests left would be freed meanwhile
        before = torch.cuda.memory_allocated(DEVICE)
        run, _, state = make_state(folder, *WIDE, "plan.precision=bf16", f"plan.cpu_offload={hosted}")
        held[hosted] = torch.cuda.memory_allocated(DEVICE) - before
        parameters = sum(weight.numel() for weight in state.chunks[0].parameters())
        state.loader.close()
        del state, run
    # Twelve bytes a parameter: an fp32 master weight and two moments. Left are scalars and the batches that wait.
    assert held["false"] >= 12 * parameters
    assert held["true"] < 2**20


def test_between_steps_no_state_is_on_the_device_and_its_peak_is_far_below_the_model(folder):
    run, mesh, state = make_state(folder, *WIDE, "arch.layers=24", "plan.precision=bf16", "steps=3", HOSTED)
    parameters = sum(weight.numel() for weight in state.chunks[0].parameters())
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    list(train(run, state, mesh))
    state.loader.close()
    optimizer = state.optimizer
    assert isinstance(optimizer, CpuOffloadOptimizer)
    held = [*optimizer.masters, *chain.from_iterable(optimizer.states().values()), optimizer.count]
    held += [local(weight.grad) for weight in optimizer.weights if weight.grad is not None]
    assert len(held) == 4 * len(optimizer.weights) + 1
    assert {tensor.device.type for tensor in held} == {"cpu"}
    # Sixteen bytes a parameter would be there without; activations of 256 tokens weigh little beside 24 such blocks.
    assert torch.cuda.max_memory_allocated(DEVICE) - before < 8 * parameters


def test_weights_and_gradients_are_pinned_and_stay_where_the_optimizer_sees_them(folder):
    run, mesh, state = make_state(folder, "plan.precision=bf16", "steps=2", HOSTED)
    optimizer = state.optimizer
    assert isinstance(optimizer, CpuOffloadOptimizer)
    assert optimizer.memory.addresses, "nearly all weights are in pages that we have pinned"
    assert all(local(weight.detach()).is_pinned() for weight in optimizer.weights)
    list(train(run, state, mesh))
    state.loader.close()
    for weight, master in zip(optimizer.weights, optimizer.masters, strict=True):
        assert local(weight.detach()).data_ptr() == master.data_ptr()  # torch has put no copy in their place
        assert weight.grad is not None
        assert local(weight.grad).is_pinned()


def test_the_whole_model_can_be_read_back(folder):
    run, mesh, state = make_state(folder, "plan.precision=bf16", HOSTED)
    _, _, plain = make_state(folder, "plan.precision=bf16")
    mine, theirs = dict(weights(state.chunks, run, mesh)), dict(weights(plain.chunks, run, mesh))
    state.loader.close()
    plain.loader.close()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], weight) for name, weight in theirs.items())


@pytest.mark.parametrize("again", ["false", "true"])
def test_a_checkpoint_goes_on_with_and_without_it(folder, again):
    words = ("plan.precision=bf16", "steps=6", "checkpoint.every=4")
    saved = digest_before_the_cut(*make_state(folder, *words, HOSTED), folder / "run")
    assert_it_goes_on(saved, *make_state(folder, *words, f"plan.cpu_offload={again}"), folder / "run")


@pytest.mark.parametrize("rounding", ["none", "split"])
def test_weights_of_bf16_are_rounded_by_the_host(folder, rounding):
    words = (
        "plan.precision=bf16",
        "steps=30",
        f"optim.master_weights={rounding}",
        f"optim.stochastic_rounding={str(rounding == 'none').lower()}",
        HOSTED,
    )
    found = losses(folder, *words)
    assert found[-1] < found[0] - 1
