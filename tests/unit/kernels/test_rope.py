"""RoPE: the reference is the model's own, the kernel is the reference in every layout."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import TYPES, assert_same, draw, interpreted
from kernel_pairs import LAYOUTS, rope_pair

from meshwright.config import presets
from meshwright.kernels.attention import apply_rope
from meshwright.models import layers


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_the_plain_twin_is_the_models(dtype):
    arch = presets.preset("tiny")
    wide = torch.promote_types(dtype, torch.float32)
    rope = layers.rope_table(arch, torch.arange(6)[None].expand(2, 6), wide)
    q, k = (draw((2, heads, 6, arch.head_dim), dtype, heads) for heads in (4, 2))
    ours = apply_rope(q, k, rope, "plain")
    assert torch.equal(ours[0], layers.apply_rope(q, rope))
    assert torch.equal(ours[1], layers.apply_rope(k, rope))


def test_a_rotation_keeps_lengths():
    pair = rope_pair("positions first", (4, 2), (2, 5, 16), torch.float64)
    for before, after in zip(pair.tensors, pair.plain(*pair.tensors), strict=True):
        torch.testing.assert_close(before.norm(dim=-1), after.norm(dim=-1))


@interpreted
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_is_its_twin(layout, dtype):
    assert_same(*rope_pair(layout, (6, 2), (2, 5, 24), dtype))


@interpreted
@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(
    st.sampled_from(LAYOUTS),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 20).map(lambda half: 2 * half)),
    st.sampled_from(TYPES),
)
def test_any_sizes_will_do(layout, heads, sizes, dtype):
    assert_same(*rope_pair(layout, heads, sizes, dtype))


@interpreted
def test_slices_of_one_merged_projection_are_turned_where_they_lie():
    merged = draw((2, 5, 8, 16), torch.float32, 1)
    angles = draw((2, 5, 1, 8), torch.float32, 2)
    rope = angles.cos(), angles.sin()
    q, k = merged[:, :, :4], merged[:, :, 4:6]
    torch.testing.assert_close(apply_rope(q, k, rope, "fused"), apply_rope(q, k, rope, "plain"))
