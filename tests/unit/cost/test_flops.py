import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.config.presets import preset
from meshwright.cost.flops import (
    attention_flops,
    block_flops_per_token,
    causal_step_flops,
    document_span,
    hardware_flops,
    matmul_flops_per_token,
    norm_flops,
    step_flops,
    utilization,
)
from meshwright.models import lora
from meshwright.models.decoder import Decoder
from meshwright.parallel import recompute
from meshwright.parallel.model_spec import DECODER
from meshwright.spec.arch import Arch
from meshwright.spec.params import count, params
from meshwright.spec.plan import Plan
from meshwright.spec.tuning import Adapter, Tuning


def test_a_gpu_that_only_does_the_model_is_fully_used():
    assert utilization(flops=989e12, seconds=1.0, peak_flops_per_second=989e12) == 1.0


def test_it_is_six_times_the_weights_and_attention_in_full():
    # The convention of the peers: (6 · weights without the input embedding + 12 · layers · hidden · sequence) a token.
    arch = preset("llama3-8b")
    weights = count(arch) - arch.vocab * arch.hidden - (2 * arch.layers + 1) * arch.hidden  # norms multiply nothing
    expected = 6 * weights + 12 * arch.layers * arch.hidden * 8192
    assert step_flops(arch, 8192, 1) / 8192 == pytest.approx(expected, rel=1e-12)


def test_a_tied_projection_still_multiplies():
    tied, untied = preset("gpt2"), msgspec.structs.replace(preset("gpt2"), tied=False)
    assert matmul_flops_per_token(tied) == matmul_flops_per_token(untied)


def test_only_chosen_experts_work():
    mixtral = preset("mixtral-8x7b")
    dense = msgspec.structs.replace(mixtral, experts=0, ffn=2 * mixtral.expert_ffn)
    router = 2 * mixtral.layers * mixtral.experts * mixtral.hidden
    assert matmul_flops_per_token(mixtral) == matmul_flops_per_token(dense) + router


def changed(name: str, **changes) -> Arch:
    return msgspec.structs.replace(preset(name), **{"layers": 5, "context": 32, **changes})


ARCHS = {
    "llama": changed("tiny"),
    "gpt": changed("tiny", norm="layer", positions="learned", mlp="gelu_tanh", bias=True, tied=True),
    "mixture with a loss of its own": changed("tiny-moe"),
    "mixture without": changed("tiny-moe", balance_loss=0.0, z_loss=0.0),
    "mixture without shared experts": changed("tiny-moe", balance_loss=0.0, z_loss=0.0, shared_experts=0),
    "every second layer a mixture": changed("tiny-moe", moe_every=2, balance_loss=0.0, z_loss=0.0),
    "multi-token prediction": changed("tiny-deepseek-v3", layers=4, mtp_layers=1),
}


def counted(arch: Arch, policy: str) -> int:
    """Operations of a real forward and backward, as torch counts them."""
    plan = Plan(microbatch=2, recompute=policy)
    nobody: Any = None  # one rank has no mesh
    decoder, trains = Decoder(arch), {param.name: param.trained for param in params(arch)}
    for name, weight in decoder.named_parameters():
        weight.requires_grad_(trains[name])
    for module in (each for each in decoder.modules() if isinstance(each, lora.LoraLinear)):
        module.begin(1, "", torch.device("cpu"))  # of dropout, where there is any
    model = recompute.keep_costly(decoder, plan, nobody, DECODER)
    model = recompute.keep_inputs(model, plan, nobody, DECODER)
    tokens = torch.arange(64).view(2, 32)
    # Torch counts the products of plain attention, not those of its fast kernel for CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        following = {"following": tokens} if arch.mtp_layers else {}
        found = model(tokens, tokens % 32, index=tokens, **following)
        logits = found if arch.mtp_layers else (found,)
        sum(each.sum() for each in logits).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_what_the_backward_does_anew_is_what_torch_counts(arch):
    torch.manual_seed(0)
    once, model = counted(arch, "none"), step_flops(arch, 32, 2)
    assert once == model
    for policy in ("full", "every-2", "first-2", "sqrt", "every-9", "selective", "selective-1"):
        plan = Plan(microbatch=2, recompute=policy)
        assert hardware_flops(arch, plan, 32, 2) - model == counted(arch, policy) - once, policy


def test_stages_recompute_by_themselves():
    arch, whole = preset("tiny"), Plan(microbatch=1, recompute="every-4")
    cut = Plan(microbatch=1, pp=2, stages=(3, 3), recompute="every-4")
    assert hardware_flops(arch, whole, 32, 2) == hardware_flops(arch, cut, 32, 2)  # two runs each, of 4 + 2 and 3 + 3
    first = Plan(microbatch=1, pp=2, stages=(3, 3), recompute="first-1")
    alone = msgspec.structs.replace(whole, recompute="first-2")
    assert hardware_flops(arch, first, 32, 2) == hardware_flops(arch, alone, 32, 2)


def test_full_recomputation_is_almost_a_fourth_pass():
    arch = preset("llama3-8b")
    share = hardware_flops(arch, Plan(microbatch=1, recompute="full"), 8192, 1) / step_flops(arch, 8192, 1)
    assert 1.25 < share < 4 / 3  # the output projection, and each block's last product, are not repeated


def test_what_a_compiler_made_is_computed_to_its_end():
    arch, plan = preset("tiny"), Plan(microbatch=1, recompute="full", compile=True)
    blocks = sum(block_flops_per_token(arch, layer, 32) for layer in range(arch.layers))
    assert hardware_flops(arch, plan, 32, 2) == step_flops(arch, 32, 2) + blocks * 64


def test_without_documents_the_span_is_the_sequence_and_causal_attention_is_half_of_the_full():
    arch = preset("tiny")
    assert step_flops(arch, 64, 2, 64.0) == step_flops(arch, 64, 2)
    products = step_flops(arch, 64, 2) - attention_flops(arch, 64, 2)
    causal = causal_step_flops(arch, 64, 2) - products
    assert causal == pytest.approx(attention_flops(arch, 64, 2) * 65 / 128)  # a token sees itself too


def test_documents_leave_the_attention_within_them():
    arch = preset("tiny")
    lengths = [10, 4, 50]
    span = sum(length**2 for length in lengths) / 64
    alone = sum(attention_flops(arch, length, 1) for length in lengths)
    assert attention_flops(arch, 64, 1, span) == pytest.approx(alone)
    pairs = sum(length * (length + 1) / 2 for length in lengths)  # (query, key), each a product of two, twice
    computed = causal_step_flops(arch, 64, 1, span) - (step_flops(arch, 64, 1) - attention_flops(arch, 64, 1))
    assert computed == pytest.approx(3 * 4 * arch.layers * arch.q_width * pairs)


def test_the_span_to_expect_is_that_of_documents_cut_at_random():
    draw = random.Random(1)
    sequence, mean, squares = 2000, 300.0, 0
    for _ in range(400):
        ends = [end for end in range(1, sequence) if draw.random() < 1 / mean]
        squares += sum((later - earlier) ** 2 for earlier, later in pairwise([0, *ends, sequence]))
    assert document_span(sequence, mean) == pytest.approx(squares / 400 / sequence, rel=0.05)
    assert document_span(sequence, 1e9) == pytest.approx(sequence, rel=1e-3)  # documents longer than a sample


def test_frozen_weights_have_one_product_in_the_backward():
    whole = preset("llama3-8b")
    tuned = msgspec.structs.replace(whole, tuning=Tuning(adapter=Adapter(kind="lora")))
    for flops in (step_flops, causal_step_flops):
        assert 0.66 < flops(tuned, 2048, 4) / flops(whole, 2048, 4) < 0.73  # two of three, attention, and the adapters
    assert causal_step_flops(tuned, 2048, 4) < step_flops(tuned, 2048, 4)


def tuned(arch: Arch, *freeze: str, **adapter: Any) -> Arch:
    return msgspec.structs.replace(arch, tuning=Tuning(adapter=Adapter(**adapter), freeze=freeze))


PARTLY_TRAINED = {
    "adapters": tuned(changed("tiny"), kind="lora"),
    "adapters with dropout": tuned(changed("tiny"), kind="lora", dropout=0.25),
    "adapters of what is last": tuned(changed("tiny-neox"), kind="lora", targets=("mlp.down",)),
    "adapters of experts": tuned(changed("tiny-moe"), kind="lora"),
    "adapters of experts alone": tuned(changed("tiny-moe"), kind="lora", targets=("mlp.experts.down",)),
    "magnitudes": tuned(changed("tiny"), kind="dora"),
    "magnitudes of experts": tuned(changed("tiny-moe"), kind="dora", targets=("o_proj", "mlp.experts.*")),
    "magnitudes beside dropout": tuned(changed("tiny"), kind="dora", dropout=0.25),
    "first blocks frozen": tuned(changed("tiny"), "embed", "blocks.0", "blocks.1", "blocks.2"),
    "and a part of one": tuned(changed("tiny-moe"), "embed", "blocks.0", "blocks.1.attn*", "blocks.1.mlp_norm"),
    "latent attention": tuned(changed("tiny-deepseek-v3"), "embed", "blocks.0", "blocks.1.attn_norm"),
    "all but the projection": tuned(changed("tiny"), "embed", "blocks", "norm"),
}


@pytest.mark.parametrize("arch", PARTLY_TRAINED.values(), ids=PARTLY_TRAINED)
def test_nothing_is_counted_beneath_the_first_weight_that_is_trained(arch):
    torch.manual_seed(0)
    for policy in ("none", "full", "every-2"):
        plan = Plan(microbatch=2, recompute=policy)
        assert hardware_flops(arch, plan, 32, 2) == counted(arch, policy), policy


def test_norms_of_rows_are_the_model_s_once_and_the_machines_in_every_microbatch_of_every_rank():
    arch = tuned(changed("tiny"), kind="dora")
    norms = 2 * step_flops(arch, 32, 1) - step_flops(arch, 32, 2)
    plan = Plan(microbatch=1, grad_accum=3, shard=2, zero=3)
    assert norms == sum(norm_flops(arch)) > 0
    assert hardware_flops(arch, plan, 32, plan.batch) - step_flops(arch, 32, plan.batch) == 5 * norms
