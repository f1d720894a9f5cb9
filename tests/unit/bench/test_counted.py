import msgspec
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.bench.measure import counted_flops, counted_ratio
from meshwright.config.presets import preset
from meshwright.cost.flops import step_flops
from meshwright.models.decoder import Decoder


def changed(name: str, **changes):
    return msgspec.structs.replace(preset(name), **{"layers": 3, "context": 64, **changes})


ARCHS = {
    "llama": changed("tiny"),
    "gpt": changed("tiny", norm="layer", positions="learned", mlp="gelu_tanh", bias=True, tied=True),
    "all heads alike": changed("tiny", kv_heads=preset("tiny").heads),
}


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_the_formula_is_what_torch_counts(arch):
    assert counted_flops(arch, 64) == step_flops(arch, 64, 1)
    assert counted_ratio(arch, 64) == 1.0


@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b"])
def test_it_holds_for_models_that_would_not_fit_here(name):
    assert counted_ratio(preset(name), 1024) == 1.0


@pytest.mark.parametrize("shared", [0, 1])
def test_a_mixture_is_counted_by_running_it(shared):
    arch = changed("tiny-moe", balance_loss=0.0, z_loss=0.0, shared_experts=shared)
    tokens = torch.arange(128).view(2, 64)
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        Decoder(arch)(tokens, tokens % 64).sum().backward()
    assert counter.get_total_flops() == step_flops(arch, 64, 2)
    assert counted_ratio(arch, 64) is None, "experts choose by values, and shapes have none"
