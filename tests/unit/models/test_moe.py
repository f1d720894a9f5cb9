import weakref

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from meshwright.kernels import experts as kernels
from meshwright.models.decoder import Decoder
from meshwright.models.init import normal
from meshwright.models.layers import token_loss_sum
from meshwright.models.moe import ROUTERS, Experts, MoELayer, carry, grouped, mix_grouped, one_by_one, run_experts
from meshwright.models.moe import mix as plain_mix
from meshwright.spec.arch import Arch


def layer_of(model: Decoder) -> MoELayer:
    return model.blocks["1"].mlp


def input_of_layer() -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(33).view(3, 11) + 500


def slow_expert(experts: Experts, expert: int, x: Tensor) -> Tensor:
    inner = experts.up[expert] @ x
    inner = experts.activate(inner) if experts.gate is None else F.silu(experts.gate[expert] @ x) * inner
    return experts.down[expert] @ inner


def slow_logits(layer: MoELayer, x: Tensor, index: Tensor) -> Tensor:
    logits = x @ layer.router.weight.T
    if layer.noise is None:
        return logits
    numbers = [[[normal(layer.key, i * 4 + expert) for expert in range(4)] for i in row] for row in index]
    return logits + torch.tensor(numbers, dtype=x.dtype) * F.softplus(x @ layer.noise.weight.T)


def test_the_experts_input_is_freed_before_their_output_is_combined(mixture, build, monkeypatch):
    layer, given = layer_of(build(mixture)), []

    def run(experts: Experts, rows: Tensor, counts: Tensor, *more) -> Tensor:
        given.append(weakref.ref(rows))
        return run_experts(experts, rows, counts)

    def combined(rows: Tensor, places: Tensor, kept: Tensor) -> Tensor:
        given.append(given[0]())
        return sum_rows(rows, places, kept)

    sum_rows = kernels.sum_rows
    monkeypatch.setattr(kernels, "sum_rows", combined)
    layer.run = run
    with torch.no_grad():  # else the graph has it, as the ledger knows
        layer(*input_of_layer())
    assert given[1] is None


def test_a_mixture_is_the_gated_sum_of_its_experts(mixture, build):
    layer = layer_of(build(mixture))
    x, index = input_of_layer()
    logits = slow_logits(layer, x, index)
    routing = ROUTERS[mixture.router](logits, mixture, layer._draw(index))
    expected = torch.zeros_like(x) if layer.shared is None else layer.shared(x)
    for sequence, token, choice in routing.kept.nonzero().tolist():
        expert = int(routing.experts[sequence, token, choice])
        gate = routing.gates[sequence, token, choice]
        expected[sequence, token] += gate * slow_expert(layer.experts, expert, x[sequence, token])
    assert (layer(x, index) - expected).abs().max() < 1e-12


def results(layer: MoELayer, x: Tensor, index: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    x = x.clone().requires_grad_()
    y = layer(x, index)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])]


def test_gates_inside_the_experts_change_nothing(mixture, build):
    after, inside = layer_of(build(mixture)), layer_of(build(mixture))
    inside.mix = mix_grouped
    for mine, other in zip(results(inside, *input_of_layer()), results(after, *input_of_layer()), strict=True):
        assert (mine - other).abs().max() < 1e-12


LOADS = {"fair": [3, 3, 3, 3], "skewed": [9, 0, 1, 2], "one expert": [0, 0, 12, 0], "none": [0, 0, 0, 0]}


@pytest.mark.parametrize("compute", [one_by_one, grouped])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("load", LOADS)
def test_rows_by_expert_are_rows_one_by_one(topk, load, mlp, compute):
    experts = Experts(msgspec.structs.replace(topk, mlp=mlp, capacity=1.0)).double()
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, dtype=torch.float64, generator=random))
    experts.compute = compute
    x = torch.randn(14, 16, dtype=torch.float64, generator=random, requires_grad=True)  # two past the last
    slope = torch.randn(14, 16, dtype=torch.float64, generator=random)
    owners = [expert for expert, rows in enumerate(LOADS[load]) for _ in range(rows)]
    apart = [slow_expert(experts, expert, x[row]) for row, expert in enumerate(owners)]
    expected = torch.stack([*apart, *[torch.zeros(16, dtype=torch.float64)] * (14 - len(owners))])
    y = run_experts(experts, x, torch.tensor(LOADS[load]))
    assert (y - expected).abs().max() < 1e-12
    if not owners:
        return
    wanted = [x, *experts.parameters()]
    ours, theirs = (torch.autograd.grad(each, wanted, slope, allow_unused=True) for each in (y, expected))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < 1e-12


def test_an_expert_without_tokens_has_a_gradient_of_zeros(mixture, build):
    layer = layer_of(build(msgspec.structs.replace(mixture, balance_loss=0.0, z_loss=0.0)))
    x, index = input_of_layer()
    layer(x[:1, :1], index[:1, :1]).square().sum().backward()
    for name, weight in layer.named_parameters():
        assert weight.grad is not None, name
    assert layer.experts.up.grad is not None
    chosen = layer.experts.up.grad.flatten(1).any(1).sum()
    # One token does not reach them all, unless it is they who choose.
    assert chosen < mixture.experts or mixture.router == "expert_choice"


def test_gradients_are_those_of_the_function(mixture, build):
    layer = layer_of(build(msgspec.structs.replace(mixture, balance_loss=0.0, z_loss=0.0)))
    x, index = input_of_layer()
    x, index = x[:2, :5].clone().requires_grad_(), index[:2, :5]
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x, index))

    # One random direction instead of every element: choices are far from flipping at the check's step of 1e-6.
    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


def test_four_sequences_at_once_are_four_one_by_one(mixture, build, batch):
    together, apart = build(mixture), build(mixture)
    for model in (together, apart):
        for layer in range(2):
            if mixture.is_moe(layer):
                model.blocks[str(layer)].mlp.loss_weight = torch.tensor(1 / 48, dtype=torch.float64)
    (token_loss_sum(together(**batch), batch["tokens"]) / 48).backward()
    for row in range(4):
        one = {name: value[[row]] for name, value in batch.items()}
        (token_loss_sum(apart(**one), one["tokens"]) / 48).backward()
    for (name, parameter), twin in zip(together.named_parameters(), apart.parameters(), strict=True):
        assert (parameter.grad - twin.grad).abs().max() < 1e-12, name


def explicit_auxiliary(layer: MoELayer, x: Tensor, index: Tensor) -> Tensor:
    """The auxiliary losses of a layer's input by their definitions, summed over sequences."""
    arch = layer.arch
    logits = slow_logits(layer, x, index)
    probabilities = logits.softmax(-1)
    total = logits.new_zeros(())
    for sequence in range(len(x)):
        share = torch.full((4,), 0.25, dtype=x.dtype)
        if arch.router != "expert_choice":
            chosen = probabilities[sequence].topk(arch.top_k).indices.flatten()
            share = chosen.bincount(minlength=4).to(x.dtype) / chosen.numel()
        balance = 4 * (share * probabilities[sequence].mean(0)).sum()
        z = logits[sequence].logsumexp(-1).square().mean()
        total = total + (arch.balance_loss * balance + arch.z_loss * z) * x.shape[1]
    return total


def test_the_auxiliary_gradient_is_that_of_the_explicit_loss(mixture, build, batch):
    carried = build(mixture)
    explicit = build(msgspec.structs.replace(mixture, balance_loss=0.0, z_loss=0.0))
    terms: list[Tensor] = []
    for layer in range(2):
        if mixture.is_moe(layer):
            carried.blocks[str(layer)].mlp.loss_weight = torch.tensor(1 / 48, dtype=torch.float64)
            module = explicit.blocks[str(layer)].mlp

            def add(module: MoELayer, inputs: tuple, output: Tensor) -> None:
                weighted = module.arch
                module.arch = mixture  # the twin computes without the losses; here they are wanted
                terms.append(explicit_auxiliary(module, *inputs))
                module.arch = weighted

            module.register_forward_hook(add)
    (token_loss_sum(carried(**batch), batch["tokens"]) / 48).backward()
    loss = token_loss_sum(explicit(**batch), batch["tokens"]) / 48
    plain = torch.autograd.grad(loss, layer_of(explicit).router.weight, retain_graph=True)[0]
    ((loss * 48 + sum(terms)) / 48).backward()
    for (name, parameter), twin in zip(carried.named_parameters(), explicit.parameters(), strict=True):
        assert (parameter.grad - twin.grad).abs().max() < 1e-12, name
    assert (layer_of(carried).router.weight.grad - plain).abs().max() > 1e-5  # the losses are not just zero


def test_carry_returns_its_input_and_gives_the_weight_as_gradient():
    x = torch.randn(3, requires_grad=True)
    auxiliary = torch.tensor(5.0, requires_grad=True)
    y = carry(x, auxiliary, torch.tensor(0.25))
    assert torch.equal(y, x)
    (2 * y).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    assert auxiliary.grad.item() == 0.25


def test_nothing_is_drawn_in_evaluation_or_without_an_index(mixture, build):
    layer = layer_of(build(mixture))
    x, index = input_of_layer()
    drawn, without = layer(x, index), layer(x)
    assert torch.equal(layer.eval()(x, index), without)
    assert torch.equal(drawn, without) == (mixture.router not in ("noisy_topk", "gshard"))


def test_draws_follow_the_token_not_its_place(build, mixture):
    layer = layer_of(build(mixture))
    x, index = input_of_layer()
    turned = torch.tensor([2, 0, 1])
    assert (layer(x[turned], index[turned]) - layer(x, index)[turned]).abs().max() < 1e-13
    assert torch.equal(layer(x, index + 99), layer(x, index)) == (mixture.router not in ("noisy_topk", "gshard"))


def test_one_layers_compiled_code_serves_all_layers_and_steps(mixture):
    torch._dynamo.reset()
    compiled = CompileCounter()
    for step in range(2):
        for number in range(3):
            layer = MoELayer(mixture, number).double()
            torch.nn.init.ones_(layer.router.weight)
            layer.run = lambda experts, rows, *more: rows * 2  # the plain experts ask for sizes, grouped ones do not
            layer.loss_weight = torch.tensor(1 / (step + 2), dtype=torch.float64)
            torch.compile(layer, backend=compiled)(*input_of_layer()).sum().backward()
    assert compiled.frame_count == 1


def test_statistics_are_of_the_last_training_forward(topk, build):
    layer = layer_of(build(topk))
    x, index = input_of_layer()
    layer.eval()(x, index)
    assert layer.statistics is None
    layer.train()(x, index)
    assert layer.statistics.shape == (1 + 4,)
    assert not layer.statistics.requires_grad
    routing = ROUTERS["topk"](x @ layer.router.weight.T, topk, None)
    assert layer.statistics[0].item() == pytest.approx(routing.balance.mean().item(), rel=1e-12)
    asked = routing.experts.flatten().bincount(minlength=4).double() / routing.experts.numel()
    assert layer.statistics[1:].tolist() == pytest.approx(asked.tolist(), rel=1e-14)


def test_the_run_of_experts_may_be_replaced(mixture, build):
    layer = layer_of(build(mixture))
    x, index = input_of_layer()
    expected = layer(x, index)
    seen = {}

    def watched(experts: Experts, rows: Tensor, counts: Tensor, *more) -> Tensor:
        seen.update(rows=rows, counts=counts)
        return run_experts(experts, rows, counts)

    layer.run = watched
    assert torch.equal(layer(x, index), expected)
    assert seen["counts"].shape == (4,)
    assert seen["counts"].sum() <= len(seen["rows"])
    if mixture.capacity == 0:
        assert seen["counts"].sum() == len(seen["rows"]) == 33 * mixture.top_k


def test_experts_take_consecutive_rows_and_leave_the_rest_zero(topk):
    experts = Experts(topk).double()
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, dtype=torch.float64))
    x = torch.randn(9, 16, dtype=torch.float64)
    y = run_experts(experts, x, torch.tensor([3, 0, 4, 1]))
    for row, expert in enumerate([0, 0, 0, 2, 2, 2, 2, 3]):
        assert (y[row] - slow_expert(experts, expert, x[row])).abs().max() < 1e-12
    assert y[8].abs().max() == 0
    y.sum().backward()
    assert experts.up.grad[1].abs().max() == 0  # idle, yet with a gradient: every rank reduces the same tensors
    assert experts.up.grad[2].abs().max() > 0


def saved_bytes(layer: MoELayer, x: Tensor, index: Tensor) -> int:
    """Of what a forward leaves for the backward, all but weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, index).sum()  # the sum keeps the graph, and with it every storage, until all were seen
    return sum(saved.values())


@pytest.mark.parametrize("mix", [plain_mix, mix_grouped])
def test_what_is_saved_does_not_grow_with_the_experts(topk, mix):
    tokens, held = 3 * 11, {}
    for experts in (4, 16, 64):
        arch = msgspec.structs.replace(topk, experts=experts, capacity=0.0)
        layer = MoELayer(arch, 0).double()
        torch.nn.init.normal_(layer.router.weight)
        layer.experts.compute, layer.mix = grouped, mix
        held[experts] = saved_bytes(
            layer, *(each.requires_grad_(each.is_floating_point()) for each in input_of_layer())
        )
    # The router has a few numbers for every token and expert; rows and what experts do with them are as many as before.
    for experts in (16, 64):
        assert held[experts] - held[4] <= (experts - 4) * (tokens * (4 * 8 + 8) + 16 * 8)


def test_a_dropped_token_passes_only_through_the_residual(topk, build):
    arch: Arch = msgspec.structs.replace(topk, router="switch", top_k=1, capacity=0.5)  # 2 slots for 11 tokens
    layer = layer_of(build(arch))
    x, _ = input_of_layer()
    x = x[:1, :1].expand(1, 11, 16)  # all want the same expert
    y = layer(x)
    assert y[0, :2].abs().min() > 0
    assert y[0, 2:].abs().max() == 0
