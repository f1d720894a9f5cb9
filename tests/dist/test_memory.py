"""A rank holds exactly the bytes that its plan implies: the real model and optimizer, through a real step."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from live import Live
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from trials import alone, corpus_file, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.config.run import Run
from meshwright.cost.activations import microbatch_shape, saved_activations
from meshwright.cost.job import Job
from meshwright.cost.layout import layout_of, state_layout
from meshwright.cost.memory import ledger
from meshwright.cost.rank_view import still_blocks
from meshwright.cost.resident import PIECE, SLOTS, host_states, largest_weight, rounding_bytes, states
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stacks
from meshwright.optim import host_memory
from meshwright.optim.offload import OffloadedOptimizer
from meshwright.parallel.mesh import Mesh, local
from meshwright.parallel.tensor import loss_context
from meshwright.search.budget import job_of
from meshwright.spec.params import count
from meshwright.train import oom
from meshwright.train.build import build
from meshwright.train.step import choose, losses

SMALL = ("arch.layers=3", "data.eval_fraction=0.0", "plan.precision=fp32")
BF16 = ("plan.precision=bf16",)
SGD = ("optim.name=sgd",)
TWICE = ("plan.grad_accum=2",)
HOSTED = ("plan.zero=3", "plan.cpu_offload=true")
FOUR_TIMES = ("plan.grad_accum=4", "arch.layers=4")
DEEP = ("arch.layers=8",)
FOUR_CHUNKS = ("plan.chunks=4", *FOUR_TIMES, *DEEP)
MOE = ("arch.preset=tiny-moe",)
LORA = ("adapter.kind=lora", "adapter.rank=3")  # odd, so that a sharded matrix is padded
DORA = ("adapter.kind=dora", "adapter.rank=3")
QLORA = ("adapter.kind=qlora", "adapter.rank=3", "arch.hidden=128", "arch.head_dim=16", "arch.ffn=384")
FROZEN = ("optim.freeze=embed,blocks.0.*,blocks.1.attn",)
GPT = (
    "arch.norm=layer",
    "arch.positions=learned",
    "arch.bias=true",
    "arch.tied=true",
    "arch.context=33",  # odd, so that a sharded table is filled up
)

FP8 = ("plan.precision=fp8",)
DENSE_LATENT = ("arch.preset=tiny-deepseek-v2", "arch.experts=0", "arch.router_groups=1", "arch.router_top_groups=1")
POST_NORM = (*GPT, "arch.norm_position=post")
SPLIT = (*BF16, "optim.master_weights=split")
BF16_STATES = (*SPLIT, "optim.state_dtype=bf16")
NO_MASTERS = (*BF16, "optim.master_weights=none", "optim.stochastic_rounding=true", "optim.state_dtype=bf16")
CAPACITY = (*MOE, "arch.capacity=1.25", "arch.shared_experts=1")

# By axis, several plans each: they share one world, whose start costs more than a step.
TWO = {
    "replicate": [
        ("plan.replicate=2",),
        ("plan.replicate=2", "plan.zero=3"),
        ("plan.replicate=2", *TWICE),
        ("plan.replicate=2", *BF16, *TWICE, *GPT),
        ("plan.replicate=2", *BF16, *TWICE, "optim.master_weights=none", "optim.stochastic_rounding=true"),
    ],
    "shard": [
        ("plan.shard=2", "plan.zero=1", *TWICE, *BF16, "optim.master_weights=split"),
        ("plan.shard=2", "plan.zero=3", *BF16, "optim.master_weights=split", *GPT),
        ("plan.shard=2", "plan.zero=1", *BF16),
        ("plan.shard=2", "plan.zero=1", *TWICE, *BF16),
        ("plan.shard=2", "plan.zero=2", *TWICE),
        ("plan.shard=2", "plan.zero=3", *TWICE, *BF16),
        ("plan.shard=2", "plan.zero=3", "plan.precision=fp64", *GPT),
        ("plan.shard=2", "plan.zero=3", *BF16, *POST_NORM),
        ("plan.shard=2", "plan.zero=3", *MOE, "arch.moe_every=2", *BF16),
        ("plan.shard=2", "plan.zero=3", *TWICE, *BF16, *SGD),
        ("plan.shard=2", "plan.zero=1", *BF16, "optim.master_weights=split", *SGD),
        ("plan.shard=2", "plan.zero=2", *TWICE, *BF16_STATES),
    ],
    "hosted": [
        ("plan.shard=2", *HOSTED, *TWICE, *BF16),
        ("plan.shard=2", *HOSTED, "plan.precision=fp64", *GPT),
        ("plan.shard=2", *HOSTED, *BF16, "optim.master_weights=split", *GPT),
        ("plan.shard=2", "plan.ep=2", *HOSTED, *MOE, *BF16),
        ("plan.replicate=2", *HOSTED),
        ("plan.shard=2", *HOSTED, *BF16, *SGD),
        ("plan.shard=2", "plan.ep=2", *HOSTED, *CAPACITY, *NO_MASTERS, *TWICE),
        ("plan.shard=2", *HOSTED, *BF16_STATES, *SGD),
        ("plan.shard=2", *HOSTED, *LORA, *TWICE, *BF16),
        ("plan.shard=2", *HOSTED, *QLORA, *BF16),
        ("plan.shard=2", *HOSTED, *FROZEN),
    ],
    "tp": [
        ("plan.tp=2",),
        ("plan.tp=2", *TWICE),
        ("plan.tp=2", *TWICE, *GPT),
        ("plan.tp=2", *GPT, *BF16, *TWICE),
        ("plan.tp=2", *BF16, *TWICE),
        ("plan.tp=2", "plan.precision=fp8", *TWICE),
        ("plan.tp=2", *POST_NORM),
        ("plan.tp=2", *MOE),
    ],
    "cp": [("plan.cp=2", *TWICE), ("plan.cp=2", "plan.zero=3", *BF16)],
    "ahead": [
        ("plan.shard=2", "plan.zero=3", "arch.mtp_layers=1", *BF16),
        ("plan.shard=2", "plan.zero=1", "plan.ep=2", *MOE, "arch.mtp_layers=1", *TWICE),
        ("plan.tp=2", "arch.mtp_layers=1", *TWICE, *BF16),
        ("plan.tp=2", "arch.mtp_layers=1", "plan.microbatch=4", *FP8),
        ("plan.pp=2", "arch.mtp_layers=1", *FOUR_TIMES, *BF16),
        ("plan.pp=2", "arch.mtp_layers=1", *FOUR_TIMES, "plan.schedule=zbv"),
    ],
    "adapters": [
        ("plan.shard=2", "plan.zero=3", *LORA, *TWICE, *BF16),
        ("plan.shard=2", "plan.zero=1", *LORA, *BF16, "optim.master_weights=split"),
        ("plan.replicate=2", *LORA, *TWICE),
        ("plan.tp=2", *LORA, *TWICE, *BF16),
        ("plan.pp=2", *LORA, *FOUR_TIMES, *BF16),
        ("plan.shard=2", "plan.zero=3", *DORA, *TWICE, *BF16),
        ("plan.shard=2", "plan.zero=3", *QLORA, *TWICE, *BF16),
        ("plan.tp=2", *QLORA, *TWICE, *BF16, "optim.state_dtype=int8"),
        ("plan.pp=2", *QLORA, *FOUR_TIMES, "adapter.base=fp8"),
        ("plan.tp=2", *QLORA, "adapter.base=fp8", "plan.precision=fp8"),
        ("plan.shard=2", "plan.zero=3", "plan.ep=2", *MOE, *LORA, *TWICE, *BF16),
        ("plan.tp=2", *MOE, *DORA, *BF16),
        ("plan.shard=2", "plan.zero=3", *MOE, *QLORA, "arch.expert_ffn=128", *BF16),
        ("plan.replicate=2", "plan.ep=2", *MOE, *QLORA, "arch.expert_ffn=128", "adapter.base=fp8"),
        ("plan.shard=2", "plan.zero=2", *FROZEN, *TWICE, *BF16),
        ("plan.pp=2", "arch.tied=true", "optim.freeze=embed", *FOUR_TIMES),
    ],
    "ep": [
        ("plan.shard=2", "plan.zero=1", "plan.ep=2", *MOE, *TWICE),
        ("plan.shard=2", "plan.zero=3", "plan.ep=2", *MOE, *BF16),
        ("plan.replicate=2", "plan.ep=2", *MOE),
    ],
    "pp": [
        ("plan.pp=2", *FOUR_TIMES),
        ("plan.pp=2", "plan.schedule=zbv", *FOUR_TIMES, *GPT, *BF16),
        ("plan.pp=2", "plan.schedule=zb1p", *FOUR_TIMES, *BF16),
        ("plan.pp=2", *FOUR_TIMES, *POST_NORM),
        ("plan.pp=2", "plan.schedule=zb1p", *FOUR_TIMES, *BF16, "optim.master_weights=split"),
        ("plan.pp=2", "plan.schedule=looped", *FOUR_TIMES),
        ("plan.pp=2", "plan.schedule=interleaved", *FOUR_CHUNKS),
    ],
}
FOUR = {
    "hsdp": [
        ("plan.replicate=2", "plan.shard=2", "plan.zero=3", *TWICE, *BF16),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=2", *TWICE),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=1", *TWICE, *GPT),
        ("plan.shard=4", "plan.zero=3", *MOE, *BF16),
    ],
    "products": [
        ("plan.tp=2", "plan.shard=2", "plan.zero=3", *TWICE, *BF16, *GPT),
        ("plan.cp=2", "plan.shard=2", "plan.zero=3"),
        ("plan.shard=4", "plan.zero=3", "plan.ep=2", *MOE, *TWICE),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2", *MOE, *BF16),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2", *MOE, *LORA, *BF16),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2", *CAPACITY, *BF16_STATES),
        ("plan.shard=2", "plan.zero=1", "plan.cp=2", "plan.ep=4", *CAPACITY, *NO_MASTERS, *TWICE),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", *NO_MASTERS, *POST_NORM),
    ],
    "pp": [
        ("plan.pp=2", "plan.shard=2", "plan.zero=3", *FOUR_TIMES, *GPT, *BF16),
        ("plan.pp=2", "plan.tp=2", "plan.schedule=zb1p", *FOUR_TIMES),
        ("plan.pp=2", "plan.tp=2", *FOUR_TIMES, *GPT),
        ("plan.pp=2", "plan.tp=2", *FOUR_TIMES, *GPT, *BF16),
        ("plan.pp=2", "plan.shard=2", "plan.zero=1", "plan.schedule=looped", *FOUR_TIMES, *BF16),
        ("plan.pp=2", "plan.shard=2", "plan.zero=3", "plan.schedule=zbv", *FOUR_TIMES, *BF16),
        ("plan.pp=2", "plan.shard=2", "plan.zero=2", "plan.ep=2", *FOUR_TIMES, *MOE),
        ("plan.pp=2", "plan.shard=2", "plan.zero=3", *FOUR_TIMES, *POST_NORM, *BF16_STATES),
        ("plan.pp=2", "plan.tp=2", "plan.schedule=zbv", *FOUR_TIMES, *NO_MASTERS),
    ],
    # Of four stages torch holds three gathered: so under zero 3, and short of it all four.
    "many chunks": [
        ("plan.pp=2", "plan.shard=2", "plan.zero=3", "plan.schedule=interleaved", *FOUR_CHUNKS),
        ("plan.pp=2", "plan.shard=2", "plan.zero=1", "plan.schedule=interleaved", *FOUR_CHUNKS, *BF16),
        ("plan.pp=2", "plan.shard=2", "plan.zero=1", "plan.schedule=looped", *FOUR_CHUNKS, *GPT),
        ("plan.pp=2", "plan.shard=2", "plan.zero=2", "plan.schedule=zb1p", *FOUR_CHUNKS, *BF16),
        ("plan.pp=2", "plan.shard=2", "plan.zero=1", "plan.ep=2", "plan.schedule=interleaved", *FOUR_CHUNKS, *MOE),
        ("plan.pp=2", "plan.replicate=2", "plan.schedule=interleaved", *FOUR_CHUNKS, *BF16),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    corpus_file(path)
    make_corpus(make_run(path), path)  # tokenised once, before the ranks ask
    return path


@dataclass
class Watch:
    """What torch's groups of weights hold, looked at whenever one has gathered or scattered something."""

    groups: dict[int, FSDPParamGroup] = field(default_factory=dict)
    gathered: int = 0  # bytes, at the peak
    blocks: int = 0  # of which at least something is gathered, at the peak
    partial: int = 0  # bytes of gradients that wait for their sum over copies, at the peak
    gradients: int = 0  # bytes that are kept for a later microbatch, or for the sum over ranks, at the peak

    def look(self, group: FSDPParamGroup) -> None:
        self.groups[id(group)] = group
        sizes = [(block_of(group._module_fqn or ""), gathered_bytes(group)) for group in self.groups.values()]
        self.gathered = max(self.gathered, sum(size for _, size in sizes))
        self.blocks = max(self.blocks, len({block for block, size in sizes if size} - {None}))

    def look_at_gradients(self) -> None:
        weights = [weight for group in self.groups.values() for weight in group.fsdp_params]
        waiting = [weight.unsharded_accumulated_grad for weight in weights]
        waiting += [weight._unsharded_param.grad for weight in weights if hasattr(weight, "_unsharded_param")]
        scattered = [weight.sharded_param.grad for weight in weights]
        self.partial = max(self.partial, stored(group._partial_reduce_output for group in self.groups.values()))
        self.gradients = max(self.gradients, stored([*waiting, *scattered]))


def block_of(name: str) -> str | None:
    """The layer of a module, or None outside the blocks."""
    head, _, rest = name.partition(".")
    return rest.split(".")[0] if head == "blocks" else None


def gathered_bytes(group: FSDPParamGroup) -> int:
    """Bytes of a group that is gathered, or on its way."""
    if group.is_unsharded:
        return sum(output.nbytes for weight in group.fsdp_params for output in weight.all_gather_outputs)
    result = group._all_gather_result
    return result.all_gather_output.nbytes if result is not None else 0


def stored(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory behind tensors, which several may share."""
    storages = [local(tensor).untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


@contextmanager
def watching(pipeline: bool) -> Iterator[Watch]:
    """Look after every gathering; at gradients when a microbatch begins, and before a pipeline sums its own."""
    watch, gather, wait = Watch(), FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard
    forward, backward = FSDPParamGroup.pre_forward, FSDPParamGroup.post_backward
    weigh = PipelineStage.backward_weight_one_chunk

    def unshard(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        gather(group, *args, **kwargs)
        watch.look(group)

    def wait_for_unshard(group: FSDPParamGroup) -> None:
        wait(group)
        watch.look(group)

    def pre_forward(group: FSDPParamGroup, *args: Any) -> Any:
        watch.look_at_gradients()
        return forward(group, *args)

    def backward_weight_one_chunk(stage: PipelineStage, *args: Any, **kwargs: Any) -> None:
        weigh(stage, *args, **kwargs)
        watch.look_at_gradients()

    def post_backward(group: FSDPParamGroup, *unused: Any) -> None:
        if pipeline and group.reduce_grads:
            watch.look_at_gradients()
        backward(group, *unused)

    with pytest.MonkeyPatch.context() as patched:
        for replacement in (unshard, wait_for_unshard, pre_forward, post_backward):
            patched.setattr(FSDPParamGroup, replacement.__name__, replacement)
        patched.setattr(PipelineStage, weigh.__name__, backward_weight_one_chunk)
        yield watch


def measured(run: Run, mesh: Mesh, folder: Path) -> tuple[dict[str, int], Watch]:
    """The ledger of a real step, up to the update, and what was watched on the way."""
    state = build(run, make_corpus(run, folder), mesh)
    with watching(run.plan.pp > 1) as watch:
        choose(run, state.chunks, mesh)(state.loader.take(0), state.scale.value)
    state.loader.close()
    weights = [weight for chunk in state.chunks for weight in chunk.parameters()]
    gradients = stored(weight.grad for weight in weights)
    bytes_of = {
        "weights": stored(weights),
        "gradients": gradients,
        "moments": stored(chain.from_iterable(state.optimizer.states().values())),
        "all_gathered_params": watch.gathered,
        "unreduced_grads": max(watch.gradients - gradients, 0),
    }
    if low := stored(getattr(weight, "low_bits", None) for weight in weights):
        bytes_of["master"] = low
    return bytes_of, watch


def surprises(folder: Path, words: tuple[str, ...]) -> list[str]:
    """Where a real step differs from the arithmetic."""
    run = make_run(folder, *SMALL, *words)
    mesh = mesh_of(run.plan)
    seen, _ = measured(run, mesh, folder)
    of = (run.arch, run.plan, mesh.place, state_layout(job_of(run)))
    said = {line.name: line.bytes for line in (*states(*of), *host_states(*of))}  # a CPU's memory is the host's
    return [f"{run.plan}: {name} seen {seen[name]}, said {said[name]}" for name in said if seen[name] != said[name]]


@pytest.mark.parametrize("plans", TWO.values(), ids=TWO)
@world(2)
def test_two_ranks_hold_what_the_plan_implies(folder, plans):
    told = [text for words in plans for text in surprises(folder, words)]
    assert not told, "\n".join(told)


@pytest.mark.parametrize("plans", FOUR.values(), ids=FOUR)
@world(4)
def test_four_ranks_hold_what_the_plan_implies(folder, plans):
    told = [text for words in plans for text in surprises(folder, words)]
    assert not told, "\n".join(told)


@pytest.mark.parametrize("plan", [("plan.precision=fp32",), ("plan.precision=fp32", *TWICE)])
def test_a_lone_rank_uses_its_weights_where_they_lie(folder, plan):
    run = make_run(folder, *SMALL, *plan, "plan.replicate=1")
    seen, _ = measured(run, alone(), folder)
    assert seen == {line.name: line.bytes for line in states(run.arch, run.plan)}
    assert seen["all_gathered_params"] == 0


@pytest.mark.parametrize("words", [("plan.precision=fp32",), (*BF16, *TWICE), (*BF16, *LORA)])
@world(1)
def test_a_lone_rank_whose_weights_are_in_host_memory_copies_one_block_at_a_time(folder, words):
    run = make_run(folder, *SMALL, *words, *HOSTED, "plan.replicate=1")
    seen, _ = measured(run, mesh_of(run.plan), folder)
    near = {line.name: line.bytes for line in states(run.arch, run.plan)}
    assert near["weights"] == near["gradients"] == near["moments"] == near["unreduced_grads"] == 0
    assert seen == near | {line.name: line.bytes for line in host_states(run.arch, run.plan)}
    assert 0 < near["all_gathered_params"] < count(run.arch) * (2 if run.plan.precision == "bf16" else 4)


@pytest.mark.parametrize("precision", [(), BF16])
@world(2)
def test_gradients_that_wait_for_copies_are_the_only_states_on_the_device(folder, precision):
    run = make_run(folder, *SMALL, *precision, "plan.replicate=2", *HOSTED, *TWICE)
    _, watch = measured(run, mesh_of(run.plan), folder)
    near = {line.name: line.bytes for line in states(run.arch, run.plan)}
    assert near["gradients"] == watch.partial > 0
    assert near["weights"] == near["moments"] == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rounding", ["none", "split"])
@pytest.mark.parametrize("accumulate", [(), TWICE])
def test_a_lone_rank_whose_weights_are_rounded_computes_with_them_where_they_lie(folder, rounding, accumulate, dtype):
    run = make_run(
        folder,
        *SMALL,
        *BF16,
        *accumulate,
        f"optim.master_weights={rounding}",
        f"optim.stochastic_rounding={str(rounding == 'none').lower()}",
        f"optim.state_dtype={dtype}",
        "plan.replicate=1",
    )
    seen, _ = measured(run, alone(), folder)
    layout = layout_of(run.plan, rounding, dtype)
    assert seen == {line.name: line.bytes for line in states(run.arch, run.plan, layout=layout)}
    assert seen["weights"] == 2 * count(run.arch)
    assert seen["moments"] == (4 if dtype == "bf16" else 8) * count(run.arch)


@pytest.mark.parametrize("words", [(), SGD])
def test_out_of_memory_measures_the_lines_of_the_ledger(folder, words):
    run = make_run(folder, *SMALL, *BF16, "plan.bf16_params=true", "plan.replicate=1", *words)
    state = build(run, make_corpus(run, folder), alone())
    choose(run, state.chunks, alone())(state.loader.take(0), state.scale.value)
    state.loader.close()
    layout = state_layout(job_of(run))
    said = {line.name: line.bytes for line in states(run.arch, run.plan, layout=layout)}
    assert oom.held(state, layout) == {name: said[name] for name in ("weights", "gradients", "moments")}
    assert said["weights"] == 4 * count(run.arch)
    assert said["moments"] == (4 if words else 8) * count(run.arch)


OFFLOADED = [
    ("plan.precision=fp32", "plan.optimizer_offload=host"),
    (*BF16, "plan.optimizer_offload=host"),
    (*BF16, "plan.optimizer_offload=host", "plan.optimizer_offload_update=device", *TWICE),
    (*BF16, "plan.optimizer_offload=host", "plan.optimizer_offload_update=device", "optim.state_dtype=bf16"),
    (*BF16, "plan.optimizer_offload=disk"),
    (*BF16, "plan.optimizer_offload=host", *SGD),
    (*BF16, "plan.optimizer_offload=host", "plan.optimizer_offload_update=device", "optim.state_dtype=bf16", *SGD),
    (*BF16, "plan.optimizer_offload=disk", "plan.optimizer_offload_update=device", "optim.state_dtype=bf16", *TWICE),
    (*BF16, "plan.optimizer_offload=host", *QLORA, *TWICE),
]


@pytest.mark.parametrize("words", OFFLOADED)
def test_states_that_live_elsewhere_take_the_bytes_that_are_said_there(folder, words, tmp_path):
    run = make_run(folder, *SMALL, *words, "plan.replicate=1", f"plan.optimizer_offload_folder={tmp_path}")
    state = build(run, make_corpus(run, folder), alone())
    choose(run, state.chunks, alone())(state.loader.take(0), state.scale.value)
    state.loader.close()
    optimizer = state.optimizer
    assert isinstance(optimizer, OffloadedOptimizer)
    job = job_of(run)
    lines = {line.name: line.bytes for line in states(run.arch, run.plan)}
    weights = [weight for chunk in state.chunks for weight in chunk.parameters()]
    assert stored(weights) == lines["weights"]
    assert stored(weight.grad for weight in weights) == lines["gradients"]
    assert lines["moments"] == lines["all_gathered_params"] == 0
    assert oom.held(state, state_layout(job)) == {name: lines[name] for name in ("weights", "gradients")}
    near = [array for home in optimizer.locations for array in home.arrays]
    slots = [buffer for slot in optimizer.slots for buffer in slot.near]
    optimizer.close()
    said = ledger(job).offloaded
    kept = {line.name: line.bytes for line in (*said.host, *said.disk)}
    assert sum(array.nbytes for array in near) == kept["states"]
    assert bool(said.disk) == (run.plan.optimizer_offload == "disk")
    if run.plan.optimizer_offload_update == "device":
        on_device = {line.name: line.bytes for line in ledger(job).lines}["update"]
        layout = layout_of(run.plan, "fp32", run.optim.state_dtype, run.optim.name)
        rounding = rounding_bytes(layout, largest_weight(run.arch))
        assert sum(buffer.nbytes for buffer in slots) in (on_device, on_device - rounding)


def test_the_pieces_of_the_ledger_are_the_optimizer_s():
    assert (PIECE, SLOTS) == (host_memory.PIECE, host_memory.SLOTS)


@world(2)
def test_zero_3_never_gathers_more_than_two_blocks_and_zero_2_all_of_them(folder):
    blocks = {}
    for zero in (2, 3):
        run = make_run(folder, *SMALL, "arch.layers=6", "plan.shard=2", f"plan.zero={zero}", *TWICE)
        blocks[zero] = measured(run, mesh_of(run.plan), folder)[1].blocks
    assert blocks == {2: 6, 3: 2}


KEPT = {
    "tp": [
        ("plan.tp=2",),
        ("plan.tp=2", *BF16),
        ("plan.tp=2", "plan.precision=fp8"),
        ("plan.tp=2", *GPT, "arch.mlp=gelu", *BF16),
    ],
    "cp": [
        ("plan.cp=2",),
        ("plan.cp=2", *BF16),
        ("plan.cp=2", *GPT),
        ("plan.cp=2", "plan.cp_kind=ulysses", *BF16),
        ("plan.cp=2", "plan.cp_kind=ulysses", *GPT),
    ],
    "shard": [
        ("plan.shard=2", "plan.zero=3", *BF16),
        ("plan.replicate=2", *GPT),
        ("plan.replicate=2", "optim.freeze=embed,blocks.0"),  # which no backward reaches
    ],
    # On a CPU masks of windows and scores of softcaps are dense, which the ledger leaves out; a ring has none.
    "families": [
        ("plan.tp=2", "arch.preset=tiny-qwen3", *BF16),
        ("plan.tp=2", "arch.preset=tiny-olmo2"),
        ("plan.tp=2", "arch.preset=tiny-olmo2", "arch.kv_heads=1"),
        ("plan.tp=2", "arch.preset=tiny-neox", *BF16),
        ("plan.cp=2", "arch.preset=tiny-cohere"),
        ("plan.tp=2", "arch.preset=tiny-cohere", "arch.qk_norm=layer", *BF16),
        ("plan.cp=2", "arch.preset=tiny-gemma3", *BF16),
        ("plan.tp=2", *DENSE_LATENT, "arch.v_dim=0", "arch.q_rank=48", *BF16),  # else SDPA of a CPU keeps the scores
        ("plan.tp=2", *DENSE_LATENT, "arch.v_dim=0", "arch.q_rank=48", "arch.head_dim=32", "arch.rope_dim=16", *FP8),
        ("plan.tp=2", "arch.kv_heads=1", "arch.head_dim=16", *FP8),
        ("plan.cp=2", *DENSE_LATENT),
        ("plan.cp=2", "arch.mtp_layers=1", *BF16),
        ("plan.shard=2", "plan.zero=3", "arch.mtp_layers=1"),
        ("plan.tp=2", "arch.mtp_layers=1", *BF16),
    ],
}


def saved_for_backward(run: Run, mesh: Mesh, folder: Path) -> int:
    """Bytes of activations that autograd saves in one forward; weights and the integers given are left out."""
    state = build(run, make_corpus(run, folder), mesh)
    batch = state.loader.take(0)
    found: dict[int, int] = {}
    with watching(False) as watch:

        def pack(tensor: Tensor) -> Tensor:
            held = local(tensor)
            held = held.elem if isinstance(held, AsyncCollectiveTensor) else held  # which nobody waited for yet
            storage = held.untyped_storage()
            if tensor.is_floating_point() and tensor.numel() > 1 and storage.data_ptr() not in gathered(watch):
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), loss_context(run.plan):
            graph = losses(state.chunks[0], run.plan, mesh, torch.ones(()), batch.microbatches[0])
    del graph
    state.loader.close()
    return sum(found.values())


def gathered(watch: Watch) -> set[int]:
    """Where the weights lie that are gathered now."""
    weights = [weight for group in watch.groups.values() for weight in group.fsdp_params]
    return {output.untyped_storage().data_ptr() for weight in weights for output in weight.all_gather_outputs}


def unexpected(folder: Path, words: tuple[str, ...]) -> list[str]:
    """Where a forward keeps other bytes than the ledger says."""
    run = make_run(folder, *SMALL, "plan.kernels=plain", *words)
    machines, ours = cluster("8xh100"), stacks()["meshwright"]
    work = microbatch_shape(
        Job(arch=run.arch, plan=run.plan, sequence=run.sequence, cluster=machines, stack=ours), fused_norm=False
    )
    still = still_blocks(run.arch)
    said = saved_activations(work, (False,) * run.arch.blocks, True, "none", still)
    # The first norm with a gradient has none of its input, so that operations in the place of a kernel save it once.
    once = work.split * (run.arch.hidden + 1) * work.accum_bytes if still else 0
    # Of an odd vocabulary one rank of tp has half an entry more than the mean, the other half an entry less.
    odd = work.whole * work.accum_bytes / 2 * (1 + run.arch.mtp_layers) if run.plan.tp > 1 else 0
    seen = saved_for_backward(run, mesh_of(run.plan), folder)
    differ = seen - said.activations - said.logits + once
    return [] if abs(differ) == odd else [f"{run.plan}: seen {seen}, differs by {differ}"]


@pytest.mark.parametrize("plans", KEPT.values(), ids=KEPT)
@world(2)
def test_a_forward_keeps_what_the_ledger_says(folder, plans):
    told = [text for words in plans for text in unexpected(folder, words)]
    assert not told, "\n".join(told)


@world(2)
def test_a_base_in_fp8_keeps_for_its_adapter_what_one_in_bf16_keeps(folder):
    found = []
    for words in ((*LORA, *BF16), (*LORA, "adapter.base=fp8", "plan.precision=fp8")):
        run = make_run(folder, *SMALL, "plan.kernels=plain", "plan.tp=2", *words)
        machines, ours = cluster("8xh100"), stacks()["meshwright"]
        work = microbatch_shape(
            Job(arch=run.arch, plan=run.plan, sequence=run.sequence, cluster=machines, stack=ours), fused_norm=False
        )
        said = saved_activations(work, (False,) * run.arch.blocks, True, "none", still_blocks(run.arch))
        found.append((saved_for_backward(run, mesh_of(run.plan), folder), said))
    assert found[0] == found[1]


class LiveParts(Live):
    """Counts a rank's own parts: what torch makes for a tensor that ranks share, or still wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind in (DTensor, AsyncCollectiveTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def alive_after_forward(run: Run, mesh: Mesh, folder: Path) -> int:
    """Bytes that one forward leaves, weights and inputs apart."""
    state = build(run, make_corpus(run, folder), mesh)
    batch = state.loader.take(0).microbatches[0]
    inputs = [batch.tokens, batch.targets, batch.positions, batch.index]
    given = [local(weight) for chunk in state.chunks for weight in chunk.parameters()]
    with LiveParts([*given, *inputs]) as live, loss_context(run.plan):
        graph = losses(state.chunks[0], run.plan, mesh, torch.ones(()), batch)
        gc.collect()  # what only cycles of references hold is not kept
        held = live.bytes
    del graph
    state.loader.close()
    return held


@world(2)
def test_what_is_computed_anew_over_tp_is_not_kept(folder):
    for policy in ("full", "selective", "selective-1", "every-2"):
        run = make_run(folder, *SMALL, "plan.kernels=plain", "plan.tp=2", *BF16, f"plan.recompute={policy}")
        mesh = mesh_of(run.plan)
        whole = {line.name: line.bytes for line in states(run.arch, run.plan, mesh.place)}["all_gathered_params"]
        ours = stacks()["meshwright"]
        job = Job(arch=run.arch, plan=run.plan, sequence=run.sequence, cluster=cluster("8xh100"), stack=ours)
        work = microbatch_shape(job, fused_norm=False)
        said = saved_activations(work, (False,) * run.arch.layers, True, policy)
        differ = alive_after_forward(run, mesh, folder) - whole - said.activations - said.logits
        # The last block's result lives on beside the fp32 copy that the norm after it keeps; and the vocabulary is odd.
        assert abs(differ - work.hidden_states) <= work.whole * work.accum_bytes / 2 + 64, (policy, mesh.rank, differ)
