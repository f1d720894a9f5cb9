"""Windows, softcaps and sinks by FlexAttention on a GPU, beside attention by all scores."""

import pytest
import torch

from meshwright.kernels.attention import Scoring, build_mask, document_attention, scored_attention, visible

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SINKS = (0.3, -1.0, 2.0, 0.0, 0.5, 1.0, -0.5, 0.1)
HOW = {"window": {"window": 100}, "softcap": {"softcap": 5.0}, "sinks": {"window": 128, "sinks": SINKS}}


@pytest.mark.parametrize("words", HOW.values(), ids=HOW)
@pytest.mark.parametrize("length", [512, 640])
def test_blocks_give_what_all_scores_give(words, length):
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (
        torch.randn(2, heads, length, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (8, 2, 2)
    )
    sinks = torch.tensor(words["sinks"], device="cuda") if "sinks" in words else None
    how = Scoring(**words | ({"sinks": sinks} if sinks is not None else {}))
    documents = (torch.arange(length, device="cuda") // 200).expand(2, length)
    found = document_attention(q, k, v, build_mask(documents, how.window), how)
    wide = [x.double() for x in (q, k, v)]
    wanted = scored_attention(*wide, visible(documents, length, how.window, q.device), how)
    assert (found - wanted).abs().max() < 0.05  # bf16 keeps 8 bits of numbers near one
