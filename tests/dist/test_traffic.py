"""A step issues exactly the collectives that its plan implies."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from trials import CPU, corpus_file, make_corpus, make_run
from worlds import world

from meshwright.cost.traffic import traffic
from meshwright.parallel import mesh as meshes
from meshwright.parallel.mesh import Mesh
from meshwright.spec.run import Run
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.verify.observe import Call, Calls, differences, implied, observing, ranks_of

SMALL = ("arch.layers=2", "steps=2", "data.held_out=0.0", "plan.precision=fp32")
BF16 = ("plan.precision=bf16",)
TWICE = ("plan.accumulate=2",)
MASKED = ("data.mask_documents=true",)
GPT = (
    "arch.norm=layer",
    "arch.positions=learned",
    "arch.mlp=gelu_tanh",
    "arch.bias=true",
    "arch.tied=true",
    "arch.kv_heads=8",
    "arch.context=33",  # odd, so that a sharded table is padded
)
MOE = ("arch.preset=tiny-moe",)

TWO = {
    "replicate": ("plan.replicate=2", *TWICE),
    "replicate bf16": ("plan.replicate=2", *BF16),
    "zero1": ("plan.shard=2", "plan.zero=1", *TWICE),
    "zero2": ("plan.shard=2", "plan.zero=2", *TWICE),
    "zero3": ("plan.shard=2", "plan.zero=3", *TWICE),
    "zero3 fp64": ("plan.shard=2", "plan.zero=3", "plan.precision=fp64"),
    "zero3 bf16 gpt": ("plan.shard=2", "plan.zero=3", *BF16, *GPT),
    "zero3 moe": ("plan.shard=2", "plan.zero=3", *MOE, "arch.moe_every=2"),
    "tp": ("plan.tp=2", *TWICE),
    "tp gpt": ("plan.tp=2", *GPT),
    "tp gpt bf16": ("plan.tp=2", *GPT, *BF16),
    "tp tied bf16": ("plan.tp=2", "arch.tied=true", *BF16, *TWICE),
    "tp moe": ("plan.tp=2", *MOE, *TWICE),
    "tp gpt moe": ("plan.tp=2", *MOE, *GPT, "arch.router=noisy_topk", *BF16),
    "ring": ("plan.cp=2", *TWICE),
    "ring masked bf16": ("plan.cp=2", *MASKED, *BF16),
    "ring fp64": ("plan.cp=2", "plan.zero=3", "plan.precision=fp64"),
    "ulysses": ("plan.cp=2", "plan.cp_kind=ulysses", *TWICE),
    "ulysses masked bf16": ("plan.cp=2", "plan.cp_kind=ulysses", *MASKED, *BF16),
    "cp moe": ("plan.cp=2", *MOE, "arch.moe_every=2"),
    "cp moe gshard": ("plan.cp=2", *MOE, "arch.router=gshard", "arch.capacity=1.0", *BF16),
}
FOUR = {
    "hsdp": ("plan.replicate=2", "plan.shard=2", "plan.zero=3", *TWICE),
    "hsdp zero1": ("plan.replicate=2", "plan.shard=2", "plan.zero=1", *TWICE),
    "hsdp zero2 bf16": ("plan.replicate=2", "plan.shard=2", "plan.zero=2", *TWICE, *BF16),
    "zero3": ("plan.shard=4", "plan.zero=3", *MOE),
    "tp": ("plan.tp=4",),
    "tp zero1 bf16": ("plan.tp=2", "plan.shard=2", "plan.zero=1", *TWICE, *BF16),
    "tp zero3 bf16": ("plan.tp=2", "plan.shard=2", "plan.zero=3", *TWICE, *BF16, *GPT),
    "tp replicate": ("plan.tp=2", "plan.replicate=2", *MOE),
    "ring": ("plan.cp=4", "plan.zero=3", *MASKED),
    "ring tp": ("plan.cp=2", "plan.tp=2", *BF16, *MASKED),
    "ulysses tp moe": ("plan.cp=2", "plan.tp=2", "plan.cp_kind=ulysses", *MOE),
    "ring shard": ("plan.cp=2", "plan.shard=2", "plan.zero=3", *TWICE),
    "ulysses replicate": ("plan.cp=2", "plan.replicate=2", "plan.cp_kind=ulysses"),
    "ring replicate zero1": ("plan.cp=2", "plan.replicate=2", "plan.zero=1", *TWICE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("traffic")
    corpus_file(path)
    make_corpus(make_run(path), path)  # tokenised once, before the ranks ask
    return path


def second_step(run: Run, mesh: Mesh, folder) -> Calls:
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


COUNTS = 4 * 8  # bytes of four experts' counts of rows


def check(folder, words) -> None:
    run = make_run(folder, *SMALL, *words)
    mesh = meshes.make(run.plan, CPU)
    said = traffic(run.arch, run.plan, run.sequence, masked=run.data.mask_documents, place=mesh.place)
    seen = level(second_step(run, mesh, folder), run, mesh)
    assert not differences(seen, implied(said, run.plan, mesh))


@pytest.mark.parametrize("words", TWO.values(), ids=TWO)
@world(2)
def test_two_ranks_send_what_the_plan_implies(folder, words):
    check(folder, words)


@pytest.mark.parametrize("words", FOUR.values(), ids=FOUR)
@world(4)
def test_four_ranks_send_what_the_plan_implies(folder, words):
    check(folder, words)
