"""`meshwright cache`: what is kept from one run to the next, and how to be rid of it."""

import argparse
import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from meshwright.cli import env
from meshwright.cli import options as words
from meshwright.report.run_data import duration
from meshwright.runtime.files import writing
from meshwright.spec.units import GIB

try:
    import fcntl
except ImportError:  # not POSIX: nobody can be asked whether an entry is being made
    fcntl = None

# What there is, by name; every entry is made again by the run that needs it.
KINDS = {
    "tokens": "tokenized text",
    "tokenizers": "tokenizers trained on text",
    "documents": "where the documents of ready tokens end",
    "profiles": "quick probes of machines, by bench",
    "unfinished": "left by a process that was killed",
}
FILES = {"tokens.bin": "tokens", "tokenizer.json": "tokenizers", "ends.bin": "documents", "meta.json": "tokens"}
FILES |= dict.fromkeys(("mask.bin", "samples.bin", "chat.json"), "tokens")  # of conversations
MADE = re.compile(
    r"(\.)?([0-9a-f]{24})(?(1)\.[0-9a-f]{8}\.part)"
)  # as data/prepare.py names an entry, and its beginning
PROFILE = re.compile(r".+-\d+-torch-.+\.json")  # as bench/sweep.py does


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Files that were made together, and go together."""

    kind: str
    folder: Path
    files: tuple[Path, ...]
    bytes: int
    changed: float  # seconds since the epoch


def add_cache(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument(
        "what", nargs="?", choices=("show", "clear"), default="show", help="show it (default), or empty it"
    )
    verb.add_argument("name", nargs="?", choices=tuple(KINDS), metavar="NAME", help=f"only {', '.join(KINDS)}")


def cache(options: argparse.Namespace) -> int:
    """Show or empty the cache. What somebody else put into its folder is left alone."""
    root = env.cache()
    found = [each for each in entries(root) if options.name in (None, each.kind)]
    if options.what == "show":
        words.show(options, {"folder": str(root), "kinds": _kinds(found)}, _table(root, found))
        return 0
    gone = [each for each in found if _removed(each)]
    in_use, size = len(found) - len(gone), sum(each.bytes for each in gone)
    record = {"folder": str(root), "removed": len(gone), "bytes": size, "in_use": in_use}
    text = f"removed {_many(len(gone))}, {_humane(size)}, from {root}" if gone else f"nothing to remove in {root}"
    text += f"; {_many(in_use)} left, which a run is making now" if in_use else ""
    words.show(options, record, [text])
    return 0


def entries(root: Path) -> Iterator[CacheEntry]:
    """Everything in the cache that Meshwright made: known names, which hold files of known names and nothing else."""
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_symlink() or not folder.is_dir():
            continue
        files = sorted(folder.iterdir())
        if any(file.is_symlink() or not file.is_file() for file in files):
            continue
        if folder.name == "profiles":
            yield from (_entry("profiles", folder, (file,)) for file in files if PROFILE.fullmatch(file.name))
        elif (named := MADE.fullmatch(folder.name)) and {file.name for file in files} <= set(FILES):
            kinds = [kind for name, kind in FILES.items() if folder / name in files]
            if named[1] or kinds:
                yield _entry("unfinished" if named[1] else kinds[0], folder, tuple(files))


def _entry(kind: str, folder: Path, files: tuple[Path, ...]) -> CacheEntry:
    stats = [file.stat() for file in files] or [folder.stat()]
    size = sum(stat.st_size for stat in stats) if files else 0
    return CacheEntry(kind=kind, folder=folder, files=files, bytes=size, changed=max(stat.st_mtime for stat in stats))


def _removed(entry: CacheEntry) -> bool:
    """Remove an entry; False where a process is making it. A run that reads its tokens now keeps them mapped."""
    name = entry.folder.name.lstrip(".").partition(".")[0]
    lock = entry.folder.with_name(f".{name}.lock")
    with writing(entry.folder, "make it writable, or remove it as its owner"), contextlib.ExitStack() as held:
        if fcntl is not None and lock.is_file():
            descriptor = held.enter_context(lock.open("a")).fileno()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # a file system without locks
                pass
        for file in entry.files:
            file.unlink(missing_ok=True)
        if not any(entry.folder.iterdir()):
            entry.folder.rmdir()
        lock.unlink(missing_ok=True)
    return True


def _kinds(found: list[CacheEntry]) -> list[dict[str, object]]:
    return [
        {"name": kind, "about": about, "entries": len(own), "bytes": sum(each.bytes for each in own)}
        for kind, about in KINDS.items()
        if (own := [each for each in found if each.kind == kind])
    ]


def _table(root: Path, found: list[CacheEntry]) -> Iterator[str]:
    if not found:
        yield f"nothing is cached in {root}"
        return
    yield f"{root}: {_humane(sum(each.bytes for each in found))}"
    for kind, about in KINDS.items():
        if own := [each for each in found if each.kind == kind]:
            age = duration(max(time.time() - max(each.changed for each in own), 0.0))
            size = _humane(sum(each.bytes for each in own))
            yield f"  {kind:<12}{len(own):>6}{size:>12}  newest {age} ago; {about}"
    yield "empty it with `meshwright cache clear`, or one line of it with `meshwright cache clear NAME`"


def _many(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"


def _humane(size: int) -> str:
    """Bytes in the unit in which they are at least one."""
    for scale, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
