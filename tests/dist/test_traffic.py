"""A step issues exactly the collectives that its plan implies."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trials import GPT, corpus_file, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.config.run import Run
from meshwright.cost.traffic import traffic
from meshwright.parallel.mesh import Mesh
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.verify.collectives import Call, Calls, differences, implied, observing, ranks_of
from meshwright.verify.prove import SCHEDULES

SMALL = ("arch.layers=2", "steps=2", "data.eval_fraction=0.0", "plan.precision=fp32")
BF16 = ("plan.precision=bf16",)
FP8 = ("plan.precision=fp8",)
TWICE = ("plan.grad_accum=2",)
HOSTED = ("plan.zero=3", "plan.cpu_offload=true")
FOUR_TIMES = ("plan.grad_accum=4", "arch.layers=4")
DEEP = ("arch.layers=8",)
FOUR_CHUNKS = ("plan.chunks=4", *FOUR_TIMES, *DEEP)
MASKED = ("data.mask_documents=true",)
ODD_GPT = (*GPT, "arch.context=33")  # odd, so that a sharded table is padded
MOE = ("arch.preset=tiny-moe",)
AHEAD = ("arch.preset=tiny-deepseek-v3", "arch.mtp_layers=1")
LATENT = ("arch.preset=tiny-deepseek-v3", "arch.head_dim=32", "arch.rope_dim=16", "arch.v_dim=16")
ONE_HEAD = ("arch.kv_heads=1", "arch.head_dim=16")  # fewer than ranks
LORA = ("adapter.kind=lora", "adapter.rank=3")  # odd, so that a sharded matrix is padded
DORA = ("adapter.kind=dora", "adapter.rank=3")
QLORA = ("adapter.kind=qlora", "adapter.rank=3", "arch.hidden=128", "arch.head_dim=16", "arch.ffn=384")
FROZEN = ("optim.freeze=embed,blocks.0.*,blocks.1.attn",)
FIRST_TWO = ("optim.freeze=embed,blocks.0.*,blocks.1.*",)  # which no backward reaches
ANEW = ("full", "selective", "selective-1", "every-3", "first-1")
FOUR_LAYERS = ("arch.layers=4",)
COUNTS = 4 * 8  # bytes of four experts' counts of rows

# By axis, several plans each: they share one world, whose start costs more than a step.
TWO = {
    "replicate": [("plan.replicate=2", *TWICE), ("plan.replicate=2", *BF16), ("plan.replicate=2", *GPT)],
    "shard": [
        ("plan.shard=2", "plan.zero=1", *TWICE),
        ("plan.shard=2", "plan.zero=2", *TWICE),
        ("plan.shard=2", "plan.zero=3", *TWICE),
        ("plan.shard=2", "plan.zero=3", "plan.precision=fp64"),
        ("plan.shard=2", "plan.zero=3", *BF16, *GPT),
        ("plan.shard=2", "plan.zero=3", *MOE, "arch.moe_every=2"),
    ],
    "hosted": [
        ("plan.shard=2", *HOSTED, *TWICE),
        ("plan.shard=2", *HOSTED, *BF16, *GPT),
        ("plan.replicate=2", *HOSTED, *TWICE),
        ("plan.shard=2", "plan.ep=2", *HOSTED, *MOE),
    ],
    "tp": [
        ("plan.tp=2", *TWICE),
        ("plan.tp=2", *GPT),
        ("plan.tp=2", *GPT, *BF16),
        ("plan.tp=2", "arch.tied=true", *BF16, *TWICE),
        ("plan.tp=2", *MOE, *TWICE),
        ("plan.tp=2", *MOE, *GPT, "arch.router=noisy_topk", *BF16),
    ],
    "tp in FP8": [
        ("plan.tp=2", *FP8, *TWICE),
        ("plan.tp=2", *FP8, *GPT, "plan.recompute=full"),
        ("plan.tp=2", *FP8, "plan.fp8_scaling=rowwise", "plan.recompute=selective"),
        ("plan.tp=2", *FP8, "plan.fp8_scaling=rowwise", *GPT, *TWICE),
        ("plan.tp=2", *FP8, *MOE, "arch.expert_ffn=32", "arch.shared_experts=1", *TWICE),
        (
            "plan.tp=2",
            *FP8,
            *MOE,
            "arch.shared_experts=2",
            "arch.expert_ffn=32",
            "arch.moe_every=2",
            "plan.recompute=full",
        ),
        ("plan.tp=2", *FP8, *LATENT, *AHEAD[1:], *TWICE),
        ("plan.tp=2", *FP8, *LATENT, *AHEAD[1:], "plan.recompute=full"),
        ("plan.tp=2", *FP8, *LATENT, "plan.fp8_scaling=rowwise", "plan.recompute=selective"),
        ("plan.tp=2", *FP8, *ONE_HEAD, *AHEAD[1:], "plan.fp8_scaling=rowwise", "arch.attention_bias=qkv"),
        ("plan.tp=2", *FP8, *ONE_HEAD, "arch.qk_norm=full", "plan.recompute=every-2"),
    ],
    "ring": [
        ("plan.cp=2", *TWICE),
        ("plan.cp=2", *MASKED, *BF16),
        ("plan.cp=2", "plan.zero=3", "plan.precision=fp64"),
        ("plan.cp=2", *MOE, "arch.moe_every=2"),
        ("plan.cp=2", *MOE, "arch.router=gshard", "arch.capacity=1.0", *BF16),
    ],
    "ulysses": [
        ("plan.cp=2", "plan.cp_kind=ulysses", *TWICE),
        ("plan.cp=2", "plan.cp_kind=ulysses", *MASKED, *BF16),
    ],
    "ep": [
        ("plan.shard=2", "plan.zero=1", "plan.ep=2", *MOE, *TWICE),
        ("plan.shard=2", "plan.zero=3", "plan.ep=2", *MOE, *BF16),
        ("plan.cp=2", "plan.zero=2", "plan.ep=2", *MOE),
        ("plan.replicate=2", "plan.ep=2", *MOE),
        ("plan.shard=2", "plan.zero=3", "plan.ep=2", *MOE, "arch.router=expert_choice", "arch.capacity=1.0"),
        ("plan.shard=2", "plan.zero=3", "plan.ep=2", *MOE, "arch.capacity=1.25"),
        ("plan.cp=2", "plan.zero=2", "plan.ep=2", *MOE, "arch.capacity=0.75", "arch.shared_experts=0"),
    ],
    "pp": [("plan.pp=2", f"plan.schedule={schedule}", *FOUR_TIMES) for schedule in SCHEDULES],
    "adapters": [
        ("plan.shard=2", "plan.zero=3", *LORA, *TWICE, *BF16),
        ("plan.shard=2", "plan.zero=1", *LORA, *TWICE, "adapter.targets=q_proj,v_proj"),
        ("plan.replicate=2", *LORA),
        ("plan.tp=2", *LORA, *TWICE, *BF16),
        ("plan.tp=2", *MOE, *LORA, "arch.shared_experts=1"),
        ("plan.pp=2", *LORA, *FOUR_TIMES),
        ("plan.tp=2", *DORA, *TWICE, *BF16, "plan.recompute=full"),
        ("plan.tp=2", *MOE, *DORA, "arch.shared_experts=1"),
        ("plan.shard=2", "plan.zero=3", *QLORA, *TWICE, *BF16),
        ("plan.shard=2", "plan.zero=1", *QLORA, "adapter.base=fp8"),
        ("plan.tp=2", *QLORA, "adapter.rank=16", "adapter.base=fp8", *FP8),
        ("plan.tp=2", *QLORA, "adapter.base=fp8", *FP8, "plan.fp8_scaling=rowwise", "plan.recompute=full"),
        ("plan.shard=2", "plan.zero=3", *QLORA, "adapter.base=fp8", *FP8, *TWICE),
        ("plan.tp=2", *QLORA, *BF16, "plan.recompute=selective"),
        ("plan.shard=2", "plan.zero=3", "plan.ep=2", *MOE, *LORA, *TWICE, *BF16),
        ("plan.shard=2", "plan.zero=1", *MOE, *QLORA, "arch.expert_ffn=128"),
        ("plan.tp=2", "arch.preset=tiny-deepseek-v3", *LORA, *TWICE, *BF16),
        ("plan.tp=2", *MOE, *QLORA, "arch.expert_ffn=128", "adapter.base=fp8", *BF16, "plan.recompute=full"),
        ("plan.shard=2", "plan.zero=2", *FROZEN, *TWICE),
        ("plan.shard=2", *HOSTED, *QLORA, *TWICE, *BF16),
        ("plan.replicate=2", "arch.preset=tiny-glm4-moe", "optim.freeze=blocks.1"),
        ("plan.shard=2", "plan.zero=3", *FIRST_TWO, *FOUR_LAYERS, *TWICE),
        ("plan.shard=2", "plan.zero=3", *FIRST_TWO, *FOUR_LAYERS, "plan.recompute=every-2"),
        ("plan.shard=2", "plan.zero=3", "optim.freeze=embed,blocks,norm", *FOUR_LAYERS),
        ("plan.shard=2", "plan.zero=3", "plan.ep=2", *MOE, *LORA, "adapter.targets=mlp.*"),
        ("plan.cp=2", *MOE, "optim.freeze=embed,blocks.*.attn_norm,blocks.*.attn,blocks.0.mlp_norm"),
        ("plan.tp=2", *FROZEN, *BF16),
        ("plan.pp=2", "arch.tied=true", "optim.freeze=embed", *FOUR_TIMES),
    ],
    "recompute shard": [
        ("plan.shard=2", "plan.zero=3", *TWICE, *FOUR_LAYERS, f"plan.recompute={policy}") for policy in ANEW
    ],
    "recompute tp": [
        *(("plan.tp=2", *TWICE, *FOUR_LAYERS, f"plan.recompute={policy}") for policy in ANEW),
        *(("plan.tp=2", *GPT, *BF16, f"plan.recompute={policy}") for policy in ("full", "selective")),
        *(("plan.tp=2", *MOE, *FOUR_LAYERS, "arch.moe_every=2", f"plan.recompute={policy}") for policy in ANEW),
    ],
    "recompute cp": [
        *(("plan.cp=2", *MASKED, *FOUR_LAYERS, f"plan.recompute={policy}") for policy in ANEW),
        *(("plan.cp=2", "plan.cp_kind=ulysses", *MASKED, *BF16, f"plan.recompute={policy}") for policy in ANEW),
        ("plan.cp=2", *MOE, "arch.router=gshard", "arch.capacity=1.0", "plan.recompute=full"),
    ],
    "recompute ep": [
        ("plan.shard=2", f"plan.zero={zero}", "plan.ep=2", *MOE, *FOUR_LAYERS, f"plan.recompute={policy}")
        for zero in (1, 3)
        for policy in ANEW
    ],
    "recompute pp": [("plan.pp=2", *FOUR_TIMES, *DEEP, f"plan.recompute={policy}") for policy in ANEW],
    "lossy": [
        ("plan.replicate=2", "plan.grad_reduce=bf16", *TWICE),
        ("plan.replicate=2", "plan.grad_reduce=int4", *ODD_GPT, "arch.vocab=257"),
        ("plan.replicate=2", "plan.grad_reduce=int8", *MOE, "arch.experts=3"),
        ("plan.replicate=2", "plan.powersgd=3", *BF16, *GPT),
        ("plan.shard=2", "plan.zero=3", "plan.gather=fp8", "plan.grad_reduce=fp8", *BF16),
        ("plan.shard=2", "plan.zero=3", "plan.gather=int8", *TWICE, *BF16, *ODD_GPT),
        ("plan.shard=2", "plan.zero=2", "plan.grad_reduce=int4", "plan.gather=int8", *TWICE, *MOE),
    ],
    "families": [
        ("plan.tp=2", "arch.preset=tiny-olmo2", *TWICE),
        *(
            ("plan.tp=2", "arch.preset=tiny-olmo2", *BF16, f"plan.recompute={policy}")
            for policy in ("full", "selective")
        ),
        ("plan.tp=2", "arch.preset=tiny-gemma2", *BF16),
        ("plan.tp=2", "arch.preset=tiny-cohere", "arch.qk_norm=layer", *BF16),
        ("plan.tp=2", "arch.kv_heads=1", *BF16, *TWICE),
        ("plan.tp=2", "arch.kv_heads=1", "arch.preset=tiny-olmo2", *BF16),
        ("plan.tp=2", "arch.kv_heads=1", "arch.preset=tiny-cohere", "arch.qk_norm=layer"),
        ("plan.tp=2", "arch.preset=tiny-gpt-oss", *TWICE),
        ("plan.tp=2", "arch.preset=tiny-deepseek-v3", *BF16),
        ("plan.cp=2", "arch.preset=tiny-deepseek-v3", *BF16),
        ("plan.cp=2", "plan.cp_kind=ulysses", "arch.preset=tiny-deepseek-v3"),
        ("plan.shard=2", "plan.zero=3", "plan.ep=2", "arch.preset=tiny-glm4-moe"),
        ("plan.shard=2", "plan.zero=3", "plan.recompute=full", *AHEAD, *TWICE),
        ("plan.cp=2", *AHEAD, *BF16),
        ("plan.tp=2", *AHEAD, *BF16, *TWICE),
        *(("plan.tp=2", *AHEAD, f"plan.recompute={policy}") for policy in ("full", "selective", "every-2")),
        ("plan.tp=2", *AHEAD, "plan.kernels=plain"),
        ("plan.pp=2", *AHEAD, "plan.grad_accum=4", "plan.recompute=every-2"),
        ("plan.pp=2", *AHEAD, "plan.grad_accum=4", "plan.schedule=zbv", "arch.layers=3"),
        ("plan.pp=2", *FOUR_TIMES, "arch.preset=tiny-glm4-moe"),
    ],
    "pp tied": [("plan.pp=2", f"plan.schedule={schedule}", *FOUR_TIMES, *GPT, *BF16) for schedule in ("1f1b", "zbv")],
}
FOUR = {
    "hsdp": [
        ("plan.replicate=2", "plan.shard=2", "plan.zero=3", *TWICE),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=1", *TWICE),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=2", *TWICE, *BF16),
        ("plan.shard=4", "plan.zero=3", *MOE),
    ],
    "lossy": [
        ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.grad_reduce=int4", "plan.gather=int8", *TWICE),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=1", "plan.grad_reduce=fp16", "plan.error_feedback=false"),
        ("plan.shard=4", "plan.zero=3", "plan.secondary_shard=2", *TWICE, *BF16, *ODD_GPT),
        ("plan.shard=4", "plan.zero=3", "plan.secondary_shard=2", *FIRST_TWO, *FOUR_LAYERS),
        ("plan.shard=4", "plan.zero=3", "plan.secondary_shard=2", "plan.gather=int8", "plan.grad_reduce=int8"),
        ("plan.shard=4", "plan.zero=2", "plan.grad_reduce=int4", "plan.grad_reduce_node=2", *TWICE, *ODD_GPT),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.grad_reduce=int8", "plan.gather=int8", *BF16),
        ("plan.pp=2", "plan.replicate=2", "plan.grad_reduce=int8", *FOUR_TIMES),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.powersgd=3", *TWICE, *BF16, *ODD_GPT),
        ("plan.replicate=2", "plan.tp=2", "plan.powersgd=2", *MOE, "arch.experts=3"),
        ("plan.replicate=2", "plan.cp=2", "plan.zero=1", "plan.powersgd=2", *TWICE),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=2", "plan.ep=2", "plan.powersgd=2", *MOE),
        ("plan.shard=4", "plan.zero=3", "plan.ep=2", "plan.gather=int8", *MOE),
    ],
    "tp": [
        ("plan.tp=4",),
        ("plan.tp=2", "plan.shard=2", "plan.zero=1", *TWICE, *BF16),
        ("plan.tp=2", "plan.shard=2", "plan.zero=3", *TWICE, *BF16, *GPT),
        ("plan.tp=2", "plan.replicate=2", *MOE),
    ],
    "cp": [
        ("plan.cp=4", "plan.zero=3", *MASKED),
        ("plan.cp=2", "plan.shard=2", "plan.zero=3", *TWICE),
        ("plan.cp=2", "plan.replicate=2", "plan.cp_kind=ulysses"),
        ("plan.cp=2", "plan.replicate=2", "plan.zero=1", *TWICE),
        ("plan.cp=2", "plan.tp=2", *BF16, *MASKED),
        ("plan.cp=2", "plan.tp=2", "plan.cp_kind=ulysses", *MOE),
    ],
    "ep": [
        ("plan.shard=4", "plan.zero=3", "plan.ep=2", *MOE, *TWICE),
        ("plan.shard=4", "plan.zero=3", "plan.ep=2", *MOE, "optim.freeze=embed,blocks.0.*"),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=2", "plan.ep=2", *MOE, *BF16),
        ("plan.replicate=4", "plan.ep=2", *MOE),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2", *MOE),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2", *MOE, *LORA),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2", *MOE, "arch.capacity=1.25", *BF16),
        ("plan.shard=2", "plan.cp=2", "plan.zero=1", "plan.ep=4", *MOE, "arch.capacity=2.5", "plan.recompute=full"),
    ],
    "tp in FP8, the backward split": [
        ("plan.tp=2", *FP8, "plan.pp=2", "plan.schedule=zb1p", "plan.chunks=1", *FOUR_TIMES),
        ("plan.tp=2", *FP8, "plan.pp=2", "plan.schedule=zbv", "plan.fp8_scaling=rowwise", *FOUR_TIMES),
        ("plan.tp=4", *FP8, "arch.kv_heads=2", "arch.head_dim=16", "arch.ffn=256", *TWICE),
    ],
    "pp": [
        ("plan.pp=2", "plan.shard=2", "plan.zero=3", *FOUR_TIMES, *GPT),
        ("plan.pp=2", "plan.replicate=2", "plan.schedule=zbv", *FOUR_TIMES),
        ("plan.pp=2", "plan.cp=2", "plan.schedule=interleaved", *FOUR_TIMES, *MASKED),
        ("plan.pp=2", "plan.tp=2", *FOUR_TIMES, *BF16, *GPT),
        ("plan.pp=2", "plan.tp=2", *BF16, "plan.grad_accum=1", "plan.schedule=gpipe"),
        ("plan.pp=2", "plan.tp=2", "plan.schedule=zb1p", *FOUR_TIMES),
        ("plan.pp=2", "plan.tp=2", *FOUR_TIMES, *FP8),
        ("plan.pp=2", "plan.shard=2", "plan.zero=2", "plan.ep=2", *FOUR_TIMES, *MOE),
        ("plan.pp=2", "plan.tp=2", "plan.schedule=interleaved", *FOUR_TIMES, *DEEP, "plan.recompute=sqrt"),
        ("plan.pp=2", "plan.tp=2", *AHEAD, *BF16, "plan.grad_accum=4"),
        ("plan.pp=2", "plan.shard=2", "plan.zero=3", *AHEAD, "plan.grad_accum=4"),
    ],
    # Of four stages torch holds three gathered: under zero 3 some are gathered more than once, short of it none is.
    "many chunks": [
        ("plan.pp=2", "plan.shard=2", "plan.zero=3", "plan.schedule=interleaved", *FOUR_CHUNKS),
        ("plan.pp=2", "plan.shard=2", "plan.zero=1", "plan.schedule=interleaved", *FOUR_CHUNKS, *BF16),
        ("plan.pp=2", "plan.shard=2", "plan.zero=1", "plan.schedule=looped", *FOUR_CHUNKS, *GPT),
        ("plan.pp=2", "plan.shard=2", "plan.zero=2", "plan.schedule=zb1p", *FOUR_CHUNKS),
        ("plan.pp=2", "plan.shard=2", "plan.zero=1", "plan.ep=2", "plan.schedule=interleaved", *FOUR_CHUNKS, *MOE),
        ("plan.pp=2", "plan.cp=2", "plan.zero=1", "plan.schedule=interleaved", *FOUR_CHUNKS),
        ("plan.pp=2", "plan.replicate=2", "plan.schedule=interleaved", *FOUR_CHUNKS),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("traffic")
    corpus_file(path)
    make_corpus(make_run(path), path)  # tokenised once, before the ranks ask
    return path


def second_step(run: Run, mesh: Mesh, folder: Path) -> Calls:
    """What the real loop issues, once everything that is made at first use is there."""
    state = build(run, make_corpus(run, folder), mesh)
    steps = train(run, state, mesh)
    next(steps)
    with observing() as seen:
        next(steps)
    state.loader.close()
    return seen


def level(seen: Calls, run: Run, mesh: Mesh) -> Calls:
    """The rows that ranks of ep exchange, each as large as their mean: who gets how many is the routers' affair."""
    if run.plan.ep == 1:
        return seen
    ranks = ranks_of("ep", run.plan, mesh)
    rows = [call for call in seen if call.kind == "all_to_all" and call.ranks == ranks and call.bytes != COUNTS]
    total = torch.tensor([sum(seen[call] for call in rows), sum(seen[call] * call.bytes for call in rows)])
    dist.all_reduce(total, group=mesh.group("ep"))
    count, size = total.tolist()
    even = Counter({call: times for call, times in seen.items() if call not in rows})
    even[Call("all_to_all", ranks, size // count)] += count // len(ranks)
    return even


def surprises(folder: Path, words: tuple[str, ...]) -> list[str]:
    """Where a real step differs from the arithmetic."""
    run = make_run(folder, *SMALL, *words)
    mesh = mesh_of(run.plan)
    said = traffic(run.arch, run.plan, run.sequence, place=mesh.place)
    seen = level(second_step(run, mesh, folder), run, mesh)
    return [f"{run.plan}: {text}" for text in differences(seen, implied(said, run.plan, mesh))]


@pytest.mark.parametrize("plans", TWO.values(), ids=TWO)
@world(2)
def test_two_ranks_send_what_the_plan_implies(folder, plans):
    told = [text for words in plans for text in surprises(folder, words)]
    assert not told, "\n".join(told)


@pytest.mark.parametrize("plans", FOUR.values(), ids=FOUR)
@world(4)
def test_four_ranks_send_what_the_plan_implies(folder, plans):
    told = [text for words in plans for text in surprises(folder, words)]
    assert not told, "\n".join(told)


@world(2)
def test_every_kind_of_call_is_seen_with_its_ranks_and_its_whole_tensor():
    mine, alone = torch.zeros(6), dist.new_group([dist.get_rank()], use_local_synchronization=True)
    other = 1 - dist.get_rank()
    with observing() as seen:
        dist.all_reduce(mine)
        dist.broadcast(mine, src=0)
        dist.all_gather([torch.empty(6), torch.empty(6)], mine)
        dist.all_gather_into_tensor(torch.empty(12), mine)
        dist.reduce_scatter_tensor(torch.empty(3), mine)
        dist.all_to_all_single(torch.empty(6), mine)
        exchange = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, torch.empty(6), other)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        dist.all_reduce(mine, group=alone)
        dist.barrier()
    sizes = {"all_reduce": 24, "broadcast": 24, "reduce_scatter": 24, "all_to_all": 24, "send": 24}
    expected = Counter({Call(kind, (0, 1), size): 1 for kind, size in sizes.items()})
    expected[Call("all_gather", (0, 1), 48)] = 2
    assert seen == expected


def test_a_call_too_many_and_one_too_few_are_both_told():
    one, other = Call("all_reduce", (0, 1), 16), Call("send", (0, 1), 64)
    told = differences(Counter({one: 2}), Counter({one: 1, other: 3}))
    assert told == [
        "all_reduce among ranks (0, 1) of 16 bytes: seen 2, said 1",
        "send among ranks (0, 1) of 64 bytes: seen 0, said 3",
    ]
    assert differences(Counter({one: 2}), Counter({one: 2})) == []
