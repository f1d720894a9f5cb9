"""The run folder: whose it is, what it already holds, who is writing to it, and how another run may go on in it."""

import fcntl
import math
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import load
from meshwright.config.huggingface import TOKENIZER, shape_differences
from meshwright.config.run import Run, digests, mathematics
from meshwright.config.weights import CHECKPOINTS, RUN, SUMMARY, present
from meshwright.runtime.failure import Exit, Failure, FailureError, process_name, this_session
from meshwright.runtime.files import replace_file, replace_json, writing
from meshwright.runtime.records import Summary
from meshwright.spec.optimizers import DESCRIPTIONS, description_of
from meshwright.spec.params import count as count_parameters
from meshwright.spec.params import saved, trained
from meshwright.spec.problem import UNDECODABLE, InputError, Problem, mistake
from meshwright.spec.units import plural

LOCK, DATA, STOP = "lock", "data.json", "stop"  # the last: put there by people, to have the run save and end
FORMER_LOSS = "held_out_loss"  # how a summary called its validation loss
NAMED = re.compile(r"(?P<name>.+)-[0-9a-f]{8}")  # a folder that nobody named
STUTTER_SECONDS = 1.0  # in which a shared filesystem finds again what it did not see for a moment
ROOM = "free some space, name a --folder on another disk, lower checkpoint.keep_last, or set checkpoint.keep_best=false"
OTHERWISE = "name another --folder, or add --fresh to set that run aside and start over"
# What no checkpoint can go on with, and why.
FIXED = {
    "optim.name": "its optimizer state is of another kind",
    "optim.master_weights": "its weights are saved in another form",
    "optim.state_dtype": "its optimizer state is saved in another dtype",
    "init.from": "it has begun already",
    "init.optimizer_state": "it has begun already",
    **dict.fromkeys(("adapter.kind", "adapter.rank", "adapter.targets"), "its checkpoints have other weights"),
    **dict.fromkeys(("adapter.alpha", "adapter.rslora"), "what was trained would be scaled otherwise"),
    "optim.freeze": "its checkpoints have states of other weights",
}


def default(run: Run) -> Path:
    """Where a run lives if nobody says: the same mathematics always in the same folder, another in another.

    A folder that was named when keys had other names stays the run's.
    """
    if not run.name or run.name.startswith(".") or set(run.name) & set("/\\\0"):
        what = f"name = {run.name!r} cannot be part of a folder's name"
        raise InputError(
            [Problem(what, "use letters, digits, - and _, or say by --folder where the run lives", "name")]
        )
    now, before = (Path("runs") / f"{run.name}-{name}" for name in digests(run))
    return before if before.exists() and not now.exists() else now


def find(run: Run, *, fresh: bool = False, extend: bool = False) -> Path:
    """Where a run lives if nobody says, looked up: a run of the same mathematics but fewer steps is this one.

    To `extend` one is to change its mathematics: it is the only run of that name.
    """
    home = default(run)
    if fresh:
        return home
    called: dict[Path, Run] = {}
    for entry in sorted(home.parent.iterdir()) if home.parent.is_dir() else ():
        name = NAMED.fullmatch(entry.name)
        if name is not None and name["name"] == Path(run.name).name and (entry / RUN).is_file():
            with suppress(InputError):  # what it began from is gone
                called[entry] = load.load(entry / RUN).run
    same = [entry for entry, there in called.items() if _is_length(there, run, changes(there, run))]
    if same := [entry for entry in same if called[entry].steps <= run.steps]:
        return max(same, key=lambda entry: (called[entry].steps, entry == home))
    if not extend:
        return home
    if len(called) != 1:
        there = (
            f"{len(called)} runs are called {run.name}: {', '.join(map(str, called))}" if called else "no run to extend"
        )
        raise InputError([Problem(there, "name its folder with --folder")])
    return next(iter(called))


class Change(msgspec.Struct, frozen=True):
    """A setting that decides the weights and is not what it was."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{self.key} = {self.new}, which is part of the mathematics of one of them alone"
        return f"{self.key} {self.old} → {self.new}"


def changes(there: Run, here: Run) -> list[Change]:
    """In which settings the mathematics of two runs differ.

    A setting may be part of one of them alone, such as the replicas of a run that rounds their gradients: with the same
    value in both it is told only where nothing else differs.
    """
    keys = _differing(mathematics(there), mathematics(here))
    named = {key if hasattr(here, key.partition(".")[0]) else f"plan.{key}" for key in keys}
    found = [Change(key, _value(there, key), _value(here, key)) for key in sorted(named)]
    return [each for each in found if each.old != each.new] or found


class Claim:
    """A folder held for one run while it lasts. A second launcher is refused, by name."""

    def __init__(self, folder: Path, run: Run, *, fresh: bool = False, extend: bool = False) -> None:
        self.folder = folder
        self._kept: list[tuple[Path, Path]] = []  # what was changed here: its copy, and where it belongs
        with writing(folder, "name another --folder"):
            if fresh:
                self._set_aside()
            self.changes = check_owner(folder, run, extend=extend)
            self._made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = locked(folder)
            self._records = self._recorded()
            self.finished = None if self.changes else read_summary(folder)
            if self.finished is None:
                for report in folder.glob("failure.rank*.json"):
                    report.unlink()  # of an earlier attempt, which whoever watches would take for this one's
                # The summary goes first: who finds the new run file must not take the old summary for its end.
                for name in [SUMMARY] * bool(self.changes) + [DATA] * extend:
                    if (folder / name).exists():
                        self._keep(name)
                        (folder / name).unlink()
                if (folder / RUN).exists() and load.load(folder / RUN).run != run:
                    self._keep(RUN)
                replace_file(folder / RUN, load.write(run).encode())

    def release(self) -> None:
        """Let the next one in."""
        self._lock.close()

    def abandon(self) -> None:
        """Leave nothing behind of a run that never began: a folder made by this claim goes, one that was there is again
        as it was. After a step nothing is undone."""
        if self._recorded() != self._records:
            return
        if self._made:
            shutil.rmtree(self.folder)
        for copy, original in self._kept:
            copy.replace(original)

    def _recorded(self) -> dict[str, int]:
        return {file.name: file.stat().st_size for file in self.folder.glob("steps.rank*.jsonl")}

    def _keep(self, name: str) -> None:
        """A copy under a number; the file itself stays, so that no other rank finds none."""
        stem, dot, end = name.rpartition(".")
        copy = _unused(self.folder, f"{stem}.{{}}{dot}{end}")
        shutil.copyfile(self.folder / name, copy)
        self._kept.append((copy, self.folder / name))

    def _set_aside(self) -> None:
        """Rename what is there, so that starting over loses nothing. Whoever is at work in it keeps it."""
        folder = self.folder
        if not folder.exists():
            return
        with locked(folder) if (folder / LOCK).is_file() else nullcontext():
            if not (folder / RUN).is_file() and not _names(folder) <= {LOCK}:
                what = f"{folder} is not a run folder, so --fresh leaves it alone"
                raise mistake(what, "name another --folder")
            folder.rename(_unused(folder.parent, f"{folder.name}.{{}}"))


def locked(folder: Path) -> Any:
    """A file that only one process can hold open so; whoever has it is named."""
    lock = open(folder / LOCK, "a+")  # noqa: SIM115 - held for as long as the run
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another error says that this filesystem has no locks, and so no word of others
        lock.seek(0)
        what = f"{folder} is in use by {lock.read().strip() or 'another process'}"
        lock.close()
        raise mistake(what, "wait for it, or name another --folder") from None
    except OSError:
        pass
    lock.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    lock.write(f"process {os.getpid()} on {platform.node()} since {since}")
    lock.flush()
    return lock


def is_held(folder: Path) -> bool:
    """Whether somebody holds the folder right now, as far as its filesystem knows."""
    try:
        with open(folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def holder(folder: Path) -> str:
    """Who holds the folder right now, in words; "" if nobody does."""
    if not is_held(folder):
        return ""
    with suppress(OSError):
        return (folder / LOCK).read_text(errors="replace").strip() or "another process"
    return ""


class FolderWatch:
    """Whether the folder of a run that trains is still the one that it began in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = -1  # the folder's lock file, held open: with the folder it loses its last name
        with suppress(OSError):
            self.lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        self.counts_names = self.lock >= 0 and os.fstat(self.lock).st_nlink > 0  # some filesystems do not

    def is_taken(self) -> bool:
        """Whether it is no longer there, or another one is in its place."""
        return (self.counts_names and os.fstat(self.lock).st_nlink == 0) or is_gone(self.folder)

    def require(self) -> None:
        """End a run whose folder was taken away. Two looks must agree: some filesystems stutter."""
        if self.is_taken():
            time.sleep(STUTTER_SECONDS)
            if self.is_taken():
                raise FolderGoneError(gone(self.folder))

    def close(self) -> None:
        """Look no more."""
        if self.lock >= 0:
            os.close(self.lock)
        self.lock, self.counts_names = -1, False


class FolderGoneError(FailureError):
    """The run folder was taken away; what stands in its place is somebody else's."""


def is_gone(folder: Path) -> bool:
    """Whether a folder in which a run has begun is no longer there."""
    try:
        (folder / RUN).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # which may pass
        return False
    return False


def gone(folder: Path) -> Failure:
    """How a run ends whose folder was taken away. Nobody is to start it again unasked: it would start over."""
    return Failure(
        kind="error",
        code=Exit.FAILED,
        what=f"the run folder {folder} is gone: it was removed or renamed while the run was training",
        where=socket.gethostname(),
        remedy="put it back under its name and run the same command again to resume; without it the run starts over",
    )


def check_owner(folder: Path, run: Run, *, extend: bool = False) -> list[Change]:
    """How this run differs from the one in a folder, where it may go on there. What is not a run's is never touched."""
    with writing(folder, "name another --folder"):
        # What begins with a dot is being written: the run file, by the first rank of the same job.
        if not folder.exists() or {name for name in _names(folder) if not name.startswith(".")} <= {LOCK}:
            return []
    if not (folder / RUN).is_file():
        raise mistake(f"{folder} holds other files", "name an empty --folder")
    there = load.load(folder / RUN).run
    if (found := changes(there, run)) and (problem := _obstacle(folder, there, run, found, extend)) is not None:
        raise InputError([problem])
    return found


def _obstacle(folder: Path, there: Run, run: Run, found: list[Change], extend: bool) -> Problem | None:
    """Why the run in a folder does not go on with some changes, None if it does."""
    listed, is_length = "; ".join(map(str, found)), _is_length(there, run, found)
    if why := _impossible(there, run, found):
        return Problem(f"{folder} belongs to another run, and cannot be resumed with {why}", OTHERWISE)
    summary, saved = read_summary(folder), max(present(folder / CHECKPOINTS), default=0)
    done = saved if summary is None else summary.step
    more = f"ask for more than {plural(done, 'step')}" if run.steps < done or (summary and run.steps == done) else ""
    if not extend and not (is_length and (more or run.steps > there.steps)):
        remedy = f"add --extend to resume from its newest checkpoint with these changes, {OTHERWISE}"
        return Problem(f"{folder} belongs to another run ({listed})", f"{more} and {remedy}" if more else remedy)
    if more:
        what = f"{folder} has made {plural(done, 'step')}, and steps = {run.steps} asks for no more"
        return Problem(what, f"{more}, {OTHERWISE}", "steps")
    own, texts = folder / TOKENIZER, {"data.source", "data.mix", "data.format", "data.field"}
    if own.exists() and run.data.tokenizer == "train" and texts & {each.key for each in found}:
        what = f"a tokenizer trained on other text than {folder}'s would number tokens otherwise ({listed})"
        return Problem(what, f"add data.tokenizer={own}", "data.tokenizer")
    if summary is not None and not saved:
        what = f"{folder} has finished without a checkpoint to resume from"
        return Problem(what, f"begin another run with its weights, init.from={folder}, and {OTHERWISE}")
    return None


def _is_length(there: Run, here: Run, found: list[Change]) -> bool:
    """Whether two runs differ in their length alone, and in what follows from it: a warm-up that nobody stated."""
    follows = all(run.optim.warmup == load.usual_warmup(run.steps) for run in (there, here))
    return {each.key for each in found} <= ({"steps", "optim.warmup"} if follows else {"steps"})


def _impossible(there: Run, run: Run, found: list[Change]) -> str:
    """What no checkpoint can go on with, and why; "" if there is nothing of the kind."""
    why = [f"{each} ({FIXED[each.key]})" for each in found if each.key in FIXED]
    if shapes := shape_differences(there.arch, run.arch):
        why.append(f"{'; '.join(shapes)} (its weights have other shapes)")
    if {there.plan.precision, run.plan.precision} > {"fp64"}:
        why.append(
            f"plan.precision {there.plan.precision} → {run.plan.precision} (its weights are saved in another form)"
        )
    return "; ".join(why)


def earlier(folder: Path) -> dict[str, Run]:
    """What the run in a folder has been before, by digest."""
    return _by_digest(folder.glob("run.*.toml"))


def now_and_earlier(folder: Path) -> dict[str, Run]:
    """The same, and what the run in it is now, which a longer one will have been."""
    return _by_digest([*folder.glob("run.*.toml"), folder / RUN])


def _by_digest(files: Iterable[Path]) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for file in files:
        with suppress(InputError):
            run = load.load(file).run
            found |= dict.fromkeys(digests(run), run)
    return found


def state_bytes(run: Run) -> int:
    """One saved step: every weight and its optimizer states; padding of a few bytes is left out."""
    width = 8 if run.plan.precision == "fp64" else 4
    states = DESCRIPTIONS[description_of(run.optim)].total_bytes(
        trained(run.arch), 2 if run.optim.state_dtype == "bf16" else width
    )
    # Of errors each replica saves its own; those of the servers are one more copy together.
    errors = run.plan.replicate * width * count_parameters(run.arch) if run.compresses else 0
    return width * sum(param.numel for param in saved(run.arch)) + states + errors


def lack_of_room(run: Run, folder: Path, free: int) -> str | None:
    """Why a disk can take no save beside the one before it; None if it can."""
    wanted, least, size = _saves(run, folder)
    if least * size <= free:
        return None
    needs = f"need {wanted * size:,} bytes ({wanted} of {size:,})"
    return f"not enough disk for checkpoints: {needs}, free {free:,} in {folder}"


def fewer_kept(run: Run, folder: Path, free: int) -> str | None:
    """That a disk has room for one save and the next, though more are to be kept; None if it has for all."""
    wanted, least, size = _saves(run, folder)
    if wanted * size <= free or wanted == least:
        return None
    return (
        f"only the newest checkpoint is kept: those that the run file asks for need {wanted * size:,} bytes "
        f"({wanted} of {size:,}), and {free:,} are free in {folder}"
    )


def _saves(run: Run, folder: Path) -> tuple[int, int, int]:
    """How many saves the disk still has to take, if all are kept and if one is, with the one at work; their size."""
    wish, there = run.checkpoint, len(present(folder / CHECKPOINTS))
    milestones = run.steps // wish.keep_every if wish.keep_every else 0
    saves = math.ceil(run.steps / wish.every) if wish.every else 1
    most = min(saves, wish.keep_last + wish.keep_best + milestones + 1)
    least = min(saves, 1)
    return max(most - there, least), max(min(saves, 2) - there, least), state_bytes(run)


def document_tokens(target: Path) -> float | None:
    """The mean length of the documents that a run learnt from, of its folder or run file; None: nobody counted."""
    file = (target if target.is_dir() else target.parent) / DATA
    if not target.exists() or not file.is_file():
        return None
    facts: list[dict[str, Any]] = []
    with suppress(*UNDECODABLE):
        facts = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    documents = sum(fact.get("documents", 0) for fact in facts)
    return sum(fact.get("tokens", 0) for fact in facts) / documents if documents else None


def write_summary(folder: Path, summary: Summary) -> None:
    """The last thing a run writes: it is finished when this file is there."""
    replace_json(folder / SUMMARY, summary)


def read_summary(folder: Path) -> Summary | None:
    """How the run in a folder, which may have been moved, ended; None if it has not. JSON has null for a NaN."""
    file = folder / SUMMARY
    if not file.exists():
        return None
    try:
        values = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        lost = {name: math.nan for name in ("first_loss", "loss") if values.get(name, 0.0) is None}
        renamed = {"validation_loss": values[FORMER_LOSS]} if FORMER_LOSS in values else {}
        return msgspec.convert(renamed | values | lost | {"folder": str(folder)}, Summary)
    except UNDECODABLE as error:
        remedy = "delete it to resume from the newest checkpoint, or add --fresh to set the run aside"
        raise mistake(f"{file} is damaged: {error}", remedy) from None


def _unused(folder: Path, name: str) -> Path:
    """A name with the first number that none in the folder has."""
    return next(path for number in count(1) if not (path := folder / name.format(number)).exists())


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _differing(there: Any, here: Any, prefix: str = "") -> set[str]:
    """The dotted keys of two nested tables that have other values."""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return set() if there == here else {prefix[:-1]}
    keys = here.keys() | there.keys()
    return set().union(*(_differing(there.get(key), here.get(key), f"{prefix}{key}.") for key in keys))


def _value(run: Run, key: str) -> Any:
    values = msgspec.to_builtins(run)
    for part in key.split("."):
        values = values[part]
    return values


OWNED = re.compile(r"meshwright-(?P<owner>(?P<host>.+):(?P<pid>\d+):\d+)(-\w+)?")


HOST_MEMORY = Path("/dev/shm")  # files that live in host memory, on Linux


def prefix() -> str:
    """How the names of this launcher's temporary folders begin."""
    return f"meshwright-{this_session()}-"


def in_host_memory() -> "tempfile.TemporaryDirectory[str]":
    """A folder of this launcher's in host memory, that only its user can read; gone with the launcher."""
    if not HOST_MEMORY.is_dir():
        what = f"faults.memory_every needs files in host memory, and there is no {HOST_MEMORY}"
        raise mistake(what, "leave it out, and save to the disk more often (checkpoint.every)", "faults.memory_every")
    return tempfile.TemporaryDirectory(prefix=prefix(), dir=HOST_MEMORY)


def make_own(folder: Path) -> None:
    """A temporary folder that ranks of one machine share, or a refusal: its name can be guessed by anybody there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if folder.is_symlink() or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise mistake(f"{folder} belongs to somebody else, or others may write there", "remove it, or set TMPDIR")


def sweep(folder: Path | None = None) -> list[Path]:
    """Remove what processes of this machine and user have left that were killed; what was removed."""
    found = []
    for entry in (folder or Path(tempfile.gettempdir())).glob("meshwright-*"):
        name = OWNED.fullmatch(entry.name)
        if name is None or name["host"] != socket.gethostname() or entry.is_symlink() or not entry.is_dir():
            continue
        # A number is given to another process one day; together with when that began it is not.
        if entry.lstat().st_uid == os.geteuid() and process_name(int(name["pid"])) != name["owner"]:
            shutil.rmtree(entry, ignore_errors=True)  # another launcher may be at it too
            found.append(entry)
    return found
