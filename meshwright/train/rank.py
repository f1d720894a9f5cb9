"""One rank of a run, from meeting the others to the last file."""

import platform
import time
from collections import deque
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from meshwright import __version__
from meshwright.checkpoint.folder import save_native
from meshwright.data.prepare import Corpus
from meshwright.parallel import deterministic
from meshwright.parallel.mesh import Mesh
from meshwright.spec.params import count
from meshwright.spec.place import Place
from meshwright.spec.record import Summary
from meshwright.spec.run import Run
from meshwright.train.build import State, build
from meshwright.train.gather import weights
from meshwright.train.log import Recorder, peak_bytes
from meshwright.train.loop import train
from meshwright.train.sample import continuation
from meshwright.train.screen import Screen
from meshwright.train.world import world
from meshwright.train.writers import Writer


def run_rank(run: Run, place: Place, folder: Path, corpus: Corpus, screen: Screen, started: float) -> Summary:
    """Train to the last step, then leave a model, a sample and a summary. `started` is when the user pressed Enter."""
    with world(run, place) as mesh:
        screen.say(f"building {count(run.arch):,} parameters on {described(mesh)}")
        state = build(run, corpus, mesh)
        if mesh.rank == 0:
            _write_environment(folder, mesh)
        for line in deterministic.described(run.plan, state.chunks):
            screen.say(line)
        recorder = Recorder(run, mesh, folder, screen, _writers(run, mesh, folder, screen))
        screen.say("first step")
        try:
            for result in train(run, state, mesh):
                recorder.add(result)
        finally:
            recorder.close()
            state.loader.close()
            screen.close()
        return _finish(run, state, mesh, recorder, corpus, started)


def described(mesh: Mesh) -> str:
    """The devices of a run in words."""
    name = (
        torch.cuda.get_device_name(mesh.device)
        if mesh.device.type == "cuda"
        else f"CPU ({torch.get_num_threads()} threads)"
    )
    return f"{mesh.world} × {name}, {dist.get_backend()}"


def _finish(run: Run, state: State, mesh: Mesh, recorder: Recorder, corpus: Corpus, started: float) -> Summary:
    sample = ""
    if run.held.sample_tokens and corpus.tokenizer is not None:
        opening = state.loader.held(0).microbatches[0].tokens[0, :16]
        sample = continuation(state.chunks, run, corpus.tokenizer, opening, mesh)
    peak = torch.tensor(peak_bytes(mesh.device), device=mesh.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    whole = weights(state.chunks, run, mesh)
    if mesh.rank == 0:
        save_native(recorder.folder / "model", run.arch, whole, corpus.tokenizer)
    else:
        deque(whole, maxlen=0)  # take part in gathering
    records = recorder.records
    steady = records[1:] or records  # the first step pays for warming up
    return Summary(
        step=state.step,
        first_loss=records[0].loss,
        loss=records[-1].loss,
        held_out_loss=recorder.last_held.loss if recorder.last_held else None,
        tokens_per_second=sum(record.tokens for record in steady) / sum(record.seconds for record in steady),
        seconds_to_first_loss=recorder.first_at - started,
        seconds=time.time() - started,
        peak_bytes=int(peak.item()),
        parameters=count(run.arch),
        ranks=mesh.world,
        folder=str(recorder.folder),
        sample=sample,
    )


def _writers(run: Run, mesh: Mesh, folder: Path, screen: Screen) -> list[Writer]:
    return [Writer(name, run, folder, screen.say) for name in run.log.writers] if mesh.rank == 0 else []


def _write_environment(folder: Path, mesh: Mesh) -> None:
    """What else the numbers depend on, beside the run file."""
    facts = {
        "meshwright": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "device": described(mesh),
    }
    (folder / "env.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
