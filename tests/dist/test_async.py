"""Asynchronous replicas: staleness 0 is plain training, no worker runs further ahead than it may, nothing is lost."""

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from commands import meshwright
from trials import CPU, corpus_file, deviation, drive, losses_of, made, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.cost.job import Job
from meshwright.cost.layout import layout_of
from meshwright.cost.resident import served, states
from meshwright.cost.traffic import traffic
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.optim.parameter_server import AsynchronousReplicas, ServedOptimizer
from meshwright.parallel.mesh import local
from meshwright.train.loop import StepResult, Stop, train
from meshwright.train.oom import held
from meshwright.train.saving import digest_of, restore
from meshwright.verify.collectives import differences, implied, observing

TOLERANCE = 1e-12  # float64 sums in another order, through a few updates
SMALL = ("arch.layers=2", "data.eval_fraction=0.0", "plan.replicate=2")
BOUND = 2
STALE = (*SMALL, f"plan.staleness={BOUND}")
ODD = ("arch.vocab=259", "arch.hidden=72", "arch.ffn=90", "arch.heads=4", "arch.kv_heads=2")  # servers have unlike rows


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)  # tokenised once, before the ranks ask
    return tmp_path


def test_a_process_that_repeats_what_happened_has_the_same_weights(tmp_path):
    short = ("arch.layers=2", "sequence=16", "batch=12", "--steps", "7")
    plans = ("replicate=2,staleness=0", "replicate=2,staleness=2", "replicate=3,staleness=1,grad_accum=2")
    asked = [word for plan in plans for word in ("--plan", plan)]
    done = meshwright("verify", "tiny", *short, *asked, "--json", "--folder", "proof", folder=tmp_path)
    verdicts = json.loads(done.stdout)
    numbers = [value for verdict in verdicts for key, value in verdict.items() if key.endswith("_deviation")]
    assert max(numbers) <= TOLERANCE, verdicts
    certificates = json.loads((tmp_path / "proof/certificate.json").read_text())
    assert [each["reference"].split(",")[0] for each in certificates] == [
        "one process",
        *["one process that computes every worker's gradient by the weights that it had then"] * 2,
    ]


@world(2)
def test_staleness_zero_is_plain_training(folder):
    for name in ("adamw", "sgd"):
        words = (*SMALL, f"optim.name={name}", "data.eval_fraction=0.1")
        runs = (make_run(folder, *words), make_run(folder, *words, "plan.staleness=0"))
        plain, stale = (drive(run, make_corpus(run, folder), mesh_of(run.plan)) for run in runs)
        assert deviation(stale, plain) <= TOLERANCE
        assert isinstance(stale.state.outer, AsynchronousReplicas)
        assert stale.state.outer.histogram == Counter({0: 3})
        stale.state.optimizer.close()


@world(2)
def test_a_worker_runs_ahead_of_a_slow_one_and_no_further_than_it_may(folder):
    """The second worker does not begin before the first has made as many steps as it may without it."""
    run, mesh, state = made(make_run(folder, *STALE, "steps=8"), folder, CPU)
    assert isinstance(state.outer, AsynchronousReplicas)
    word, take = torch.zeros(1), state.loader.take

    def waits(step: int):
        if step == 0 and mesh.rank == 1:
            dist.recv(word, 0)
        return take(step)

    state.loader.take = waits
    found = list[int | None]()
    for result in train(run, state, mesh):
        assert isinstance(result, StepResult)
        found.append(result.staleness)
        if mesh.rank == 0 and result.step == BOUND + 1:
            assert state.outer.server.version == 0  # the slow worker's gradient is missing
            dist.send(word, 1)
    ahead = list(range(BOUND + 1))
    assert mesh.rank == 1 or found[: BOUND + 1] == ahead
    assert all(age is not None and 0 <= age <= BOUND for age in found)
    assert Counter(found) == state.outer.histogram
    assert state.outer.server.version == 8
    mine = torch.cat([local(weight.detach()).flatten() for weight in state.optimizer.weights])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both)  # after the last step everything that was pushed is in the weights
    state.loader.close()
    state.optimizer.close()


@world(2)
def test_a_stop_is_heard_by_all_in_the_same_step_and_resumed_from(folder):
    run, mesh, state = made(make_run(folder, *STALE, *ODD, "steps=12", "checkpoint.every=0"), folder, CPU)
    stop, losses = Stop(), list[float]()
    for result in train(run, state, mesh, folder / "run", stop):
        assert isinstance(result, StepResult)
        losses.append(result.loss.item())
        stop.asked = mesh.rank == 1 and result.step >= 2  # said in step 3, which all have seen BOUND + 1 steps later
    assert (state.step, state.stopped, state.saved) == (3 + BOUND + 1, True, True)
    digest = digest_of(state, run, mesh)
    state.loader.close()
    state.optimizer.close()
    run, mesh, state = made(run, folder, CPU)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert (restored.step, restored.state) == (6, digest) == (6, digest_of(state, run, mesh))
    assert [result.step for result in train(run, state, mesh)] == list(range(7, 13))
    assert state.optimizer.count.item() == 12
    state.loader.close()
    state.optimizer.close()


@world(2)
def test_a_checkpoint_goes_on_without_a_server_where_it_was_synchronous(folder):
    words = (*SMALL, "steps=6", "checkpoint.every=4")
    run, mesh, state = made(make_run(folder, *words, "plan.staleness=0"), folder, CPU)
    for result in train(run, state, mesh, folder / "run"):
        if result.step == 5:
            break
    state.loader.close()
    state.optimizer.close()
    run, mesh, state = made(make_run(folder, *words), folder, CPU)  # the same mathematics, so the same run
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 4
    further = losses_of(run, mesh, state)
    whole = losses_of(*made(run, folder, CPU))
    assert max(abs(one - two) / two for one, two in zip(further, whole[4:], strict=True)) <= TOLERANCE


@world(2)
def test_workers_and_servers_send_what_the_plan_implies(folder):
    for words in ((), ODD, ("plan.precision=bf16", "plan.grad_accum=2")):
        run, mesh, state = made(make_run(folder, *STALE, *words), folder, CPU)
        assert isinstance(state.optimizer, ServedOptimizer)
        server, calls, steps = state.optimizer.server, Counter(), train(run, state, mesh)
        next(steps)
        server.settle()
        update = server._update

        def watched(push, update=update, calls=calls):
            with observing() as seen:
                update(push)
            calls.update(seen)

        server._update = watched
        with observing() as mine:
            next(steps)
        state.optimizer.close()  # its thread has ended
        said = implied(traffic(run.arch, run.plan, run.sequence, place=mesh.place), run.plan, mesh)
        assert not differences(Counter(mine) + calls, said)
        state.loader.close()


@world(2)
def test_device_and_host_hold_what_the_ledger_says(folder):
    run, mesh, state = made(make_run(folder, *STALE, *ODD, "plan.precision=fp32"), folder, CPU)
    assert isinstance(state.optimizer, ServedOptimizer)
    next(train(run, state, mesh))
    layout = layout_of(run.plan)
    said = {line.name: line.bytes for line in states(run.arch, run.plan, mesh.place, layout)}
    assert said["moments"] == 0 == held(state, layout)["moments"]
    server = state.optimizer.server
    job = Job(
        arch=run.arch, plan=run.plan, sequence=run.sequence, cluster=cluster("2xh100"), stack=stack_of("meshwright")
    )
    host = {line.name: line.bytes for line in served(job, mesh.place)}
    assert host["weights"] == sum(shard.nbytes for shard in server.shards.values())
    assert host["moments"] == sum(tensor.nbytes for tensors in server.optimizer.states().values() for tensor in tensors)
    most = (
        (BOUND + 1) * (sum(server.sizes) + 2 * server.sizes[mesh.part]) * 4 + server.front.nbytes + server.back.nbytes
    )
    assert host["pieces"] == most
    state.loader.close()
    state.optimizer.close()
