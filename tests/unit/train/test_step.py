"""One definition of the loss: however the same tokens are cut into ranks and microbatches, the gradient is the same."""

from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.config.presets import preset
from meshwright.config.run import Run
from meshwright.data.loader import Batch, StepBatch
from meshwright.kernels import cross_entropy
from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill_model
from meshwright.parallel.mesh import Mesh
from meshwright.spec import plan as spec
from meshwright.spec.plan import AXES, Plan
from meshwright.train.step import evaluating, held_loss, in_turn

ARCH = msgspec.structs.replace(preset("tiny"), layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=23)
MIXTURE = msgspec.structs.replace(
    ARCH, experts=3, top_k=2, expert_ffn=8, balance_loss=0.1, z_loss=0.01, router="gshard", capacity=1.0
)
ROWS, POSITIONS = 6, 5
nobody: Any = None
ALONE = Mesh(
    dense=nobody,
    expert=nobody,
    fine=nobody,
    device=torch.device("cpu"),
    rank=0,
    world=1,
    data_rank=0,
    place=dict.fromkeys(AXES, 0),
)


def batch(lengths):
    """Rows of which only the first so many positions are predicted."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = torch.randint(0, ARCH.vocab, (ROWS, POSITIONS), generator=generator)
    targets = torch.randint(0, ARCH.vocab, (ROWS, POSITIONS), generator=generator)
    positions = torch.arange(POSITIONS).expand(ROWS, -1)
    hidden = positions >= torch.tensor(lengths)[:, None]
    index = torch.arange(ROWS * POSITIONS).view(ROWS, POSITIONS)
    return Batch(tokens, targets.masked_fill(hidden, IGNORE), positions, None, index)


def part(whole, start, end):
    pick = slice(start, end)
    return Batch(whole.tokens[pick], whole.targets[pick], whole.positions[pick], None, whole.index[pick])


def gradient(arch, groups, whole, tokens):
    """Each group of row ranges is a rank, each range one of its microbatches; gradients of ranks are summed."""
    model = Decoder(arch).double().train()
    fill_model(model, arch, seed=1)
    scale = torch.ones((), dtype=torch.float64)
    total = 0.0
    for ranges in groups:
        step = StepBatch(tuple(part(whole, *each) for each in ranges), tokens, 0.0)
        total += in_turn(model, Plan(microbatch=1), ALONE, step, scale).item()
    return total, torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


@pytest.mark.parametrize("arch", [ARCH, MIXTURE], ids=["dense", "mixture"])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, POSITIONS), min_size=ROWS, max_size=ROWS).filter(any),
    sizes=st.lists(st.integers(1, ROWS), min_size=1, max_size=ROWS).filter(lambda sizes: sum(sizes) <= ROWS),
    ranks=st.integers(1, 3),
)
def test_any_split_of_ragged_rows_has_one_gradient(arch, lengths, sizes, ranks):
    whole, tokens = batch(lengths), sum(lengths)
    ends = [0, *accumulate(sizes), ROWS]
    ranges = [(start, end) for start, end in pairwise(ends) if end > start]
    groups = [group for group in (ranges[rank::ranks] for rank in range(ranks)) if group]
    loss, split = gradient(arch, groups, whole, tokens)
    expected, together = gradient(arch, [[(0, ROWS)]], whole, tokens)
    assert loss == pytest.approx(expected, rel=1e-13)
    # Sums of a few hundred float64 terms in another order.
    assert (split - together).norm() <= 1e-13 * together.norm()


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = (each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        self.numbers = max(self.numbers, *made, 0)
        return result


def test_a_validation_loss_has_no_more_logits_at_a_time_than_training(monkeypatch):
    monkeypatch.setattr(spec, "LOGIT_BYTES", 1)
    monkeypatch.setattr(spec, "LOGIT_ROWS", 8)
    arch = msgspec.structs.replace(ARCH, vocab=4096)
    model = Decoder(arch)
    plain = Decoder(arch)
    plain.load_state_dict(model.state_dict())
    model.loss = cross_entropy.weighted_loss  # as on a GPU
    tokens = torch.arange(64).view(2, 32) % arch.vocab
    positions = torch.arange(32).expand(2, 32)
    sample = Batch(tokens=tokens, targets=tokens, positions=positions, documents=None, index=positions)
    run = Run(arch=arch, plan=Plan(microbatch=2))
    with evaluating([model]), Largest() as seen:
        found = held_loss([model], run, ALONE, sample)
    with evaluating([plain]):
        torch.testing.assert_close(found, held_loss([plain], run, ALONE, sample))
    assert seen.numbers <= arch.vocab * arch.hidden  # the projection, and not 64 rows of logits
