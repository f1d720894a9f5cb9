"""Optimizer states in int8, int4 and fp8: the same codes under every plan, in checkpoints, and in the bytes said."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_whole_tensors import surprises_of_a_step
from torch import Tensor
from trials import (
    CPU,
    Trial,
    alone,
    corpus_file,
    deviation,
    digest_before_the_cut,
    drive,
    made,
    make_corpus,
    make_run,
    mesh_of,
)
from worlds import start, world

from meshwright.checkpoint import format as manifests
from meshwright.checkpoint.model_folder import save_native
from meshwright.config.run import Run
from meshwright.optim import quantized as quantized_module
from meshwright.parallel.mesh import Mesh, region_of
from meshwright.spec.problem import InputError
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.saving import digest_of, holdings, restore
from meshwright.train.state import weights

DTYPES = ("int8", "int4")
ALL = (*DTYPES, "fp8")
CODES = (torch.uint8, torch.float8_e4m3fn)
# float64 sums in another order: a few hundred terms of relative error 1e-16 each, through four updates. No code lies
# so near to the middle between two values; one that did would move its weight by a thousandth.
TOLERANCE = 1e-11


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


def quantized(folder: Path, states: str, plan: str, *words: str, arch: str = "tiny") -> Run:
    fields = (f"plan.{word}" for word in plan.split(","))
    return make_run(folder, f"optim.state_dtype={states}", *fields, *words, arch=arch)


def codes(trial: Trial, run: Run, mesh: Mesh) -> dict[str, tuple[tuple[tuple[int, int], ...], Tensor]]:
    """Every tensor of codes that this rank has, with its region."""
    held = holdings(trial.state, run, mesh)
    return {each.name: (each.region, each.tensor.view(torch.uint8)) for each in held if each.tensor.dtype in CODES}


def compare(folder: Path, states: str, plans: tuple[str, ...], *words: str, arch: str = "tiny") -> None:
    """Plans beside one process: losses, weights, and every code."""
    one, file = quantized(folder, states, "replicate=1", *words, arch=arch), folder / "codes.pt"
    corpus = make_corpus(one, folder)
    reference = drive(one, corpus, alone()) if dist.get_rank() == 0 else None
    if reference is not None:
        torch.save({name: tensor for name, (_, tensor) in codes(reference, one, alone()).items()}, file)
    dist.barrier()
    whole = torch.load(file)
    for plan in plans:
        run = quantized(folder, states, plan, *words, arch=arch)
        mesh = mesh_of(run.plan)
        trial = drive(run, corpus, mesh)
        mine = codes(trial, run, mesh)
        assert any(tensor.numel() for _, tensor in mine.values())
        for name, (region, tensor) in mine.items():
            there = whole[name][tuple(slice(*part) for part in region)]
            assert torch.equal(tensor, there), f"{plan}: {name}: {(tensor != there).sum()} of {tensor.numel()} differ"
        if reference is not None:
            assert deviation(trial, reference) < TOLERANCE, plan
            assert len(whole) > 10
        dist.barrier()


@pytest.mark.parametrize("states", ALL)
@world(2)
def test_two_ranks_have_the_codes_of_one(folder, states):
    axes = ("replicate=2", "shard=2,zero=1", "shard=2,zero=2,grad_accum=2", "cp=2", "pp=2,schedule=1f1b,grad_accum=4")
    compare(folder, states, ("shard=2,zero=3", "tp=2", *(axes if states in DTYPES else ())))


@pytest.mark.parametrize("states", ALL)
@world(4)
def test_four_ranks_have_the_codes_of_one(folder, states):
    if states == "fp8":  # whose parts are as int4's; its codes are special, and its dtype
        compare(folder, states, ("shard=2,zero=3,tp=2", "tp=4"))
        return
    compare(folder, states, ("shard=4,zero=3", "tp=4", "shard=2,zero=3,tp=2", "replicate=2,shard=2,zero=3"))
    compare(folder, states, ("shard=4,zero=3,ep=2", "shard=2,zero=3,tp=2,ep=2"), arch="tiny-moe")


@pytest.mark.parametrize("states", DTYPES)
@world(8)
def test_eight_ranks_have_the_codes_of_one(folder, states):
    compare(folder, states, ("replicate=2,shard=2,zero=3,tp=2",))


@pytest.mark.parametrize("states", DTYPES)
@world(2)
def test_blocks_of_a_rank_alone_would_have_other_codes(folder, states):
    """What others do: blocks counted from a rank's own first column, with the scales of its own elements."""
    part = quantized_module._part

    def own(weight, format, dtype):
        whole = part(weight, format, dtype)
        begin, end = whole.columns
        return replace(whole, columns=(0, end - begin), size=end - begin, shared=())

    run = quantized(folder, states, "tp=2")
    compare(folder, states, ("tp=2",))
    with pytest.MonkeyPatch.context() as patch:  # the ranks go on to other tests
        patch.setattr(quantized_module, "_part", own)
        trial = drive(run, make_corpus(run, folder), mesh_of(run.plan))
    whole, differ = torch.load(folder / "codes.pt"), 0
    per_byte = 1 if states == "int8" else 2
    for name, weight in trial.state.chunks[0].named_parameters():
        if f"first/{name}" in whole:
            rows, columns = region_of(weight)
            there = whole[f"first/{name}"][rows, columns.start // per_byte : columns.stop // per_byte]
            differ += (trial.state.optimizer.held()[id(weight)]["first"] != there).sum().item()
    assert differ > 100


@world(1)
def leave_digests(folder, states, plans, grad_accum):
    """Of weights, codes and scales, as fp32 has them after four steps."""
    for plan in plans:
        run = quantized(
            folder, states, f"{plan},microbatch=1,grad_accum={grad_accum},deterministic=true,precision=fp32"
        )
        mesh = mesh_of(run.plan)
        digest = digest_of(drive(run, make_corpus(run, folder), mesh).state, run, mesh)
        if mesh.rank == 0:
            (folder / f"digest.{plan}").write_text(digest)


@pytest.mark.parametrize("states", DTYPES)
def test_in_deterministic_mode_every_bit_is_that_of_one_rank(folder, states):
    """In fp32: codes, scales and weights, over replicate and shard."""
    plans = {1: ("replicate=1",), 4: ("replicate=4", "replicate=2,shard=2,zero=3", "shard=4,zero=2")}
    for ranks, chosen in plans.items():
        arguments = {"folder": folder, "states": states, "plans": chosen, "grad_accum": 8 // ranks}
        start(ranks, Path(__file__), "leave_digests", arguments)
    assert len({(folder / f"digest.{plan}").read_text() for chosen in plans.values() for plan in chosen}) == 1


# Rows of 300 are a block and a part; cut by tp, four parts and no whole block. In a stack of five experts of 27 shards
# of two or four cut the last dim.
WIDE = ("arch.hidden=300", "arch.heads=4", "arch.kv_heads=4", "arch.head_dim=40", "arch.ffn=312")
THIRDS = ("arch.preset=tiny-moe", "arch.experts=5", "arch.expert_ffn=27", "arch.hidden=64")
HELD = (
    ("plan.shard=4", "plan.zero=3", *WIDE),
    ("plan.shard=2", "plan.zero=1", "plan.tp=2", *WIDE),
    ("plan.tp=4", "plan.precision=fp32"),
    ("plan.tp=4", "arch.ffn=2048"),  # whose parts are whole blocks: only the output projection's are cut
    ("plan.pp=2", "plan.tp=2", "plan.grad_accum=4"),
    ("plan.cp=2", "plan.shard=2", "plan.zero=3", "plan.precision=bf16"),
    ("plan.shard=4", "plan.zero=2", "plan.ep=2", "plan.grad_accum=2", "arch.preset=tiny-moe"),
    ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2", "arch.preset=tiny-moe"),
    ("plan.shard=4", "plan.zero=3", *THIRDS),
)


@pytest.mark.parametrize("states", ALL)
@world(4)
def test_four_ranks_send_and_hold_what_the_planner_says(folder, states):
    # Of int4, whose codes share bytes, what comes out uneven and what has experts; of fp8, cut as int4, some of both.
    held = {"int8": HELD, "int4": (*HELD[:2], *HELD[-2:]), "fp8": HELD[1:3]}[states]
    found = [text for words in held for text in surprises_of_a_step(folder, (f"optim.state_dtype={states}", *words))]
    assert not found


@world(4)
def test_shards_of_a_stack_may_cut_its_rows(folder):
    compare(folder, "int8", ("shard=4,zero=3",), *THIRDS[1:], arch="tiny-moe")


SAVED = ("steps=6", "checkpoint.every=4")


@pytest.mark.parametrize("states", ALL)
@world(2)
def test_a_checkpoint_resumes_under_another_plan_with_the_same_codes(folder, states):
    run, mesh, state = made(quantized(folder, states, "tp=2", *SAVED), folder, CPU)
    digest = digest_before_the_cut(run, mesh, state, folder / "run")
    dist.barrier()
    if mesh.rank == 0:
        saved = manifests.read(folder / "run" / "checkpoints" / "step-4")
        dtypes = {f"{tensor.name.split('/')[0]} {tensor.dtype}" for tensor in saved.tensors}
        codes_as = "F8_E4M3" if states == "fp8" else "U8"
        of_states = {f"{kind} {dtype}" for kind in ("first", "second") for dtype in (codes_as, "F64")}
        assert dtypes == {"weight F64", "first_scales F64", "second_scales F64", *of_states}
    for plan in ("shard=2,zero=3", "pp=2,grad_accum=4", "tp=2"):
        run, mesh, state = made(quantized(folder, states, plan, *SAVED), folder, CPU)
        restored = restore(state, run, mesh, folder / "run", lambda text: None)
        assert restored is not None
        assert (restored.step, digest_of(state, run, mesh)) == (4, digest)
        state.loader.close()


@pytest.mark.parametrize("states", ALL)
@world(2)
def test_a_run_that_resumes_under_another_plan_ends_with_the_codes_of_one_that_did_not(folder, states):
    whole = quantized(folder, states, "shard=2,zero=3", *SAVED)
    through = drive(whole, make_corpus(whole, folder), mesh_of(whole.plan))
    expected = codes(through, whole, mesh_of(whole.plan))
    run, mesh, state = made(quantized(folder, states, "tp=2", *SAVED), folder, CPU)
    digest_before_the_cut(run, mesh, state, folder / "run")
    dist.barrier()
    run, mesh, state = made(whole, folder, CPU)
    assert restore(state, run, mesh, folder / "run", lambda text: None) is not None
    list(train(run, state, mesh))
    state.loader.close()
    for each in holdings(state, run, mesh):
        if each.name in expected:
            assert torch.equal(each.tensor.view(torch.uint8), expected[each.name][1]), each.name


@pytest.mark.parametrize(("saved", "states", "dtype"), [("fp32", "int8", "F64"), ("int8", "fp8", "U8")])
def test_states_of_another_dtype_do_not_follow_into_a_new_phase(folder, saved, states, dtype):
    """Codes of int8 are bytes as FP8 numbers are, and mean something else."""
    run = make_run(folder, "steps=2", "checkpoint.every=2", "plan.replicate=1", f"optim.state_dtype={saved}")
    state = build(run, make_corpus(run, folder), alone())
    list(train(run, state, alone(), folder / "first"))
    state.loader.close()
    corpus = make_corpus(run, folder)
    save_native(folder / "first" / "model", run.arch, weights(state.chunks, run, alone()), corpus.tokenizer)
    words = (f"init.from={folder}/first", "init.optimizer_state=true", "sequence=64", "steps=2")
    later = quantized(folder, states, "replicate=1", *words)
    after = build(later, make_corpus(later, folder), alone())
    with pytest.raises(InputError, match=rf"has optimizer states of another optim.state_dtype: first/\S+ is {dtype}"):
        restore(after, later, alone(), folder / "second", lambda text: None)
    after.loader.close()
