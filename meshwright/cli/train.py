"""`meshwright train`: the launcher of local ranks, and a rank that somebody else has launched."""

import argparse
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from meshwright.cli import env
from meshwright.cli import options as words
from meshwright.config import check, load
from meshwright.config.huggingface import is_exportable
from meshwright.config.run import Data, Run
from meshwright.runtime import failure
from meshwright.runtime.failure import Exit, Failure
from meshwright.runtime.files import Speaker, printable, teller
from meshwright.runtime.place import ALONE, Place, RankSpec
from meshwright.runtime.records import Summary
from meshwright.spec.params import count
from meshwright.spec.problem import InputError, Problem, mistake
from meshwright.spec.units import GIB, plural

if TYPE_CHECKING:
    from meshwright.launch.node import NodePlace
    from meshwright.runtime.meeting import Met
    from meshwright.runtime.run_folder import Change

RANK = "meshwright.train.rank"  # by name: the launcher never imports torch
HELD_SECONDS = 75.0  # in which rank 0, if it is who holds the folder, is there to be met


def add_train(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument("words", nargs="*", metavar="RUN.toml | key=value", help=words.OVERRIDES)
    verb.add_argument(
        "--ranks", type=words.count, help="processes to start (default: 2 on a CPU, else one for each GPU)"
    )
    verb.add_argument("--folder", type=Path, help="where the run lives (default: runs/NAME-DIGEST)")
    earlier = verb.add_mutually_exclusive_group()
    earlier.add_argument("--extend", action="store_true", help="resume an earlier run though its settings differ")
    earlier.add_argument("--fresh", action="store_true", help="set an earlier run in the folder aside and start over")
    verb.add_argument("--debug", action="store_true", help="debug logging of torch, NCCL and Gloo, in logs/")
    verb.add_argument("--inject", default="", metavar="FAULT", help=argparse.SUPPRESS)  # for `rehearse`


def train(options: argparse.Namespace) -> int:
    """Train: as the launcher of local ranks, or as one rank that somebody else has launched."""
    words.require_training()
    here = started_as(env.here(), options.ranks)
    if here is None:
        return until_asked(lambda: _launch(_resolved(options, options.ranks, is_first=True), options), options)
    resolved = partial(_resolved, options, here.world, is_first=here.rank == 0)
    return until_asked(lambda: _rank(resolved(), here, options), options, here.rank)


def train_on_machine(options: argparse.Namespace, place: "NodePlace", ranks: int) -> int:
    """Train on one machine of several, whose replicas can do without those of the others; `ranks` are the plan's."""
    words.require_training()
    resolved = partial(_resolved, options, ranks, is_first=True)
    return until_asked(lambda: _launch_machine(resolved(), options, place), options)


def until_asked(work: Callable[[], int], options: argparse.Namespace, rank: int | None = None) -> int:
    """Do it, unless SIGTERM comes before there is a rank that can save, or a launcher that has ranks to tell."""
    if threading.current_thread() is not threading.main_thread():  # as Ray's TorchTrainer calls a function
        what = "training listens for signals, and only the main thread of a process can"
        raise mistake(what, "start it as a process of its own: python -m meshwright train …")
    before = {number: signal.signal(number, _end_early) for number in failure.ASKS}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)  # which a rank that trains here takes
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, failure.ASKS)
        return work()
    except EarlyEnd as early:
        signal.pthread_sigmask(signal.SIG_BLOCK, failure.ASKS)  # a second one is not to end this in a stack
        who = "" if rank is None else f"rank {rank}: "
        what = str(early) or "stopped by SIGTERM before the first step; nothing to save"
        print(f"{who}{what}", file=sys.stderr)
        if options.json and not rank:
            _tell_program(Failure(kind="stopped", code=Exit.PREEMPTED, what=what), Exit.PREEMPTED)
        return Exit.PREEMPTED
    finally:  # who runs the verb in a process of their own goes on with theirs; the program ends with its own code
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


class EarlyEnd(BaseException):
    """SIGTERM, while there is nothing to save; no handler of errors is to take it for one."""


def _end_early(number: int, frame: FrameType | None) -> None:
    raise EarlyEnd


def started_as(here: Place | None, ranks: int | None) -> Place | None:
    """Whether this process is the rank that its environment names, or is asked to start some of its own."""
    if here is None or ranks in (None, here.world):
        return here
    if here.world == 1:  # a shell of a scheduler's, say, in which somebody asks for more
        return None
    what = f"--ranks {ranks} is asked for, and {here.launcher} has started {here.world}"
    raise InputError([Problem(what, "leave --ranks out, or start one process and let it start the ranks")])


def _resolved(options: argparse.Namespace, ranks: int | None, is_first: bool) -> Run:
    """The run of the words; of the ranks of one job, one looks at the data and speaks for all."""
    loaded = examined(options.words, ranks, looks=is_first)
    from meshwright.search import budget  # not before the words are known to be right

    loaded, choice = budget.resolved(loaded)
    if choice is not None and is_first:
        _teller(options.json)(f"goal.memory_gib = {loaded.run.goal.memory_gib:g}: {choice}")
    run = loaded.run
    if run.epochs:
        from meshwright.data.prepare import with_epochs

        run = with_epochs(run, env.cache(), _teller(options.json) if is_first else lambda text: None)
    return run


def examined(given: list[str], ranks: int | None, looks: bool = True) -> load.LoadedRun:
    """The run of a verb's words. Of the ranks of one job, one looks at the data for all."""
    file, overrides = words.split(given)
    loaded, problems = load.examine(file, overrides, ranks=ranks, default_ranks=env.default_ranks())
    if loaded is not None and not problems and looks:  # of data that the run may not mean there is nothing to say
        from meshwright.cli import preflight
        from meshwright.data import prepare

        run = loaded.run
        found = [*preflight.problems(run, env.gpu_names(), is_asked=ranks is not None)]
        found += [*prepare.problems(run), *check.missing(run.plan)]
        problems = [load.placed(problem, loaded.origins) for problem in found]
    if loaded is None or problems:
        raise InputError(problems)
    return loaded


def _launch(run: Run, options: argparse.Namespace) -> int:
    """Supervise the ranks of one machine, and prepare the tokens while their fork server imports torch."""
    from meshwright.runtime import ranks
    from meshwright.runtime import run_folder as folders
    from meshwright.runtime.failure import this_session

    say, world = _teller(options.json), run.plan.world
    folder = options.folder or folders.find(run, fresh=options.fresh, extend=options.extend)
    changed = options.fresh or folders.check_owner(folder, run, extend=options.extend)
    if changed or not (folder / folders.SUMMARY).exists():  # what has finished is only shown
        from meshwright.cli import preflight

        if problems := [*preflight.spare_problems(run, len(env.gpu_names()))]:
            raise InputError(problems)
        preflight.require_room(run, folder, env.gpu_names())
        preflight.require_remote(run, folder, options.fresh)
    claim = folders.Claim(folder, run, fresh=options.fresh, extend=options.extend)
    (folder / folders.STOP).unlink(missing_ok=True)  # it was for those who have stopped
    if claim.finished is not None:
        try:
            _make_up(run, folder, say)
        finally:
            claim.release()
        say(f"{folder} has finished this run; ask for more steps to continue it, or add --fresh to train it again")
        _tell(claim.finished, run, options)
        return Exit.DONE
    for warning in check.warnings(run):
        say(f"warning: {warning}")
    say(
        f"{run.name}: {plural(run.steps, 'step')} of {plural(run.tokens, 'token')}, "
        f"{count(run.arch):,} parameters; in {folder}"
    )
    if claim.changes:
        say(_extension(claim.changes, run))
    say(f"plan: {run.plan}")
    say(f"starting {plural(world, 'rank')} (or: torchrun --nproc-per-node {world} -m meshwright train …)")
    environment = {**ranks.defaults(world), **env.of_ranks(options.debug)}  # what the user says comes last
    try:
        failed = _supervised(run, folder, options, environment, session=this_session())
    except BaseException:
        claim.abandon()
        raise
    finally:
        claim.release()
    if failed is None:
        _tell(folders.read_summary(folder), run, options)
        return Exit.DONE
    if failed.kind in ("input", "corrupt"):
        claim.abandon()
    return _tell_failure(failed, options.json)


def _make_up(run: Run, folder: Path, say: Callable[[str], None]) -> None:
    """Run the last command of a run that was ended before it had; SIGTERM ends it again."""
    from meshwright.train import eval_command

    try:
        eval_command.make_up(run, folder, say)
    except EarlyEnd:
        raise EarlyEnd(f"stopped by SIGTERM, {failure.OWED}; {failure.OWED_REMEDY}") from None


def leave_bar(people: TextIO) -> None:
    """A rank that was killed takes no leave of the terminal: its bar's line is erased, and the cursor shown again."""
    if env.can_erase(people.isatty()):
        print("\r\x1b[2K\x1b[?25h", end="", file=people, flush=True)


def _supervised(
    run: Run, folder: Path, options: argparse.Namespace, environment: dict[str, str], session: str, **among: Any
) -> Failure | None:
    """Prepare the tokens while the fork server imports torch, then start ranks and watch them to their end.

    `among`: what a machine of several knows of the others.
    """
    from meshwright.data.prepare import described, prepare
    from meshwright.runtime import ranks
    from meshwright.runtime.supervise import StopRequest, Supervisor

    say, people = _teller(options.json), sys.stderr if options.json else sys.stdout
    speaker = Speaker(people)  # a launcher that waits for a reader restarts nobody, and tells nobody to save
    log = folder / "logs" / "fork_server.txt"
    place = msgspec.structs.replace(ALONE, threads=ranks.threads(environment))
    supervisor = Supervisor(
        run=run,
        folder=folder,
        fork_server=lambda: ranks.ForkServer(RANK, environment, log, people.fileno()),
        order=_order(folder, options, place=place, session=session),
        say=lambda text: speaker.say(lambda: say(text)),
        **among,
    )
    try:
        for line in described(run, prepare(run, env.cache(), say)):
            say(line)
        failed = supervisor.supervise(StopRequest().listen())
    finally:
        supervisor.close()
        speaker.close()
    if failed is not None:
        leave_bar(people)
    return failed


def _launch_machine(run: Run, options: argparse.Namespace, place: "NodePlace") -> int:
    """Supervise the ranks of one machine of several, whose replicas can do without those of the others."""
    from meshwright.cli import preflight
    from meshwright.launch.node import MachineSession
    from meshwright.runtime import meeting, ranks
    from meshwright.runtime import run_folder as folders
    from meshwright.runtime.links import interface_towards, is_loopback
    from meshwright.runtime.machines import Machines

    if problems := [*check.divide_replicas(run, place.nodes)]:
        raise InputError(problems)
    say, folder = _teller(options.json), options.folder or folders.find(run)
    if not folders.check_owner(folder, run) and (finished := folders.read_summary(folder)) is not None:
        if place.node == 0:
            _make_up(run, folder, say)
        say(f"{folder} has finished this run; ask for more steps to continue it")
        _tell(finished, run, options)
        return Exit.DONE
    preflight.require_room(run, folder, env.gpu_names())
    preflight.require_remote(run, folder, False)
    meeting.resolved(place.address, place.port, run.faults.meet_seconds)  # a pod's name may take a while
    own = partial(Machines, place.node, place.nodes, folder, place.address, place.port)
    session = MachineSession(run, folder, own, say)
    try:
        machines, is_new = session.meet()
        which = f"machine {place.node} of {place.nodes}, {plural(place.ranks, 'rank')}"
        say(f"{run.name}: {which}; {'all are there' if is_new else 'joining the others'}; in {folder}")
        for line in (*(f"warning: {each}" for each in check.warnings(run)), f"plan: {run.plan}"):
            say(line)
        inside = interface_towards(place.address, place.port, is_whole=is_loopback(place.address))
        listens = {"GLOO_SOCKET_IFNAME": inside} if inside else {}
        defaults = {name: value for name, value in ranks.defaults(place.ranks).items() if name != "GLOO_SOCKET_IFNAME"}
        environment = {**defaults, **listens, **env.of_ranks()}
        among = {"machines": machines, "is_new": is_new, "hold": session.hold, "meet_again": session.meet}
        failed = _supervised(run, folder, options, environment, session=machines.lease.job, **among)
    except InputError as error:
        session.refuse(error)
        raise
    finally:
        session.close()
    if failed is None:
        _tell(folders.read_summary(folder), run, options)
        return Exit.DONE
    return _tell_failure(failed, options.json)


def _order(folder: Path, options: argparse.Namespace, **own: Any) -> RankSpec:
    """What ranks are given; `own` is what differs between ours and those that somebody else launched."""
    from meshwright.runtime import run_folder as folders

    run, cache = str(folder / folders.RUN), str(env.cache())
    return RankSpec(run=run, folder=str(folder), cache=cache, began=env.BEGAN, inject=options.inject, **own)


def _rank(run: Run, here: Place, options: argparse.Namespace) -> int:
    """Be one rank of a job that torchrun, Slurm or MPI started; a sidecar of the first one here watches them all."""
    from meshwright.runtime import run_folder as folders
    from meshwright.train import eval_command

    if problems := [*check.need_own_starter(run, here.launcher, has_memory=bool(env.memory()))]:
        raise InputError(problems)
    fresh = options.fresh and env.attempt() == 1  # a restart resumes what it was asked to start
    folder = options.folder or folders.find(run, fresh=fresh, extend=options.extend)
    # In this order: whoever claims the folder sets the summary aside before it changes the run.
    patience = run.faults.meet_seconds
    try:
        changed = [] if fresh else folders.check_owner(folder, run, extend=options.extend)
    except InputError:
        # What a later rank finds in a folder that is held may be what rank 0 put there a moment ago: that the two were
        # started with different words is for their meeting to say, where all hear it and none waits for the other.
        if here.rank == 0 or not folders.is_held(folder):
            raise
        changed, patience = True, min(patience, HELD_SECONDS)
    finished = None if fresh or changed else folders.read_summary(folder)
    is_over = finished is not None and not eval_command.is_owed(run, folder)
    if env.attempt() > 1 and (folder / folders.STOP).exists() and not is_over:
        _teller(options.json)(f"rank {here.rank}: {folder / folders.STOP} is there; remove it to resume")
        return Exit.INTERRUPTED
    if finished is not None:
        if here.rank == 0:
            say = _teller(options.json)
            _make_up(run, folder, say)
            say(f"{folder} has finished this run; ask for more steps, or add --fresh")
            _tell(finished, run, options)
        return Exit.DONE
    if options.debug:
        env.debug()
    if here.rank == 0:
        return _first_rank(run, here, folder, fresh, options)
    return _serve(run, here, folder, options, patience)


def _first_rank(run: Run, here: Place, folder: Path, fresh: bool, options: argparse.Namespace) -> int:
    """Rank 0, which holds the folder for all and speaks for them."""
    from meshwright.cli import preflight
    from meshwright.runtime import run_folder as folders

    preflight.require_remote(run, folder, fresh)
    claim = folders.Claim(folder, run, fresh=fresh, extend=options.extend)
    (folder / folders.STOP).unlink(missing_ok=True)  # it was for those who have stopped
    if claim.changes:
        _teller(options.json)(_extension(claim.changes, run))
    try:
        code = _serve(run, here, folder, options, run.faults.meet_seconds)
    except (InputError, EarlyEnd, KeyboardInterrupt):
        claim.abandon()
        raise
    finally:
        claim.release()
    _tell_end(code, run, folder, options)
    return code


def _serve(run: Run, here: Place, folder: Path, options: argparse.Namespace, patience: float) -> int:
    """Meet the other ranks, train, and part; the exit code. `patience`: seconds without a newcomer."""
    from meshwright.runtime import run_folder
    from meshwright.runtime.links import interface_towards
    from meshwright.runtime.ranks import lasting_imports
    from meshwright.runtime.sidecar import Sidecar

    met = _met(here, folder, options, patience)
    beats = Path(tempfile.gettempdir()) / f"meshwright-{met.session}"  # the folder is rank 0's to claim
    run_folder.make_own(beats)
    about = {"place": met.place, "beats": str(beats), "speaks": here.rank == 0, "session": met.session}
    about["memory"] = env.memory() if run.faults.memory_every else ""
    order = _order(folder, options, attempt=env.attempt(), **about)
    if here.address:
        env.listen_on(interface_towards(here.address, here.port, is_whole=len(met.ranks) == here.world))
    is_leader = here.rank == met.ranks[0]
    if is_leader and len(met.ranks) < here.world:
        _warn_of_machine(here.rank)
    sidecar = Sidecar(run, met.place, met.ranks, beats, folder) if is_leader else None
    try:
        with lasting_imports():
            from meshwright.train.rank import serve  # imports torch: the sidecar watches meanwhile

        return serve(order, run, options.json)
    finally:
        if sidecar is not None:
            sidecar.close()


def _warn_of_machine(rank: int) -> None:
    """What the doctor would say of this machine alone, which takes milliseconds; training may do without."""
    from meshwright.runtime import doctor
    from meshwright.runtime.devices import gpu_health

    seen = msgspec.structs.replace(doctor.look(env.gpu_names()), rank=rank, health=gpu_health())
    for found in doctor.findings([seen], [], env.of_ranks()):
        if found.kind == "problem":
            print(f"warning: {seen.host}: {found.text}; {found.remedy}", file=sys.stderr, flush=True)


def _met(here: Place, folder: Path, options: argparse.Namespace, patience: float) -> "Met":
    """Who is beside this rank. Whoever listens for ranks itself, as torchrun does, has started them all."""
    from meshwright.runtime import meeting
    from meshwright.runtime.failure import session_above

    session = session_above(env.rank_variable(here))
    if here.is_agent or here.world == 1:
        first = here.rank - here.local_rank
        ranks = tuple(range(first, first + here.local_world))
        return meeting.Met(place=here, ranks=ranks, session=session)
    say = (lambda text: None) if here.rank else _teller(options.json)
    return meeting.meet(here, folder, session, patience, say)


def _tell_end(code: int, run: Run, folder: Path, options: argparse.Namespace) -> None:
    """How a run ended that somebody else's ranks made."""
    from meshwright.runtime import run_folder as folders
    from meshwright.runtime.supervise import newest_step

    if code == Exit.DONE:
        _tell(folders.read_summary(folder), run, options)
        return
    by_person = f"stopped by the file {folders.STOP}" if (folder / folders.STOP).exists() else "interrupted"
    how = "stopped by SIGTERM" if code == Exit.PREEMPTED else by_person
    is_asked = code in (Exit.PREEMPTED, Exit.INTERRUPTED)
    if is_asked and (folder / folders.SUMMARY).exists():
        _teller(options.json)(f"{how}, {failure.OWED}; {failure.OWED_REMEDY}")
    elif is_asked and (step := newest_step(folder)) >= 0:
        _teller(options.json)(f"{how}, checkpoint saved at step {step}: run the same command again to resume")
    if options.json:
        _tell_program(next((own for own in failure.read(folder) if own.rank == 0), None), code)


def _extension(changes: "list[Change]", run: Run) -> str:
    """What is no longer as it was in a run that is resumed."""
    steps = plural(run.steps, "step")
    return f"resuming with {'; '.join(map(str, changes))}; the learning rate schedule is now that of {steps}"


def _tell(summary: Summary | None, run: Run, options: argparse.Namespace) -> None:
    """How a run ended: one object for a program, a few lines and the sample for a person."""
    assert summary is not None, "a run that ends well leaves a summary"
    if options.json:
        teller(sys.stdout)(msgspec.json.encode(summary).decode())
        return
    validation = f", validation {summary.validation_loss:.4f}" if summary.validation_loss is not None else ""
    bad = [f"{name} {share:.1%}" for name, share in summary.badput.items() if share >= 0.0005]  # else it shows as 0.0 %
    attempts = f"; {summary.attempts} attempts" if summary.attempts > 1 else ""
    lines = [
        "",
        f"done: {plural(summary.step, 'step')} in {summary.seconds:.0f} s on {plural(summary.ranks, 'rank')}",
        f"  loss        {summary.first_loss:.4f} → {summary.loss:.4f}{validation}",
        f"  speed       {summary.tokens_per_second:,.0f} tokens/s{utilized(summary)}",
        f"  first loss  after {summary.seconds_to_first_loss:.1f} s",
        f"  memory      {summary.peak_bytes / GIB:.2f} GiB peak on one rank",
        f"  time        {', '.join([f'goodput {summary.goodput:.1%}', *bad])}{attempts}",
        f"  folder      {summary.folder} (run.toml, steps.rank*.jsonl, model/)",
    ]
    if summary.noise_scale is not None and summary.noise_scale_sequences is not None:
        suggested = f"suggests a batch of {max(round(summary.noise_scale_sequences), 1):,} sequences, now {run.batch:,}"
        lines.append(f"  noise       gradient noise scale {summary.noise_scale:,.0f} tokens: {suggested}")
    if summary.sample:
        lines += ["  sample", *(f"    {line}" for line in printable(summary.sample).split("\n"))]
    teller(sys.stdout, fits=True)("\n".join(lines))
    teller(sys.stdout)("\n".join(["try next:", *_next(summary, run, options)]))  # commands, to be copied as they are


def _next(summary: Summary, run: Run, options: argparse.Namespace) -> Iterator[str]:
    """What to do with a run that is done: commands, and beside them what they are for."""
    folder, found = shlex.quote(summary.folder), {}
    if run.data.sources == Data().sources:
        found["train data.source='my/*.txt'"] = "your own text"
    if summary.sample:
        found[f"generate {folder} --prompt 'my text'"] = "more of it"
    if is_exportable(run.arch):
        merge = " --merge" if run.adapter.kind != "none" else ""
        found[f"convert {folder} my-model{merge}"] = "a Hugging Face folder"
    found[shlex.join(["config", "show", *options.words])] = "every setting and where it came from"
    width = min(max(map(len, found)), 60)
    for command, what in found.items():
        yield f"  meshwright {command:<{width}}  {what}"


def utilized(summary: Summary) -> str:
    """How well the devices were used, by both conventions; nothing where their peak is not known."""
    if summary.mfu is None or summary.mfu_causal is None:
        return ""
    causal = f"{summary.mfu_causal:.1%} as computed (causal, {summary.tflops:,.0f} TFLOP/s per GPU)"
    return f", MFU {summary.mfu:.1%} with attention in full, {causal}"


def _tell_failure(failed: Failure, machine: bool) -> int:
    """How a run failed; what lay in a folder that was never begun is gone by now."""
    if not Path(failed.details).exists():
        failed = msgspec.structs.replace(failed, details="")
    teller(sys.stderr)(str(failed))
    if machine:
        _tell_program(failed, failed.code)
    return failed.code


def _tell_program(failed: Failure | None, code: int) -> None:
    """The same as one object; a rank that was interrupted has no failure report of its own."""
    report = {} if failed is None else msgspec.to_builtins(failed)
    report.pop("code", None)  # a script compares the exit code, which has its own name
    stopped = report.get("kind", "stopped") == "stopped"
    answer = {"state": "stopped" if stopped else "failed", "exit_code": int(code), **report}
    teller(sys.stdout)(msgspec.json.encode(answer).decode())


def _teller(machine: bool) -> Callable[[str], None]:
    """Where messages for people go. Training continues when nobody reads them."""
    return teller(sys.stderr if machine else sys.stdout, fits=True)
