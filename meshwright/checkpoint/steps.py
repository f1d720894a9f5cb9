"""The steps that a run folder holds, the pointer to the newest, and which of them may go."""

import re
from contextlib import suppress
from pathlib import Path

from meshwright.checkpoint import storage
from meshwright.checkpoint.corrupt import CorruptError, Damage
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.storage import Disk
from meshwright.spec.run import Checkpoint

CHECKPOINTS, LATEST = "checkpoints", "latest"
STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
POINTER = re.compile(rb"step-(0|[1-9]\d{0,17})\n([0-9a-f]{64})\n")
POINTER_BYTES = 200


def home(folder: Path) -> Path:
    """Where a run keeps its steps; a link in its place is refused, so that nothing is written elsewhere."""
    path = folder / CHECKPOINTS
    if path.is_symlink():
        raise CorruptError([Damage(file=str(path), text="is a link, and a run writes only inside its own folder")])
    return path


def name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step}"


def present(home: Path) -> list[int]:
    """The steps that have a folder, oldest first; whether they are whole is another question."""
    if not home.is_dir():
        return []
    return sorted(int(found[1]) for entry in home.iterdir() if (found := STEP.fullmatch(entry.name)))


def point(disk: Disk, home: Path, step: int, digest: str) -> None:
    """Have `latest` name a step and, on a second line, the sha256 in its manifest."""
    storage.write_whole(disk, home / LATEST, f"{name(step)}\n{digest}\n".encode())


def pointed(home: Path) -> tuple[int, str] | None:
    """The step that `latest` names, and its manifest's sha256; None where nothing was ever saved."""
    if not (home / LATEST).exists() and not (home / LATEST).is_symlink():
        return None
    found = POINTER.fullmatch(storage.read_small(home, LATEST, POINTER_BYTES))
    if found is None:
        raise CorruptError(
            [Damage(file=str(home / LATEST), text="does not name a step and the sha256 of its manifest")]
        )
    return int(found[1]), found[2].decode()


def pointer_fault(home: Path, newest: int, digest: str) -> Damage | None:
    """What `latest` says that is not so, given the newest step that is whole."""
    file = str(home / LATEST)
    try:
        found = pointed(home)
    except CorruptError as error:
        return error.damages[0]
    if found is None:
        return Damage(file=file, text=f"is missing, though {name(newest)} is whole")
    if found[0] != newest:
        return Damage(file=file, text=f"points to {name(found[0])}; the newest whole step is {name(newest)}")
    if found[1] != digest:
        return Damage(file=file, text=f"names another {MANIFEST} of {name(newest)}")
    return None


def superfluous(steps: list[int], setting: Checkpoint) -> list[int]:
    """Which steps may go once the newest of them is known to be good."""
    others = steps[: -setting.keep_last]
    return [step for step in others if not setting.keep_every or step % setting.keep_every]


def thin(disk: Disk, home: Path, setting: Checkpoint) -> None:
    """Remove what may go, now that the newest step is known to be good. What cannot be removed stays for later."""
    with suppress(OSError):
        for step in superfluous(present(home), setting):
            discard(disk, home, step)


def discard(disk: Disk, home: Path, step: int) -> None:
    """Remove a step so that at no time a part of it stands under its name."""
    hidden = home / f".{name(step)}.old"
    disk.remove(hidden)
    disk.rename(home / name(step), hidden)
    disk.remove(hidden)


def sweep(disk: Disk, home: Path) -> None:
    """Remove what saves that were cut short have left."""
    if home.is_dir():
        for entry in list(home.iterdir()):
            if entry.name.startswith(".") and entry.name.endswith((".partial", ".old")):
                disk.remove(entry)
