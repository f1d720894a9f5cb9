"""Low-rank adapters beside frozen weights: the same under every plan, the base untouched, and peft's when written."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from commands import meshwright
from safetensors.torch import load_file, save_file
from trials import (
    CPU,
    alone,
    assert_it_goes_on,
    corpus_file,
    deviation,
    digest_before_the_cut,
    drive,
    made,
    make_corpus,
    make_run,
    mesh_of,
)
from worlds import world

from meshwright.checkpoint import peft
from meshwright.checkpoint.convert import MismatchError, convert, logits, probe_tokens, stock_logits
from meshwright.checkpoint.model_folder import AdaptedFolder, SeededWeights, digest, open_folder, save_native
from meshwright.config import load
from meshwright.config.weights import note_of
from meshwright.models.decoder import Decoder
from meshwright.models.dropout import kept
from meshwright.models.lora import AdaptedExperts, DoraLinear, LoraLinear
from meshwright.parallel.expert import learned_buffers
from meshwright.spec.params import buffers, moved, params, trained
from meshwright.spec.problem import InputError
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.saving import restore
from meshwright.train.state import weights

# With fewer of both, elements of B whose gradient is rounding alone weigh more than the tolerance.
DEEP = ("arch.layers=4", "steps=4")
LORA = ("adapter.kind=lora", "adapter.rank=4", "adapter.rslora=true", "data.pack=documents", *DEEP)
DORA = ("adapter.kind=dora", "adapter.rank=4", "data.pack=documents")
WIDE = ("arch.hidden=128", "arch.heads=4", "arch.kv_heads=2", "arch.head_dim=32", "arch.ffn=256", "arch.layers=2")
QLORA = ("adapter.kind=qlora", "adapter.rank=4", "data.pack=documents", *WIDE)
FROZEN = ("optim.freeze=embed,blocks.0.*,blocks.1.attn", "data.pack=documents", *DEEP)
# float64 sums in another order: a few hundred terms of relative error 1e-16 each, through four updates.
TOLERANCE = 1e-12
HOSTED = ("plan.zero=3", "plan.cpu_offload=true")
TWO = (
    ("plan.replicate=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=1", "plan.recompute=full"),
    ("plan.shard=2", "plan.zero=3"),
    ("plan.tp=2",),
    ("plan.cp=2",),
    ("plan.pp=2", "plan.grad_accum=4"),
    ("plan.replicate=2", "plan.deterministic=true"),
)


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


def compare(folder: Path, words: tuple[str, ...], plans: tuple[tuple[str, ...], ...], arch: str = "tiny") -> None:
    """Plans beside one process over the same mathematics; what is frozen keeps every bit."""
    corpus = make_corpus(make_run(folder, *words, arch=arch), folder)
    reference = make_run(folder, *words, "plan.replicate=1", arch=arch)
    names = {param.name for param in trained(reference.arch)}
    one, first = None, {}
    if dist.get_rank() == 0:
        first = dict(weights(build(reference, corpus, alone()).chunks, reference, alone()))
        one = drive(reference, corpus, alone())
    for plan in plans:
        run = make_run(folder, *words, *plan, arch=arch)
        mine = drive(run, corpus, mesh_of(run.plan))
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, f"{run.plan}: losses {mine.losses} beside {one.losses}"
            assert one.losses[-1] < one.losses[0]
            for name, weight in mine.weights.items():
                assert torch.equal(weight, first[name]) == (name not in names), f"{run.plan}: {name}"


@world(2)
def test_two_ranks_are_one_device(folder):
    compare(folder, LORA, (*TWO, ("plan.shard=2", *HOSTED, "plan.grad_accum=2"), ("plan.replicate=2", *HOSTED)))
    compare(folder, FROZEN, (("plan.shard=2", "plan.zero=2", "plan.grad_accum=2"), ("plan.tp=2",), TWO[-2]))
    compare(folder, ("optim.freeze=head", "data.pack=documents"), (TWO[-2],))  # that the first stage has nothing of


EXPERTS = ("arch.layers=2", "arch.expert_ffn=64", "arch.shared_experts=1")
SPREAD = (
    ("plan.shard=2", "plan.zero=3", "plan.ep=2"),
    ("plan.shard=2", "plan.zero=3"),
    ("plan.tp=2", "plan.recompute=full"),
    ("plan.cp=2", "plan.ep=2", "plan.zero=1"),
    ("plan.pp=2", "plan.grad_accum=4"),
)


@world(2)
def test_experts_adapters_of_two_ranks_are_those_of_one(folder):
    compare(folder, (*LORA, *EXPERTS), SPREAD, arch="tiny-moe")
    biased = (*LORA, "adapter.targets=w1,w2,v_proj", "arch.layers=2", "arch.capacity=1.25")
    compare(folder, biased, (SPREAD[0], SPREAD[2]), arch="tiny-gpt-oss")
    compare(folder, (*DORA, *EXPERTS), (SPREAD[0], SPREAD[2]), arch="tiny-moe")


@world(2)
def test_latent_attention_s_adapters_of_two_ranks_are_those_of_one(folder):
    compare(folder, (*LORA, "arch.layers=2"), (("plan.tp=2",), SPREAD[0]), arch="tiny-deepseek-v3")
    dense = ("arch.layers=2", "arch.experts=0", "arch.router_groups=1", "arch.router_top_groups=1")
    compare(folder, (*DORA, *dense), (("plan.tp=2", "plan.recompute=full"),), arch="tiny-deepseek-v2")


@world(2)
def test_experts_codes_of_two_ranks_are_those_of_one(folder):
    coded = (*QLORA, "arch.expert_ffn=256", "steps=4")  # two groups of scales
    compare(folder, coded, (*SPREAD[:3], SPREAD[4]), arch="tiny-moe")
    compare(folder, (*coded, "adapter.base=fp8"), (SPREAD[0], SPREAD[2]), arch="tiny-moe")
    compare(folder, (*coded, "adapter.kind=dora", "adapter.base=nf4"), (SPREAD[2],), arch="tiny-moe")


@world(2)
def test_magnitudes_of_two_ranks_are_those_of_one(folder):
    compare(folder, DORA, (TWO[2], ("plan.tp=2", "plan.recompute=full"), TWO[-2], TWO[-1]))
    compare(folder, (*DORA, "arch.bias=true"), (("plan.tp=2",),))


@world(2)
def test_codes_of_two_ranks_are_those_of_one(folder):
    compare(
        folder,
        QLORA,
        (TWO[1], TWO[2], ("plan.shard=2", *HOSTED), ("plan.tp=2", "plan.recompute=full"), TWO[-2], TWO[-1]),
    )
    magnified = (*QLORA, "adapter.kind=dora", "adapter.base=nf4", "arch.bias=true")
    compare(folder, magnified, (("plan.tp=2",), TWO[2]))
    compare(folder, (*QLORA, "adapter.base=fp8", "adapter.targets=q_proj,down_proj"), (("plan.tp=2",), TWO[2]))


@world(2)
def test_adapters_of_two_ranks_drop_what_those_of_one_drop(folder):
    dropped = (*LORA, "adapter.dropout=0.3")
    compare(folder, dropped, (TWO[0], TWO[1], TWO[3], TWO[4], TWO[5]))
    compare(folder, (*DORA, "adapter.dropout=0.3"), (TWO[2], ("plan.tp=2", "plan.recompute=full"), TWO[-2], TWO[-1]))


@world(4)
def test_four_ranks_are_one_device(folder):
    plans = (("plan.pp=2", "plan.grad_accum=4", "plan.tp=2"), ("plan.shard=2", "plan.zero=3", "plan.cp=2"))
    compare(folder, LORA, plans)
    compare(folder, DORA, plans)
    compare(folder, (*LORA, *EXPERTS), (("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2"),), arch="tiny-moe")


def test_an_adapter_is_the_gradient_of_a_merged_weight():
    torch.manual_seed(1)
    linear = torch.nn.Linear(12, 10, dtype=torch.float64)
    linear.__class__ = LoraLinear
    linear.lora_a, linear.lora_b = (torch.nn.Parameter(torch.randn(*shape).double()) for shape in ((3, 12), (10, 3)))
    linear.scale = 0.7
    x = torch.randn(5, 12, dtype=torch.float64)
    linear(x).square().sum().backward()
    a, b = (weight.detach().clone().requires_grad_() for weight in (linear.lora_a, linear.lora_b))
    merged = linear.weight.detach() + 0.7 * b @ a
    F.linear(x, merged, linear.bias.detach()).square().sum().backward()
    assert torch.allclose(linear.lora_a.grad, a.grad, rtol=1e-12)
    assert torch.allclose(linear.lora_b.grad, b.grad, rtol=1e-12)


def test_dropout_of_an_adapter_drops_what_a_reads_and_nothing_else():
    torch.manual_seed(1)
    linear = torch.nn.Linear(64, 10, dtype=torch.float64)
    linear.__class__ = LoraLinear
    linear.lora_a, linear.lora_b = (torch.nn.Parameter(torch.randn(*shape).double()) for shape in ((3, 64), (10, 3)))
    linear.scale, linear.dropout = 0.7, 0.25
    linear.begin(1, "here", CPU)
    x = torch.randn(2, 30, 64, dtype=torch.float64, requires_grad=True)
    whole = linear(x)
    linear.index = torch.arange(60).view(2, 30)
    linear(x).square().sum().backward()
    keep = kept(linear.index, linear.key, 64, 0.25)
    assert keep.double().mean().item() == pytest.approx(0.75, abs=0.03)  # 3840 draws: four standard deviations
    a, b, y = (each.detach().clone().requires_grad_() for each in (linear.lora_a, linear.lora_b, x))
    expected = F.linear(y, linear.weight.detach(), linear.bias.detach()) + 0.7 * (y * keep / 0.75) @ a.T @ b.T
    expected.square().sum().backward()
    for mine, theirs in ((linear.lora_a, a), (linear.lora_b, b), (x, y)):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12)
    linear.eval()
    assert torch.equal(linear(x), whole)


def test_magnitudes_have_the_gradient_of_their_formula():
    torch.manual_seed(1)
    linear = torch.nn.Linear(12, 10, dtype=torch.float64)
    linear.__class__ = DoraLinear
    shapes = {"lora_a": (3, 12), "lora_b": (10, 3), "magnitude": (10,)}
    held = {name: torch.nn.Parameter(torch.randn(*shape).double()) for name, shape in shapes.items()}
    for name, weight in held.items():
        setattr(linear, name, weight)
    linear.scale, linear.across = 0.7, lambda squares: squares
    x = torch.randn(5, 12, dtype=torch.float64)
    linear(x).square().sum().backward()
    a, b, m = (weight.detach().clone().requires_grad_() for weight in held.values())
    whole = linear.weight.detach() + 0.7 * b @ a
    norms = whole.detach().norm(dim=1)
    F.linear(x, whole * (m / norms)[:, None], linear.bias.detach()).square().sum().backward()
    for mine, theirs in zip(held.values(), (a, b, m), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12)


class Keeps(torch.nn.Module):
    """Dropout that leaves what it is told to."""

    def __init__(self, keep: torch.Tensor) -> None:
        super().__init__()
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.keep


@pytest.mark.parametrize("cut", [0, 16])
def test_dropout_beside_magnitudes_is_peft_s(cut):
    """W x is whole; what the magnitudes change about it, and the adapter, are of what dropout leaves."""
    stock: Any = pytest.importorskip("peft")
    torch.manual_seed(1)
    theirs: Any = torch.nn.Sequential(torch.nn.Linear(64, 10, dtype=torch.float64))
    linear = copy.deepcopy(theirs[0])
    config = stock.LoraConfig(r=3, lora_alpha=2.1, use_dora=True, lora_dropout=0.25, target_modules=["0"])
    theirs = stock.inject_adapter_in_model(config, theirs).double().train()
    layer = theirs[0]
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    torch.nn.init.normal_(layer.lora_magnitude_vector["default"].weight)
    linear.__class__ = DoraLinear
    held = {
        "lora_a": layer.lora_A["default"].weight,
        "lora_b": layer.lora_B["default"].weight,
        "magnitude": layer.lora_magnitude_vector["default"].weight,
    }
    for name, weight in held.items():
        setattr(linear, name, torch.nn.Parameter(weight.detach().clone()))
    linear.scale, linear.dropout, linear.across, linear.first = 0.7, 0.25, lambda squares: squares, cut
    linear.begin(1, "here", CPU)
    linear.index = torch.arange(60).view(2, 30)
    layer.lora_dropout["default"] = Keeps(kept(linear.index, linear.key, 64, 0.25, cut).double() / 0.75)
    x = torch.randn(2, 30, 64, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    mine, wanted = linear(x), theirs(y)
    assert torch.allclose(mine, wanted, rtol=1e-12)
    mine.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-11)
    for name, weight in held.items():
        assert torch.allclose(getattr(linear, name).grad, weight.grad, rtol=1e-11), name
    assert not torch.allclose(linear.eval()(x), mine)
    linear.off = True
    assert torch.equal(
        linear.train()(x), F.linear(x, linear.weight) + linear.bias
    )  # the reference of DPO drops nothing


# With load biases, which are the base's.
MIXTURE = ("arch.preset=tiny-moe", "arch.layers=2", "arch.router_score=sigmoid", "arch.router_load_bias=true")
SAVED = (*LORA, *MIXTURE, "steps=6", "checkpoint.every=4", "data.eval_fraction=0.0")


@world(2)
def test_a_checkpoint_has_the_adapter_alone_and_resumes_beside_its_own_base(folder):
    run, mesh, state = made(make_run(folder, *SAVED, "plan.replicate=2", "plan.deterministic=true"), folder, CPU)
    saved = digest_before_the_cut(run, mesh, state, folder / "run")
    dist.barrier()
    names = {param.name for param in trained(run.arch)}
    manifest = json.loads((folder / "run/checkpoints/step-4/manifest.json").read_bytes())
    assert {each[0].partition("/")[2] for each in manifest["tensors"]} == names
    assert manifest["progress"]["base"] == state.base != ""
    deterministic = ("plan.shard=2", "plan.zero=3", "plan.deterministic=true")
    for plan in (("plan.tp=2",), deterministic, ("plan.shard=2", *HOSTED)):
        run, mesh, other = made(make_run(folder, *SAVED, *plan), folder, CPU)
        assert_it_goes_on(saved, run, mesh, other, folder / "run")
    run, mesh, other = made(make_run(folder, *SAVED, "plan.tp=2"), folder, CPU)
    frozen = next(weight for weight in other.chunks[0].parameters() if not weight.requires_grad).detach()
    bias = next(iter(learned_buffers(other.chunks[0], run.arch).values()))
    for part in (frozen, bias):
        before = part.clone()
        part.add_(0.5)
        other.base = ""  # not known yet
        with pytest.raises(InputError, match="are not those beside which step-4 was saved"):
            restore(other, run, mesh, folder / "run", lambda text: None)
        part.copy_(before)
    other.loader.close()


def test_a_base_with_other_load_biases_is_another(folder):
    run = make_run(folder, *MIXTURE)
    drawn, every = SeededWeights(run.arch, 1), (*params(run.arch), *buffers(run.arch))
    found = []
    for shift in (0.0, 0.5):
        others = ((p.name, drawn.tensor(p.name) + shift * p.name.endswith("load_bias")) for p in every)
        save_native(folder / f"base{shift}", run.arch, others, None)
        found.append(digest(open_folder(folder / f"base{shift}")))
    assert found[0] == digest(drawn) != found[1]


def test_load_biases_of_frozen_blocks_stay(folder):
    words = ("arch.layers=3", "optim.freeze=embed,blocks.1", "plan.replicate=1", "steps=1")
    run = make_run(folder, *words, arch="tiny-glm4-moe")
    mine = drive(run, make_corpus(run, folder), alone())
    biases = learned_buffers(mine.state.chunks[0], run.arch)
    assert {name: bool(bias.any()) for name, bias in biases.items()} == {
        "blocks.1.mlp.load_bias": False,
        "blocks.2.mlp.load_bias": True,
    }
    by_name = make_run(folder, *words, "optim.freeze=blocks.*.mlp.load_bias", arch="tiny-glm4-moe")
    assert not moved(by_name.arch)


def trained_adapter(folder: Path, words: tuple[str, ...] = LORA) -> Path:
    """A Hugging Face folder of a base, and a finished run of an adapter on it."""
    arch = (word for word in words if word.startswith("arch."))
    base = make_run(folder, "plan.precision=fp32", "plan.replicate=1", "steps=2", *arch)
    whole, corpus = drive(base, make_corpus(base, folder), alone()), make_corpus(base, folder)
    save_native(folder / "base", base.arch, whole.weights.items(), corpus.tokenizer)
    convert(folder / "base", folder / "hf", lambda text: None)
    run = make_run(folder, *words, f"init.from={folder}/hf", "plan.precision=fp32", "plan.replicate=1")
    tuned = drive(run, make_corpus(run, folder), alone())
    adapter = msgspec.to_builtins(run.adapter)
    note = note_of({"adapter": adapter, "init": {"from": f"{folder}/hf"}}, folder)
    save_native(folder / "adapter", run.arch, tuned.weights.items(), corpus.tokenizer, note=note)
    return folder / "adapter"


MIXTRAL = ("arch.preset=tiny-moe", "arch.shared_experts=0", "arch.expert_ffn=192", "arch.layers=2")
PHI3 = ("arch.preset=tiny-phi3", "arch.rope_share=0.5", "arch.layers=2")  # which no Llama's file can say
GPT2 = ("arch.norm=layer", "arch.positions=learned", "arch.mlp=gelu_tanh", "arch.bias=true", "arch.tied=true")
GPT2 = (*GPT2, "arch.kv_heads=8", "arch.layers=2")
KINDS = {
    "lora": LORA,
    "dora": DORA,
    # Experts beside dense layers and shared experts; gate and up in turns, and transposed; of the joined two one alone.
    "glm4-moe": (*LORA, "arch.preset=tiny-glm4-moe", "arch.layers=2"),
    "gpt-oss": (*LORA, "adapter.rslora=false", "arch.preset=tiny-gpt-oss", "arch.layers=2"),
    "mixtral": (*LORA, "adapter.targets=w3,q_proj", *MIXTRAL),
    # Queries, keys and values in one matrix, in turns by heads; of GPT-2 transposed.
    "phi3": (*LORA, "adapter.targets=q_proj,v_proj,up_proj", *PHI3),
    "neox": (*DORA, "arch.preset=tiny-neox", "arch.layers=2"),
    "gpt2": (*LORA, *GPT2),
}


@pytest.mark.parametrize("words", KINDS.values(), ids=KINDS)
def test_peft_reads_what_was_trained_and_a_merged_model_is_the_same(folder, words):
    pytest.importorskip("peft")
    path = trained_adapter(folder, words)
    adapter = open_folder(path)
    assert isinstance(adapter, AdaptedFolder)
    assert set(load_file(path / "model.safetensors")) == set(adapter.layouts)  # and nothing of the base
    said: list[str] = []
    report = convert(path, folder / "peft", said.append)
    assert report.kind_to == "adapter"
    assert report.checked_with.startswith("peft")
    tokens = probe_tokens(adapter.arch, 32)
    apart, base = logits(adapter.apart, tokens), logits(open_folder(folder / "hf"), tokens)
    theirs = stock_logits(folder / "hf", tokens, folder / "peft")
    # fp32 products in the same order on both sides; the base alone is far from either.
    assert (apart - theirs).abs().max() <= 1e-6 * apart.abs().max()
    assert (apart - base).abs().max() > 1e-2 * apart.abs().max()
    merged = convert(path, folder / "merged", said.append, merge=True)
    assert any(text.startswith("merged = adapter + base") for text in said)
    assert merged.kind_to == "huggingface"
    assert (stock_logits(folder / "merged", tokens) - apart).abs().max() <= 1e-5 * apart.abs().max()


def test_magnitudes_of_some_of_a_joined_matrix_are_merged_or_refused(folder):
    path = trained_adapter(folder, (*DORA, "adapter.targets=q_proj", *PHI3))
    with pytest.raises(InputError, match=r"blocks.0.attn.k.weight has no magnitude, and other parts .* --merge"):
        convert(path, folder / "peft", lambda text: None)
    assert convert(path, folder / "merged", lambda text: None, merge=True).kind_to == "huggingface"


def test_an_adapter_beside_codes_is_merged_into_what_they_stand_for(folder):
    path = trained_adapter(folder, QLORA)
    adapter, said = open_folder(path), list[str]()
    assert isinstance(adapter, AdaptedFolder)
    tokens = probe_tokens(adapter.arch, 32)
    assert convert(path, folder / "peft", said.append).kind_to == "adapter"  # beside the base of the files
    convert(path, folder / "merged", said.append, merge=True)
    assert any(text.startswith("merged = adapter + base as NF4 holds it, decoded") for text in said)
    held, whole = logits(adapter.apart, tokens), logits(adapter.beside_whole, tokens)
    merged = logits(open_folder(folder / "merged"), tokens)
    assert (merged - held).abs().max() <= 1e-5 * held.abs().max()
    assert (merged - whole).abs().max() > 1e-2 * held.abs().max()  # four bits are not the base
    model = build(
        make_run(folder, *QLORA, f"init.from={folder}/hf", "plan.precision=fp32", "plan.replicate=1"),
        make_corpus(make_run(folder, *QLORA), folder),
        alone(),
    ).chunks[0]
    linear = model.get_submodule("blocks.0.attn.q")
    assert isinstance(linear, LoraLinear)
    assert torch.equal(linear.matrix(torch.float32), adapter.held_base("blocks.0.attn.q.weight"))


def test_experts_without_a_form_in_peft_are_merged_or_refused(folder):
    path = trained_adapter(folder, (*DORA, *MIXTRAL))
    with pytest.raises(InputError, match=r"peft has no DoRA of model.layers.0.mlp.experts.gate_up_proj, .* --merge"):
        convert(path, folder / "peft", lambda text: None)
    assert convert(path, folder / "merged", lambda text: None, merge=True).kind_to == "huggingface"


def test_an_expert_s_adapter_is_that_of_a_linear_layer():
    torch.manual_seed(1)
    run = load.load(None, ["arch.preset=tiny-moe", "arch.layers=1", *LORA], default_ranks=1).run
    model = Decoder(run.arch).double()
    experts = model.get_submodule("blocks.0.mlp.experts")
    assert isinstance(experts, AdaptedExperts)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    counts, x = torch.tensor([3, 0, 4, 1]), torch.randn(9, 64, dtype=torch.float64, requires_grad=True)
    experts(x, counts).square().sum().backward()
    held = {name: weight.detach().clone().requires_grad_() for name, weight in experts.named_parameters()}
    y, scale, begin = x.detach().clone().requires_grad_(), run.adapter.scale, 0
    for expert, rows in enumerate(counts.tolist()):
        gate, up, down = (
            held[name][expert] + scale * held[f"{name}_lora_b"][expert] @ held[f"{name}_lora_a"][expert]
            for name in ("gate", "up", "down")
        )
        mine = y[begin : begin + rows]
        (F.silu(mine @ gate.T) * (mine @ up.T) @ down.T).square().sum().backward()
        begin += rows
    assert torch.allclose(x.grad[:8], y.grad[:8], rtol=1e-10)
    assert not x.grad[8].any()  # no expert's
    for name, weight in experts.named_parameters():
        if name.endswith(("lora_a", "lora_b")):
            assert torch.allclose(weight.grad, held[name].grad, rtol=1e-9, atol=1e-12), name


def test_peft_s_own_code_is_believed_and_not_ours(folder):
    """Keys that peft would skip in silence, as those of compiled modules, are an error."""
    pytest.importorskip("peft")
    path = trained_adapter(folder)
    convert(path, folder / "peft", lambda text: None)
    file = folder / "peft" / peft.WEIGHTS
    renamed = {name.replace("layers.0.", "layers.0._orig_mod."): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    with pytest.raises(MismatchError, match="peft reads other weights than"):
        stock_logits(folder / "hf", probe_tokens(open_folder(path).arch, 8), folder / "peft")


def test_an_adapter_of_another_base_is_refused(folder):
    path = trained_adapter(folder)
    note = json.loads((path / "adapter.json").read_bytes())
    other = make_run(folder, "plan.precision=fp32", "plan.replicate=1", "arch.ffn=64", "steps=1")
    whole = drive(other, make_corpus(other, folder), alone())
    save_native(folder / "other", other.arch, whole.weights.items(), None)
    (path / "adapter.json").write_text(json.dumps(note | {"base": f"{folder}/other"}))
    with pytest.raises(InputError, match="other is not the base of the adapter"):
        open_folder(path)
    shutil.rmtree(folder / "other")
    with pytest.raises(InputError, match=r"the base of the adapter in .* is not a folder; put the model back"):
        open_folder(path)


def test_saved_steps_of_frozen_weights_are_whole_models(folder):
    run = make_run(folder, *FROZEN, "plan.precision=bf16", "plan.replicate=1", "steps=2", "checkpoint.every=2")
    home, corpus = folder / "run", make_corpus(run, folder)
    state = build(run, corpus, alone())
    list(train(run, state, alone(), home))
    state.loader.close()
    (home / "run.toml").write_text(load.write(run))
    save_native(home / "model", run.arch, weights(state.chunks, run, alone()), corpus.tokenizer)
    saved, model = open_folder(home / "checkpoints" / "step-2"), open_folder(home / "model")
    assert saved.dtype == model.dtype == torch.float32
    for name, weight in weights(state.chunks, run, alone()):
        assert torch.equal(saved.tensor(name), weight)
        assert torch.equal(model.tensor(name), weight)
    convert(home / "model", folder / "whole", lambda text: None)  # which compares the logits


def test_a_run_of_an_adapter_ends_as_any_other_and_its_steps_convert(folder):
    words = [
        f"data.source={folder}/text.jsonl",
        "arch.preset=tiny",
        "arch.layers=2",
        "steps=2",
        "sequence=32",
        "batch=4",
    ]
    words = ["train", *LORA, *words, "checkpoint.every=1", "plan.replicate=1", "--folder", "run"]
    done = meshwright(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for step in ("run", "run@1"):
        report = convert(f"{folder}/{step}", folder / f"{step}-merged", lambda text: None, merge=True)
        assert report.kind_to == "huggingface"
    said = list[str]()
    convert(f"{folder}/run", folder / "adapter", said.append)
    assert "without its base, which is drawn from the seed of its run" in said[-1]


def test_an_adapter_beside_a_run_says_that_peft_cannot_open_its_base(folder):
    said, note = list[str](), json.loads((trained_adapter(folder) / "adapter.json").read_bytes())
    shutil.copytree(folder / "adapter", folder / "second")
    (folder / "second" / "adapter.json").write_text(json.dumps(note | {"base": f"{folder}/adapter"}))
    convert(folder / "second", folder / "peft", said.append)
    assert said[-1].endswith(f"give it what meshwright convert {folder}/adapter FOLDER --merge writes")


def test_bf16_adapters_beside_a_bf16_base_learn(folder):
    for words in (("plan.precision=bf16",), ("plan.precision=bf16", "optim.master_weights=split")):
        run = make_run(folder, *LORA, "plan.replicate=1", "steps=8", *words)
        mine = drive(run, make_corpus(run, folder), alone())
        frozen = [weight for weight in mine.state.chunks[0].parameters() if not weight.requires_grad]
        assert {weight.dtype for weight in frozen} == {torch.bfloat16}
        assert mine.losses[-1] < mine.losses[0] - 0.05
