"""Writing: atomically; what cannot be written is a mistake before the work, and no reason to end it later."""

import fcntl
import os
import queue
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import msgspec

from meshwright.runtime.terminal import fitted
from meshwright.spec.problem import mistake

# Control characters but for tab and line feed, other ends of a line, marks of direction, and halves of characters.
STEERING = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)

YOUNG_SECONDS = 60.0  # in which whoever makes a folder has it held
PATIENCE = 1.0  # seconds that one word may hold up a step; a rank that does not move for five is taken for hung
LAST_SECONDS = 10.0  # that the last words are given
MOST_WAITING = 10_000  # lines; what comes then is not said, and the records have it


@contextmanager
def writing(place: Path, remedy: str) -> Iterator[None]:
    """What the system refuses inside is the user's to put right."""
    try:
        yield
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror or error
        raise mistake(f"{place} cannot be written: {why}", remedy) from None


def require_folder(folder: Path, remedy: str) -> None:
    """Make a folder, and refuse one in which no file can be made."""
    with writing(folder, remedy):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def require_file(file: Path, remedy: str) -> None:
    """Refuse a file that could not be written later; nothing is left of the attempt."""
    with writing(file, remedy):
        is_new = not file.exists()
        with open(file, "ab"):
            pass
        if is_new:
            file.unlink()


def refuse_existing(file: Path, force: bool) -> None:
    """What is there stays, unless the user says otherwise."""
    if file.exists() and not force:
        raise mistake(f"{file} exists", "add --force to replace it, or name another file")


def replace_file(file: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file atomically: whoever reads it finds all of the old one or all of the new one."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")  # of this process: several may write the same
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(mode)
        temporary.write_bytes(data)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def replace_json(file: Path, value: object) -> None:
    """The same with a value as JSON that people can read."""
    replace_file(file, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def write_whole(file: Path, text: str, force: bool) -> None:
    """Put a text into a file, whole or not at all."""
    refuse_existing(file, force)
    try:
        replace_file(file, text.encode())
    except OSError as error:
        remedy = "name a file in a folder that can be written"
        raise mistake(f"{file}: {error.strerror}", remedy) from None


def held_folder(folder: Path) -> int | None:
    """A descriptor by which this process alone holds a folder, until it is closed or ends; None: another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also where the filesystem has no locks, and so no word of others
        os.close(descriptor)
        return None
    return descriptor


def sweep_beside(target: Path) -> None:
    """Remove what processes that were killed have left beside a folder that they wrote: it may be as large."""
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(partial|old)")
    for entry in target.parent.iterdir():
        found = left.fullmatch(entry.name)
        # What is young may be somebody's who holds it in a moment; without its target, the old one is all there is.
        if found is None or (found[1] == "old" and not target.exists()):
            continue
        with suppress(OSError):
            if time.time() - entry.stat().st_mtime > YOUNG_SECONDS and (held := held_folder(entry)) is not None:
                shutil.rmtree(entry, ignore_errors=True)
                os.close(held)


def teller(stream: TextIO, fits: bool = False) -> Callable[[str], None]:
    """Tells people what they may not stay to hear: a reader that leaves, or a full disk, ends the telling alone.

    `fits`: long lines are broken as the terminal needs it. A command would not be one any more.
    """

    def tell(text: str) -> None:
        try:
            print(fitted(text, stream) if fits else text, file=stream, flush=True)
        except OSError:
            forsake(stream)

    return tell


def printable(text: str) -> str:
    """Text of a model, or of somebody's data, for a screen: what would steer the terminal is escaped."""
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def forsake(stream: TextIO) -> None:
    """What waits in a stream that nobody reads goes nowhere, and does not change the exit code on the way out."""
    with suppress(OSError):  # a stream without a file needs none of it
        number, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


class Speaker:
    """Speaks on a thread of its own, and waits for that only while somebody reads.

    A reader may stand still: a terminal after Ctrl-S, a pager, an mpirun that was told to end. None of them stops the
    training; and what a rank has said before it is killed is there.
    """

    def __init__(self, stream: TextIO, unheard: bool = False) -> None:
        self.stream = stream
        self.unheard = unheard  # nobody is to hear it, a reader has left, or a disk is full
        self.words = queue.SimpleQueue[tuple[Callable[[], object], threading.Event]]()
        self.last = threading.Event()
        self.last.set()
        self.thread: threading.Thread | None = None

    def say(self, speak: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Have it said; who is behind with the words before is not waited for again."""
        is_behind = not self.last.is_set()
        if self.unheard or (is_behind and self.words.qsize() > MOST_WAITING):
            return
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, name="speaker", daemon=True)
            self.thread.start()
        self.last = threading.Event()
        self.words.put((speak, self.last))
        if not is_behind:
            self.last.wait(seconds)

    def close(self) -> None:
        """Give the last words a while, once."""
        if not self.unheard and not self.last.wait(LAST_SECONDS):
            self.unheard = True

    def _serve(self) -> None:
        while True:
            speak, done = self.words.get()
            if not self.unheard:
                try:
                    speak()
                except OSError:  # ends the telling and not the training
                    self.unheard = True
                    forsake(self.stream)
            done.set()
