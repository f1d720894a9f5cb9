"""Lossy communication: as one process that rounds alike, in the bytes that were planned, saved and resumed."""

import json
from pathlib import Path

import pytest
import torch
from commands import meshwright
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from trials import CPU, corpus_file, losses_of, made, make_corpus, make_run
from waiting import HANG
from worlds import world

from meshwright.cost.layout import layout_of
from meshwright.cost.resident import states
from meshwright.parallel.fsdp import param_groups
from meshwright.runtime.ranks import run_ranks
from meshwright.train.loop import StepResult, train
from meshwright.train.oom import held
from meshwright.train.saving import digest_of, restore
from meshwright.verify import prove
from meshwright.verify.evidence import compare

QUIET = ("data.eval_fraction=0.0",)
SMALL = ("arch.layers=2", *QUIET)
TOLERANCE = 1e-12  # float64 sums in another order, through a few updates
TWO = (
    "replicate=2,grad_reduce=bf16,grad_accum=2",
    "replicate=2,grad_reduce=int8",
    "shard=2,zero=3,gather=fp8,grad_reduce=fp8",
    "replicate=2,grad_reduce=int4,error_feedback=false",
    "replicate=2,powersgd=2,zero=2,grad_accum=2",
    "shard=2,zero=2,grad_reduce=int4,grad_accum=2",
    "shard=2,zero=3,gather=int8,recompute=full",
    "cp=2,zero=3,gather=int8",
)
FOUR = (
    "replicate=2,shard=2,zero=3,grad_reduce=int4,gather=int8,grad_accum=2",
    "replicate=2,shard=2,zero=1,grad_reduce=fp16",
    "shard=4,zero=3,secondary_shard=2",
    "shard=4,zero=3,secondary_shard=2,gather=int8,grad_reduce=int8,grad_reduce_node=2",
    "shard=4,zero=2,grad_reduce=int4,grad_reduce_node=2,grad_accum=2",
    "shard=2,zero=3,tp=2,grad_reduce=int8,gather=int8",
    "pp=2,replicate=2,grad_reduce=int8",
    "pp=2,replicate=2,powersgd=3",
    "replicate=2,shard=2,zero=3,powersgd=2,grad_accum=2",
    "replicate=2,tp=2,powersgd=2",
)
OF_MANY = (
    "replicate=2,shard=2,zero=1,tp=2,powersgd=2",
    "replicate=2,shard=2,zero=2,pp=2,powersgd=2",
    "replicate=2,cp=2,zero=3,powersgd=2",
)
OF_EXPERTS = ("replicate=2,shard=4,zero=2,ep=2,powersgd=2", "replicate=2,shard=2,zero=3,ep=2,tp=2,powersgd=2")
EXPERTS = (
    "shard=4,zero=3,ep=2,gather=int8",
    "shard=2,zero=3,grad_reduce=int8,gather=int8",
    "replicate=2,shard=2,zero=3,powersgd=2",
)
LOSSY = "one process that rounds each rank's gradients and weights on their way, and feeds the errors back"


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


@pytest.mark.parametrize(
    ("model", "plans"),
    [("tiny", TWO), ("tiny", FOUR), ("tiny-moe", EXPERTS), ("tiny", OF_MANY), ("tiny-moe", OF_EXPERTS)],
    ids=["two ranks", "four", "experts", "replicas of many", "replicas that share experts out"],
)
def test_ranks_train_like_a_process_that_rounds_as_they_do(tmp_path, model, plans):
    asked = [word for plan in plans for word in ("--plan", plan)]
    short = ("arch.layers=2", "sequence=16", "--steps", "3")
    done = meshwright("verify", model, *short, *asked, "--json", "--folder", "proof", folder=tmp_path)
    verdicts = json.loads(done.stdout)
    numbers = [value for verdict in verdicts for name, value in verdict.items() if name.endswith("_deviation")]
    assert max(numbers) <= TOLERANCE, verdicts
    certificates = json.loads((tmp_path / "proof/certificate.json").read_text())
    compared = {verdict["plan"]: each["reference"] for each in certificates for verdict in each["verdicts"]}
    exact = "shard=4,zero=3,secondary_shard=2"  # which rounds nothing
    assert compared == {plan: "one process" if plan == exact else LOSSY for plan in plans}


@pytest.mark.parametrize(
    ("plan", "other", "first_bad"),
    [
        (
            "replicate=2,grad_reduce=int4",
            "replicate=2,grad_reduce=int4,error_feedback=false",
            "step 2: gradient norm",  # the first step owes nothing
        ),
        (
            "shard=4,zero=3,grad_reduce=int4,grad_reduce_node=2",
            "shard=4,zero=3,grad_reduce=int4",
            "step 1: gradient of embed.weight",
        ),
    ],
    ids=["that forget what they owe", "that round once where the plan rounds twice"],
)
def test_ranks_are_caught(tmp_path, plan, other, first_bad):
    prove.write_ragged(tmp_path / prove.TEXT)
    plans = (plan, other)
    words = ["arch.layers=1", "sequence=16"]
    ((reference, _),), ((_, [(_, run)]),) = (prove.jobs("tiny", words, [plan], 2, tmp_path) for plan in plans)
    theirs, ours = (tmp_path / name for name in ("reference", "plan"))
    theirs.mkdir()
    ours.mkdir()
    run_ranks(prove.named(reference)[1], 1, (reference, tmp_path / "cache", theirs), HANG)
    run_ranks(prove.RECORD, run.plan.world, (run, tmp_path / "cache", ours), HANG)
    verdict = compare(run, theirs, ours, TOLERANCE, 0.0)
    assert verdict.first_bad is not None
    assert verdict.first_bad.startswith(first_bad)


@world(2)
def test_what_is_off_leaves_everything_as_it_was(folder):
    off = ("plan.grad_reduce=default", "plan.powersgd=0", "plan.gather=default", "plan.secondary_shard=1")
    plain = make_run(folder, "plan.shard=2", "plan.zero=3", *SMALL)
    assert make_run(folder, "plan.shard=2", "plan.zero=3", *off, *SMALL) == plain
    _, _, state = made(plain, folder, CPU)
    groups = [
        group
        for module in state.chunks[0].modules()
        if isinstance(module, FSDPModule)
        for group in param_groups(module)
    ]
    assert {type(group._reduce_scatter_comm) for group in groups} == {DefaultReduceScatter}
    assert {type(group._all_gather_comm) for group in groups} == {DefaultAllGather}
    assert not any(group._all_reduce_hook or group._use_post_forward_mesh for group in groups)
    assert state.reductions == []
    state.loader.close()


@world(2)
def test_full_rank_is_plain_training_and_what_is_rounded_is_not(folder):
    words = ("plan.replicate=2", "plan.grad_accum=2", *SMALL)
    plain = losses_of(*made(make_run(folder, *words), folder, CPU))

    def off_by(*more: str) -> float:
        losses = losses_of(*made(make_run(folder, *words, *more), folder, CPU))
        return max(abs(one - two) / two for one, two in zip(losses, plain, strict=True))

    assert off_by("plan.powersgd=64") <= TOLERANCE  # the width of the model, which every matrix has for its short side
    fine, coarse = off_by("plan.grad_reduce=bf16"), off_by("plan.grad_reduce=int4", "plan.error_feedback=false")
    assert 1e-9 < fine < coarse < 0.1
    assert 1e-6 < off_by("plan.powersgd=1") < 0.5


@world(2)
def test_a_gradient_that_is_not_finite_is_skipped_and_leaves_nothing_behind(folder):
    for more in ("plan.grad_reduce=int8", "plan.grad_reduce=bf16", "plan.powersgd=2"):
        run, mesh, state = made(make_run(folder, "plan.replicate=2", more, *SMALL), folder, CPU)
        steps = train(run, state, mesh)
        next(steps)
        usual = state.scale.value
        if mesh.rank == 1:
            state.scale.value = torch.full_like(usual, torch.nan)
        second = next(steps)
        state.scale.value = usual
        third = next(steps)
        assert isinstance(second, StepResult)
        assert isinstance(third, StepResult)
        assert (second.finite.item(), third.finite.item()) == (0.0, 1.0)
        assert all(tensor.isfinite().all() for each in state.reductions for tensor in each.kept())
        state.loader.close()


SAVED = (*SMALL, "steps=6", "checkpoint.every=3")
ROUNDED = ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.grad_reduce=int4", "plan.gather=int8")
FACTORED = ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.powersgd=2")
NODES = ("plan.shard=4", "plan.zero=3", "plan.grad_reduce=int4", "plan.grad_reduce_node=2")


def interrupted(folder: Path, *words: str) -> tuple[str, list[float]]:
    """The digest of the state that a run saved after its third step, and its losses after that."""
    run, mesh, state = made(make_run(folder, *words), folder, CPU)
    digest, losses = "", list[float]()
    for result in train(run, state, mesh, folder / "run"):
        if result.step == 3:
            digest = digest_of(state, run, mesh)
        if result.step > 3 and isinstance(result, StepResult):
            losses.append(result.loss.item())
            if result.step == 5:
                break
    state.loader.close()
    return digest, losses


def resumed(folder: Path, *words: str) -> tuple[str, list[float]]:
    run, mesh, state = made(make_run(folder, *words), folder, CPU)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 3
    digest = digest_of(state, run, mesh)
    assert digest == restored.state
    return digest, losses_of(run, mesh, state)[:2]


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (ROUNDED, ()),
        (
            ("plan.replicate=2", "plan.grad_reduce=int8", "plan.tp=2"),
            ("plan.replicate=2", "plan.grad_reduce=int8", "plan.pp=2"),
        ),
        (("plan.replicate=4", "plan.powersgd=2"), ()),
        (FACTORED, ("plan.replicate=2", "plan.tp=2", "plan.powersgd=2", "plan.microbatch=4")),
        (NODES, ()),
    ],
    ids=["zero++", "replicas", "powersgd", "powersgd between shards", "nodes"],
)
@world(4)
def test_errors_are_saved_and_resumed_bit_by_bit(folder, words, other):
    digest, losses = interrupted(folder, *SAVED, *words)
    assert resumed(folder, *SAVED, *words) == (digest, losses)
    if other:  # whose ranks round the same gradients
        again, near = resumed(folder, *SAVED, *other)
        assert again == digest
        assert max(abs(one - two) / two for one, two in zip(near, losses, strict=True)) <= TOLERANCE


def held_otherwise(folder: Path, *words: str) -> list[str]:
    """Where what a rank holds differs from the ledger."""
    run, mesh, state = made(make_run(folder, *SMALL, *words), folder, CPU)
    next(train(run, state, mesh))
    layout = layout_of(run.plan)
    said = {line.name: line.bytes for line in states(run.arch, run.plan, mesh.place, layout)}
    seen = held(state, layout)
    state.loader.close()
    return [
        f"{run.plan}: {seen.get(name)}, not {said.get(name)}"
        for name in ("error_feedback", "moments")
        if seen.get(name) != said.get(name)
    ]


@world(4)
def test_ranks_hold_the_errors_that_the_ledger_says(folder):
    plans = [
        (*ROUNDED, "arch.vocab=257", "arch.preset=tiny-moe"),
        (*NODES, "arch.vocab=257"),
        ("plan.replicate=4", "plan.grad_reduce=bf16", "plan.error_feedback=false"),
        ("plan.replicate=4", "plan.powersgd=2", "plan.precision=bf16"),
        (*FACTORED, "arch.vocab=257"),
        ("plan.replicate=2", "plan.tp=2", "plan.powersgd=2", "arch.vocab=257"),
        (*FACTORED, "plan.ep=2", "arch.preset=tiny-moe", "arch.vocab=257"),
        ("plan.shard=2", "plan.zero=1", "plan.tp=2", "plan.grad_reduce=int8", "plan.precision=bf16"),
        ("plan.pp=2", "plan.replicate=2", "plan.grad_reduce=int8", "plan.grad_accum=4"),
    ]
    assert not [text for words in plans for text in held_otherwise(folder, *words)]
