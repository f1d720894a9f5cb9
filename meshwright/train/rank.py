"""One rank of a run, from meeting the others to the last file."""

import platform
import time
import traceback
from collections import deque
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import __version__
from meshwright.checkpoint.folder import save_native
from meshwright.cost import goodput
from meshwright.data.prepare import Corpus, prepare
from meshwright.parallel import compiled, deterministic, fused
from meshwright.parallel.mesh import Mesh
from meshwright.spec import verdict
from meshwright.spec.exits import Exit
from meshwright.spec.order import Order
from meshwright.spec.params import count
from meshwright.spec.record import AttemptRecord, Summary
from meshwright.spec.run import Run
from meshwright.train import same_data
from meshwright.train.build import State, build, restore
from meshwright.train.collectives import deviated, recorded
from meshwright.train.ending import verdict_of
from meshwright.train.faults import Faults
from meshwright.train.gather import weights
from meshwright.train.heartbeat import Heart
from meshwright.train.inject import inject
from meshwright.train.log import Recorder, peak_bytes
from meshwright.train.loop import StepResult, train
from meshwright.train.oom import expected, explaining
from meshwright.train.sample import continuation
from meshwright.train.screen import Screen, default_stream, screen
from meshwright.train.signals import Stop
from meshwright.train.world import world
from meshwright.train.writers import Writer

SUMMARY = "summary.json"
OPENING = 16  # tokens that a sample without a prompt continues
SETTLED = 3  # steps after which nothing new should have to be compiled


def serve(order: Order, run: Run, machine: bool = False) -> int:
    """Be one rank, and end with the exit code that says how it went. Last words are left in the run folder."""
    stop = Stop().listen()
    heart = Heart(Path(order.beats), order.place.rank)
    try:
        view = screen(default_stream(machine), run.log.every, quiet=not order.speaks)
        summary = run_rank(run, order, view, heart, stop)
    except Exception as error:
        traceback.print_exc()
        step = heart.step if heart.restored >= 0 else -1
        odd = deviated(recorded(), heart.step_ends_ns)
        last = verdict_of(error, order, step, odd, begun=heart.steps_here > 0)
        verdict.write(Path(order.folder), last)
        return last.code
    if summary is None:
        return Exit.PREEMPTED if stop.saved else Exit.RESUMABLE  # a save that failed lost steps, not the run
    if order.place.rank == 0:
        _write(Path(order.folder) / SUMMARY, summary)
    return Exit.DONE


def run_rank(run: Run, order: Order, screen: Screen, heart: Heart, stop: Stop) -> Summary | None:
    """Train to the last step, then leave a model, a sample and a summary; None when asked to end before."""
    ours = order.place.launcher == "meshwright"
    corpus = prepare(run, Path(order.cache), (lambda text: None) if ours else screen.say)
    folder = Path(order.folder)
    same_data.check(run, corpus, folder, writes=order.place.rank == 0)
    with world(run, order.place, order.attempt) as mesh:
        screen.say(f"building {count(run.arch):,} parameters on {described(mesh)}")
        if words := expected(run, mesh.device):
            screen.say(words)
        with explaining(run, mesh.device):
            state = build(run, corpus, mesh, folder)
        restore(state, run, mesh, folder, screen.say)
        kernels = fused.chosen(run.plan, mesh.device, state.chunks, state.optimizer.is_one_pass)
        if mesh.rank == 0:
            _write(folder / "env.json", {**_environment(mesh), "kernels": kernels})
        for line in (*deterministic.described(run.plan, state.chunks), f"kernels: {kernels}"):
            screen.say(line)
        recorder = Recorder(run, mesh, folder, screen, _writers(run, mesh, folder, screen))
        try:
            with explaining(run, mesh.device, state):
                _train(state, recorder, order, heart, stop)
            screen.close()
            if not state.stopped:
                return _finish(run, state, mesh, recorder, corpus)
            recorder.end(state.step)
            stop.saved = state.saved
            return None
        finally:
            recorder.close()
            state.loader.close()
            state.optimizer.close()
            screen.close()


def _train(state: State, recorder: Recorder, order: Order, heart: Heart, stop: Stop) -> None:
    run, mesh = recorder.run, recorder.mesh
    faults = Faults(run, state, mesh, recorder, heart)
    inject(order.inject, run, state, mesh)
    heart.begins(state.step)
    recorder.begin(
        AttemptRecord(
            step=state.step, session=order.session, number=order.attempt, began=order.began, at=time.monotonic()
        )
    )
    for result in train(run, state, mesh, recorder.folder, stop):
        recorder.add(result)
        heart.did(result.step) if isinstance(result, StepResult) else heart.looked()
        faults.look()
        if run.plan.compile and isinstance(result, StepResult) and result.step == heart.restored + SETTLED:
            for line in compiled.described():
                recorder.screen.say(line)


def described(mesh: Mesh) -> str:
    """The devices of a run in words."""
    name = (
        torch.cuda.get_device_name(mesh.device)
        if mesh.device.type == "cuda"
        else f"CPU ({torch.get_num_threads()} threads)"
    )
    return f"{mesh.world} × {name}, {dist.get_backend()}"


def _finish(run: Run, state: State, mesh: Mesh, recorder: Recorder, corpus: Corpus) -> Summary:
    sample = ""
    if run.held.sample_tokens and corpus.tokenizer is not None:
        sample = continuation(state.chunks, run, corpus.tokenizer, _opening(state), mesh)
    peak = torch.tensor(peak_bytes(mesh.device), device=mesh.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    whole = weights(state.chunks, run, mesh)
    if mesh.rank == 0:
        save_native(recorder.folder / "model", run.arch, whole, corpus.tokenizer)
    else:
        deque(whole, maxlen=0)  # take part in gathering
    recorder.end(state.step)
    records = goodput.kept(recorder.past)
    steady = records[1:] or records  # the first step pays for warming up
    spent = goodput.account(recorder.past)
    return Summary(
        step=state.step,
        first_loss=records[0].loss,
        loss=records[-1].loss,
        held_out_loss=recorder.last_held.loss if recorder.last_held else None,
        tokens_per_second=sum(record.tokens for record in steady) / sum(record.seconds for record in steady),
        seconds_to_first_loss=goodput.first_loss_seconds(recorder.past),
        seconds=spent.wall,
        peak_bytes=int(peak.item()),
        parameters=count(run.arch),
        ranks=mesh.world,
        folder=str(recorder.folder),
        sample=sample,
        attempts=spent.attempts,
        goodput=spent.goodput,
        badput=spent.badput,
    )


def _opening(state: State) -> Tensor:
    """How a held-out sample begins, or the first one where none is held out."""
    loader = state.loader
    return (loader.held(0) if loader.holds_out else loader.take(0)).microbatches[0].tokens[0, :OPENING]


def _writers(run: Run, mesh: Mesh, folder: Path, screen: Screen) -> list[Writer]:
    return [Writer(name, run, folder, screen.say) for name in run.log.writers] if mesh.rank == 0 else []


def _environment(mesh: Mesh) -> dict[str, str | None]:
    """What else the numbers depend on, beside the run file."""
    return {
        "meshwright": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "device": described(mesh),
    }


def _write(file: Path, value: object) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    temporary.replace(file)
