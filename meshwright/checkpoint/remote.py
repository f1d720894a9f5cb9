"""Saved steps at an address: copied there beside training, and fetched where a run starts with none.

A step is there once its manifest is, which goes first when a step is replaced or removed and comes last when it is
sent. What is fetched is held to the manifest's own sha256s before it gets its name here.
"""

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from meshwright.checkpoint import format, storage, write
from meshwright.checkpoint.format import MANIFEST, Manifest
from meshwright.checkpoint.storage import CorruptError, Damage, Disk, side_by_side
from meshwright.config.huggingface import TOKENIZER
from meshwright.config.run import Checkpoint, Run, digests
from meshwright.config.weights import CHECKPOINTS, RUN, TEXT, best_step
from meshwright.parallel.mesh import Mesh
from meshwright.runtime import run_folder
from meshwright.runtime.files import replace_json
from meshwright.runtime.object_store import RemoteFolder, telling, words_of
from meshwright.spec.problem import mistake

Say = Callable[[str], None]
SENDERS = 4  # files at a time
WAIT_SECONDS = 0.5
COPIES = "copies.json"  # in a run folder: what became of them
MOST_FAILURES = 100  # that are listed there
SLOW = "copies take longer than saves come; raise checkpoint.every"
SUSPECT = "suspect-"  # before the name of a step whose state is in doubt


class CopyFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is not at the address."""

    step: int
    text: str


class CopyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How far the copies have come, in the run folder."""

    address: str
    step: int  # the newest that is there, by this attempt; -1: none
    failures: tuple[CopyFailure, ...]


def place_of(step: int, name: str = "") -> str:
    """The name of a step's file below an address, as in a run folder."""
    return "/".join(part for part in (CHECKPOINTS, format.name(step), name) if part)


def send(remote: RemoteFolder, run_folder: Path, step_folder: Path, step: int, count: Callable[[int], None]) -> None:
    """Put a saved step there, with the small files that make the folder a run's."""
    manifest = format.read(step_folder)
    remote.remove(place_of(step, MANIFEST))  # of an earlier step of this number, whose chunks are replaced
    beside = [run_folder / RUN, run_folder / TOKENIZER, *sorted((run_folder / TEXT).glob("*"))]
    pairs = [(file, str(file.relative_to(run_folder))) for file in beside if file.is_file()]
    pairs += [(step_folder / chunk.file, place_of(step, chunk.file)) for chunk in manifest.chunks]
    side_by_side(lambda pair: remote.send(pair[0], pair[1], count), pairs, SENDERS)
    remote.write(place_of(step, MANIFEST), (step_folder / MANIFEST).read_bytes())


def discard(remote: RemoteFolder, step: int) -> None:
    """Remove a step so that at no time a part of it passes for the whole."""
    remote.remove(place_of(step, MANIFEST))
    for name in remote.names(place_of(step)):
        remote.remove(name)


def retire(remote: RemoteFolder, run_folder: Path, setting: Checkpoint) -> None:
    """Keep there what is kept here, and nothing of a copy whose sender was killed."""
    steps = remote.saved_steps()
    best = best_step(run_folder, steps) if setting.keep_best else None
    for step in [*format.superfluous(steps, setting, best), *remote.cut_short()]:
        discard(remote, step)


class Mirror:
    """Copies steps to an address, one at a time, by a thread of its own: no step of training waits for it.

    Files are linked as they are saved, so that one that is still being sent may be retired meanwhile. A failure is
    kept for whoever asks, and ends nothing.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self.remote, self.setting, self.folder = RemoteFolder(run.checkpoint.remote), run.checkpoint, folder
        self.wake = threading.Condition()
        self.waiting: tuple[int, Path] | None = None
        self.busy = self.ended = False
        self.step = -1  # that is on its way, or was last
        self.grace = run.faults.grace_seconds / 2  # the save itself has the other half
        self.sent = 0  # bytes so far
        self.newest = -1  # the last step that is there
        self.events: deque[CopyFailure] = deque()  # that nobody has asked for yet
        self.failures: deque[CopyFailure] = deque(maxlen=MOST_FAILURES)
        self.thread: threading.Thread | None = None

    def send(self, step: int) -> None:
        """Have a saved step copied once the one before it is; of those that wait only the newest is."""
        linked = self._linked(step)
        with self.wake:
            if self.waiting is not None:
                passed, folder = self.waiting
                self._forget(folder)
                self._fail(passed, SLOW)
            self.waiting = step, linked
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, name="mirror", daemon=True)
                self.thread.start()
            self.wake.notify_all()

    def take_events(self) -> Iterator["CopyFailure"]:
        """What went wrong since it was last asked for."""
        while self.events:
            yield self.events.popleft()

    def finish(self, say: Say, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait for what is on its way, and say where the newest step is; a run that was asked to end waits less."""
        seen, began = -1, time.monotonic()
        while not self._is_idle():
            if is_stopped() and time.monotonic() - began > self.grace:
                self._fail(self.step, f"the run was stopped, and {self.grace:g} s were not enough")
                self._record()
                break
            # Whoever watches this rank sees it move, from one of these lines to the other, as long as bytes go out.
            if self.sent == seen:
                self._pause()
            else:
                seen = self.sent
                self._pause()
        if self.newest >= 0:
            say(f"{format.name(self.newest)} is at {self.remote.address}")
        for failed in self.take_events():
            say(f"warning: {failed.text}")

    def close(self) -> None:
        """Begin nothing more."""
        with self.wake:
            self.ended = True
            if self.waiting is not None:
                self._forget(self.waiting[1])
                self.waiting = None
            self.wake.notify_all()

    def _is_idle(self) -> bool:
        with self.wake:
            return not self.busy and self.waiting is None

    def _pause(self) -> None:
        with self.wake:
            self.wake.wait(WAIT_SECONDS)

    def _serve(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.waiting is not None or self.ended)
                if self.ended:
                    return
                assert self.waiting is not None
                (step, folder), self.waiting, self.busy = self.waiting, None, True
                self.step = step
            try:
                self._send(step, folder)
                self.newest = step
                retire(self.remote, self.folder, self.setting)
            except Exception as error:  # each store has errors of its own, and none is a reason to stop training
                self._fail(step, words_of(error))
            finally:
                self._forget(folder)
                self._record()
                with self.wake:
                    self.busy = False
                    self.wake.notify_all()

    def _send(self, step: int, folder: Path) -> None:
        """Send a step; what is there of one that fails goes, so that a store that is full has room for the next."""
        try:
            send(self.remote, self.folder, folder, step, self._count)
        except Exception:
            with suppress(Exception):  # it is tried again beside the next step that is there
                discard(self.remote, step)
            raise

    def _fail(self, step: int, why: str) -> None:
        failure = CopyFailure(step=step, text=f"{format.name(step)} was not copied to {self.remote.address}: {why}")
        self.events.append(failure)
        self.failures.append(failure)

    def _record(self) -> None:
        with suppress(OSError):  # a full disk, say; training says so itself
            record = CopyRecord(address=self.remote.address, step=self.newest, failures=tuple(self.failures))
            replace_json(self.folder / COPIES, record)

    def _count(self, size: int) -> None:
        self.sent += size

    def _linked(self, step: int) -> Path:
        """Other names for the files of a step; where the disk has no links, the step itself."""
        home = format.home(self.folder)
        source, linked = home / format.name(step), home / f".{format.name(step)}.mirror.partial"
        try:
            Disk().remove(linked)
            linked.mkdir()
            for file in source.iterdir():
                os.link(file, linked / file.name)
        except OSError:
            with suppress(OSError):
                Disk().remove(linked)
            return source
        return linked

    def _forget(self, folder: Path) -> None:
        if folder.name.startswith("."):
            with suppress(OSError):
                Disk().remove(folder)


@contextmanager
def mirroring(
    run: Run, folder: Path, say: Say, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[Mirror | None]:
    """What copies saved steps while a run lasts, None where it has no address; the last copy is waited for."""
    if not run.checkpoint.remote:
        yield None
        return
    mirror = Mirror(run, folder)
    try:
        yield mirror
        mirror.finish(say, is_stopped)
    finally:
        mirror.close()


def fetch(run: Run, home: Path, mesh: Mesh, say: Say) -> None:
    """Where nothing is saved here, bring the newest step that is whole there; every rank fetches some of its chunks.

    Ranks wait for each other by files, as in a save: a collective would give up after minutes.
    """
    if not run.checkpoint.remote or write.number_of_first(len(format.present(home)), mesh):
        return
    remote, seen = RemoteFolder(run.checkpoint.remote), list[str]()
    attempt = write.number_of_first(secrets.randbits(32), mesh)  # what an earlier one has left is not taken for this
    steps = _offered(remote, home) if mesh.rank == 0 else []
    while (step := write.number_of_first(steps.pop() if steps else -1, mesh)) >= 0:
        say(f"fetching {format.name(step)} from {remote.address}")
        stump = home / f".{format.name(step)}.{attempt:08x}.fetched.partial"
        manifest, words = _fetched(remote, stump, step, run, mesh)
        words = write.first_words(words, mesh)
        if words is None:
            assert manifest is not None
            if mesh.rank == 0:
                _named(stump, manifest, mesh.world)
            return
        say(f"warning: {format.name(step)} of {remote.address} cannot be used: {words}")
        seen.append(words)
        if mesh.rank == 0:
            Disk().remove(stump)
    if seen:
        raise CorruptError([Damage(file=remote.address, text=f"no step in it can be used: {'; '.join(seen)}")])


def _offered(remote: RemoteFolder, home: Path) -> list[int]:
    """The steps that are there, but for those that were found to be in doubt here."""
    with telling(remote.address):
        return [step for step in remote.saved_steps() if not (home / f"{SUSPECT}{format.name(step)}").exists()]


def _fetched(remote: RemoteFolder, stump: Path, step: int, run: Run, mesh: Mesh) -> tuple[Manifest | None, str | None]:
    """This rank's share of a step's chunks, checked; then what any rank found wrong."""
    manifest, check = None, write.RankCheck()
    disk = Disk()
    disk.make_folder(stump)
    try:
        known = (*digests(run), *run_folder.earlier(stump.parent.parent))
        manifest = _manifest(remote.read(place_of(step, MANIFEST)), remote, step, known)
        for chunk in manifest.chunks[mesh.rank :: mesh.world]:
            remote.receive(place_of(step, chunk.file), stump / chunk.file)
            _check(stump, manifest, chunk.file)
    except Exception as error:  # of the store, or of what it gave
        check = write.RankCheck(damage=words_of(error)[:500])
    note = stump / write.part_name(mesh.rank)
    storage.write_whole(disk, note, msgspec.json.encode(check), is_passing=True)
    said = write.collect(stump, range(mesh.world), threading.Event(), write.RankCheck)
    return manifest, next((one.damage for one in said if one.damage), None)


def _manifest(content: bytes, remote: RemoteFolder, step: int, known: Sequence[str]) -> Manifest:
    """A manifest that was fetched; it must be of this step, and of this run as it is or was."""
    file = f"{remote.address}/{place_of(step, MANIFEST)}"
    manifest = format.decoded(content, file)
    if manifest.progress.step != step:
        raise CorruptError([Damage(file=file, text=f"is the manifest of step {manifest.progress.step}")])
    if manifest.run not in known:
        raise CorruptError([Damage(file=file, text=f"is of another run ({manifest.run}, not {known[0]})")])
    return manifest


def _check(stump: Path, manifest: Manifest, name: str) -> None:
    """A chunk must be what its manifest says, to the byte."""
    number, chunk = next(pair for pair in enumerate(manifest.chunks) if pair[1].file == name)
    parts = [(0, chunk.header_bytes, chunk.header_sha256)]
    parts += [(each.begin, each.end, each.sha256) for each in manifest.slices if each.chunk == number]
    with storage.opened(stump, name) as descriptor:
        if (size := storage.size_of(descriptor)) != chunk.bytes:
            raise CorruptError([Damage(file=name, text=f"has {size} bytes, not {chunk.bytes}")])
        for begin, end, digest in parts:
            if storage.range_sha256(descriptor, begin, end) != digest:
                text = "checksum mismatch (sha256): is not what was written"
                raise CorruptError([Damage(file=name, text=text, begin=begin, end=end)])
        os.fsync(descriptor)


def _named(stump: Path, manifest: Manifest, world: int) -> None:
    """Rank 0: give what all have fetched its name."""
    disk, home, step = Disk(), stump.parent, manifest.progress.step
    disk.write(stump / MANIFEST, [format.encode(manifest)])
    for rank in range(world):
        disk.remove(stump / write.part_name(rank))
    disk.sync_folder(stump)
    try:
        disk.rename(stump, home / format.name(step))
    except OSError:
        if not (home / format.name(step)).exists():
            raise
        disk.remove(stump)  # another replica was faster, where each is a world of its own
        return
    disk.sync_folder(home)
    format.point(disk, home, step, format.read(home / format.name(step)).sha256)


def bring(reference: str, target: Path, say: Say) -> str:
    """Put what is at an address, or its step behind an @, into a run folder here; returns the reference to that."""
    address, at, word = reference.rpartition("@")
    remote, step = RemoteFolder(address if at and word.isdecimal() else reference), word if at else ""
    with telling(remote.address):
        steps, names = remote.saved_steps(), remote.names()
    chosen = int(step) if step.isdecimal() else max(steps, default=-1)
    if RUN not in names or chosen not in steps:
        there = f"saved are {', '.join(map(str, steps))}" if steps else "no step is saved there"
        raise mistake(f"{remote.address} has no such run: {there}", "name what checkpoint.remote of a run names")
    say(f"fetching {format.name(chosen)} from {remote.address}")
    folder = target / CHECKPOINTS / format.name(chosen)
    folder.mkdir(parents=True)
    (target / TEXT).mkdir()
    beside = [name for name in names if name in (RUN, TOKENIZER) or name.rpartition("/")[0] == TEXT]
    with telling(remote.address):
        content = remote.read(place_of(chosen, MANIFEST))
        for name in beside:
            remote.receive(name, target / TEXT / Path(name).name if "/" in name else target / name)
    manifest = format.decoded(content, f"{remote.address}/{place_of(chosen, MANIFEST)}")
    for chunk in manifest.chunks:
        with telling(remote.address):
            remote.receive(place_of(chosen, chunk.file), folder / chunk.file)
        _check(folder, manifest, chunk.file)
    (folder / MANIFEST).write_bytes(content)
    return f"{target}@{chosen}"
