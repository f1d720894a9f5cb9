"""Replicas that sync rarely: equal to a process that trains them one after another, saved and resumed."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from commands import meshwright
from live import Live
from test_traffic import level
from trials import CPU, corpus_file, drive, losses_of, made, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.config.run import Run
from meshwright.cost.layout import layout_of
from meshwright.cost.rank_view import RankView
from meshwright.cost.resident import states, sync_bytes
from meshwright.cost.traffic import of_every_step, traffic
from meshwright.optim import outer as outer_loop
from meshwright.optim.outer import OuterLoop
from meshwright.parallel.mesh import Mesh, join, local
from meshwright.runtime.failure import FailureError
from meshwright.runtime.run_folder import Claim
from meshwright.train.loop import EvalResult, StepResult, Stop, train
from meshwright.train.oom import held
from meshwright.train.saving import digest_of, restore
from meshwright.train.state import State
from meshwright.verify.collectives import Call, differences, implied, observing

QUIET = ("data.eval_fraction=0.0",)
DILOCO = ("plan.replicate=2", "plan.sync_every=2", "plan.outer=diloco")
# float64 sums in another order, through a few updates of the weights and of the replicas' mean.
TOLERANCE = 1e-12
TWO = (
    "replicate=2,sync_every=2",
    "replicate=2,sync_every=3,outer=slowmo,grad_accum=2",
    "replicate=2,sync_every=2,outer=diloco",
    "replicate=2,sync_every=3,outer=diloco,outer_fragments=3,outer_quant=int4",
    "replicate=2,sync_every=2,outer_quant=int8",
)
FOUR = (
    "replicate=2,shard=2,zero=3,sync_every=2,outer=diloco",
    "replicate=2,shard=2,zero=1,sync_every=2,outer=diloco,outer_quant=int4,outer_fragments=2,grad_accum=2",
    "replicate=2,tp=2,sync_every=2,outer=diloco,outer_quant=int8",
    "replicate=2,cp=2,sync_every=2,outer=slowmo",
    "replicate=2,pp=2,sync_every=2,outer=diloco,outer_fragments=2",
    "replicate=4,sync_every=3,outer=diloco,outer_quant=int8",
)
EXPERTS = ("replicate=2,shard=2,zero=3,ep=2,sync_every=2,outer=diloco,outer_quant=int8",)


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


@pytest.mark.parametrize(
    ("words", "plans"),
    [(("tiny",), TWO), (("tiny", "optim.sync_warmup=2"), TWO[2:4]), (("tiny",), FOUR), (("tiny-moe",), EXPERTS)],
    ids=["two ranks", "warm-up", "four ranks", "experts"],
)
def test_replicas_train_like_a_process_that_trains_them_in_turn(tmp_path, words, plans):
    asked = [word for plan in plans for word in ("--plan", plan)]
    short = ("arch.layers=4", "sequence=16", "--steps", "5")
    done = meshwright("verify", *words, *short, *asked, "--json", "--folder", "proof", folder=tmp_path)
    verdicts = json.loads(done.stdout)
    numbers = [value for verdict in verdicts for name, value in verdict.items() if name.endswith("_deviation")]
    assert max(numbers) <= TOLERANCE, verdicts
    certificates = json.loads((tmp_path / "proof/certificate.json").read_text())
    assert {each["reference"] for each in certificates} == {
        "one process that trains the replicas one after another and syncs them"
    }


@world(2)
def test_a_sync_in_every_step_is_plain_training_bit_by_bit(folder):
    for outer in ("average", "diloco"):
        plain = make_run(folder, "plan.replicate=2")
        same = make_run(folder, "plan.replicate=2", "plan.sync_every=1", f"plan.outer={outer}")
        one, other = (drive(run, make_corpus(run, folder), mesh_of(run.plan)) for run in (plain, same))
        assert one.losses == other.losses
        assert all(torch.equal(one.weights[name], weight) for name, weight in other.weights.items())


@world(2)
def test_a_warm_up_that_lasts_is_plain_training(folder):
    """Gradients are summed after the backward instead of during it: the same sums of two terms."""
    plain = make_run(folder, "plan.replicate=2", *QUIET, "steps=4")
    warm = make_run(folder, *DILOCO, *QUIET, "steps=4", "optim.sync_warmup=3")
    found = [losses_of(*made(run, folder, CPU)) for run in (plain, warm)]
    assert max(abs(one - other) / one for one, other in list(zip(*found, strict=True))[:3]) <= TOLERANCE


def own_weights(state: State) -> torch.Tensor:
    return torch.cat([local(weight.detach()).flatten() for weight in state.optimizer.weights])


def apart(state: State, mesh: Mesh) -> bool:
    """Whether the replicas' weights differ."""
    mine = own_weights(state)
    both = [torch.empty_like(mine) for _ in range(mesh.parts)]
    dist.all_gather(both, mine, group=mesh.group("replicate"))
    return not torch.equal(both[0], both[1])


@world(2)
def test_replicas_differ_between_syncs_and_at_the_end_they_do_not(folder):
    run, mesh, state = made(make_run(folder, *DILOCO, *QUIET, "steps=5", "eval.every=1"), folder, CPU)
    results = [(result, apart(state, mesh)) for result in train(run, state, mesh)]
    assert [differ for _, differ in results] == [True, False, True, False, False]  # the last step syncs too
    means = [result.mean_loss for result, _ in results if isinstance(result, StepResult)]
    assert [mean is None for mean in means] == [True, False, True, False, False]
    losses = torch.tensor([result.loss for result, _ in results if isinstance(result, StepResult)])
    gathered = [torch.empty_like(losses) for _ in range(2)]
    dist.all_gather(gathered, losses)
    assert (gathered[0] != gathered[1]).all()  # each has its own
    assert means[1] is not None
    assert min(gathered[0][:2].min(), gathered[1][:2].min()) < means[1]
    state.loader.close()


@world(2)
def test_validation_waits_for_the_next_sync(folder):
    run, mesh, state = made(make_run(folder, *DILOCO, "steps=6", "eval.every=1", "data.eval_fraction=0.1"), folder, CPU)
    assert [result.step for result in train(run, state, mesh) if isinstance(result, EvalResult)] == [2, 4, 6]
    state.loader.close()


def saved_until(folder: Path, stop: int, *words: str) -> tuple[str, list[float]]:
    """A run that is cut short: the digest of its last save's state, and the losses after that of one that is not."""
    run, mesh, state = made(make_run(folder, *words), folder, CPU)
    digest = ""
    for result in train(run, state, mesh, folder / "run"):
        if result.step == stop:
            digest = digest_of(state, run, mesh)
        if result.step == stop + 1:
            break
    state.loader.close()
    run, mesh, state = made(run, folder, CPU)
    return digest, losses_of(run, mesh, state)[stop:]


def goes_on(folder: Path, stop: int, *words: str) -> tuple[str, list[float]]:
    """What a run of other ranks restores, and its further losses."""
    run, mesh, state = made(make_run(folder, *words), folder, CPU)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == stop
    digest = digest_of(state, run, mesh)
    assert digest == restored.state
    return digest, losses_of(run, mesh, state)


SAVED = (*DILOCO, *QUIET, "steps=8", "checkpoint.every=3")


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("plan.outer_fragments=2",),
        ("plan.outer_quant=int8",),
        ("optim.state_dtype=int8",),  # each replica saves codes and scales of its own
        ("optim.name=muon",),
    ],
)
@world(4)
def test_a_save_waits_for_a_sync_and_is_resumed_under_another_plan(folder, more):
    # Due after 3, saved after 4, when replicas meet; streaming fragments meet at every step here.
    stop = 3 if "plan.outer_fragments=2" in more else 4
    wide = ("plan.shard=2", "plan.zero=3")
    digest, further = saved_until(folder, stop, *SAVED, *more, *wide)
    again, losses = goes_on(folder, stop, *SAVED, *more, *wide)
    assert (again, losses) == (digest, further)
    other, losses = goes_on(folder, stop, *SAVED, *more, "plan.tp=2")
    assert other == digest
    assert max(abs(one - two) / two for one, two in zip(losses, further, strict=True)) <= TOLERANCE


@world(2)
def test_a_stop_is_heard_by_all_at_the_next_sync_and_saved_there(folder):
    run, mesh, state = made(make_run(folder, *DILOCO, *QUIET, "steps=9", "checkpoint.every=0"), folder, CPU)
    stop, made_steps = Stop(), list[int]()
    for result in train(run, state, mesh, folder / "run", stop):
        made_steps.append(result.step)
        stop.asked = mesh.rank == 1 and result.step >= 2
    assert (made_steps, state.stopped, state.saved) == ([1, 2, 3, 4], True, True)
    state.loader.close()
    run, mesh, state = made(run, folder, CPU)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 4
    assert [result.step for result in train(run, state, mesh)] == [5, 6, 7, 8, 9]
    state.loader.close()


@world(2)
def test_a_replica_that_skips_an_update_goes_on_with_the_others(folder):
    """A gradient that is not finite is one replica's own: it alone skips, and counts all updates after the sync."""
    run, mesh, state = made(make_run(folder, *DILOCO, *QUIET, "steps=4"), folder, CPU)
    steps = train(run, state, mesh)
    usual = state.scale.value
    if mesh.part == 1:  # its next gradient is not a number
        state.scale.value = torch.full_like(usual, torch.nan)
    first = next(steps)
    state.scale.value = usual
    assert isinstance(first, StepResult)
    assert first.finite.item() == float(mesh.part == 0)
    assert state.optimizer.count.item() == float(mesh.part == 0)
    next(steps)
    assert state.optimizer.count.item() == 2  # of the replica that made most
    assert all(torch.isfinite(local(each.detach())).all() for each in state.optimizer.weights)
    state.loader.close()


@world(4)
def test_another_number_of_replicas_goes_on_from_a_sync(folder):
    first = make_run(folder, *SAVED, "plan.shard=2", "plan.zero=1")
    if dist.get_rank() == 0:
        Claim(folder / "run", first).release()
    dist.barrier()
    saved_until(folder, 4, *SAVED, "plan.shard=2", "plan.zero=1")
    four = ("plan.replicate=4", "plan.sync_every=2", "plan.outer=diloco", *QUIET, "steps=8", "checkpoint.every=3")
    run = make_run(folder, *four)
    if dist.get_rank() == 0:
        Claim(folder / "run", run, extend=True).release()
    dist.barrier()
    _, mesh, state = made(run, folder, CPU)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 4
    assert not apart(state, mesh)
    assert all(loss < 7 for loss in losses_of(run, mesh, state))


SMALL = ("arch.layers=3", *QUIET, "steps=8", "plan.precision=fp32")
SENT = {
    2: [
        ("plan.replicate=2", "plan.sync_every=3"),
        ("plan.replicate=2", "plan.sync_every=3", "plan.outer=diloco", "plan.precision=bf16", "plan.grad_accum=2"),
        ("plan.replicate=2", "plan.sync_every=3", "plan.outer=slowmo", "plan.outer_fragments=3", "arch.hidden=80"),
        ("plan.replicate=2", "plan.sync_every=3", "plan.outer_quant=int4", "arch.vocab=257"),
    ],
    4: [
        (*DILOCO, "plan.shard=2", "plan.zero=3", "plan.outer_quant=int4", "plan.precision=bf16"),
        (*DILOCO, "plan.tp=2", "plan.outer_quant=int8"),
        (*DILOCO, "plan.cp=2", "plan.outer_fragments=2"),
        (*DILOCO, "plan.pp=2", "plan.grad_accum=4", "arch.tied=true"),
        (*DILOCO, "plan.shard=2", "plan.zero=2", "plan.ep=2", "arch.preset=tiny-moe", "plan.outer_quant=int8"),
        (*DILOCO, "plan.shard=2", "plan.zero=1", "arch.context=33", "arch.positions=learned"),
    ],
}


def surprises(folder: Path, *words: str) -> list[str]:
    """Where a rank differs from the arithmetic: in what it holds after a sync, and in what it sends.

    That is compared over a whole interval, one by one between syncs, and in all.
    """
    run, mesh, state = made(make_run(folder, *SMALL, *words), folder, CPU)
    said = traffic(run.arch, run.plan, run.sequence, place=mesh.place)
    every, steps, total, found = run.plan.sync_every, train(run, state, mesh), Counter[Call](), list[str]()
    for _ in range(every):  # what is made at first use
        next(steps)
    found += held_otherwise(run, mesh, state)
    for step in range(every + 1, 2 * every + 1):
        with observing() as seen:
            next(steps)
        seen = level(seen, run, mesh)
        total += seen
        if not state.outer.calendar.due(step):
            found += differences(seen, implied(of_every_step(said), run.plan, mesh))
    state.loader.close()
    for each in said:
        if each.every == 1:
            each = msgspec.structs.replace(each, count=every * each.count)
        total.subtract(implied([each], run.plan, mesh))
    return [*found, *(f"{run.plan}: {call}: {times}" for call, times in total.items() if times)]


def held_otherwise(run: Run, mesh: Mesh, state: State) -> list[str]:
    """Where what a rank holds after a sync differs from the ledger."""
    layout = layout_of(run.plan)
    said = {line.name: line.bytes for line in states(run.arch, run.plan, mesh.place, layout)}
    seen = {"outer_states": 0} | held(state, layout)
    names = ("moments", "outer_states")  # weights and gradients are padded
    return [
        f"{run.plan}: {name}: {seen[name]}, not {said.get(name, 0)}"
        for name in names
        if seen[name] != said.get(name, 0)
    ]


@world(2)
def test_two_replicas_send_and_hold_what_the_plan_implies_and_mostly_send_nothing(folder):
    assert not [text for words in SENT[2] for text in surprises(folder, *words)]


@world(4)
def test_four_ranks_send_and_hold_what_the_plan_implies(folder):
    assert not [text for words in SENT[4] for text in surprises(folder, *words)]


@pytest.mark.parametrize(
    ("words", "least"),
    # What is made by plain operators is known to the byte; of codes the ledger has an upper bound.
    [
        ((), 1.0),
        (("plan.outer=diloco",), 1.0),
        (("plan.outer=diloco", "plan.outer_quant=int8"), 0.99),
        (("plan.outer_quant=int4",), 0.99),
    ],
    ids=["average", "diloco", "int8", "int4"],
)
@world(2)
def test_a_sync_makes_what_the_ledger_says(folder, words, least):
    plan = ("plan.replicate=2", "plan.sync_every=2", "arch.hidden=256")
    run, mesh, state = made(make_run(folder, *SMALL, *plan, *words), folder, CPU)
    next(train(run, state, mesh))
    outer, peak = state.outer, 0
    assert isinstance(outer, OuterLoop)
    for bucket, codes in zip(outer.buckets, outer.codes, strict=True):
        sent = list[torch.Tensor]()

        def kept(x: torch.Tensor, dim: int, group: dist.ProcessGroup, sent: list[torch.Tensor] = sent) -> torch.Tensor:
            sent.append(x)  # Gloo's thread lets go of a message when it comes to that: here as late as can be
            return join(x, dim, group)

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(outer_loop, "join", kept)
            with Live([*bucket.masters, *bucket.anchor, *bucket.momentum]) as live:
                outer._sync(bucket, codes, 2)
        peak = max(peak, live.peak)
    said = sync_bytes(RankView(arch=run.arch, plan=run.plan, sequence=0, place=mesh.place))
    assert least * said <= peak <= said
    state.loader.close()


@world(2)
def test_a_replica_with_another_outer_state_is_found_at_the_sync_after_the_next(folder):
    run, mesh, state = made(make_run(folder, *DILOCO, *QUIET, "steps=8"), folder, CPU)
    assert isinstance(state.outer, OuterLoop)
    steps = train(run, state, mesh)
    assert [next(steps).step for _ in range(2)] == [1, 2]
    if mesh.part == 1:  # from which the next sync makes weights
        state.outer.buckets[0].anchor[0].view(-1)[0] += 2.0**-40
    assert [next(steps).step for _ in range(3)] == [3, 4, 5]
    with pytest.raises(FailureError, match="replicas left step 4 with different weights"):
        next(steps)
    state.loader.close()
