"""The run folder: whose it is, what it already holds, who is writing to it."""

import fcntl
import math
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import load
from meshwright.config.run import Run, digests, mathematics
from meshwright.runtime.failure import process_name, this_session
from meshwright.runtime.files import replace_file, replace_json, writing
from meshwright.runtime.records import Summary
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.params import count as count_parameters
from meshwright.spec.problem import InputError, Problem

RUN, SUMMARY, LOCK = "run.toml", "summary.json", "lock"


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


class Claim:
    """A folder held for one run while it lasts. A second launcher is refused, by name."""

    def __init__(self, folder: Path, run: Run, *, fresh: bool = False) -> None:
        self.folder = folder
        with writing(folder, "name another --folder"):
            if fresh:
                self._set_aside()
            check_owner(folder, run)
            self._made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
            self.finished = read_summary(folder)
            if self.finished is None:
                for report in folder.glob("failure.rank*.json"):
                    report.unlink()  # of an earlier attempt, which whoever watches would take for this one's
                _write_run(folder, run)

    def release(self) -> None:
        """Let the next one in."""
        self._lock.close()

    def abandon(self) -> None:
        """Leave nothing behind of a run that never began: only a folder made by this claim, and only before a step."""
        if self._made and not any(self.folder.glob("steps.rank*.jsonl")):
            shutil.rmtree(self.folder)

    def _set_aside(self) -> None:
        """Rename what is there, so that starting over loses nothing. Whoever is at work in it keeps it."""
        folder = self.folder
        if not folder.exists():
            return
        with self._locked() if (folder / LOCK).is_file() else nullcontext():
            if not (folder / RUN).is_file() and not _names(folder) <= {LOCK}:
                what = f"{folder} is not a run folder, so --fresh leaves it alone"
                raise InputError([Problem(what, "name another --folder")])
            folder.rename(_unused(folder.parent, f"{folder.name}.{{}}"))

    def _locked(self) -> Any:
        lock = open(self.folder / LOCK, "a+")  # noqa: SIM115 - held for as long as the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            what = f"{self.folder} is in use by {lock.read().strip() or 'another process'}"
            lock.close()
            raise InputError([Problem(what, "wait for it, or name another --folder")]) from None
        lock.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        lock.write(f"process {os.getpid()} on {platform.node()} since {since}")
        lock.flush()
        return lock


def check_owner(folder: Path, run: Run) -> None:
    """Another run's folder, or a folder that is not a run's, is never written to."""
    if not folder.exists() or _names(folder) <= {LOCK}:
        return
    if not (folder / RUN).is_file():
        raise InputError([Problem(f"{folder} holds other files", "name an empty --folder")])
    if found := _differences(mathematics(load.load(folder / RUN).run), mathematics(run)):
        remedy = "name another --folder, or add --fresh to set that run aside and start anew"
        raise InputError([Problem(f"{folder} belongs to another run ({'; '.join(found)})", remedy)])


def state_bytes(run: Run) -> int:
    """One saved step: every weight and its optimizer states."""
    width = 8 if run.plan.precision == "fp64" else 4
    return (width + OPTIMIZERS[run.optim.name].state_bytes(width)) * count_parameters(run.arch)


def checkpoint_problems(run: Run, folder: Path) -> list[Problem]:
    """Whether the disk can take the checkpoints that a run keeps, beside those it has, and one while it is written."""
    wish, size = run.checkpoint, state_bytes(run)
    saves = run.steps // wish.every if wish.every else 1
    kept = wish.keep_last + (run.steps // wish.keep_every if wish.keep_every else 0)
    present = len(list(folder.glob("checkpoints/step-*")))
    times = max(min(saves, kept + 1) - present, min(saves, 1))
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    need, free = times * size, shutil.disk_usage(place).free
    if need <= free:
        return []
    what = f"not enough disk for checkpoints: need {need:,} bytes ({times} of {size:,}), free {free:,} in {place}"
    return [Problem(what, "free some, name a --folder on another disk, or lower checkpoint.keep_last", "checkpoint")]


def write_summary(folder: Path, summary: Summary) -> None:
    """The last thing a run writes: it is finished when this file is there."""
    replace_json(folder / SUMMARY, summary)


def read_summary(folder: Path) -> Summary | None:
    """How the run in a folder ended, None if it has not. JSON has null for a loss that is not finite."""
    file = folder / SUMMARY
    if not file.exists():
        return None
    try:
        values = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        lost = {name: math.nan for name in ("first_loss", "loss") if values.get(name, 0.0) is None}
        return msgspec.convert(values | lost, Summary)
    except msgspec.DecodeError as error:
        remedy = "delete it to resume from the newest checkpoint, or add --fresh to set the run aside"
        raise InputError([Problem(f"{file} is damaged: {error}", remedy)]) from None


def _write_run(folder: Path, run: Run) -> None:
    """The run as it continues; how it was before, under another plan for example, is kept under a number."""
    file = folder / RUN
    if file.exists() and load.load(file).run != run:
        file.rename(_unused(folder, "run.{}.toml"))
    replace_file(file, load.write(run).encode())


def _unused(folder: Path, name: str) -> Path:
    """A name with the first number that none in the folder has."""
    return next(path for number in count(1) if not (path := folder / name.format(number)).exists())


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _differences(there: Any, here: Any, prefix: str = "") -> list[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        found = []
        for key in here.keys() | there.keys():
            found += _differences(there.get(key), here.get(key), f"{prefix}{key}.")
        return sorted(found)
    return [] if there == here else [f"{prefix[:-1]} {there!r} there, {here!r} here"]


OWNED = re.compile(r"meshwright-(?P<owner>(?P<host>.+):(?P<pid>\d+):\d+)(-\w+)?")


def prefix() -> str:
    """How the names of this launcher's temporary folders begin."""
    return f"meshwright-{this_session()}-"


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
