"""The kernels of the loss and of the update, on a GPU, beside references in double precision."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16 = 5e-3  # a bf16 number keeps 8 bits: 2e-3 of rounding in each of a few places
FP32 = 1e-6


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return ((value.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize(("rows", "vocab", "chunk_rows"), [(3000, 5003, 1024), (100, 128, 8192), (2048, 50304, 1024)])
@pytest.mark.parametrize("upstream", [1.0, 0.25])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(monkeypatch, rows, vocab, chunk_rows, upstream):
    from meshwright.kernels import cross_entropy

    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", vocab * 2 * chunk_rows)
    torch.manual_seed(1)
    x = torch.randn(1, rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    projection = (torch.randn(vocab, 256, device="cuda") * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (1, rows), device="cuda")
    targets[:, ::7] = cross_entropy.IGNORE
    weight = torch.tensor(0.01, device="cuda", dtype=torch.float64)
    weighed, total = cross_entropy.weighed_loss(x, projection, targets, weight)
    (weighed * upstream).backward()

    exact_x, exact_projection = (each.detach().double().requires_grad_() for each in (x, projection))
    logits = (exact_x @ exact_projection.t()).flatten(0, 1)
    exact = F.cross_entropy(logits, targets.flatten(), ignore_index=cross_entropy.IGNORE, reduction="sum")
    (exact * 0.01 * upstream).backward()
    assert relative(total, exact.detach()) < 1e-3  # the logits are rounded to bf16 before the sum
    assert relative(weighed.detach(), exact.detach() * 0.01) < 1e-3
    assert relative(x.grad, exact_x.grad) < BF16
    assert relative(projection.grad, exact_projection.grad) < BF16


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shapes", [((512, 384), (16,), (1000, 48)), ((7,), (33, 5))])
def test_one_pass_updates_as_torch_does(narrow, shapes):
    from meshwright.kernels.adamw import Group, Moves

    torch.manual_seed(2)
    masters = [torch.randn(shape, device="cuda") for shape in shapes]
    twins = [torch.nn.Parameter(master.clone()) for master in masters]
    optimizer = torch.optim.AdamW(twins, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    first, second = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    copies = [torch.empty_like(master, dtype=torch.bfloat16) for master in masters]
    group = Group(masters, first, second, copies)
    count, factor = torch.zeros((), device="cuda"), torch.tensor(0.5, device="cuda")
    for step in range(4):
        gradients = [torch.randn_like(master).to(narrow) for master in masters]
        finite = torch.tensor(float(step != 2), device="cuda")  # the third update is skipped
        count += finite
        group.update(gradients, 0.1, Moves(1e-2, 0.9, 0.95, 1e-8, count, factor, finite))
        if step != 2:
            for twin, gradient in zip(twins, gradients, strict=True):
                twin.grad = gradient.float() * 0.5
            optimizer.step()
    for master, twin, copy in zip(masters, twins, copies, strict=True):
        assert relative(master, twin.detach()) < FP32
        assert torch.equal(copy, master.bfloat16())
