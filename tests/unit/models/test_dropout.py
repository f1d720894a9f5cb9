"""Dropout keyed by token index: its share, its gradient, and that a part of the tokens drops what the whole does."""

import math

import pytest
import torch

from meshwright.config import load
from meshwright.config.presets import preset
from meshwright.config.run import digest
from meshwright.models.decoder import Decoder
from meshwright.models.dropout import Dropout, kept
from meshwright.spec.problem import InputError

HIDDEN = 256
INDEX = torch.arange(8 * 64).view(8, 64) + 10**9


def drop(p: float, seed: int = 1, name: str = "blocks.0.mlp_dropout") -> Dropout:
    module = Dropout(p)
    module.begin(seed, name)
    return module


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p_and_the_mean_stays(p):
    y = drop(p)(torch.ones(8, 64, HIDDEN, dtype=torch.float64), INDEX)
    share = (y == 0).double().mean().item()
    spread = math.sqrt(p * (1 - p) / y.numel())
    assert abs(share - p) < 5 * spread, "five standard deviations of independent draws"
    assert set(y.unique().tolist()) == {0.0, 1 / (1 - p)}


def test_draws_are_independent_along_tokens_and_elements():
    keep = kept(INDEX, drop(0.5).key, HIDDEN, 0.5).double() * 2 - 1  # signs of mean 0
    for a, b in ((keep[:, 1:], keep[:, :-1]), (keep[..., 1:], keep[..., :-1]), (keep[1:], keep[:-1])):
        assert abs((a * b).mean().item()) < 5 / math.sqrt(a.numel())


def test_a_part_of_the_tokens_drops_what_the_whole_drops():
    x = torch.randn(8, 64, HIDDEN)
    whole, module = drop(0.3)(x, INDEX), drop(0.3)
    assert torch.equal(module(x[2:5], INDEX[2:5]), whole[2:5])
    assert torch.equal(module(x[:, 16:32], INDEX[:, 16:32]), whole[:, 16:32])
    order = torch.randperm(64)
    assert torch.equal(module(x[:, order], INDEX[:, order]), whole[:, order])


def test_the_gradient_is_that_of_what_was_kept_and_no_mask_is_saved():
    x = torch.randn(8, 64, HIDDEN, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = drop(0.25)(x, INDEX)
    y.sum().backward()
    assert torch.equal(x.grad, (y != 0).double() / 0.75)
    assert [tensor.data_ptr() for tensor in saved if tensor.numel() > 1] == [INDEX.data_ptr()]


def test_other_seeds_places_and_steps_draw_otherwise():
    masks = [
        kept(INDEX, module.key, HIDDEN, 0.5)
        for module in (drop(0.5), drop(0.5, seed=2), drop(0.5, name="blocks.1.mlp_dropout"))
    ]
    masks.append(kept(INDEX + 8 * 64, drop(0.5).key, HIDDEN, 0.5))
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert (mask == other).double().mean().item() == pytest.approx(0.5, abs=0.01)  # 131,072 draws: 7 deviations


def test_evaluation_and_inputs_without_an_index_drop_nothing():
    x, module = torch.randn(1, 4, HIDDEN), drop(0.5)
    assert module(x, None) is x
    assert module.eval()(x, INDEX[:1, :4]) is x
    assert not any(isinstance(module, Dropout) for module in Decoder(preset("tiny")).modules())


def test_a_run_says_its_dropout_and_refuses_attentions_by_name():
    usual = load.load(None, ["arch.preset=tiny"]).run
    some = load.load(None, ["arch.preset=tiny", "arch.dropout=0.1"]).run
    assert digest(usual) != digest(some)
    with pytest.raises(InputError, match=r"arch.attention_dropout is not supported.*use arch.dropout"):
        load.load(None, ["arch.preset=tiny", "arch.attention_dropout=0.1"])
    with pytest.raises(InputError, match=r"arch.dropout = 1 is no probability"):
        load.load(None, ["arch.preset=tiny", "arch.dropout=1.0"])
