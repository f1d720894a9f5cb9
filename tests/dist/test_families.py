"""Every family of models under plans that meet what it adds: each trains as one process does."""

import math

import pytest
import torch
import torch.distributed as dist
from test_data_parallel import compare, folder  # noqa: F401
from trials import alone, assert_it_goes_on, digest_before_the_cut, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.models.moe import MoELayer
from meshwright.parallel.expert import learned_buffers
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train

TP, RING, ULYSSES = ("plan.tp=2",), ("plan.cp=2",), ("plan.cp=2", "plan.cp_kind=ulysses")
PIPED = ("plan.pp=2", "plan.schedule=zbv", "plan.grad_accum=4")  # of four chunks
STAGES = ("plan.pp=2", "plan.grad_accum=4", "plan.recompute=full")
EXPERTS = ("plan.shard=2", "plan.zero=3", "plan.ep=2", "plan.recompute=full")
ALONE = ("plan.shard=2", "plan.zero=3", "plan.grad_accum=2")
PLANS = {
    "tiny-qwen2": (TP, STAGES, ALONE),
    "tiny-qwen3": (TP, RING, PIPED),
    "tiny-qwen3-moe": (TP, ULYSSES, EXPERTS),
    "tiny-gemma2": (TP, RING, STAGES),
    "tiny-gemma3": (TP, RING, PIPED),
    "tiny-olmo2": (TP, ULYSSES, PIPED),
    "tiny-olmo3": (TP, RING, PIPED),
    "tiny-olmoe": (TP, ULYSSES, EXPERTS),
    "tiny-phi3": (RING, ULYSSES, ALONE),
    "tiny-gpt-oss": (TP, RING, EXPERTS),
    "tiny-deepseek-v2": (TP, ULYSSES, EXPERTS),
    "tiny-deepseek-v3": (TP, RING, PIPED),
    "tiny-glm4-moe": (TP, STAGES, EXPERTS),
    "tiny-glm4": (TP, RING, STAGES),
    "tiny-neox": (TP, RING, PIPED),
    "tiny-mistral": (RING, ULYSSES, ALONE),
    "tiny-cohere": (TP, ULYSSES, STAGES),
    "tiny-granite": (TP, RING, PIPED),
    "tiny-smollm3": (TP, ULYSSES, STAGES),
    "tiny-starcoder2": (TP, RING, PIPED),
}
STEPS = ("steps=2",)
GENTLY = ("optim.lr=1e-3",)  # norms of what sub-layers return multiply rounding, the more so the longer a step


@pytest.mark.parametrize("arch", PLANS)
@world(2)
def test_two_ranks_train_as_one_process_does(folder, arch):  # noqa: F811
    for plan in PLANS[arch]:
        compare(folder, (*STEPS, "arch.layers=4") if plan is PIPED else STEPS, plan, arch)


@world(2)
def test_fewer_heads_of_keys_than_ranks_are_held_by_each(folder):  # noqa: F811
    compare(folder, ("arch.kv_heads=1",), TP, "tiny-qwen2")
    compare(folder, (*STEPS, "arch.kv_heads=1", *GENTLY), TP, "tiny-olmo2")
    compare(folder, (*STEPS, "arch.kv_heads=1", "arch.qk_norm=layer", *GENTLY), TP, "tiny-cohere")


@world(4)
def test_two_heads_of_keys_are_each_held_by_two_ranks(folder):  # noqa: F811
    for arch, words in (("tiny-olmo3", ()), ("tiny-cohere", ("arch.qk_norm=layer",))):
        compare(folder, (*STEPS, "arch.kv_heads=2", *words, *GENTLY), ("plan.tp=4",), arch)


@world(2)
def test_norms_of_heads_with_weights_of_their_own_are_cut_by_head(folder):  # noqa: F811
    for plan in (TP, (*ALONE, "plan.recompute=selective")):
        compare(folder, (*STEPS, "arch.qk_norm=layer"), plan, "tiny-cohere")


@world(2)
def test_longrope_goes_by_the_length_of_whole_sequences(folder):  # noqa: F811
    factors = ("arch.rope_short=[1.0,1.5,2.0,4.0]", "arch.rope_long=[1.5,3.0,9.0,20.0]")
    words = (*STEPS, "arch.rope_scaling=longrope", "arch.rope_original=20", *factors)  # of 32, of which a rank has 16
    for plan in (RING, ULYSSES):
        compare(folder, words, plan, "tiny-phi3")


@world(2)
def test_windows_end_where_documents_do(folder):  # noqa: F811
    for plan in (RING, ULYSSES, ("plan.shard=2", "plan.zero=3", "plan.grad_accum=2")):
        compare(folder, (*STEPS, "data.mask_documents=true"), plan, "tiny-gpt-oss")


@world(2)
def test_multi_token_prediction_is_the_same_under_every_plan_that_has_it(folder):  # noqa: F811
    words = (*STEPS, "arch.mtp_layers=1", "arch.layers=2")
    runs = ("plan.recompute=every-2",)
    for plan in (RING, ULYSSES, EXPERTS, ALONE, ("plan.replicate=2", "plan.recompute=selective")):
        compare(folder, words, plan, "tiny-deepseek-v3")
    for plan in (TP, (*TP, *runs, "plan.kernels=plain"), (*ALONE, *runs), (*STAGES, *runs)):
        compare(folder, words, plan, "tiny-deepseek-v3")
    for schedule in ("1f1b", "zb1p"):
        plan = ("plan.pp=2", f"plan.schedule={schedule}", "plan.grad_accum=4", "plan.chunks=1")
        compare(folder, words, plan, "tiny-deepseek-v3")
    compare(folder, (*STEPS, "arch.mtp_layers=1", "arch.layers=3"), PIPED, "tiny-deepseek-v3")
    compare(folder, (*words, "data.mask_documents=true"), RING, "tiny-glm4-moe")
    compare(folder, (*words, "data.mask_documents=true"), STAGES, "tiny-glm4-moe")


@world(4)
def test_multi_token_prediction_is_the_same_under_products_of_axes(folder):  # noqa: F811
    words = (*STEPS, "arch.mtp_layers=1", "arch.layers=2")
    for plan in (
        ("plan.pp=2", "plan.tp=2", "plan.grad_accum=4"),
        ("plan.pp=2", "plan.cp=2", "plan.zero=3", "plan.grad_accum=4"),
        ("plan.tp=2", "plan.shard=2", "plan.zero=3", "plan.ep=2", "plan.recompute=full"),
    ):
        compare(folder, words, plan, "tiny-deepseek-v3")


@pytest.mark.parametrize(("before", "after"), [(STAGES, TP), (EXPERTS, STAGES)], ids=["tp", "pp"])
@world(2)
def test_a_load_bias_is_saved_and_resumed_under_another_plan(folder, before, after):  # noqa: F811
    place = folder / f"resumed-{len(after)}"
    words = ("steps=6", "checkpoint.every=4", "arch.layers=2", "arch.mtp_layers=1", "data.eval_fraction=0.0")
    first = make_run(folder, *words, *before, arch="tiny-glm4-moe")
    mesh = mesh_of(first.plan)
    digest = digest_before_the_cut(first, mesh, build(first, make_corpus(first, folder), mesh), place)
    run = make_run(folder, *words, *after, arch="tiny-glm4-moe")
    state = build(run, make_corpus(run, folder), mesh_of(run.plan))
    assert_it_goes_on(digest, run, mesh_of(run.plan), state, place)
    biases = [bias for chunk in state.chunks for bias in learned_buffers(chunk, run.arch).values()]
    assert all(bias.abs().max() > 0 for bias in biases)


class Tally:
    """DeepSeek's rule in plain Python: who a token asks for, by its logits, and where the biases go after a step."""

    def __init__(self, state, arch):
        self.arch = arch
        self.layers = {
            name: module
            for chunk in state.chunks
            for name, module in chunk.named_modules()
            if isinstance(module, MoELayer)
        }
        self.bias = {f"blocks.{layer}.mlp": [0.0] * arch.experts for layer in range(arch.layers)}
        self.asked = {name: [0] * arch.experts for name in self.bias}
        for name, layer in self.layers.items():
            layer.route = self.counting(name, layer.route)

    def counting(self, name, route):
        def count(logits, *others):
            for token in logits.detach().flatten(0, 1).tolist():
                for expert in self.chosen(token, self.bias[name]):
                    self.asked[name][expert] += 1
            return route(logits, *others)

        return count

    def chosen(self, logits, bias):
        """The best experts of the best groups, a group being as good as its best two."""
        arch, scores = self.arch, [1 / (1 + math.exp(-x)) + b for x, b in zip(logits, bias, strict=True)]
        size = arch.experts // arch.router_groups
        groups = [range(first, first + size) for first in range(0, arch.experts, size)]
        groups.sort(key=lambda group: -sum(sorted(scores[expert] for expert in group)[-2:]))
        among = [expert for group in groups[: arch.router_top_groups] for expert in group]
        return sorted(among, key=lambda expert: -scores[expert])[: arch.top_k]

    def update(self, ranks):
        counts = torch.tensor([*self.asked.values()])
        if ranks > 1:
            dist.all_reduce(counts)
        for name, row in zip(self.asked, counts.tolist(), strict=True):
            steps = [(sum(row) / len(row) > asked) - (sum(row) / len(row) < asked) for asked in row]
            self.bias[name] = [b + self.arch.router_load_rate * s for b, s in zip(self.bias[name], steps, strict=True)]
            self.asked[name] = [0] * len(row)


@pytest.mark.parametrize("arch", ["tiny-deepseek-v3", "tiny-glm4-moe"])
@world(2)
def test_load_biases_move_by_deepseeks_rule_under_every_plan(folder, arch):  # noqa: F811
    for plan in (("plan.replicate=1",), TP, RING, ULYSSES, EXPERTS, ALONE, STAGES, PIPED):
        layers = "arch.layers=4" if plan is PIPED else "arch.layers=3"
        run = make_run(folder, layers, *plan, arch=arch)
        mesh = mesh_of(run.plan) if run.plan.world > 1 else alone()
        state = build(run, make_corpus(run, folder), mesh)
        tally = Tally(state, run.arch)
        for result in train(run, state, mesh):
            if not isinstance(result, StepResult):
                continue
            assert result.load is not None
            if run.plan.world == 1:  # one microbatch, of which the record tells
                loads = [
                    asked * len(row) / sum(row) for name in tally.layers for row in [tally.asked[name]] for asked in row
                ]
                assert result.load[1:].tolist() == pytest.approx([max(loads), min(loads)])
            tally.update(run.plan.world)
            for name, layer in tally.layers.items():
                assert layer.load_bias.tolist() == pytest.approx(tally.bias[name], abs=1e-6), (plan, name)
        state.loader.close()
        assert any(map(any, tally.bias.values()))
