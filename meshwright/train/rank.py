"""One rank of a run: from meeting the others to the last file, or to the report of what failed."""

import hashlib
import importlib
import platform
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright import __version__, checkpoint, data, optim
from meshwright.checkpoint import read, remote
from meshwright.checkpoint.in_parts import PartReader
from meshwright.checkpoint.model_folder import AdaptedFolder, copy_texts, digest, open_folder, save_native, staged
from meshwright.checkpoint.storage import CorruptError
from meshwright.config.huggingface import TOKENIZER, read_config
from meshwright.config.load import load
from meshwright.config.run import Run
from meshwright.config.weights import BASE, MODEL, TEXT, BaseDigest, note_of
from meshwright.cost import goodput
from meshwright.cost.flops import utilization
from meshwright.data import tokenize
from meshwright.data.chat import GENERATION, TEMPLATE, text_folder
from meshwright.data.prepare import Corpus, prepare
from meshwright.data.prepare import described as described_data
from meshwright.data.shards import Tokens
from meshwright.optim import onebit, outer, parameter_server
from meshwright.parallel import compile, context, deterministic, fused_kernels
from meshwright.parallel.mesh import Mesh
from meshwright.runtime import failure, generations
from meshwright.runtime.failure import Exit, Failure, FailureError, Kind, is_broken
from meshwright.runtime.files import Speaker, replace_file, replace_json
from meshwright.runtime.heartbeat import PhaseMark, PhaseTable
from meshwright.runtime.place import RankSpec
from meshwright.runtime.records import AttemptRecord, EventRecord, Summary
from meshwright.runtime.run_folder import DATA, STOP, FolderGoneError, FolderWatch, write_summary
from meshwright.spec import communication
from meshwright.spec.params import count
from meshwright.spec.problem import UNDECODABLE, InputError, Problem, mistake
from meshwright.spec.units import plural
from meshwright.train import build as building
from meshwright.train import ending, loop, step, survivors
from meshwright.train import world as meeting
from meshwright.train.build import build
from meshwright.train.evaluator import Evaluator
from meshwright.train.faults import FaultWatch
from meshwright.train.heartbeat import Heartbeat, deviated, recorded
from meshwright.train.inject import inject
from meshwright.train.log import PlainLines, Recorder, Writer, default_stream, peak_bytes, screen
from meshwright.train.loop import StepResult, Stop, train
from meshwright.train.noise_scale import noise_scale
from meshwright.train.oom import expected, explaining
from meshwright.train.replica_group import ReplicaGroup
from meshwright.train.sample import closing_sample
from meshwright.train.saving import restore
from meshwright.train.state import State, weights
from meshwright.train.world import StoppedError, code, world

AGAIN = "fix it and run the same command again to resume from the newest checkpoint"
OPENING = 16  # tokens that a sample without a prompt continues
SETTLED = 3  # steps after which nothing new should have to be compiled
WINDOWS, WINDOW = 64, 256  # places of a source that are looked at, and tokens at each


def serve_order(order: RankSpec) -> int:
    """Be the rank of an order, whose run is in a file."""
    return serve(order, load(Path(order.run)).run)


def fetch_rest() -> None:
    """Import what a rank imports on its way to the first step: forked from here, it need not do so again."""
    for name in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "safetensors.torch", "tokenizers"):
        importlib.import_module(name)


class StartTimeline:
    """What a rank does before its first step, and how long each takes."""

    def __init__(self, began: float) -> None:
        self.last = began
        self.phases: dict[str, float] = {}

    def passed(self, name: str) -> None:
        """A phase ends here."""
        now = time.monotonic()
        self.phases[name] = self.phases.get(name, 0.0) + now - self.last
        self.last = now


def import_compiler() -> None:
    """Import torch's compiler, which takes seconds, while the rank waits for others, its device and its files."""
    for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.async_compile"):
        importlib.import_module(name)


def serve(order: RankSpec, run: Run, machine: bool = False) -> int:
    """Be one rank, and end with the exit code that says how it went. A failure report is left in the run folder."""
    start = StartTimeline(order.began if order.attempt == 1 else time.monotonic())
    start.passed("launch")  # the command line, processes, importing torch; the data too where the launcher prepares it
    looks = order.place.rank == 0 or run.faults.live  # any replica may be the one that is left
    home = FolderWatch(Path(order.folder))
    stop = Stop(home if looks else None).listen()
    code()  # as it is now: the ranks compare it when they meet
    heartbeat = Heartbeat(Path(order.beats), order.place.rank, phase_table())
    try:
        # mpirun and srun --pty give ranks a terminal of their own, and write what is drawn there into a log.
        is_log = order.place.launcher not in ("meshwright", "torchrun")
        view = screen(default_stream(machine), run.log.every, quiet=not order.speaks, plain=is_log)
        summary = run_rank(run, order, view, heartbeat, stop, start)
    except StoppedError:
        heartbeat.leave()
        return Exit.INTERRUPTED if stop.interrupts else Exit.PREEMPTED  # no step was begun: there is nothing to save
    except Exception as error:
        _say(error, order)
        step = heartbeat.step if heartbeat.restored >= 0 else -1
        odd = deviated(recorded(), heartbeat.step_ends_ns)
        last = failure_of(error, order, step, odd, begun=heartbeat.steps_here > 0)
        if not home.is_taken():
            failure.write_somewhere((Path(order.folder), Path(order.beats)), last)
        heartbeat.leave()
        return last.code
    heartbeat.leave()
    if summary is None or stop.owes:
        return _stopped(order, stop)
    return Exit.DONE


def _stopped(order: RankSpec, stop: Stop) -> int:
    """How a rank ends that was asked to. A person is no scheduler's signal: nobody is to start the run again."""
    if not stop.saved:  # a save that failed lost steps, not the run
        failure.write_somewhere((Path(order.folder), Path(order.beats)), ending.unsaved(order))
        return Exit.RESUMABLE
    is_ours = order.place.launcher == "meshwright"  # whose supervisor looks for the file itself
    by_person = stop.interrupts > 0 or (not is_ours and (Path(order.folder) / STOP).exists())
    return Exit.INTERRUPTED if by_person else Exit.PREEMPTED


def _say(error: Exception, order: RankSpec) -> None:
    """What went wrong, in this rank's log. Under other launchers all ranks write into one: a mistake is a sentence
    there, and so is the loss of somebody else, whose own words say why. Stacks are in the failure reports."""
    is_plain = isinstance(error, InputError | FolderGoneError) or is_broken(str(error))
    if order.place.launcher != "meshwright" and is_plain:
        known = failure.report_of(error)
        words = _first_line(error) if known is None else f"{known.what}; {known.remedy}"
        print(f"rank {order.place.rank}: {words}", file=sys.stderr, flush=True)
    else:
        traceback.print_exc()


def run_rank(
    run: Run, order: RankSpec, screen: PlainLines, heartbeat: Heartbeat, stop: Stop, start: StartTimeline
) -> Summary | None:
    """Train to the last step, then leave a model, a sample and a summary; None when stopped before."""
    evaluator = Evaluator(run, Path(order.folder), order.place.rank)
    with evaluator.closing(stop):
        return _run_rank(run, order, screen, heartbeat, stop, start, evaluator)


def _run_rank(
    run: Run,
    order: RankSpec,
    screen: PlainLines,
    heartbeat: Heartbeat,
    stop: Stop,
    start: StartTimeline,
    evaluator: Evaluator,
) -> Summary | None:
    if run.plan.compile:
        threading.Thread(target=import_compiler, name="import-compiler", daemon=True).start()
    ours = order.place.launcher == "meshwright"
    corpus = prepare(run, Path(order.cache), (lambda text: None) if ours else screen.say)
    for line in () if ours else described_data(run, corpus):
        screen.say(line)
    folder = Path(order.folder)
    for line in check(run, corpus, folder, writes=order.place.rank == 0):
        screen.say(line)
    start.passed("data")
    own, here = (survivors.inside(run), survivors.place_inside(run, order)) if run.faults.live else (run, order.place)
    meet = world(own, here, order.attempt, folder, lambda: stop.asked)
    copies = remote.mirroring(run, folder, screen.say, lambda: stop.asked)
    with copies as mirror, meet as mesh:  # in this order: other ranks do not wait for the last copy
        start.passed("meet")  # the other ranks, and the device
        apart = f", in each of {run.plan.replicate + run.faults.spares} replicas" if run.faults.live else ""
        screen.say(f"building {count(run.arch):,} parameters on {described(mesh)}{apart}")
        if words := expected(run, mesh.device):
            screen.say(words)
        with explaining(run, mesh.device):
            state = build(own, corpus, mesh, folder)
            live = survivors.of(run, order, mesh, stop, state)
            state.memory, state.beside = memory_of(order)
            start.passed("build")
            if not order.start:
                restore(state, run, mesh, folder, screen.say)
            start.passed("restore")
        recorder = _recorder(run, state, mesh if live is None else live.told, folder, screen)
        recorder.mirror = mirror
        evaluator.begin(state, mesh, corpus, recorder)
        try:
            with explaining(run, mesh.device, state):
                if live is not None:
                    live.adopt = recorder.adopt
                    live.begin(state, corpus)
                _train(state, mesh, recorder, order, heartbeat, stop, start, evaluator)
                screen.close()
                if not state.stopped:
                    stop.require_folder()
                    return _finish(run, state, mesh, recorder, corpus, evaluator, stop)
            recorder.end(state.step)
            stop.saved = state.saved
            return None
        finally:
            recorder.close()
            state.loader.close() if live is None else live.close()
            state.optimizer.close()
            screen.close()


def _recorder(run: Run, state: State, mesh: Mesh, folder: Path, screen: PlainLines) -> Recorder:
    """This rank's records, by its place among all ranks; how the run computes is said, and written down, before any."""
    kernels = fused_kernels.chosen(run.plan, mesh.device, state.chunks, state.optimizer.is_one_pass)
    if mesh.rank == 0:
        replace_json(folder / "env.json", environment(mesh, kernels))
    how = (
        *deterministic.described(run.plan, state.chunks),
        *outer.described(run),
        *onebit.described(run),
        *parameter_server.described(run),
        *communication.described(run.plan),
    )
    for line in (*how, f"kernels: {kernels}"):
        screen.say(line)
    trackers = run.log.writers if mesh.rank == 0 else ()
    return Recorder(run, mesh, folder, screen, [Writer(name, run, folder, screen.say) for name in trackers])


def memory_of(order: RankSpec) -> tuple[Path | None, range | None]:
    """Where this rank's in-memory checkpoints are; and which ranks they are of, where others are on other machines."""
    place, first = order.place, order.place.rank - order.place.local_rank
    beside = range(first, first + place.local_world) if order.memory and place.local_world < place.world else None
    return Path(order.memory) if order.memory else None, beside


def _train(
    state: State,
    mesh: Mesh,
    recorder: Recorder,
    order: RankSpec,
    heartbeat: Heartbeat,
    stop: Stop,
    start: StartTimeline,
    evaluator: Evaluator,
) -> None:
    run, live = recorder.run, state.live
    faults = FaultWatch(run, state, mesh, recorder, heartbeat)
    for line in faults.matmuls.described():
        recorder.screen.say(line)
    inject(order.inject, run, state, recorder.mesh)
    state.note = recorder.saved
    heartbeat.begins(state.step)
    start.passed("prepare")  # kernels tried, trackers, watches
    if not order.start:  # else the others never stopped, and their records are this rank's too
        recorder.begin(
            AttemptRecord(
                step=state.step,
                session=order.session,
                number=order.attempt,
                began=order.began,
                at=start.last,
                phases=start.phases,
            )
        )
    handled = time.monotonic()
    for result in train(run, state, mesh, recorder.folder, stop):
        recorder.add(result)
        for event in live.take_events() if live is not None else ():
            recorder.tell(event)
        for failed in recorder.mirror.take_events() if recorder.mirror is not None else ():
            recorder.tell(EventRecord(step=recorder.added, what="upload", text=failed.text, at=time.monotonic()))
        heartbeat.did(result.step) if isinstance(result, StepResult) else heartbeat.looked()
        faults.look()
        if isinstance(result, StepResult):
            evaluator.after(result.step)
        if run.plan.compile and isinstance(result, StepResult) and result.step == heartbeat.restored + SETTLED:
            for line in compile.described():
                recorder.screen.say(line)
        handled = time.monotonic()
    recorder.last_save_seconds = time.monotonic() - handled  # the loop ends when nothing is left to be saved


def _finish(
    run: Run, state: State, mesh: Mesh, recorder: Recorder, corpus: Corpus, evaluator: Evaluator, stop: Stop
) -> Summary:
    sample, loader = "", state.loader
    if run.eval.sample_tokens and corpus.tokenizer is not None:
        # How a validation sample begins, or the first training sample where there is none.
        first = (loader.held(0) if loader.holds_out else loader.take(0)).microbatches[0].tokens[0]
        sample = closing_sample(state.chunks, run, corpus, first[:OPENING], mesh)
    evaluator.finish(state.step)
    peak = torch.tensor(peak_bytes(mesh.device), device=mesh.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    leaves = mesh.rank == 0 and (state.live is None or state.live.leads)
    surely = partial(
        ending.surely, folder=recorder.folder, step=state.step, mesh=mesh, stop=stop, say=recorder.screen.say
    )

    def write_model() -> None:
        whole, folder = weights(state.chunks, run, mesh), recorder.folder
        try:
            if leaves:
                note = note_of(msgspec.to_builtins(run), folder)
                save_native(folder / MODEL, run.arch, whole, corpus.tokenizer, folder / TEXT, note)
        finally:
            deque(whole, maxlen=0)  # take part in gathering

    surely("the model", write_model)
    recorder.end(state.step)
    records = goodput.kept(recorder.past)
    steady = records[1:] or records  # the first step pays for warming up
    spent = goodput.account(recorder.past)
    seconds = sum(record.seconds for record in steady)
    flops, causal = (sum(getattr(record, name) for record in steady) for name in ("flops", "flops_causal"))
    peak_rate = recorder.peak
    noise = noise_scale(records, run.batch)
    summary = Summary(
        step=state.step,
        first_loss=records[0].loss,
        loss=records[-1].loss,
        validation_loss=recorder.last_eval.loss if recorder.last_eval else None,
        tokens_per_second=sum(record.tokens for record in steady) / seconds,
        seconds_to_first_loss=goodput.first_loss_seconds(recorder.past),
        seconds=spent.wall,
        peak_bytes=int(peak.item()),
        mfu=utilization(flops, seconds, peak_rate) if peak_rate else None,
        mfu_causal=utilization(causal, seconds, peak_rate) if peak_rate else None,
        tflops=causal / seconds / recorder.mesh.world / 1e12,
        parameters=count(run.arch),
        ranks=recorder.mesh.world,
        folder=str(recorder.folder),
        sample=sample,
        attempts=spent.attempts,
        goodput=spent.goodput,
        badput=spent.badput,
        noise_scale=noise.tokens if noise else None,
        noise_scale_sequences=noise.sequences if noise else None,
    )
    surely("the summary", lambda: write_summary(recorder.folder, summary) if leaves else None)
    return summary


def described(mesh: Mesh) -> str:
    """The devices of a run in words."""
    name = (
        torch.cuda.get_device_name(mesh.device)
        if mesh.device.type == "cuda"
        else f"CPU ({plural(torch.get_num_threads(), 'thread')})"
    )
    return f"{mesh.world} × {name}, {dist.get_backend()}"


def environment(mesh: Mesh, kernels: str) -> dict[str, str | None]:
    """What else the numbers depend on, beside the run file."""
    return {
        "meshwright": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "device": described(mesh),
        "kernels": kernels,
    }


def phase_table() -> PhaseTable:
    """Which frames of a rank's stack mean which phase, for its heartbeat and for whoever asks why it hangs."""
    return PhaseTable(
        enclosing=(
            _mark("eval", loop.evaluate),
            _mark("eval", Evaluator.after),
            _mark("end", _finish),
            _mark("start", building),
            _mark("start", meeting),
            _mark("start", read),
            _mark("start", remote.fetch),
            _mark("start", PartReader.newest),
            _mark("end", remote.Mirror.finish),
            _mark("end", Speaker.close),
            _mark("save", checkpoint),
        ),
        innermost=(
            PhaseMark("torch/_dynamo/convert_frame.py", "", "compile"),
            PhaseMark("torch/_inductor/", "", "compile"),
            _mark("data", data),
            PhaseMark("torch/autograd/graph.py", "_engine_run_backward", "backward"),
            _mark("optimizer", optim),
            _mark("forward", step),
        ),
        outermost=(_mark("forward", loop.steps),),
        waiting=(
            _mark("", context.arrived)[:2],
            _mark("", parameter_server.ParameterServer._take)[:2],
            _mark("", ReplicaGroup.arrived)[:2],
            _mark("", ReplicaGroup.aside)[:2],
            _mark("", generations.pause)[:2],
            _mark("", Evaluator._wait)[:2],
        ),
    )


def _mark(phase: str, owner: ModuleType | Callable[..., Any]) -> PhaseMark:
    """A phase by the code that means it: a package, a module, or one function."""
    if not isinstance(owner, ModuleType):
        return PhaseMark(f"{owner.__module__.replace('.', '/')}.py", owner.__name__, phase)
    is_package = hasattr(owner, "__path__")
    return PhaseMark(owner.__name__.replace(".", "/") + ("/" if is_package else ".py"), "", phase)


def failure_of(error: Exception, order: RankSpec, step: int, deviated: bool, begun: bool = True) -> Failure:
    """The failure report of a rank. `step` is −1 until the ranks stand ready; `begun`: they have made one since."""
    if isinstance(error, FailureError):
        report, who = error.report, ""
    else:
        kind, code, remedy = _meaning(error, order, begun and step >= 0)
        report = Failure(kind=kind, code=code, what=_first_line(error), remedy=remedy)
        # What the user is to put right before the start is no rank's failure.
        who = "" if kind == "input" else f"rank {order.place.rank} failed: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/meshwright/" in frame.filename]
    line = f"; {Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
    when = f"after step {step}" if step >= 0 else "before the first step"
    return msgspec.structs.replace(
        report,
        what=f"{who}{report.what}",
        where=report.where or f"{platform.node()}, {when}{line}",
        remedy=report.remedy or "see the traceback in the log",
        details=report.details or order.log or order.folder,
        rank=order.place.rank,
        step=step if step >= 0 else None,
        stack=tuple(traceback.format_exception(error)),
        deviated=deviated,
        at=time.time(),
    )


def _meaning(error: Exception, order: RankSpec, begun: bool) -> tuple[Kind, int, str]:
    """What an error means, as far as is known: its kind, exit code and remedy."""
    if isinstance(error, CorruptError):
        is_own = all(Path(damage.file).is_relative_to(order.folder) for damage in error.damages)
        remedy = "restore the folder from a copy, or start over with --fresh"
        return "corrupt", Exit.CORRUPT, remedy if is_own else "name another step in init.from, as RUN@STEP"
    if isinstance(error, torch.OutOfMemoryError):
        return "memory", Exit.DOES_NOT_FIT, "use a smaller microbatch, recompute, or more shards"
    if isinstance(error, InputError):
        remedy = "; ".join(dict.fromkeys(problem.remedy for problem in error.problems))  # each once
        if not begun:
            return "input", Exit.INPUT, remedy
        return "data", Exit.RESUMABLE, f"{remedy}; then run the same command again to resume"
    # Our own launcher sees who it was that left; of somebody else's we know only that a rank is gone.
    if order.place.launcher != "meshwright" and is_broken(str(error)):
        return "killed", Exit.RESUMABLE, AGAIN
    files = [Path(frame.filename).as_posix() for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, OSError) and any("/meshwright/data/" in file for file in files):
        return "data", Exit.RESUMABLE, AGAIN
    return "error", Exit.FAILED, ""


def _first_line(error: Exception) -> str:
    if isinstance(error, InputError):
        return "; ".join(problem.text for problem in error.problems)
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one source."""

    source: str
    tokens: int
    digest: str
    documents: int = 0  # that are told apart; 0: none are


def check(run: Run, corpus: Corpus, folder: Path, writes: bool) -> list[str]:
    """Refuse data and tokenizers that are not what the run began with; the first attempt remembers them.

    A run that is extended remembers them again; what has changed is returned.
    """
    own, named = folder / TOKENIZER, corpus.tokenizer
    here = [fact(one.source, tokens) for one, tokens in zip(run.data.sources, corpus.sources, strict=True)]
    # By their numbers: the clock may have been set back since one was kept.
    kept = {int(one.suffixes[0][1:]): one for one in folder.glob("data.*.json") if one.suffixes[0][1:].isdecimal()}
    file, before = folder / DATA, [kept[number] for number in sorted(kept)]
    known = file if file.exists() else before[-1] if before else None
    found = [] if known is None else differences(_remembered(known), here)
    if found and known == file:
        raise InputError(found)
    if named is not None and own.exists() and own.read_bytes() != named.read_bytes():
        _require_sound(own)
        what = f"the tokenizer of this data is not {own}, with which the run began"
        raise InputError([Problem(what, f"set data.tokenizer={own}", "data.tokenizer")])
    if writes and not file.exists():
        replace_json(file, here)
    if writes and named is not None and not own.exists():
        replace_file(own, named.read_bytes())  # with it any saved step is a whole model
    if writes and run.adapter.kind != "none" and run.init.folder and not (folder / BASE).exists():
        replace_json(folder / BASE, BaseDigest(digest=digest(open_folder(run.init.folder))))
    if writes and not (folder / TEXT).exists():
        keep_texts(run, corpus, folder / TEXT)
    return [f"extended: {problem.text}" for problem in found]


def _require_sound(tokenizer: Path) -> None:
    """Tell a run's tokenizer that is damaged from another one."""
    try:
        tokenize.load(tokenizer)
    except InputError as error:
        (problem,) = error.problems
        remedy = "restore it from a copy; model/tokenizer.json of the run is one"
        raise mistake(f"{problem.text}; the run began with it, and it is damaged", remedy) from None


def _remembered(file: Path) -> list[Fact]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Fact])
    except UNDECODABLE as error:
        remedy = "restore it from a copy; or delete it, if the data is what it was: it is then remembered anew"
        raise mistake(f"{file}, which says what data the run began with, is damaged ({error})", remedy) from None


def keep_texts(run: Run, corpus: Corpus, folder: Path) -> None:
    """Keep what the folder that a run begins from says of its text, and what the run's own data adds to it."""
    chats = [report for report in corpus.chats if report is not None]
    begin = open_folder(run.init.folder) if run.init.folder else None
    if isinstance(begin, AdaptedFolder):
        begin.require_base()
    origin = begin.texts if begin else text_folder(run) if chats else None
    if origin is None:
        return
    with staged(folder) as stage:
        copy_texts(origin, stage)
        if chats and run.data.template:
            (stage / TEMPLATE).write_text(chats[0].template)
        if any(set(report.stops) - set(report.ends) for report in chats):
            file = stage / GENERATION
            settings = read_config(file) if file.is_file() else {}
            ends = {token for report in chats for token in (*report.ends, *report.stops)}
            replace_json(file, settings | {"eos_token_id": sorted(ends)})


def fact(source: str, tokens: Tokens) -> Fact:
    """How many tokens, and a digest of some of them."""
    digest = hashlib.sha256()
    for number in range(WINDOWS):
        start = number * max(tokens.total - WINDOW, 0) // max(WINDOWS - 1, 1)
        digest.update(tokens.read(start, min(WINDOW, tokens.total)).tobytes())
    documents = len(tokens.ends)
    return Fact(source=source, tokens=tokens.total, digest=digest.hexdigest()[:16], documents=documents)


def differences(there: list[Fact], here: list[Fact]) -> list[Problem]:
    """Sources that have changed."""
    remedy = "put the data back as it was, add --extend to resume with it as it is, or start over with --fresh"
    return [
        Problem(f"{new.source} has changed since the run began ({old.tokens} tokens then, {new.tokens} now)", remedy)
        for old, new in zip(there, here, strict=False)
        if old.source == new.source and (old.tokens, old.digest) != (new.tokens, new.digest)
    ]
