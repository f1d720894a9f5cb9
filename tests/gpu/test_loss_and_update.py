"""The kernels of the loss and of the update, on a GPU, beside references in double precision."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kernels"))

import kernel_cases
import test_adamw_quantized
import test_one_pass_bf16
from kernel_cases import TYPES, draw
from loss_cases import assert_exact, in_parts, some_targets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16 = 5e-3  # a bf16 number keeps 8 bits: 2e-3 of rounding in each of a few places
FP32 = 1e-6


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return ((value.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize(("rows", "vocab", "chunk_rows"), [(3000, 5003, 1024), (100, 128, 8192), (2048, 50304, 1024)])
@pytest.mark.parametrize(("upstream", "softcap"), [(1.0, 0.0), (0.25, 0.0), (1.0, 3.0)])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(monkeypatch, rows, vocab, chunk_rows, upstream, softcap):
    from meshwright.kernels import cross_entropy
    from meshwright.spec import plan as spec

    monkeypatch.setattr(spec, "LOGIT_BYTES", vocab * 2 * chunk_rows)
    torch.manual_seed(1)
    x = torch.randn(1, rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    projection = (torch.randn(vocab, 256, device="cuda") * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (1, rows), device="cuda")
    targets[:, ::7] = cross_entropy.IGNORE
    weight = torch.tensor(0.01, device="cuda", dtype=torch.float64)
    weighed, total = cross_entropy.weighted_loss(x, projection, targets, weight, softcap=softcap)
    (weighed * upstream).backward()

    exact_x, exact_projection = (each.detach().double().requires_grad_() for each in (x, projection))
    logits = (exact_x @ exact_projection.t()).flatten(0, 1)
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    exact = F.cross_entropy(logits, targets.flatten(), ignore_index=cross_entropy.IGNORE, reduction="sum")
    (exact * 0.01 * upstream).backward()
    assert relative(total, exact.detach()) < 1e-3  # the logits are rounded to bf16 before the sum
    assert relative(weighed.detach(), exact.detach() * 0.01) < 1e-3
    assert relative(x.grad, exact_x.grad) < BF16
    assert relative(projection.grad, exact_projection.grad) < BF16


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "cuts"), [((7, 40), (20,)), ((300, 50304), (25152,)), ((65, 20001), (1, 8193))])
@pytest.mark.parametrize("strides", ["dense", "slice"])
def test_parts_of_a_vocabulary_are_the_whole(monkeypatch, shape, cuts, dtype, strides):
    monkeypatch.setattr(kernel_cases, "DEVICE", "cuda")
    logits, targets = draw(shape, dtype, 1, strides), some_targets(*shape)
    assert_exact(in_parts(logits, targets, cuts, "fused"), logits, targets)


def test_chunks_and_one_pass_agree_with_the_plain_twin(monkeypatch):
    from meshwright.kernels import cross_entropy
    from meshwright.spec import plan as spec

    monkeypatch.setattr(spec, "LOGIT_ROWS", 96)
    monkeypatch.setattr(spec, "LOGIT_BYTES", 1)
    found = []
    for kernels in ("fused", "plain"):
        torch.manual_seed(3)
        x = torch.randn(2, 200, 64, device="cuda", requires_grad=True)
        projection = torch.randn(1000, 64, device="cuda", requires_grad=True)
        targets = torch.randint(0, 1000, (2, 200), device="cuda")
        weight = torch.tensor(0.5, device="cuda", dtype=torch.float64)
        weighed, total = cross_entropy.weighted_loss(x, projection, targets, weight, kernels=kernels)
        (weighed * 3).backward()
        found.append((total, x.grad, projection.grad))
    # The same products of fp32, in the same order; exponentials and their sums differ in the last bits.
    assert all(relative(one, other) < 1e-5 for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shapes", [((512, 384), (16,), (1000, 48)), ((7,), (33, 5))])
def test_one_pass_updates_as_torch_does(narrow, shapes):
    from meshwright.kernels.adamw import AdamWGroup, AdamWStep

    torch.manual_seed(2)
    masters = [torch.randn(shape, device="cuda") for shape in shapes]
    twins = [torch.nn.Parameter(master.clone()) for master in masters]
    optimizer = torch.optim.AdamW(twins, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    first, second = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    copies = [torch.empty_like(master, dtype=torch.bfloat16) for master in masters]
    group = AdamWGroup(masters, first, second, copies)
    count, factor = torch.zeros((), device="cuda"), torch.tensor(0.5, device="cuda")
    for step in range(4):
        gradients = [torch.randn_like(master).to(narrow) for master in masters]
        finite = torch.tensor(float(step != 2), device="cuda")  # the third update is skipped
        count += finite
        group.update(gradients, 0.1, AdamWStep(1e-2, 0.9, 0.95, 1e-8, count, factor, finite))
        if step != 2:
            for twin, gradient in zip(twins, gradients, strict=True):
                twin.grad = gradient.float() * 0.5
            optimizer.step()
    for master, twin, copy in zip(masters, twins, copies, strict=True):
        assert relative(master, twin.detach()) < FP32
        assert torch.equal(copy, master.bfloat16())


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["none", "split"])
def test_one_pass_over_bf16_weights_and_states_is_the_plain_twins(monkeypatch, kind, states):
    monkeypatch.setattr(test_one_pass_bf16, "DEVICE", "cuda")
    fused, plain = (test_one_pass_bf16.moved(kind, states, way, (1.0, 0.0, 1.0)) for way in ("fused", "plain"))
    for mine, theirs in zip(fused, plain, strict=True):
        assert mine.dtype == theirs.dtype
        # The same draws: a number on the border of two may fall the other way, and what depends on it follows.
        near = mine == theirs if mine.dtype == torch.bfloat16 else torch.isclose(mine, theirs, rtol=2.0**-18, atol=1e-8)
        assert near.float().mean() > 0.99


@pytest.mark.parametrize("moment", [0, 1])
@pytest.mark.parametrize("state_dtype", ["int8", "int4", "fp8"])
def test_codes_of_moments_are_those_of_the_map(monkeypatch, state_dtype, moment):
    monkeypatch.setattr(test_adamw_quantized, "DEVICE", "cuda")
    test_adamw_quantized.test_the_kernels_lines_are_the_map(state_dtype, moment)


@pytest.mark.parametrize("kind", ["fp32", "split", "none"])
@pytest.mark.parametrize("state_dtype", ["int8", "int4", "fp8"])
def test_one_pass_over_quantized_states_is_the_plain_one(monkeypatch, state_dtype, kind):
    monkeypatch.setattr(test_adamw_quantized, "DEVICE", "cuda")
    test_adamw_quantized.test_an_optimizer_moves_as_by_plain_operations(state_dtype, kind)


@pytest.mark.parametrize("state_dtype", ["int8", "int4", "fp8"])
def test_scales_measured_first_give_the_reference(monkeypatch, state_dtype):
    monkeypatch.setattr(test_adamw_quantized, "DEVICE", "cuda")
    test_adamw_quantized.test_the_kernel_moves_as_the_reference(state_dtype, "measured first")
