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
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import load
from meshwright.config.run import Run, digests, mathematics
from meshwright.runtime.failure import process_name, this_session
from meshwright.runtime.files import replace_file, writing
from meshwright.runtime.records import Summary
from meshwright.spec.problem import InputError, Problem

RUN, SUMMARY, LOCK = "run.toml", "summary.json", "lock"


def default(run: Run) -> Path:
    """Where a run lives if nobody says: the same mathematics always in the same folder, another in another.

    A folder that was named when keys had other names stays the run's.
    """
    now, before = (Path("runs") / f"{run.name}-{name}" for name in digests(run))
    return before if before.exists() and not now.exists() else now


class Claim:
    """A folder held for one run while it lasts. A second launcher is refused, by name."""

    def __init__(self, folder: Path, run: Run, *, fresh: bool = False) -> None:
        self.folder = folder
        with writing(folder, "name another --folder"):
            self._take(run, fresh)

    def release(self) -> None:
        """Let the next one in."""
        self._lock.close()

    def abandon(self) -> None:
        """Leave nothing behind of a run that never began: only a folder made by this claim, and only before a step."""
        if self._made and not any(self.folder.glob("steps.rank*.jsonl")):
            shutil.rmtree(self.folder)

    def _take(self, run: Run, fresh: bool) -> None:
        folder = self.folder
        if fresh:
            self._set_aside()
        check_owner(folder, run)
        self._made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        self.finished = read_summary(folder)
        if self.finished is None:
            for words in folder.glob("failure.rank*.json"):
                words.unlink()  # last words of an earlier attempt, which whoever watches would take for this one's
            _write_run(folder, run)

    def _set_aside(self) -> None:
        """Rename what is there, so that starting anew loses nothing. Whoever is at work in it keeps it."""
        if not (self.folder / LOCK).is_file():
            _set_aside(self.folder)
            return
        with self._locked():
            _set_aside(self.folder)

    def _locked(self) -> Any:
        lock = open(self.folder / LOCK, "a+")  # noqa: SIM115 - held for as long as the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            lock.close()
            raise InputError(
                [Problem(f"{self.folder} is in use by {owner}", "wait for it, or name another --folder")]
            ) from None
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
    there = load.load(folder / RUN).run
    differences = _differences(mathematics(there), mathematics(run))
    if differences:
        raise InputError(
            [
                Problem(
                    f"{folder} belongs to another run ({'; '.join(differences)})",
                    "name another --folder, or add --fresh to set that run aside and start anew",
                )
            ]
        )


def write_summary(folder: Path, summary: Summary) -> None:
    """The last thing a run writes: it is finished when this file is there."""
    replace_file(folder / SUMMARY, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")


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
        remedy = "delete it to go on from the newest checkpoint, or add --fresh to set the run aside"
        raise InputError([Problem(f"{file} is damaged: {error}", remedy)]) from None


def _write_run(folder: Path, run: Run) -> None:
    """The run as it goes on; how it was before, under another plan for example, is kept under a number."""
    file = folder / RUN
    if file.exists() and load.load(file).run != run:
        number = 1
        while (old := folder / f"run.{number}.toml").exists():
            number += 1
        file.rename(old)
    replace_file(file, load.write(run).encode())


def _set_aside(folder: Path) -> None:
    if not folder.exists():
        return
    if not (folder / RUN).is_file() and not _names(folder) <= {LOCK}:
        raise InputError(
            [Problem(f"{folder} is not a run folder, so --fresh leaves it alone", "name another --folder")]
        )
    number = 1
    while (old := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(old)


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
    found = [entry for entry in (folder or Path(tempfile.gettempdir())).glob("meshwright-*") if _is_left(entry)]
    for entry in found:
        shutil.rmtree(entry, ignore_errors=True)  # another launcher may be at it too
    return found


def _is_left(entry: Path) -> bool:
    """A number is given to another process one day; together with when that began it is not."""
    name = OWNED.fullmatch(entry.name)
    if name is None or name["host"] != socket.gethostname() or entry.is_symlink() or not entry.is_dir():
        return False
    return entry.lstat().st_uid == os.geteuid() and process_name(int(name["pid"])) != name["owner"]
