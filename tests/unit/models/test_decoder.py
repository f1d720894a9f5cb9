import msgspec
import pytest
import torch

from meshwright.config.presets import preset, preset_names
from meshwright.models.decoder import Decoder
from meshwright.models.layers import token_loss_sum
from meshwright.spec.arch import Arch
from meshwright.spec.params import params, stored
from meshwright.spec.tuning import Adapter, Tuning


def table(arch: Arch) -> list[tuple[str, tuple[int, ...]]]:
    return [(param.name, param.shape) for param in params(arch)]


def held(model: Decoder) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def test_the_parameter_table_is_the_model(arch):
    assert held(Decoder(arch)) == table(arch)
    assert list(Decoder(arch).buffers()) == []


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_parameter_table_has_the_adapters(arch, kind):
    adapted = msgspec.structs.replace(arch, tuning=Tuning(adapter=Adapter(kind=kind, rank=2)))
    assert held(Decoder(adapted)) == table(adapted)


@pytest.mark.parametrize("base", ["nf4", "fp8"])
def test_weights_in_few_bits_are_the_tensors_of_the_table(dense, base):
    wide = msgspec.structs.replace(dense, hidden=64, head_dim=16, ffn=128, bias=True)
    adapted = msgspec.structs.replace(wide, tuning=Tuning(adapter=Adapter(kind="lora", rank=2, base=base)))
    assert held(Decoder(adapted)) == [(param.name, param.shape) for param in stored(adapted)]


@pytest.mark.parametrize("name", preset_names())
def test_the_parameter_table_is_the_model_for_every_preset(name):
    arch = preset(name)
    with torch.device("meta"):
        model = Decoder(arch)
    assert held(model) == table(arch)


def test_float64_stays_float64(arch, build, batch):
    seen = []
    model = build(arch)
    for module in model.modules():
        module.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model(**batch).sum().backward()
    assert set(seen) == {torch.float64}
    # A step through float32 would leave an error near 1e-7; float64 against float64 with other sums leaves 1e-13.
    with torch.no_grad():
        whole = model(**batch)
        apart = torch.cat([model(**{name: value[[row]] for name, value in batch.items()}) for row in range(4)])
    assert (whole - apart).abs().max() < 1e-12


def test_bfloat16_stays_bfloat16_and_near_float32(dense, build, batch):
    low, full = build(dense, torch.bfloat16), build(dense, torch.float32)
    full.load_state_dict(low.state_dict())
    logits = low(**batch)
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - full(**batch)).abs().max() / full(**batch).abs().max()
    assert error < 0.05  # bfloat16 keeps 8 bits (0.4 %), some ten roundings deep


@pytest.mark.parametrize("router", [None, "topk", "gshard"])
def test_mixtures_run_in_bfloat16(router, topk, build, batch):
    arch = topk if router is None else msgspec.structs.replace(topk, router=router, capacity=1.0)
    model = build(arch, torch.bfloat16)
    logits = model(**batch)
    token_loss_sum(logits, batch["tokens"]).backward()
    assert logits.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())


# Experts that choose among the whole sequence, and slots given to all first choices before any second one, let a token
# feel later ones: the warned-about leaks.
LEAKY = {"expert_choice", "gshard"}


def test_a_later_token_leaves_earlier_logits_alone(arch, build, batch):
    model = build(arch).eval()
    before = model(**batch)
    batch["tokens"] = batch["tokens"].clone()
    batch["tokens"][:, 7] += 1
    batch["tokens"] %= 31
    change = (model(**batch) - before).abs()
    assert change[:, 7:].max() > 1e-3
    if arch.router in LEAKY:
        assert change[:, :7].max() > 1e-3
    else:
        assert change[:, :7].max() < 1e-12


def test_documents_in_one_sequence_equal_documents_apart(dense, build, batch):
    model = build(dense)
    cut = 5
    positions = torch.cat([torch.arange(cut), torch.arange(12 - cut)]).expand(4, 12)
    documents = (torch.arange(12) >= cut).long().expand(4, 12)
    tokens = batch["tokens"]
    packed = model(tokens, positions, documents)
    first = model(tokens[:, :cut], positions[:, :cut])
    second = model(tokens[:, cut:], positions[:, cut:])
    assert (packed - torch.cat([first, second], dim=1)).abs().max() < 1e-12
    assert (packed - model(tokens, positions))[:, cut:].abs().max() > 1e-3  # without the mask they do see each other


def test_one_document_needs_no_mask(dense, build, batch):
    model = build(dense)
    documents = torch.zeros_like(batch["tokens"])
    assert (model(**batch, documents=documents) - model(**batch)).abs().max() < 1e-12


def test_rotary_positions_are_relative(llama, build, batch):
    model = build(llama)
    moved = model(batch["tokens"], batch["positions"] + 9)
    assert (moved - model(**batch)).abs().max() < 1e-12
    stretched = model(batch["tokens"], batch["positions"] * 2)
    assert (stretched - model(**batch)).abs().max() > 1e-3


def part(arch: Arch, whole: Decoder, layers: range, *, first: bool, last: bool) -> Decoder:
    """A stage of a pipeline: the layers, with the ends where it has them."""
    model = Decoder(arch).to(torch.float64)
    for layer in set(range(arch.layers)) - set(layers):
        del model.blocks[str(layer)]
    if not first:
        model.positions = None
        model.embed = model.embed if last and arch.tied else None
    if not last:
        model.norm = model.head = None
    model.load_state_dict({name: whole.state_dict()[name] for name in model.state_dict()})
    return model


def test_parts_in_a_row_are_the_whole(arch, build, batch):
    whole = build(arch)
    first = part(arch, whole, range(1), first=True, last=False)
    last = part(arch, whole, range(1, 2), first=False, last=True)
    inner = first(**batch)
    assert inner.shape == (4, 12, 16)
    assert torch.equal(last(**(batch | {"tokens": inner})), whole(**batch))


def test_a_part_without_ends_passes_hidden_states_through(llama, build, batch):
    middle = part(llama, build(llama), range(0), first=False, last=False)
    x = torch.randn(4, 12, 16, dtype=torch.float64)
    assert torch.equal(middle(x, batch["positions"]), x)


def test_forward_is_hidden_then_project(arch, build, batch):
    model = build(arch)
    assert torch.equal(model.project(model.hidden(**batch)), model(**batch))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_gives_the_same_logits(llama, topk, build, batch):
    for arch in (llama, topk):
        torch.compiler.reset()
        model = build(arch)
        compiled = torch.compile(model, backend="aot_eager")  # graphs and autograd are captured, code is not generated
        loss, twin = token_loss_sum(compiled(**batch), batch["tokens"]), token_loss_sum(model(**batch), batch["tokens"])
        assert (loss - twin).abs() < 1e-10
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        twins = torch.autograd.grad(twin, list(model.parameters()))
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(gradients, twins, strict=True))
