"""The dry run finds in the real trainer what was planned, without a GPU, a second process or memory."""

from collections import Counter

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.cost.job import Job
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stacks
from meshwright.spec.optimizers import description_of
from meshwright.verify.collectives import Call
from meshwright.verify.trace import DryRunStep, TraceReport, _calls, even, following, lines, stored, trace, traceable

BASE = ("arch.preset=tiny", "arch.layers=2", "arch.hidden=256", "sequence=256", "batch=16", "plan.precision=bf16")
MOE = ("arch.preset=tiny-moe",)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_run(*words: str) -> Run:
    return load.load(None, [*BASE, *words]).run


def traced(*words: str, rank: int | None = None) -> TraceReport:
    run = make_run(*words)
    job = Job(
        arch=run.arch,
        plan=run.plan,
        sequence=run.sequence,
        master_weights=run.optim.master_weights,
        state_dtype=run.optim.state_dtype,
        optimizer=description_of(run.optim),
        cluster=cluster("8xh100"),
        stack=stacks()["meshwright"],
    )
    return trace(run, job, rank)


@pytest.mark.parametrize(
    "words",
    [
        ("plan.replicate=4",),
        ("plan.shard=2", "plan.zero=1", "plan.microbatch=2"),
        ("plan.shard=2", "plan.replicate=2", "plan.zero=2", "plan.microbatch=2"),
        ("plan.shard=4", "plan.zero=3", "plan.recompute=full"),
        ("plan.shard=4", "plan.zero=3", "plan.recompute=selective"),
        ("plan.shard=4", "plan.zero=3", "plan.cpu_offload=true"),
        ("plan.tp=2", "plan.shard=2", "plan.zero=3"),
        ("plan.cp=2", "plan.cp_kind=ulysses", "data.mask_documents=true"),
        ("plan.cp=2", "plan.cp_kind=ring"),
        ("plan.pp=2", "plan.grad_accum=4", "arch.tied=true"),
        ("plan.pp=2", "plan.grad_accum=4", "plan.schedule=zbv", "plan.shard=2", "plan.zero=1", "arch.layers=4"),
        (*MOE, "plan.shard=4", "plan.zero=3", "plan.ep=2"),
        (*MOE, "plan.tp=2"),
        (*MOE, "plan.tp=2", "adapter.kind=lora", "arch.router_score=sigmoid", "arch.router_load_bias=true"),
        ("arch.preset=tiny-deepseek-v2", "arch.v_dim=20", "plan.tp=2", "adapter.kind=dora", "batch=2"),
        (*MOE, "plan.shard=2", "plan.zero=1", "arch.router_score=sigmoid", "arch.router_load_bias=true"),
        (*MOE, "plan.shard=4", "plan.zero=3", "plan.ep=2", "adapter.kind=qlora", "arch.expert_ffn=128"),
        ("plan.shard=2", "plan.zero=1", "plan.deterministic=true"),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.tp=2", "optim.name=onebit_lamb"),
        ("plan.shard=2", "plan.zero=3", "plan.precision=bf16", "optim.master_weights=split"),
        (
            "plan.shard=2",
            "plan.zero=3",
            "plan.precision=bf16",
            "optim.master_weights=split",
            "optim.state_dtype=bf16",
        ),
        ("plan.shard=2", "plan.zero=3", "plan.activation_quant=int8", "plan.activation_offload=true"),
        ("plan.replicate=4", "plan.grad_reduce=int4"),
        ("plan.replicate=4", "plan.powersgd=2"),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.grad_reduce=int8", "plan.gather=int8"),
        ("plan.shard=4", "plan.zero=3", "plan.secondary_shard=2", "plan.precision=bf16"),
        ("plan.shard=4", "plan.zero=3", "plan.grad_reduce=int8", "plan.grad_reduce_node=2"),
        ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.powersgd=2"),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", "optim.name=muon"),
        ("plan.shard=2", "plan.zero=3", "plan.tp=2", "adapter.kind=dora", "adapter.dropout=0.1"),
    ],
    ids=" ".join,
)
def test_the_trainer_sends_and_holds_what_was_planned(words):
    found = traced(*words)
    assert not found.refused
    assert [row for row in found.calls if not row.agrees] == []
    assert [row for row in found.held[:-1] if not row.agrees] == []  # the states, to the byte
    peak = found.held[-1]
    # In a model this small single buffers of one block weigh more than the tenth that a trace allows.
    assert peak.traced == pytest.approx(peak.planned, rel=0.2)
    assert found.calls


@pytest.mark.parametrize(
    "words",
    [("arch.qk_norm=full", "arch.ffn=512"), (*MOE, "arch.shared_experts=2", "arch.expert_ffn=512")],
    ids=["norms that ranks share", "shared experts"],
)
def test_a_layer_cut_by_tp_saves_what_was_planned(words):
    words = (*words, "plan.tp=2", "batch=8")
    few, more = (traced(*words, f"arch.layers={layers}").held[-1] for layers in (2, 4))
    assert more.traced - few.traced == pytest.approx(more.planned - few.planned, rel=0.01)


def test_a_thousand_ranks_are_traced_as_one():
    found = traced("plan.shard=8", "plan.replicate=128", "plan.zero=3", "batch=1024", "arch.layers=2", "sequence=64")
    assert (found.world, found.refused) == (1024, "")
    assert all(row.agrees for row in found.calls)
    assert {row.axis for row in found.calls} == {"shard", "replicate", "world"}


def test_another_rank_of_a_pipeline_holds_something_else():
    words = ("plan.pp=2", "plan.grad_accum=4", "plan.shard=2", "plan.zero=1", "sequence=64", "arch.ffn=128")
    first, last = traced(*words, rank=0), traced(*words, rank=3)
    assert all(row.agrees for found in (first, last) for row in (*found.calls, *found.held[:-1]))
    assert first.held[0].traced != last.held[0].traced  # the last rank has the final norm


def test_nothing_is_left_of_the_fake_world():
    traced("plan.shard=2", "plan.zero=3", "arch.layers=1", "sequence=64")
    assert not dist.is_initialized()
    assert torch.zeros(2).sum().item() == 0.0


def test_what_is_traced_otherwise_is_said():
    assert any("compiler" in note for note in traced("plan.compile=true", "arch.layers=1", "sequence=64").notes)
    run = make_run("plan.compile=true")
    assert traceable(run.plan) == msgspec.structs.replace(run.plan, compile=False, kernels="plain")


def test_a_step_that_cannot_be_traced_is_told_and_does_not_pass(monkeypatch):
    def impossible(*args):
        raise RuntimeError("needs values\nand more")

    monkeypatch.setattr("meshwright.verify.trace.trace_step", impossible)
    found = traced("plan.shard=2", "plan.zero=3")
    assert not found.agrees
    assert "could not be traced: RuntimeError: needs values" in "\n".join(lines(found))


def test_a_call_that_was_not_planned_is_a_difference():
    call, ranks = Call("all_reduce", (0, 1), 64), (0, 1)
    seen = DryRunStep(Counter({call: 2}), Counter({call: 1}), {ranks: "shard"}, {}, {}, 0, "")
    (row,) = _calls(seen)
    assert (row.axis, row.planned, row.traced, row.agrees) == ("shard", 1, 2, False)


def test_live_bytes_rise_and_fall_with_tensors():
    with FakeTensorMode(), following() as live:
        kept = torch.empty(1000, dtype=torch.float32)
        gone = torch.empty(500, dtype=torch.float32)
        view = kept.view(10, 100)  # the same memory
        assert live.bytes == 6000
        del gone
        assert live.bytes == 4000
        kept.untyped_storage().resize_(0)
        assert live.bytes == 0
        assert stored([kept, view, None]) == 0
    assert live.peak == 6000


def test_rows_are_shared_out_evenly():
    assert even(10, 4) == [3, 3, 2, 2]
