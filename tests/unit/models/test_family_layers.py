"""What families add to the decoder, each beside a plain computation."""

import msgspec
import pytest
import torch

from meshwright.config import check
from meshwright.config.presets import preset
from meshwright.config.run import Run
from meshwright.kernels.attention import Scoring, build_mask, scored_attention, uncompiled, visible
from meshwright.models.decoder import Decoder
from meshwright.models.generate import Sampling, caching, chooser, continuations, forward
from meshwright.models.init import fill_model
from meshwright.models.layers import causal_attention
from meshwright.models.moe import MoELayer
from meshwright.parallel.expert import learned_buffers
from meshwright.spec.plan import Plan

HOW = {
    "window": Scoring(window=5),
    "softcap": Scoring(softcap=0.7, scale=0.4),
    "sinks": Scoring(window=5, sinks=torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)),
}


def inputs(length: int = 19):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, heads, length, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_attention_by_blocks_is_attention_by_all_scores(how):
    q, k, v = inputs()
    documents = torch.tensor([0] * 8 + [1] * 11).expand(2, 19)
    for told in (documents, torch.zeros_like(documents)):
        wanted = scored_attention(q, k, v, visible(told, 19, how.window, q.device), how)
        assert (causal_attention(q, k, v, told, how) - wanted).abs().max() < 1e-14
        assert (uncompiled(q, k, v, build_mask(told, how.window), how) - wanted).abs().max() < 1e-12


def test_a_window_hides_what_is_behind_it():
    q, k, v = inputs()
    before = causal_attention(q, k, v, None, Scoring(window=5))
    v[:, :, 6] += 1
    changed = (causal_attention(q, k, v, None, Scoring(window=5)) - before).abs().amax((0, 1, 3)) > 0
    assert changed.tolist() == [6 <= place < 11 for place in range(19)]


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-gemma3", "tiny-deepseek-v3", "tiny-smollm3"])
def test_a_cache_continues_as_the_whole_model_does(name):
    arch = msgspec.structs.replace(preset(name), layers=3)
    model = Decoder(arch).eval()
    fill_model(model, arch, seed=1)
    prompt = torch.randint(arch.vocab, (12,), generator=torch.Generator().manual_seed(4)).tolist()
    cpu = torch.device("cpu")
    with torch.inference_mode(), caching([model], 18):
        more = continuations(forward(model), chooser(Sampling(), cpu, 1), arch, cpu, [prompt])
        tokens = [next(more)[0] for _ in range(6)]
    for token in tokens:
        logits = model(torch.tensor([prompt]), torch.arange(len(prompt))[None])
        assert token == int(logits[0, -1].argmax())
        prompt.append(token)


def test_the_load_bias_moves_by_deepseeks_rule():
    arch = preset("tiny-glm4-moe")
    layer = MoELayer(arch, 1)
    assert layer.load_bias is not None
    layer.update_load_bias(torch.tensor([10, 30, 20, 20]), torch.ones(()))
    assert layer.load_bias.tolist() == pytest.approx([0.01, -0.01, 0.0, 0.0])
    layer.update_load_bias(torch.tensor([10, 30, 20, 20]), torch.zeros(()))  # a step that is skipped
    assert layer.load_bias.tolist() == pytest.approx([0.01, -0.01, 0.0, 0.0])
    assert layer.to(torch.bfloat16).load_bias.dtype == torch.float32  # whose steps bf16 would lose


def test_the_load_bias_chooses_and_does_not_weigh():
    arch = preset("tiny-glm4-moe")
    logits = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = MoELayer(arch, 1)
    pushed = layer.route(logits, arch, None, torch.tensor([9.0, 9.0, 0.0, 0.0], dtype=torch.float64))
    assert set(pushed.experts.flatten().tolist()) == {0, 1}
    scores = logits.sigmoid()[..., :2]
    wanted = arch.router_scale * scores / scores.sum(-1, keepdim=True)
    assert torch.allclose(pushed.gates.sort(-1).values, wanted.sort(-1).values)
    assert learned_buffers(Decoder(arch), arch).keys() == {f"blocks.{layer}.mlp.load_bias" for layer in range(1, 6)}


def test_groups_leave_experts_of_the_others_out():
    arch = preset("tiny-deepseek-v3")
    logits = torch.randn(2, 50, arch.experts, generator=torch.Generator().manual_seed(3))
    routing = MoELayer(arch, 1).route(logits, arch, None, torch.zeros(arch.experts))
    size = arch.experts // arch.router_groups
    groups = [{expert // size for expert in chosen} for chosen in routing.experts.flatten(0, 1).tolist()]
    assert max(map(len, groups)) == arch.router_top_groups


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("tiny-mistral", {"window": 1000}, "arch.window"),
        ("tiny-deepseek-v3", {"router_groups": 3}, "arch.router_groups"),
        ("tiny-deepseek-v3", {"router_groups": 8}, "arch.router_groups"),
        ("tiny-deepseek-v3", {"router_top_groups": 5}, "arch.router_top_groups"),
        ("tiny-deepseek-v3", {"top_k": 5}, "arch.top_k"),
        ("tiny-deepseek-v3", {"rope_dim": 7}, "arch.rope_dim"),
        ("tiny-deepseek-v3", {"kv_heads": 4}, "arch.kv_heads"),
        ("tiny-deepseek-v3", {"sinks": True}, "arch.sinks"),
        ("tiny-qwen3", {"q_rank": 8}, "arch.kv_rank"),
        ("tiny-qwen3", {"full_every": 2}, "arch.window"),
        ("tiny-neox", {"norm_position": "both"}, "arch.parallel_residual"),
        ("tiny-neox", {"rope_share": 0.0}, "arch.rope_share"),
        ("tiny-moe", {"router": "switch", "top_k": 1, "capacity": 1.0, "router_score": "sigmoid"}, "arch.router_score"),
    ],
)
def test_what_makes_no_sense_together_is_refused_by_its_key(name, change, key):
    arch = msgspec.structs.replace(preset(name), **change)
    found = [problem for problem in check.problems(Run(arch=arch, plan=Plan(microbatch=1))) if problem.key == key]
    assert found
    assert all(problem.remedy for problem in found)
