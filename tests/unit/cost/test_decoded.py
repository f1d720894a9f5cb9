"""Weights that are held in few bits: how many of their elements a real step decodes, and what the ledger says of it."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from meshwright.config.presets import preset
from meshwright.cost.job import Job
from meshwright.cost.layer_time import block, decoded_elements, layer_model
from meshwright.cost.memory import ledger
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stacks
from meshwright.kernels import quantized
from meshwright.models import lora
from meshwright.models.decoder import Decoder
from meshwright.models.layers import token_loss_sum
from meshwright.parallel import precision
from meshwright.parallel.model_spec import DECODER
from meshwright.spec.arch import Arch
from meshwright.spec.params import params
from meshwright.spec.plan import Plan, Precision
from meshwright.spec.tuning import Adapter, Tuning

SEQUENCE = 32
DENSE = msgspec.structs.replace(preset("tiny"), layers=2, hidden=128, head_dim=16, ffn=384)
MOE = msgspec.structs.replace(preset("tiny-moe"), layers=2, hidden=128, head_dim=16, ffn=384, expert_ffn=128)
HOW: dict[str, tuple[Arch, dict[str, Any], Precision]] = {
    "nf4": (DENSE, {"kind": "qlora"}, "bf16"),
    "fp8": (DENSE, {"kind": "lora", "base": "fp8"}, "bf16"),
    "fp8, as it is held": (DENSE, {"kind": "lora", "base": "fp8"}, "fp8"),
    "dora, nf4": (DENSE, {"kind": "dora", "base": "nf4"}, "bf16"),
    "dora, fp8, as it is held": (DENSE, {"kind": "dora", "base": "fp8"}, "fp8"),
    "dora with dropout": (DENSE, {"kind": "dora", "base": "nf4", "dropout": 0.25}, "bf16"),
    "dora, fp8, with dropout": (DENSE, {"kind": "dora", "base": "fp8", "dropout": 0.25}, "fp8"),
    "dora of some": (DENSE, {"kind": "dora", "base": "fp8", "targets": ("q_proj",)}, "fp8"),
    "experts": (MOE, {"kind": "qlora"}, "bf16"),
    "dora of experts": (MOE, {"kind": "dora", "base": "fp8"}, "bf16"),
}


def tuned(arch: Arch, adapter: dict[str, Any]) -> Arch:
    return msgspec.structs.replace(arch, tuning=Tuning(adapter=Adapter(rank=4, **adapter)))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_step_decodes_as_many_elements_as_is_priced(how, monkeypatch):
    base, adapter, number = how
    arch, plan = tuned(base, adapter), Plan(microbatch=1, precision=number, kernels="plain")
    model: Any = Decoder(arch)
    mesh: Any = SimpleNamespace(device=torch.device("cpu"))
    lora.freeze(model, arch, torch.bfloat16)
    model = precision.wrap(model.to(torch.bfloat16), plan, mesh, DECODER)
    for weight in model.parameters():  # any numbers, or any codes of some
        weight.data.normal_(std=0.02) if weight.is_floating_point() else weight.data.random_(0, 64)
    for module in (each for each in model.modules() if isinstance(each, lora.LoraLinear)):
        module.begin(1, "", torch.device("cpu"))  # of dropout, where there is any
    decoded: list[int] = []

    def counting(*args: Any, **keys: Any) -> torch.Tensor:
        matrix = quantized.decode(*args, **keys)
        decoded.append(matrix.numel())
        return matrix

    monkeypatch.setattr(lora, "decode", counting)
    place = torch.arange(SEQUENCE)[None]
    tokens, targets = torch.randint(0, arch.vocab, (2, 1, SEQUENCE))
    loss = token_loss_sum(model(tokens, place, None, place), targets)
    forward = sum(decoded)
    loss.backward()
    kinds = [arch.is_moe(layer) for layer in range(arch.layers)]
    said = [decoded_elements(arch, plan, mixture) for mixture in kinds]
    assert forward == sum(each for each, _ in said)
    # Beneath the first adapter nothing has a gradient.
    most = 2 * arch.hidden**2 * (1 + (arch.adapter.dropout > 0))
    assert 0 <= sum(each for _, each in said) - (sum(decoded) - forward) <= most
    if number == "fp8":
        assert sum(decoded) == forward == sum(p.numel for p in params(arch) if takes_norms(arch, p.name))


def takes_norms(arch: Arch, name: str) -> bool:
    """Whether a weight has a magnitude beside it."""
    return name.replace("weight", "magnitude") in {param.name for param in params(arch)} and "weight" in name


def workspace(arch: Arch, number: Precision) -> tuple[float, str]:
    """Bytes beside those of libraries, and the words."""
    ours = stacks()["meshwright"]
    job = Job(
        arch=arch, plan=Plan(microbatch=1, precision=number), sequence=SEQUENCE, cluster=cluster("1xh200"), stack=ours
    )
    line = next(line for line in ledger(job).lines if line.name == "workspace")
    return line.bytes - ours.holds.workspace_bytes, line.why


def test_a_weight_that_is_multiplied_as_it_is_held_takes_no_room_decoded():
    largest = max(param.numel for param in params(DENSE) if param.layer >= 0)
    lora_, dora = ({"kind": kind, "base": "fp8"} for kind in ("lora", "dora"))
    assert workspace(tuned(DENSE, {"kind": "lora"}), "bf16")[0] == 0
    turned, why = workspace(tuned(DENSE, lora_), "fp8")
    assert (turned, "transposed" in why) == (largest, True)  # a byte of each for the backward
    decoding: list[tuple[Any, Precision]] = [(lora_, "bf16"), (dora, "bf16"), (dora, "fp8")]
    for adapter, number in decoding:
        made, why = workspace(tuned(DENSE, adapter), number)
        assert (made, "decoded" in why) == (largest * (2 + 6), True)  # bf16, and what decoding makes
    some = dora | {"targets": ("q_proj",)}
    made, _ = workspace(tuned(DENSE, some), "fp8")
    assert made == max(largest, DENSE.hidden * DENSE.q_width * 8)


def test_plain_operators_take_longer_to_decode_than_the_kernel():
    ours = stacks()["meshwright"]

    def seconds(kernels: Any) -> float:
        plan = Plan(microbatch=1, precision="bf16", kernels=kernels)
        arch = tuned(DENSE, {"kind": "qlora"})
        job = Job(arch=arch, plan=plan, sequence=SEQUENCE, cluster=cluster("1xh200"), stack=ours)
        return block(layer_model(job), moe=False).forward.elementwise

    assert seconds("plain") > seconds("auto")
