"""Blocks that are computed anew: nothing changes but what is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.config.presets import preset
from meshwright.kernels.fp8 import Fp8Linear
from meshwright.models.decoder import Decoder
from meshwright.parallel import recompute
from meshwright.parallel.model_spec import DECODER, Absent, ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

POLICIES = ["full", "selective", "selective-2", "every-2", "every-4", "first-2", "sqrt"]
NOBODY: Any = None  # one rank has no mesh


def wrapped(model: nn.Module, policy: str, model_spec: ModelSpec = DECODER) -> nn.Module:
    plan = Plan(microbatch=1, recompute=policy)
    model = recompute.keep_costly(model, plan, NOBODY, model_spec)
    return recompute.keep_inputs(model, plan, NOBODY, model_spec)


def decoder(policy: str, name: str = "tiny", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(preset(name))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.1)
    return wrapped(model.to(dtype), policy)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    tokens = torch.arange(48).view(2, 24) * 7 % 509
    positions = torch.arange(24).expand(2, 24)
    model(tokens, positions, index=tokens).float().square().mean().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_keep_every_bit(name, dtype):
    plain = gradients(decoder("none", name, dtype))
    for policy in POLICIES:
        anew = gradients(decoder(policy, name, dtype))
        assert anew.keys() == plain.keys(), policy
        assert all(torch.equal(anew[weight], plain[weight]) for weight in plain), policy


def test_names_stay():
    names = list(dict(Decoder(preset("tiny")).named_modules()))
    assert all(list(dict(decoder(policy).named_modules())) == names for policy in POLICIES)


def kept(policy: str) -> int:
    """Bytes that a forward leaves for the backward outside its recomputed regions, weights not counted."""
    model, seen = decoder(policy), {}
    weights = {weight.data_ptr() for weight in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in weights:
            seen[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    tokens = torch.arange(128).view(4, 32)
    with saved_tensors_hooks(pack, lambda x: x):
        model(tokens, tokens % 32)
    return sum(seen.values())


def test_first_k_trades_finely_and_longer_runs_keep_less():
    fine = [kept(policy) for policy in ("none", "first-1", "first-2", "first-4", "full")]
    assert fine == sorted(fine, reverse=True)
    assert len(set(fine)) == len(fine)
    assert kept("first-6") == kept("full")


class Dropping(nn.Module):
    """Blocks that draw from the stateful generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_that_draws_draws_the_same_again(policy):
    found = []
    for word in ("none", policy):
        torch.manual_seed(3)
        model = wrapped(Dropping(), word, ModelSpec())
        model(torch.ones(5, 4)).sum().backward()
        found.append([weight.grad for weight in model.parameters()])
    assert all(map(torch.equal, *found))


class Meddling(Dropping):
    """Does something of its own between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * 2
        return x


class Overwriting(Dropping):
    """The same, where the tensor stays the same object."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.mul_(2)
        return x


@pytest.mark.parametrize("kind", [Meddling, Overwriting])
def test_a_model_that_works_between_its_blocks_is_not_run_wrongly(kind):
    with pytest.raises(InputError, match=r"does something between its blocks; use plan\.recompute = full"):
        wrapped(kind(), "every-2", ModelSpec())(torch.ones(5, 4))
    wrapped(kind(), "first-2", ModelSpec())(torch.ones(5, 4)).sum().backward()  # each by itself: nothing to refuse


class Leaving(Dropping):
    """Never calls its last block, whose call would compute those before it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
        return x


def test_a_run_whose_last_block_is_not_called_is_not_passed_over():
    with pytest.raises(InputError, match=r"leaves one of them out .* use plan\.recompute = full"):
        wrapped(Leaving(), "every-2", ModelSpec())(torch.ones(5, 4))
    wrapped(Leaving(), "full", ModelSpec())(torch.ones(5, 4)).sum().backward()


def test_blocks_of_other_stages_are_not_counted():
    model = Dropping()
    model.layers[0] = model.layers[1] = Absent()
    calls = []
    model.layers[2].register_forward_pre_hook(lambda *_: calls.append(2))
    model.layers[3].register_forward_pre_hook(lambda *_: calls.append(3))
    wrapped(model, "every-2", ModelSpec())(torch.ones(5, 4)).sum().backward()
    assert calls == [2, 3, 2, 3]  # hooks belong to a call, and run again with it


def test_a_forward_without_gradients_keeps_nothing_and_is_the_same():
    plain, anew = decoder("none"), decoder("every-4")
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(plain(tokens, tokens), anew(tokens, tokens))


class Products(TorchDispatchMode):
    """Counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten._scaled_mm)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("linear", [nn.Linear, Fp8Linear])
def test_by_operation_no_product_is_computed_anew(linear):
    block = nn.Sequential(linear(64, 64, bias=False), nn.SiLU(), linear(64, 64, bias=False)).bfloat16()
    model = wrapped(nn.Sequential(block), "selective", ModelSpec(blocks=lambda whole: dict(whole.named_children())))
    with Products() as seen:
        model(torch.randn(1, 32, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert seen.count == 6
