"""Weights that live in host memory train the same model, alone and sharded, with or without a checkpoint between."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trials import alone, corpus_file, deviation, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.optim import clip
from meshwright.optim.host_memory import PinnedMemory
from meshwright.optim.resident import CpuOffloadOptimizer
from meshwright.parallel.mesh import local
from meshwright.spec.problem import InputError
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.saving import digest_of, restore
from meshwright.train.state import weights

# float64 sums in another order: a few hundred terms of relative error 1e-16 each, through four AdamW steps.
TOLERANCE = 1e-12
HOSTED = ("plan.zero=3", "plan.cpu_offload=true")
TWICE = ("plan.grad_accum=2",)


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


def compare(folder: Path, plan: tuple[str, ...], arch: str = "tiny", *tuning: str) -> None:
    """The plan, its weights in host memory, against one process that has them beside its arithmetic."""
    words = ("data.pack=documents", *tuning)
    run = make_run(folder, *words, *HOSTED, *plan, arch=arch)
    corpus = make_corpus(run, folder)
    mine = drive(run, corpus, mesh_of(run.plan))
    assert isinstance(mine.state.optimizer, CpuOffloadOptimizer)
    if dist.get_rank() > 0:
        return
    theirs = drive(make_run(folder, *words, "plan.replicate=1", arch=arch), corpus, alone())
    assert deviation(mine, theirs) < TOLERANCE, f"losses {mine.losses} beside {theirs.losses}"
    assert theirs.losses[-1] < theirs.losses[0]


@pytest.mark.parametrize("plan", [(), TWICE, ("plan.recompute=full",)], ids=["plain", "accumulated", "recomputed"])
@world(1)
def test_a_lone_rank_trains_the_same_model(folder, plan):
    compare(folder, ("plan.replicate=1", *plan))


@world(1)
def test_a_lone_rank_trains_the_same_adapter_and_what_is_not_frozen(folder):
    compare(folder, ("plan.replicate=1", *TWICE), "tiny", "adapter.kind=lora", "adapter.rank=4", "steps=4")
    compare(folder, ("plan.replicate=1",), "tiny", "optim.freeze=embed,blocks.0")


@pytest.mark.parametrize(
    "plan", [(), TWICE, ("plan.activation_offload=true",)], ids=["plain", "accumulated", "activations"]
)
@world(2)
def test_two_ranks_that_share_the_weights_are_one_device(folder, plan):
    compare(folder, ("plan.shard=2", *plan))


@pytest.mark.parametrize("axis", ["plan.replicate=2", "plan.tp=2", "plan.cp=2"])
@world(2)
def test_the_other_axes_work_beside_it(folder, axis):
    compare(folder, (axis, *TWICE))


@world(2)
def test_experts_that_ranks_share_work_beside_it(folder):
    compare(folder, ("plan.shard=2", "plan.ep=2"), arch="tiny-moe")


@world(4)
def test_copies_of_shared_weights_are_one_device(folder):
    compare(folder, ("plan.replicate=2", "plan.shard=2", *TWICE))


@pytest.mark.parametrize("rounding", ["fp32", "none", "split"])
@world(2)
def test_in_low_precision_no_bit_changes(folder, rounding):
    words = (
        "plan.precision=bf16",
        "plan.shard=2",
        "plan.zero=3",
        f"optim.master_weights={rounding}",
        f"optim.stochastic_rounding={str(rounding == 'none').lower()}",
        "data.eval_fraction=0.0",
    )
    plain, hosted = (make_run(folder, *words, *more) for more in ((), ("plan.cpu_offload=true",)))
    corpus, mesh = make_corpus(plain, folder), mesh_of(plain.plan)
    theirs, mine = drive(plain, corpus, mesh), drive(hosted, corpus, mesh)
    # The same kernels on the same tensors: only where they live differs, and on a CPU that is one place.
    assert mine.losses == theirs.losses
    assert all(torch.equal(mine.weights[name], weight) for name, weight in theirs.weights.items())


@pytest.mark.parametrize("first", [True, False], ids=["from-hosted", "to-hosted"])
@world(2)
def test_a_checkpoint_goes_on_with_and_without_it(folder, first):
    base = (
        "steps=6",
        "checkpoint.every=3",
        "data.eval_fraction=0.0",
        "plan.precision=fp32",
        "plan.shard=2",
        "plan.zero=3",
    )
    runs = [make_run(folder, *base, f"plan.cpu_offload={str(hosted).lower()}") for hosted in (first, not first)]
    corpus, mesh = make_corpus(runs[0], folder), mesh_of(runs[0].plan)
    whole = build(runs[0], corpus, mesh)
    list(train(runs[0], whole, mesh))
    whole.loader.close()
    cut = build(runs[0], corpus, mesh)
    for result in train(runs[0], cut, mesh, folder / "run"):
        if result.step == 4:
            break
    cut.loader.close()
    again = build(runs[1], corpus, mesh)
    restored = restore(again, runs[1], mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 3
    list(train(runs[1], again, mesh))
    again.loader.close()
    assert isinstance(again.optimizer, CpuOffloadOptimizer) != first
    # The same sums in the same order: a checkpoint that lost a bit, or put it elsewhere, would be seen.
    assert digest_of(again, runs[1], mesh) == digest_of(whole, runs[0], mesh)


@world(2)
def test_a_save_without_room_for_a_copy_is_written_from_the_weights_by_all_ranks(folder):
    words = ("steps=2", "checkpoint.every=2", "data.eval_fraction=0.0", "plan.precision=fp32", "plan.shard=2", *HOSTED)
    run = make_run(folder, *words)
    corpus, mesh, said = make_corpus(run, folder), mesh_of(run.plan), []
    state = build(run, corpus, mesh)
    state.say = said.append
    with pytest.MonkeyPatch.context() as small:
        if mesh.rank == 1:  # one rank lacks room, and both wait
            small.setattr("meshwright.optim.host_memory.free_host_bytes", lambda: 1000)
        list(train(run, state, mesh, folder / "run"))
    state.loader.close()
    assert ["checkpoints are written straight from the states" in text for text in said] == [True]
    again = build(run, corpus, mesh)
    restored = restore(again, run, mesh, folder / "run", lambda text: None)
    again.loader.close()
    assert restored is not None
    assert restored.state == digest_of(state, run, mesh)


@world(2)
def test_a_gradient_that_is_not_finite_moves_nothing_on_either_rank(folder):
    run = make_run(folder, "plan.precision=fp16", "plan.shard=2", *HOSTED, "steps=2", "data.eval_fraction=0.0")
    mesh = mesh_of(run.plan)
    state = build(run, make_corpus(run, folder), mesh)
    before = {name: weight.clone() for name, weight in weights(state.chunks, run, mesh)}
    spoil = state.chunks[0].register_forward_hook(
        lambda module, arguments, logits: logits * torch.inf if mesh.rank == 1 else None
    )
    steps = train(run, state, mesh)
    first = next(steps)
    spoil.remove()
    after = dict(weights(state.chunks, run, mesh))
    second = next(steps)
    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert (first.finite, second.finite) == (0.0, 1.0)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert state.optimizer.count == 1
    state.loader.close()


@world(1)
def test_the_norm_is_that_of_weights_on_the_device(folder):
    squares = []
    for words in (("plan.zero=3", "plan.precision=bf16", "plan.bf16_params=false"), ("plan.precision=bf16", *HOSTED)):
        run = make_run(folder, "plan.replicate=1", "steps=1", "data.eval_fraction=0.0", *words)
        mesh = mesh_of(run.plan)
        state = build(run, make_corpus(run, folder), mesh)
        list(train(run, state, mesh))
        state.loader.close()
        squares.append(clip.square_share(state.chunks, mesh).item())
    assert squares[0] == squares[1]


class Pages(PinnedMemory):
    """Memory by the page as a GPU has it, which nobody can pin here."""

    def __init__(self, pinned: bool, remedy: str, key: str) -> None:
        super().__init__(pinned=False, remedy=remedy, key=key)
        self.pinned = True

    def _pin(self, whole: torch.Tensor) -> None:
        self.addresses.append(whole.data_ptr())


@world(2)
def test_weights_stay_in_the_pages_that_they_are_given(folder):
    words = ("plan.shard=2", *HOSTED, "data.eval_fraction=0.0", "plan.precision=fp32")
    run = make_run(folder, *words)
    corpus, mesh = make_corpus(run, folder), mesh_of(run.plan)
    usual = drive(run, corpus, mesh)
    with pytest.MonkeyPatch.context() as paged:
        paged.setattr("meshwright.optim.resident.PinnedMemory", Pages)
        mine = drive(run, corpus, mesh)
    optimizer = mine.state.optimizer
    assert isinstance(optimizer, CpuOffloadOptimizer)
    # After steps that gathered from them and moved them: torch has put no copy in their place.
    places = {local(weight.detach()).untyped_storage().data_ptr(): weight for weight in optimizer.weights}
    even = {place for place, weight in places.items() if weight.shape[0] % 2 == 0}
    assert even == set(optimizer.memory.addresses) < set(places), "the vocabulary is odd"
    assert {moved.untyped_storage().data_ptr() for moved in optimizer.masters} == set(places)
    assert mine.losses == usual.losses
    assert all(torch.equal(mine.weights[name], weight) for name, weight in usual.weights.items())


@world(1)
def test_too_little_room_is_refused_before_the_first_step(folder):
    run = make_run(folder, "plan.replicate=1", "plan.precision=bf16", *HOSTED)
    with pytest.MonkeyPatch.context() as small:
        small.setattr("meshwright.optim.host_memory.free_host_bytes", lambda: 1000)
        with pytest.raises(InputError, match=r"needs [\d,]+ bytes of host memory for this rank, and 1,000 are free"):
            build(run, make_corpus(run, folder), mesh_of(run.plan))
