import msgspec
import pytest

from meshwright.cost.flops import forward_flops_per_token, step_flops, utilization
from meshwright.spec.params import count
from meshwright.spec.zoo import preset


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
    assert forward_flops_per_token(tied, 1024) == forward_flops_per_token(untied, 1024)


def test_only_chosen_experts_work():
    mixtral = preset("mixtral-8x7b")
    dense = msgspec.structs.replace(mixtral, experts=0, ffn=2 * mixtral.expert_ffn)
    router = 2 * mixtral.layers * mixtral.experts * mixtral.hidden
    assert forward_flops_per_token(mixtral, 4096) == forward_flops_per_token(dense, 4096) + router
