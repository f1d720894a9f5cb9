import msgspec
import pytest
import torch

from checkpoint.tiny import ARCHS, weights_of
from meshwright.checkpoint import convert
from meshwright.checkpoint.model_folder import open_folder, save_native
from meshwright.models.decoder import Decoder


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_one_block_at_a_time_computes_what_the_whole_model_does(native, arch):
    model = Decoder(arch).eval()
    model.load_state_dict(weights_of(arch))
    tokens = convert.probe_tokens(arch, 16)
    with torch.inference_mode():
        whole = model(tokens, torch.arange(16)[None])
    assert torch.equal(convert.logits(open_folder(native(arch)), tokens), whole)


@pytest.mark.parametrize(
    "change",
    [{"mlp": "gelu"}, {"norm_eps": 1e-3}, {"rope_theta": 20_000.0}, {"rope_scaling": "none"}, {"top_k": 1}],
    ids=str,
)
def test_a_wrong_constant_is_beyond_the_tolerance(tmp_path, change):
    base = "gpt2" if "mlp" in change else "mixtral" if "top_k" in change else "llama tied llama3"
    arch = ARCHS[base]
    wrong = msgspec.structs.replace(arch, **change)
    tokens = convert.probe_tokens(arch, 64)
    found = []
    for name, each in (("right", arch), ("wrong", wrong)):
        save_native(tmp_path / name, each, weights_of(arch).items(), None)
        found.append(convert.logits(open_folder(tmp_path / name), tokens))
    assert (found[0] - found[1]).abs().max() > 10 * convert.tolerance(arch, found[0])


def test_the_tokens_stay_within_the_model_and_are_always_the_same():
    arch = ARCHS["gpt2"]
    tokens = convert.probe_tokens(arch, 1000)
    assert tokens.shape == (1, arch.context)
    assert tokens.max() < arch.vocab
    assert torch.equal(tokens, convert.probe_tokens(arch, 1000))


def test_a_model_beyond_the_memory_is_left_to_our_own_check():
    assert convert.fits_memory(10**6)
    assert not convert.fits_memory(10**15)
