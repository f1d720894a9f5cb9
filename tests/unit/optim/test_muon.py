"""Newton–Schulz: singular values near one, singular vectors unchanged, batches and transposes alike."""

import pytest
import torch
from torch.optim import Muon

from meshwright.optim.muon import even, joined, one_by_one, orthogonalize, parted, scale
from meshwright.spec.matrices import MatrixCut


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(24, 24), (12, 48), (48, 12)])
def test_singular_values_become_one_and_vectors_stay(shape):
    x = drawn(3, *shape)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    y = orthogonalize(x.clone())
    found = left.mT @ y @ right.mT  # diagonal in the singular vectors of x
    made = found.diagonal(dim1=-2, dim2=-1)
    assert (found - torch.diag_embed(made)).abs().max() < 1e-12
    # The least singular value of the square ones is 1/400 of the norm: five steps bring it to about a half.
    assert made[values > 0.02 * x.norm(dim=(1, 2))[:, None]].sub(1).abs().max() < 0.35


def test_a_polynomial_of_singular_values_is_applied_and_nothing_else():
    x = drawn(1, 6, 9)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    values = values / x.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert torch.allclose(orthogonalize(x.clone()), left @ torch.diag_embed(values) @ right, atol=1e-12)


def test_a_matrix_does_not_depend_on_those_beside_it():
    x = drawn(4, 10, 16, dtype=torch.float32)
    alone = torch.cat([one_by_one(each[None].clone()) for each in x])
    assert torch.equal(one_by_one(x.clone()), alone)
    assert torch.allclose(orthogonalize(x.clone()), alone, atol=1e-5)


def test_zeros_stay_zeros():
    assert not orthogonalize(torch.zeros(2, 4, 6)).any()


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_torchs_own_makes_the_same_update(shape):
    """Torch's is in bf16 always: five steps leave it, and ours in bf16, some 2 % from the same in float64."""
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = drawn(*shape, dtype=torch.float32)
    Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw").step()
    factor = -scale(MatrixCut(rows=shape[0], columns=shape[1]))
    exact, low = (factor * orthogonalize(weight.grad[None].to(dtype))[0] for dtype in (torch.float64, torch.bfloat16))
    for each in (weight.detach(), low):
        assert (each - exact).norm() < 0.03 * exact.norm()
    assert exact.square().mean().sqrt() == pytest.approx(0.2, abs=0.04)  # as AdamW's


@pytest.mark.parametrize(
    "cut",
    [
        MatrixCut(rows=8, columns=12, shard=2, tp=2),
        MatrixCut(rows=8, columns=12, shard=2, tp=2, tp_dim=1),
        MatrixCut(rows=8, columns=12, shard=4, shard_dim=1, tp=2, tp_dim=0),
        MatrixCut(rows=7, columns=5, shard=3, tp=2, tp_dim=1),
        MatrixCut(rows=2, columns=5, shard=4),
    ],
)
def test_pieces_are_put_together_and_taken_apart(cut):
    whole = drawn(3, cut.rows, cut.columns)
    pieces = [whole[:, rows, columns].reshape(-1) for rows, columns in map(cut.region, range(cut.ranks))]
    assert torch.equal(parted(whole, cut), torch.cat(pieces))
    assert torch.equal(joined(torch.cat(pieces), cut, 3), whole)
    assert even(cut) == (len({len(each) for each in pieces}) == 1)
