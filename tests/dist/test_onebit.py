"""1-bit Adam, 0/1 Adam and 1-bit LAMB: as one process that is all workers and servers, to the byte, resumed."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from commands import meshwright
from live import Live
from trials import CPU, corpus_file, losses_of, made, make_corpus, make_run
from worlds import world

from meshwright.checkpoint.storage import CorruptError
from meshwright.config.run import Run
from meshwright.cost.layout import layout_of
from meshwright.cost.rank_view import RankView
from meshwright.cost.resident import sign_bytes, states
from meshwright.cost.traffic import traffic
from meshwright.optim.clip import GradStats
from meshwright.optim.master_weights import given
from meshwright.optim.onebit import rule_in
from meshwright.parallel.mesh import Mesh, local
from meshwright.runtime.failure import FailureError
from meshwright.spec.communication import exchange_of
from meshwright.spec.optimizers import description_of
from meshwright.train.faults import Replicas
from meshwright.train.loop import StepResult, Stop, train
from meshwright.train.oom import held
from meshwright.train.saving import digest_of, restore
from meshwright.train.state import State
from meshwright.verify import prove
from meshwright.verify.collectives import differences, implied, observing, ranks_of

# float64 sums in another order through some updates; signs of a number that is rounding alone are in no weight here.
TOLERANCE = 1e-12
# Variance updates in steps 1, 2, 4 …, then syncs ever more rarely.
ZERO_ONE = (
    "optim.name=zero_one_adam", "optim.freeze_step=4", "optim.var_update_scaler=1", "optim.local_step_scaler=1",
    "optim.local_step_clipper=3",
)  # fmt: skip
CASES = {
    "adam": ("optim.name=onebit_adam", "optim.freeze_step=2"),
    "lamb": ("optim.name=onebit_lamb", "optim.freeze_step=2"),
    "zero-one": ZERO_ONE,
}
SMALL = ("arch.layers=2", "data.eval_fraction=0.0", "plan.replicate=2", "optim.lr=1e-3")
CUT = {
    "adam": ("replicate=4,grad_accum=2", "replicate=2,shard=2,zero=1", "replicate=2,tp=2"),
    "lamb": ("replicate=2,shard=2,zero=3", "replicate=2,tp=2"),
    "zero-one": ("replicate=2,shard=2,zero=1",),
}
ODD = ("arch.vocab=259", "arch.hidden=72", "arch.ffn=90", "arch.heads=4", "arch.kv_heads=2")  # chunks are filled up


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_replicas_train_like_a_process_that_is_all_of_them(tmp_path, name):
    # A sign ÷ √v amplifies the rounding of a gradient that is small beside others of its chunk; ε bounds by how much.
    short = ("arch.layers=2", "sequence=16", "optim.lr=1e-3", "optim.eps=1e-5", "--steps", "9")
    # Four workers have chunks that are filled up: the exchange is the same in all three. What cuts a worker changes
    # nothing: all plans of two replicas have one reference.
    plans = [part for plan in ("replicate=2", *CUT[name]) for part in ("--plan", plan)]
    done = meshwright("verify", "tiny", *CASES[name], *short, *plans, "--json", "--folder", "proof", folder=tmp_path)
    verdicts = json.loads(done.stdout)
    numbers = [value for verdict in verdicts for key, value in verdict.items() if key.endswith("_deviation")]
    assert max(numbers) <= TOLERANCE, verdicts
    certificates = json.loads((tmp_path / "proof/certificate.json").read_text())
    assert len(certificates) == len({plan.split(",")[0] for plan in ("replicate=2", *CUT[name])})
    assert all("same compression and error feedback" in each["reference"] for each in certificates)


def test_with_the_usual_epsilon_a_proof_says_how_much_rounding_a_sign_amplifies(tmp_path):
    plans = [part for plan in ("replicate=2,tp=2", "replicate=2,shard=2,zero=3") for part in ("--plan", plan)]
    meshwright("verify", "tiny", "optim.name=onebit_adam", *plans, "--folder", "proof", folder=tmp_path)  # exits with 0
    (certificate,) = json.loads((tmp_path / "proof/certificate.json").read_text())
    far = max(value for each in certificate["verdicts"] for key, value in each.items() if key.endswith("_deviation"))
    assert prove.TOLERANCES["fp64"][0] < far < certificate["tolerance"] == pytest.approx(3 * 2**-23)
    assert "signs are divided" in certificate["reason"]


@world(2)
def test_a_warm_up_is_plain_training(folder):
    """Of AdamW and LAMB: the same sums, after the backward instead of during it."""
    for plain, words in (("adamw", CASES["adam"]), ("lamb", CASES["lamb"])):
        alike = (*SMALL, "steps=4", "optim.beta2=0.999", "optim.eps=1e-6")
        runs = (make_run(folder, *alike, f"optim.name={plain}"), make_run(folder, *alike, *words))
        one, other = (losses_of(*made(run, folder, CPU)) for run in runs)
        # The loss of a step is of the weights before it: the third is the first to come from a compressed update.
        assert max(abs(a - b) / b for a, b in zip(one[:3], other[:3], strict=True)) <= TOLERANCE
        assert abs(one[3] - other[3]) / one[3] > 1e-9


def kinds(run: msgspec.Struct, steps: int) -> list[str]:
    return [exchange_of(run.optim, step, run.steps) for step in range(1, steps + 1)]  # type: ignore


def check_calls(run: Run, mesh: Mesh, state: State, count: int) -> None:
    """Every step sends what its phase implies."""
    optimizer = description_of(run.optim)
    said = {
        phase: implied(
            traffic(run.arch, run.plan, run.sequence, place=mesh.place, optimizer=optimizer, warm_up=phase == "exact"),
            run.plan,
            mesh,
        )
        for phase in ("exact", "compressed")
    }
    between = ranks_of("replicate", run.plan, mesh)  # two replicas of one rank agree on a loss among the same ranks
    alone = {call: number for call, number in said["exact"].items() if call.ranks != between or call.bytes == 3 * 8}
    said["local"] = Counter(alone)
    steps, phases = train(run, state, mesh), kinds(run, count)
    next(steps)  # what is made at first use
    for phase in phases[1:]:
        with observing() as seen:
            next(steps)
        found = differences(seen, said[phase])
        assert not found, (str(run.plan), phase, found)
    state.loader.close()


@world(2)
def test_every_step_sends_what_its_phase_implies(folder):
    for words in (
        *CASES.values(),
        (*CASES["adam"], *ODD),
        (*CASES["adam"], "plan.precision=bf16", "plan.grad_accum=2"),
    ):
        run, mesh, state = made(make_run(folder, *SMALL, "steps=9", *words), folder, CPU)
        check_calls(run, mesh, state, 9)
        assert "local" in kinds(run, 9) or words[0] != ZERO_ONE[0]


@world(4)
def test_replicas_of_several_ranks_send_and_hold_what_the_plan_implies(folder):
    sharded, few = ("plan.shard=2", "plan.zero=3"), ("steps=4", "optim.freeze_step=2")
    for words, phases in (
        ((*CASES["lamb"], *ODD, *sharded, *few), 4),
        ((*CASES["adam"], *few, "plan.shard=2", "plan.zero=1", "plan.grad_accum=2", "plan.precision=bf16"), 4),
        ((*ZERO_ONE, "steps=9", *sharded), 9),
        ((*CASES["lamb"], *ODD, *few, "plan.tp=2"), 4),
        ((*CASES["adam"], *few, "plan.shard=2", "plan.zero=2", "plan.ep=2", "arch.capacity=1.25"), 4),
    ):
        arch = "tiny-moe" if "plan.ep=2" in words else "tiny"
        run, mesh, state = made(make_run(folder, *SMALL, *words, arch=arch), folder, CPU)
        layout = layout_of(run.plan, optimizer=description_of(run.optim))
        said = {line.name: line.bytes for line in states(run.arch, run.plan, mesh.place, layout)}
        assert held(state, layout)["moments"] == said["moments"], words
        check_calls(run, mesh, state, phases)


@world(2)
def test_a_rank_holds_what_the_plan_implies(folder):
    for words in (*CASES.values(), (*CASES["lamb"], *ODD, "plan.precision=fp32")):
        run, mesh, state = made(make_run(folder, *SMALL, "steps=5", *words), folder, CPU)
        layout = layout_of(run.plan, optimizer=description_of(run.optim))
        said = {line.name: line.bytes for line in states(run.arch, run.plan, mesh.place, layout)}
        next(train(run, state, mesh))
        assert held(state, layout)["moments"] == said["moments"]
        state.loader.close()


def check_peak(run: Run, mesh: Mesh, state: State) -> None:
    """A compressed update makes what the ledger says."""
    steps, rule = train(run, state, mesh), rule_in(state.optimizer)
    for _ in range(5):
        next(steps)
    weights = state.optimizer.weights
    held = [tensor for tensors in state.optimizer.states().values() for tensor in tensors]
    held += [local(each) for weight in weights for each in (weight.detach(), given(weight))]
    rule.step, rule.exchange = 6, "compressed"
    one = torch.ones((), dtype=torch.float64)
    with torch.no_grad(), Live(held) as live:
        state.optimizer.step(1e-3, GradStats(loss=one, norm=one, finite=one, factor=one))
    view = RankView(arch=run.arch, plan=run.plan, sequence=0, place=mesh.place)
    said = sign_bytes(view, state.optimizer.spec.temporaries)
    assert 0.6 * said <= live.peak <= said, (str(run.plan), run.optim.name, live.peak / said)
    state.loader.close()


@world(2)
def test_an_update_makes_what_the_ledger_says(folder):
    for words in CASES.values():
        check_peak(*made(make_run(folder, *SMALL, *words, "arch.hidden=128", "steps=6"), folder, CPU))


@world(4)
def test_an_update_of_shards_makes_what_the_ledger_says(folder):
    for words in CASES.values():
        sharded = ("arch.hidden=128", "steps=6", "plan.shard=2", "plan.zero=3")
        check_peak(*made(make_run(folder, *SMALL, *words, *sharded), folder, CPU))


def cut_short(run: Run, mesh: Mesh, state: State, folder: Path) -> tuple[list[float], str]:
    """The losses of a run that saves after its fifth step and ends after its seventh, and what it saved."""
    digest, losses = "", list[float]()
    for result in train(run, state, mesh, folder):
        assert isinstance(result, StepResult)
        losses.append(result.loss.item())
        if result.step == 5:
            digest = digest_of(state, run, mesh)
        if result.step == 7:
            break
    state.loader.close()
    return losses, digest


def own_weights(state: State) -> torch.Tensor:
    return torch.cat([local(weight.detach()).flatten() for weight in state.optimizer.weights])


def apart(state: State, mesh: Mesh) -> bool:
    """Whether the replicas' weights differ."""
    mine = own_weights(state)
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=mesh.group("replicate"))
    return not torch.equal(both[0], both[1])


@world(2)
def test_weights_differ_after_local_steps_alone_and_saves_wait_for_a_sync(folder):
    run, mesh, state = made(make_run(folder, *SMALL, *ZERO_ONE, "steps=9", "checkpoint.every=2"), folder, CPU)
    stop, differ, saved = Stop(), list[bool](), list[int]()
    state.note = lambda record: saved.append(record.step)
    replicas = Replicas(1, state, mesh)
    for result in train(run, state, mesh, folder / "run", stop):
        differ.append(apart(state, mesh))
        replicas.look(result.step)  # raises where weights that should be alike are not
        stop.asked = mesh.rank == 1 and result.step >= 5
    # Interval 1 at step 5, 2 at step 6, 3 (clipped) from step 7 on; asked at step 6, heard and saved there.
    assert (differ, state.step, state.stopped, state.saved) == ([False] * 6, 6, True, True)
    state.loader.close()
    run, mesh, state = made(run, folder, CPU)
    assert restore(state, run, mesh, folder / "run", lambda text: None).step == 6  # type: ignore
    assert [(result.step, apart(state, mesh)) for result in train(run, state, mesh)] == [
        (7, True),
        (8, True),
        (9, False),
    ]
    state.loader.close()


@pytest.mark.parametrize("name", CASES)
@world(2)
def test_a_save_is_resumed_with_all_errors(folder, name):
    words = (*SMALL, *CASES[name], "steps=8", "checkpoint.every=5", *ODD)
    run, mesh, state = made(make_run(folder, *words), folder, CPU)
    losses, digest = cut_short(run, mesh, state, folder / "run")
    run, mesh, state = made(run, folder, CPU)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert (restored.step, restored.state) == (5, digest) == (5, digest_of(state, run, mesh))
    errors = torch.cat([error.flatten() for error in state.optimizer.states()["worker_error"]])
    assert errors.abs().sum() > 0
    both = [torch.empty_like(errors) for _ in range(2)]
    dist.all_gather(both, errors)
    assert not torch.equal(*both)  # each has its own
    assert losses_of(run, mesh, state)[:2] == losses[5:7]


@world(4)
def test_a_save_of_shards_is_resumed_however_a_replica_is_cut(folder):
    """Errors of workers and servers too: they are of whole weights, whoever has them."""
    words = (*SMALL, *CASES["lamb"], "steps=8", "checkpoint.every=5", *ODD)
    run, mesh, state = made(make_run(folder, *words, "plan.shard=2", "plan.zero=3"), folder, CPU)
    losses, digest = cut_short(run, mesh, state, folder / "run")
    for cut in (("plan.shard=2", "plan.zero=1"), ("plan.tp=2",), ("plan.pp=2", "plan.grad_accum=2")):
        run, mesh, state = made(make_run(folder, *words, *cut), folder, CPU)
        restored = restore(state, run, mesh, folder / "run", lambda text: None)
        assert restored is not None
        assert (restored.step, restored.state) == (5, digest) == (5, digest_of(state, run, mesh)), cut
        ours = losses_of(run, mesh, state)[:2]
        assert max(abs(a - b) / b for a, b in zip(ours, losses[5:], strict=True)) <= TOLERANCE, cut
    run, mesh, state = made(make_run(folder, *words, "plan.replicate=4"), folder, CPU)
    with pytest.raises(CorruptError, match="is of another run"):  # of two workers there are no errors of four
        restore(state, run, mesh, folder / "run", lambda text: None)
    state.loader.close()


@world(2)
def test_a_gradient_that_is_not_finite_changes_nothing(folder):
    run, mesh, state = made(make_run(folder, *SMALL, *CASES["adam"], "steps=5"), folder, CPU)
    steps = train(run, state, mesh)
    for _ in range(3):
        next(steps)
    before = [tensor.clone() for tensors in state.optimizer.states().values() for tensor in tensors]
    weights, usual = own_weights(state), state.scale.value
    if mesh.rank == 1:  # its next gradient is not a number
        state.scale.value = torch.full_like(usual, torch.nan)
    result = next(steps)
    state.scale.value = usual
    assert isinstance(result, StepResult)
    assert result.finite.item() == 0
    after = [tensor for tensors in state.optimizer.states().values() for tensor in tensors]
    assert all(map(torch.equal, before, after))
    assert torch.equal(own_weights(state), weights)
    next(steps)
    assert not apart(state, mesh)
    state.loader.close()


@world(2)
def test_a_replica_with_another_momentum_is_found(folder):
    run, mesh, state = made(make_run(folder, *SMALL, *CASES["adam"], "steps=6"), folder, CPU)
    steps, replicas = train(run, state, mesh), Replicas(1, state, mesh)
    for _ in range(3):
        next(steps)
    replicas.look(3)
    if mesh.rank == 1:
        state.optimizer.states()["second"][0].view(-1)[0] += 1.0
    next(steps)
    with pytest.raises(FailureError, match="differ"):
        replicas.look(4)
    state.loader.close()
