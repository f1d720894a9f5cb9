"""Multi-token prediction beside a plain implementation by the equations of DeepSeek-V3, and its folders."""

import json

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.checkpoint.convert import convert
from meshwright.checkpoint.model_folder import SINGLE, huggingface, open_folder, store
from meshwright.config.check import problems
from meshwright.config.huggingface import config_of
from meshwright.config.presets import preset
from meshwright.config.run import Run
from meshwright.cost.flops import matmul_flops_per_token
from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.decoder import Decoder, one_ahead
from meshwright.models.init import initial
from meshwright.spec.params import buffers, count, params
from meshwright.spec.plan import Plan

LENGTH = 12


def small(name: str = "tiny-deepseek-v3", **more):
    arch = msgspec.structs.replace(preset(name), layers=2, vocab=61, balance_loss=0.0, mtp_layers=1)
    return msgspec.structs.replace(arch, **more)


def made(arch, dtype=torch.float64) -> Decoder:
    model = Decoder(arch)
    torch.manual_seed(1)
    values = {param.name: 0.3 * torch.randn(param.shape) for param in (*params(arch), *buffers(arch))}
    model.load_state_dict(values, strict=False)
    return model.to(dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def plain_loss(model: Decoder, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Equations 21 to 25, sample by sample and without its last position, which has no token after the next.

    The block is the model's own, which transformers' holds to; nothing else is.
    """
    arch, weights = model.arch, dict(model.named_parameters())
    main, further = [], []
    for row, wanted in zip(tokens, targets, strict=True):
        positions = torch.arange(len(row))[None]
        h = model.hidden(row[None], positions)
        main.append(F.cross_entropy(h[0] @ weights["head.weight"].T, wanted, reduction="sum"))
        at, place = f"blocks.{arch.layers}.", model.blocks[str(arch.layers)]
        e = weights["embed.weight"][row[1:]]
        pair = (
            rms(e, weights[f"{at}embed_norm.weight"], arch.norm_eps),
            rms(h[0, :-1], weights[f"{at}hidden_norm.weight"], arch.norm_eps),
        )
        joined = torch.cat(pair, 1) @ weights[f"{at}join.weight"].T
        rope, mask = model._given(joined[None], positions[:, :-1], None)[str(arch.layers)]
        block = super(type(place), place).forward(joined[None], rope, mask, None)[0]
        last = rms(block, weights[f"{at}end_norm.weight"], arch.norm_eps)
        further.append(F.cross_entropy(last @ weights["head.weight"].T, wanted[1:], reduction="sum"))
    return sum(main), sum(further)


@pytest.mark.parametrize("name", ["tiny-deepseek-v3", "tiny-glm4-moe", "tiny"])
def test_loss_and_gradients_are_those_of_the_equations(name):
    model = made(small(name, mtp_loss_weight=0.3))
    tokens = torch.randint(61, (3, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    weight = torch.tensor(1 / targets.numel(), dtype=torch.float64)
    positions = torch.arange(LENGTH).expand_as(tokens)
    following, both = one_ahead(tokens, targets, None)
    weighed, total = model(tokens, positions, wanted=(both, weight), following=following)
    weighed.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    main, further = plain_loss(model, tokens, targets)
    wanted = (main + 0.3 * further) * weight
    wanted.backward()
    assert torch.allclose(total, main, rtol=1e-12)
    assert torch.allclose(weighed, wanted, rtol=1e-12)
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter.grad).abs().max() <= 1e-12 * largest, name


def test_nothing_is_predicted_past_the_end_of_a_sequence_or_a_document():
    tokens, targets = torch.arange(6)[None], torch.arange(1, 7)[None]
    targets[0, 3] = IGNORE
    following, both = one_ahead(tokens, targets, torch.tensor([[0, 0, 0, 0, 1, 1]]))
    assert following.tolist() == [[1, 2, 3, 4, 5, 5]]
    assert torch.equal(both[..., 0], targets)
    assert both[..., 1].tolist() == [[2, 3, IGNORE, IGNORE, 6, IGNORE]]


def test_logits_are_those_of_the_model_without_it():
    arch = small()
    model, other = made(arch), Decoder(msgspec.structs.replace(arch, mtp_layers=0)).double()
    other.load_state_dict({name: model.state_dict()[name] for name in other.state_dict()})
    tokens, positions = torch.arange(LENGTH)[None], torch.arange(LENGTH)[None]
    assert torch.equal(model(tokens, positions), other(tokens, positions))


def test_a_published_model_has_so_many_parameters_more():
    plain = preset("deepseek-v3")
    whole = msgspec.structs.replace(plain, mtp_layers=1)
    biases = sum(param.numel for param in buffers(whole)) - sum(param.numel for param in buffers(plain))
    assert biases == 256
    assert count(whole) - count(plain) + biases == 11_610_068_224
    head = 2 * plain.vocab * plain.hidden
    assert matmul_flops_per_token(whole) - matmul_flops_per_token(plain) > head


@pytest.mark.parametrize(
    ("arch", "plan", "key"),
    [
        ({"tied": True}, {}, "arch.tied"),
        ({"mtp_layers": 2}, {}, "arch.mtp_layers"),
    ],
)
def test_what_it_cannot_be_beside_is_refused_by_name(arch, plan, key):
    run = Run(arch=small(**arch), plan=Plan(microbatch=1, **plan))
    assert [problem.key for problem in problems(run) if "mtp_layers" in problem.text] == [key]


def published(arch, path) -> None:
    """A folder as DeepSeek publishes it: with copies of what multi-token prediction shares."""
    every = {param.name: param for param in (*params(arch), *buffers(arch))}
    path.mkdir()
    load = {name: initial(param, 1).bfloat16() for name, param in every.items()}
    held = {stored.name: store(stored, load.__getitem__).contiguous() for stored in huggingface(arch)}
    at = f"model.layers.{arch.layers}"
    held |= {f"{at}.embed_tokens.weight": load["embed.weight"], f"{at}.shared_head.head.weight": load["head.weight"]}
    save_file({name: tensor.clone() for name, tensor in held.items()}, path / SINGLE, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config_of(arch, "bfloat16")))


def test_a_folder_goes_there_and_back_with_it(tmp_path, transformers):
    arch = small()
    published(arch, tmp_path / "published")
    assert open_folder(tmp_path / "published").arch.mtp_layers == 0  # who wants it says so
    convert(tmp_path / "published", tmp_path / "ours", lambda text: None)
    assert open_folder(tmp_path / "ours").arch.mtp_layers == 1
    convert(tmp_path / "ours", tmp_path / "back", lambda text: None)
    first, last = (load_file(tmp_path / name / SINGLE) for name in ("published", "back"))
    copies = {name for name in first if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert {name for name in first if ".2." in name} - copies == {name for name in last if ".2." in name} - copies
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= {
        name.removeprefix("model.layers.2.") for name in last
    }
    assert all(torch.equal(tensor, first[name]) for name, tensor in last.items())
