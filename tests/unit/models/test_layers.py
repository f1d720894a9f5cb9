import math
import weakref

import msgspec
import pytest
import torch
import torch.nn.functional as F

from meshwright.models.layers import (
    Attention,
    Block,
    Mlp,
    apply_rope,
    causal_attention,
    norm,
    rope_frequencies,
    rope_table,
)

CPU = torch.device("cpu")


def test_grouped_queries_equal_repeated_heads():
    q = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 5, 4, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    for told in (None, documents):
        grouped = causal_attention(q, k, v, told)
        repeated = causal_attention(q, k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), told)
        assert (grouped - repeated).abs().max() < 1e-14


def test_attention_equals_its_definition():
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    expected = torch.zeros_like(q)
    for head in range(2):
        for here in range(5):
            seen = [there for there in range(here + 1) if documents[0, there] == documents[0, here]]
            scores = torch.stack([q[0, head, here] @ k[0, head, there] / 2 for there in seen])  # 2 = √head_dim
            expected[0, head, here] = scores.softmax(0) @ v[0, head, seen]
    assert (causal_attention(q, k, v, documents) - expected).abs().max() < 1e-14


def test_heads_are_counted_from_the_tensor(gpt):
    torch.manual_seed(0)
    whole = Attention(gpt).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    total = whole.out.bias.clone()
    for half in (slice(0, 8), slice(8, 16)):  # two of the four heads each, as tensor parallelism cuts them
        piece = Attention(gpt).double()
        for name in ("q", "k", "v"):
            setattr(piece, name, torch.nn.Linear(16, 8, dtype=torch.float64))
            getattr(piece, name).weight.data = getattr(whole, name).weight[half]
            getattr(piece, name).bias.data = getattr(whole, name).bias[half]
        piece.out = torch.nn.Linear(8, 16, bias=False, dtype=torch.float64)
        piece.out.weight.data = whole.out.weight[:, half]
        total = total + piece(x, None, None)
    assert (total - whole(x, None, None)).abs().max() < 1e-14


def test_another_attention_may_be_put_in(llama):
    attention = Attention(llama)
    attention.attend = lambda q, k, v, documents, how: torch.zeros_like(q)
    assert attention(torch.randn(1, 3, 16), None, None).abs().max() == 0


def test_what_attention_returns_is_freed_before_the_mlp(llama):
    block, returned = Block(llama, Mlp(llama, llama.ffn)), []
    block.attn.register_forward_hook(lambda module, arguments, y: returned.append(weakref.ref(y)))
    block.mlp.register_forward_pre_hook(lambda module, arguments: returned.append(returned[0]()))
    block(torch.randn(1, 3, 16), rope_table(llama, torch.arange(3)[None], torch.float32), None, None)
    assert returned[1] is None


def test_a_rotation_turns_pairs_half_a_head_apart(llama):
    rope = rope_table(llama, torch.tensor([[3]]), torch.float64)
    x = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    x[..., 1] = 1.0
    angle = 3 / math.sqrt(llama.rope_theta)  # the second of two pairs: theta^(-2/4) radians a position
    expected = torch.tensor([0, math.cos(angle), 0, math.sin(angle)], dtype=torch.float64)
    assert (apply_rope(x, rope).flatten() - expected).abs().max() < 1e-15


def test_linear_scaling_divides_every_frequency(llama):
    scaled = msgspec.structs.replace(llama, rope_scaling="linear", rope_factor=4.0)
    plain = rope_frequencies(llama, torch.float64, CPU)
    assert torch.equal(rope_frequencies(scaled, torch.float64, CPU), plain / 4)


def llama3_frequency(frequency: float, factor: float, low: float, high: float, original: int) -> float:
    """The rule as Llama 3.1's authors state it, one frequency at a time."""
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def test_llama3_scaling_follows_its_rule(llama):
    plain = msgspec.structs.replace(llama, head_dim=128, rope_theta=500_000.0)
    arch = msgspec.structs.replace(plain, rope_scaling="llama3", rope_factor=8.0)
    expected = [llama3_frequency(f, 8.0, 1.0, 4.0, 8192) for f in rope_frequencies(plain, torch.float64, CPU).tolist()]
    found = rope_frequencies(arch, torch.float64, CPU).tolist()
    assert found == pytest.approx(expected, rel=1e-14)
    assert len({round(before / after, 6) for before, after in zip(expected, found, strict=True)}) == 1


def test_low_precision_is_rotated_wide(llama):
    positions = torch.tensor([[30_000]])
    x = torch.randn(1, 1, 1, 4, dtype=torch.bfloat16)
    rotated = apply_rope(x, rope_table(llama, positions, torch.float32))
    exact = apply_rope(x.double(), rope_table(llama, positions, torch.float64))
    assert rotated.dtype == torch.bfloat16
    # Half a bfloat16 step (2⁻⁹ of up to 4) beside the float32 angle's own error at 30,000 radians (0.002).
    assert (rotated.double() - exact).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "gelu_tanh"])
def test_a_feed_forward_layer_equals_its_formula(llama, kind):
    mlp = Mlp(msgspec.structs.replace(llama, mlp=kind), 24).double()
    x = torch.randn(3, 16, dtype=torch.float64)
    up = x @ mlp.up.weight.T
    inner = {
        "swiglu": lambda: F.silu(x @ mlp.gate.weight.T) * up,
        "gelu": lambda: up * 0.5 * (1 + torch.erf(up / math.sqrt(2))),
        "gelu_tanh": lambda: up * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))),
    }[kind]()
    assert (mlp(x) - inner @ mlp.down.weight.T).abs().max() < 1e-13


def test_norms_equal_their_formulas(llama, gpt):
    x = torch.randn(3, 16, dtype=torch.float64)
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    centred = x - x.mean(-1, keepdim=True)
    layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (norm(llama).double()(x) - rms).abs().max() < 1e-14
    assert (norm(gpt).double()(x) - layer).abs().max() < 1e-14
