"""Adafactor, SM3, LAMB and Lion under every axis: as one device, states and traffic too, through checkpoints."""

from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from trials import (
    CPU,
    GPT,
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
from whole_references import REFERENCES
from worlds import world

from meshwright.config.run import Optim, Run
from meshwright.cost.layout import layout_of
from meshwright.cost.resident import states
from meshwright.cost.traffic import traffic
from meshwright.optim.clip import GradStats
from meshwright.optim.resident import ResidentOptimizer
from meshwright.parallel.mesh import Mesh
from meshwright.spec.optimizers import OPTIMIZERS, description_of
from meshwright.spec.plan import Plan
from meshwright.train.faults import compared, whose
from meshwright.train.loop import train
from meshwright.train.saving import digest_of, restore, whole_states
from meshwright.train.state import State
from meshwright.verify.collectives import Calls, differences, implied, observing

# float64 sums in another order: a few hundred terms of relative error 1e-16 each, through four updates.
TOLERANCE = 1e-12
OPTIONS = {
    "muon": ((),),
    "sm3": (("optim.lr=3e-2",),),
    "lamb": (("optim.lr=1e-2",),),
    "lion": (("optim.lr=1e-3",),),  # by elements, and beside them the plain one: nothing is reduced
    "adafactor": ((), ("optim.relative_step=true", "optim.beta1=0.9", "optim.lr=5e-2")),
}
# A block for each of two stages, and updates from states that are empty, young and older.
SHORT = ("data.pack=documents", "arch.layers=2", "steps=3")
CASES = [(f"optim.name={name}", *SHORT, *words) for name in OPTIONS for words in OPTIONS[name]]
# Of these the plans that cut a weight every way, alone and together: Muon has tests of its own by every axis, what Lion
# does by elements nothing cuts, and Adafactor's other options are no other sums over ranks than its usual ones.
BRIEF = {CASES[0], CASES[3], CASES[5]}
TWO = (
    ("plan.replicate=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=1"),
    ("plan.shard=2", "plan.zero=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=3"),
    ("plan.tp=2",),
    ("plan.cp=2", "plan.zero=3"),
    ("plan.pp=2", "plan.grad_accum=4"),
)
FOUR = (
    ("plan.pp=2", "plan.grad_accum=4", "plan.shard=2", "plan.zero=3"),
    ("plan.shard=2", "plan.zero=3", "plan.tp=2"),
    ("plan.replicate=2", "plan.shard=2", "plan.zero=3"),
)
EXPERTS = (
    ("plan.shard=4", "plan.zero=2", "plan.ep=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2"),
    ("plan.shard=4", "plan.zero=3"),
    ("plan.tp=2", "plan.replicate=2"),
    ("plan.replicate=4", "plan.ep=2"),
)
BRIEF_TWO, BRIEF_FOUR, BRIEF_EXPERTS = (TWO[0], TWO[3], TWO[4]), FOUR[:2], EXPERTS[:2]
ODD = ("arch.vocab=259", "arch.hidden=72", "arch.ffn=90", "arch.heads=4", "arch.kv_heads=2")  # shards are padded


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


def compare(folder: Path, case: tuple[str, ...], plans: tuple[tuple[str, ...], ...], arch: str = "tiny") -> None:
    """Plans beside one process over the same mathematics: losses, weights and states; and what they send and hold."""
    corpus = make_corpus(make_run(folder, *case, arch=arch), folder)
    reference = make_run(folder, *case, "plan.replicate=1", arch=arch)
    one = drive(reference, corpus, alone()) if dist.get_rank() == 0 else None
    theirs = dict(whole_states(one.state, reference, alone())) if one is not None else {}
    for plan in plans:
        run = make_run(folder, *case, *plan, arch=arch)
        mesh = mesh_of(run.plan)
        mine = drive(run, corpus, mesh, observed=2)
        assert not surprises(run, mesh, mine.state, mine.sent)
        ours = dict(whole_states(mine.state, run, mesh))
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, f"{run.plan}: losses {mine.losses} beside {one.losses}"
            assert one.losses[-1] < one.losses[0]
            assert ours.keys() == theirs.keys()
            far = {
                name: ((ours[name] - state).norm() / state.norm()).item()
                for name, state in theirs.items()
                if not name.endswith("attn.k.bias")  # whose gradient is rounding alone
            }
            assert max(far.values()) < TOLERANCE, f"{run.plan}: {max(far, key=far.__getitem__)}"


@pytest.mark.parametrize("case", CASES, ids=" ".join)
@world(2)
def test_two_ranks_are_one_device(folder, case):
    compare(folder, case, BRIEF_TWO if case in BRIEF else TWO)
    compare(folder, (*case, *ODD), (("plan.shard=2", "plan.zero=3"), ("plan.tp=2",)))
    compare(folder, (*case, *GPT), (("plan.pp=2", "plan.grad_accum=4"), ("plan.tp=2",)))  # tied on two stages, biases


@pytest.mark.parametrize("case", CASES, ids=" ".join)
@world(4)
def test_four_ranks_are_one_device(folder, case):
    compare(folder, case, BRIEF_FOUR if case in BRIEF else FOUR)
    compare(folder, (*case, *ODD), (("plan.shard=4", "plan.zero=3"),))
    compare(folder, case, BRIEF_EXPERTS if case in BRIEF else EXPERTS, arch="tiny-moe")


OPTIMS = [
    Optim(name="adafactor", beta1=0.0, weight_decay=0.3),
    Optim(name="adafactor", beta1=0.8, weight_decay=0.3, relative_step=True),
    Optim(name="lamb", beta2=0.99, eps=1e-6, weight_decay=0.3),
    Optim(name="sm3", momentum=0.8, weight_decay=0.3),
    Optim(name="lion", beta2=0.99, weight_decay=0.3),
]
SHAPES = ((6, 4), (5, 3), (7,), (1, 6), (4, 3, 6))  # odd ones, of which a rank has less, and a stack of matrices
PLACEMENTS = ((Shard(0),) * 5, (Shard(1), Shard(1), Shard(0), Shard(1), Shard(2)))


def far_from_the_reference(optim: Optim, placements: tuple[Placement, ...] | None) -> float:
    """The largest relative difference of a weight after any of five updates; None: all weights are whole."""
    random = torch.Generator().manual_seed(1)
    theirs = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)) if placements else None

    def held(tensor: Tensor, number: int) -> Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [placements[number]])

    ours = [nn.Parameter(held(weight.clone(), number)) for number, weight in enumerate(theirs)]
    optimizer, states = ResidentOptimizer(optim, ours, Plan(microbatch=1)), [{} for _ in theirs]
    one, half = torch.ones((), dtype=torch.float64), torch.full((), 0.5, dtype=torch.float64)
    furthest = 0.0
    for step in range(1, 6):
        for number, weight in enumerate(ours):
            # Of very different sizes by rows, columns and halves, so that parts are unlike the whole.
            gradient = torch.randn(SHAPES[number], generator=random, dtype=torch.float64).cumsum(0).cumsum(-1)
            weight.grad = held(gradient, number)
            args = (optim, theirs[number], gradient * 0.5, states[number], step, 0.1 / step)
            theirs[number] = REFERENCES[optim.name](*args)
        optimizer.step(0.1 / step, GradStats(loss=one, norm=one, finite=one, factor=half))
        for mine, reference in zip(ours, theirs, strict=True):
            whole = mine.detach().full_tensor() if isinstance(mine, DTensor) else mine.detach()
            furthest = max(furthest, ((whole - reference).norm() / reference.norm()).item())
    return furthest


CLOSE, FAR = 1e-13, 1e-3  # float64 in another order, and what is another mathematics


@pytest.mark.parametrize("optim", OPTIMS, ids=lambda optim: optim.name)
def test_one_rank_is_a_plain_implementation_update_by_update(optim):
    assert far_from_the_reference(optim, None) < CLOSE


@pytest.mark.parametrize("optim", OPTIMS, ids=lambda optim: optim.name)
@world(2)
def test_shards_are_a_plain_implementation_of_whole_tensors_and_each_for_itself_is_not(optim):
    for placements in PLACEMENTS:
        assert far_from_the_reference(optim, placements) < CLOSE
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("meshwright.optim.resident.cuts", lambda weight: ())  # every rank's shard is all it knows
            if OPTIMIZERS[optim.name].whole:
                assert far_from_the_reference(optim, placements) > FAR
            else:
                assert far_from_the_reference(optim, placements) < CLOSE


def test_adafactor_is_torchs_where_both_say_the_same():
    torch.manual_seed(0)
    shapes = ((6, 4), (7,), (3, 5, 2))
    ours, theirs = ([nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes] for _ in range(2))
    optim = Optim(name="adafactor", beta1=0.0, weight_decay=0.0, relative_step=True, lr=1e-2)
    mine = ResidentOptimizer(optim, ours, Plan(microbatch=1))
    reference = torch.optim.Adafactor(theirs, lr=1e-2, eps=(1e-30, optim.eps2), weight_decay=0.0)
    one = torch.ones((), dtype=torch.float64)
    for _ in range(5):
        for weight, other in zip(ours, theirs, strict=True):
            weight.grad = torch.randn_like(weight)
            other.grad = weight.grad.clone()
        mine.step(1e-2, GradStats(loss=one, norm=one, finite=one, factor=one))
        reference.step()
        for weight, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optim", OPTIMS, ids=lambda optim: optim.name)
def test_a_gradient_that_is_not_finite_changes_nothing(optim):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = ResidentOptimizer(optim, ours, Plan(microbatch=1))
    one, none = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for weight in ours:
        weight.grad = torch.randn_like(weight)
    optimizer.step(0.1, GradStats(loss=one, norm=one, finite=one, factor=one))
    before = [tensor.clone() for held in optimizer.held().values() for tensor in held.values()]
    for weight in ours:
        weight.grad = torch.full_like(weight, float("nan"))
    optimizer.step(0.1, GradStats(loss=one, norm=one, finite=none, factor=none))
    after = [tensor for held in optimizer.held().values() for tensor in held.values()]
    assert all(torch.equal(tensor, old) for tensor, old in zip(after, before, strict=True))
    assert optimizer.count == 1


def surprises(run: Run, mesh: Mesh, state: State, sent: Calls) -> list[str]:
    """Where a real step has sent, or a rank holds, something else than the planner says."""
    name = description_of(run.optim)
    planned = implied(traffic(run.arch, run.plan, run.sequence, place=mesh.place, optimizer=name), run.plan, mesh)
    found = [text for text in differences(sent, planned) if run.plan.ep == 1 or "all_to_all" not in text]
    layout = layout_of(run.plan, run.optim.master_weights, run.optim.state_dtype, name)
    said = {line.name: line.bytes for line in states(run.arch, run.plan, mesh.place, layout)}["moments"]
    held = sum(tensor.nbytes for tensor in chain.from_iterable(state.optimizer.states().values()))
    if said != held:
        found.append(f"{held} bytes of states, said {said}")
    assert len(whose(state)) == len(compared(state))  # what a replica check names
    return [f"{run.plan}: {text}" for text in found]


def surprises_of_a_step(folder: Path, words: tuple[str, ...]) -> list[str]:
    run, mesh, state = made(make_run(folder, "arch.layers=2", "steps=2", "data.eval_fraction=0.0", *words), folder, CPU)
    steps = train(run, state, mesh)
    next(steps)
    with observing() as sent:
        next(steps)
    state.loader.close()
    return surprises(run, mesh, state, sent)


BF16 = ("plan.precision=bf16",)
MOE = ("arch.preset=tiny-moe",)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
@world(4)
def test_four_ranks_send_and_hold_what_the_planner_says(folder, case):
    """Beside those that are compared with one device: low precision, and rows that ranks have unlike numbers of."""
    plans = (
        (*FOUR[0], *ODD, *BF16),
        (*FOUR[1], *ODD),
        ("plan.cp=2", "plan.shard=2", "plan.zero=1", *ODD),
        ("plan.tp=4", "plan.precision=fp32", "arch.kv_heads=8"),
        (*EXPERTS[1], *MOE, *BF16),
        ("plan.pp=2", "plan.shard=2", "plan.zero=1", "plan.ep=2", "plan.grad_accum=4", *MOE),
    )
    some = (plans[0], plans[4]) if case in BRIEF else plans
    assert not [text for words in some for text in surprises_of_a_step(folder, (*case, *words))]


SAVED = ("steps=6", "checkpoint.every=4", "plan.precision=fp64")
RESUMED = (("plan.tp=2",), ("plan.pp=2", "plan.grad_accum=4"), ("plan.replicate=2",))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
@world(2)
def test_a_checkpoint_resumes_under_another_plan(folder, case):
    words = (*case, *SAVED, *ODD)
    run, mesh, state = made(make_run(folder, *words, "plan.shard=2", "plan.zero=3"), folder, CPU)
    digest = digest_before_the_cut(run, mesh, state, folder / "run")
    dist.barrier()
    for plan in RESUMED:
        run, mesh, state = made(make_run(folder, *words, *plan), folder, CPU)
        restored = restore(state, run, mesh, folder / "run", lambda text: None)
        assert restored is not None
        assert (restored.step, digest_of(state, run, mesh)) == (4, digest)
        assert all(tensor.any() for tensor in chain.from_iterable(state.optimizer.states().values()))
        state.loader.close()


EXACT = [name for name, spec in OPTIMIZERS.items() if spec.is_exact]
BITS = ("plan.deterministic=true", "plan.microbatch=1", "plan.precision=fp32", *ODD)
ALIKE = (
    ("plan.replicate=4", "plan.grad_accum=2"),
    ("plan.shard=4", "plan.zero=3", "plan.grad_accum=2"),
    ("plan.replicate=2", "plan.shard=2", "plan.zero=1", "plan.grad_accum=2"),
)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("arch", ["tiny", "tiny-moe"])
@world(4)
def test_deterministic_mode_has_the_same_bits_whatever_the_shards(folder, name, arch):
    odd = BITS if arch == "tiny" else BITS[:3]
    words = (f"optim.name={name}", "optim.lr=1e-3", "steps=3", "arch.layers=2", *odd)
    corpus = make_corpus(make_run(folder, *words, *ALIKE[0], arch=arch), folder)
    trials = []
    for plan in ALIKE:
        run = make_run(folder, *words, *plan, arch=arch)
        mesh = mesh_of(run.plan)
        trials.append(drive(run, corpus, mesh, observed=2))
        assert not surprises(run, mesh, trials[-1].state, trials[-1].sent)
    first, *others = trials
    for other in others:
        assert (other.losses, other.norms) == (first.losses, first.norms)
        assert all(torch.equal(other.weights[name], weight) for name, weight in first.weights.items())
