"""A machine's part of an in-memory checkpoint: what it consists of, and how machines speak of it.

Every message is sealed by a key that lies in the run folder while its owner listens. Chunks themselves are held to the
sha256s that their ranks gave every slice; a part that is received has its name once it is whole.
"""

import hashlib
import hmac
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, NamedTuple, TypeVar

import msgspec

from meshwright.config.weights import present, step_name
from meshwright.runtime.meeting import kept_alive
from meshwright.spec.problem import UNDECODABLE

PART = "part.json"  # what a machine's part of a step consists of
KEPT = "kept"  # below the memory: parts of the machine before this one
READY = "ready"  # in the memory: what another machine had of this one's is here, or cannot be had
COPIED = "copied.json"  # in the memory: what became of the last copy
CHUNK = re.compile(r"chunk\.rank\d{1,7}\.safetensors")
SEAL_BYTES = 32
MOST_CALL, MOST_PART = 1 << 16, 1 << 30  # bytes of a message from anybody, and of a part's list from one of ours
BLOCK_BYTES = 4 * 2**20
CALL_SECONDS = 10.0  # in which the other side goes on


class StrangerError(OSError):
    """Whoever speaks does not have the key of this run."""


class PartError(Exception):
    """A part of a save cannot be used, or is not taken; why, in words."""


class PartSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Some bytes of a chunk."""

    begin: int
    end: int
    sha256: str


class PartChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk as its rank has described it: file, bytes, sha256, bytes and sha256 of its header; and its slices."""

    chunk: tuple[str, int, str, int, str]
    slices: tuple[PartSlice, ...]


class PartNote(msgspec.Struct, frozen=True, kw_only=True):
    """Of what a rank notes, all that is needed to check its bytes."""

    made: PartChunk | None


RankNote = TypeVar("RankNote")


class MachinePart(msgspec.Struct, Generic[RankNote], frozen=True, kw_only=True):
    """What the ranks of one machine have saved of a step; notes are a rank's own, in the order of ranks."""

    step: int
    attempt: int  # a number that all parts of one save have in common
    node: int
    nodes: int
    run: str  # the digest of the run's mathematics
    plan: dict[str, Any]
    notes: tuple[RankNote, ...]


class PartFile(NamedTuple):
    """One file of a part: every byte of it is in one of the ranges."""

    name: str
    bytes: int
    ranges: list[tuple[int, int, str]]


def encoded(part: MachinePart[Any]) -> bytes:
    """A part's list as the bytes of its file: its sha256, and JSON."""
    content = msgspec.json.encode(part)
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def decoded(content: bytes, note: type[RankNote]) -> MachinePart[RankNote]:
    """The same read; PartError if it is not what was written."""
    digest, _, text = content.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise PartError("checksum mismatch (sha256) of the list of a part")
    try:
        return msgspec.json.decode(text, type=MachinePart[note])
    except (*UNDECODABLE, RecursionError, OverflowError) as error:
        raise PartError(f"is not the list of a part: {error}") from None


def files_of(part: MachinePart[PartNote]) -> list[PartFile]:
    """The files of a part and how to check them; PartError where that would leave bytes unchecked."""
    found = []
    for made in (note.made for note in part.notes if note.made is not None):
        name, size, _, header_bytes, header_sha256 = made.chunk
        ranges = [(0, header_bytes, header_sha256)]
        ranges += sorted((each.begin, each.end, each.sha256) for each in made.slices)
        ends = [0, *(end for _, end, _ in ranges)]
        if not CHUNK.fullmatch(name) or ends[-1] != size or any(
            begin != before or end < begin for (begin, end, _), before in zip(ranges, ends, strict=False)
        ):  # fmt: skip
            raise PartError(f"the list of a part does not describe {name!r} to the byte")
        found.append(PartFile(name, size, ranges))
    if len({file.name for file in found}) < len(found):
        raise PartError("a part lists a file twice")
    return found


class SealedWire:
    """A connection on which every message is sealed: with the key, for this connection, in this order."""

    def __init__(self, wire: socket.socket, key: bytes, is_caller: bool) -> None:
        self.wire = wire
        wire.settimeout(CALL_SECONDS)
        own = secrets.token_bytes(SEAL_BYTES)
        wire.sendall(own)
        theirs = self._taken(SEAL_BYTES)
        self.key = hmac.digest(key, own + theirs if is_caller else theirs + own, hashlib.sha256)
        self.mine, self.other = (b"caller", b"called") if is_caller else (b"called", b"caller")
        self.sent = self.heard = 0

    def send(self, content: bytes) -> None:
        """A message."""
        self.wire.sendall(len(content).to_bytes(4, "big") + self._seal(self.mine, self.sent, content) + content)
        self.sent += 1

    def hear(self, most: int = MOST_CALL) -> bytes:
        """The next message; StrangerError if it is none of ours."""
        size, seal = int.from_bytes(self._taken(4), "big"), self._taken(SEAL_BYTES)
        if size > most:
            raise StrangerError(0, f"sends {size} bytes at once")
        content = self._taken(size)
        if not hmac.compare_digest(seal, self._seal(self.other, self.heard, content)):
            raise StrangerError(0, "does not have this run's key")
        self.heard += 1
        return content

    def send_file(self, file: BinaryIO, size: int) -> None:
        """The bytes of an open file, which the other side holds to their sha256s."""
        if size and self.wire.sendfile(file, 0, size) < size:
            raise ConnectionAbortedError(0, "a file ended before its time")

    def refuse(self, why: str) -> None:
        """Say why; the caller hears it when all that it has begun to send is gone, not as a broken connection."""
        self.send(msgspec.json.encode(PartAnswer(refused=why)))
        self.wire.shutdown(socket.SHUT_WR)
        while self.wire.recv(BLOCK_BYTES):
            continue

    def receive_into(self, room: memoryview) -> None:
        """So many bytes as there is room for."""
        while room:
            count = self.wire.recv_into(room)
            if count == 0:
                raise ConnectionResetError(0, "the other side closed")
            room = room[count:]

    def _seal(self, side: bytes, number: int, content: bytes) -> bytes:
        return hmac.digest(self.key, side + number.to_bytes(8, "big") + content, hashlib.sha256)

    def _taken(self, size: int) -> bytes:
        room = bytearray(size)
        self.receive_into(memoryview(room))
        return bytes(room)


class PartCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one machine asks of another."""

    word: Literal["keep", "held", "part", "file"]
    node: int  # whose part it is about
    step: int = -1
    file: str = ""
    steps: tuple[int, ...] = ()  # that the machine has itself: of others no copy is wanted


class PartAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it answers: that it will, or why not."""

    refused: str = ""
    has: bool = False  # the very part: nothing need be sent
    steps: tuple[int, ...] = ()
    size: int = 0


class KeeperAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a machine listens, and the key of whoever may call it: a file in the run folder, for its user alone."""

    address: str
    port: int
    key: str

    @staticmethod
    def file(folder: Path, node: int) -> Path:
        # Hidden: a folder with anything else in it would not be a new run's.
        return folder / f".memory.node{node}.json"

    @staticmethod
    def read(folder: Path, node: int) -> "KeeperAddress | None":
        """None where the machine has not said it, has left, or what is there makes no sense."""
        with suppress(OSError, ValueError, msgspec.DecodeError):
            found = msgspec.json.decode(KeeperAddress.file(folder, node).read_bytes(), type=KeeperAddress)
            if len(bytes.fromhex(found.key)) == SEAL_BYTES and 0 < found.port < 1 << 16:
                return found
        return None


@contextmanager
def called(where: KeeperAddress, call: PartCall) -> Iterator[SealedWire]:
    """A connection on which something was asked."""
    with socket.create_connection((where.address, where.port), timeout=CALL_SECONDS) as plain:
        wire = SealedWire(kept_alive(plain), bytes.fromhex(where.key), is_caller=True)
        wire.send(msgspec.json.encode(call))
        yield wire


def answer_on(wire: SealedWire) -> PartAnswer:
    """What the other machine says; PartError where it refuses."""
    answer = msgspec.json.decode(wire.hear(), type=PartAnswer)
    if answer.refused:
        raise PartError(answer.refused)
    return answer


def fetch_file(where: KeeperAddress, node: int, step: int, target: Path) -> None:
    """One chunk of a part that another machine has; whoever reads it checks it."""
    call = PartCall(word="file", node=node, step=step, file=target.name)
    with called(where, call) as wire:
        left, temporary = answer_on(wire).size, target.with_name(f".{target.name}.{os.getpid()}.partial")
        room = memoryview(bytearray(BLOCK_BYTES))
        with open(temporary, "xb") as file:
            while left:
                block = room[: min(left, BLOCK_BYTES)]
                wire.receive_into(block)
                file.write(block)
                left -= len(block)
        temporary.replace(target)


def receive(wire: SealedWire, step: int, files: list[PartFile], content: bytes, home: Path) -> None:
    """Take the files of a part, check every byte, and give it its name below `home`; `content` is its list."""
    stump = home / f".{step_name(step)}.received.partial"
    shutil.rmtree(stump, ignore_errors=True)
    stump.mkdir(parents=True)
    try:
        for file in files:
            _receive_file(wire, file, stump)
        (stump / PART).write_bytes(content)
        stump.replace(home / step_name(step))
    finally:
        shutil.rmtree(stump, ignore_errors=True)


def _receive_file(wire: SealedWire, file: PartFile, stump: Path) -> None:
    room = memoryview(bytearray(BLOCK_BYTES))
    with open(stump / file.name, "xb") as target:
        for begin, end, sha256 in file.ranges:
            whole = hashlib.sha256()
            for first in range(begin, end, BLOCK_BYTES):
                block = room[: min(end - first, BLOCK_BYTES)]
                wire.receive_into(block)
                whole.update(block)
                target.write(block)
            if whole.hexdigest() != sha256:
                raise PartError(f"{file.name}, bytes {begin}–{end}: checksum mismatch (sha256)")


def send(wire: SealedWire, folder: Path, files: list[PartFile]) -> None:
    """The files of a part, one after another."""
    for file in files:
        with open(folder / file.name, "rb") as source:
            wire.send_file(source, file.bytes)


class CopyNote(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a copy: it is on the next machine, or why not."""

    step: int
    attempt: int
    failed: str = ""


def copy_note(memory: Path) -> CopyNote | None:
    """Of the last one, None before there is any."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((memory / COPIED).read_bytes(), type=CopyNote)
    return None


def discard_steps(home: Path, unwanted: Callable[[int], bool]) -> None:
    """Remove steps so that at no time a part of one stands under its name, and what was cut short."""
    for step in filter(unwanted, present(home)):
        hidden = home / f".{step_name(step)}.old"
        shutil.rmtree(hidden, ignore_errors=True)
        (home / step_name(step)).rename(hidden)
    for entry in list(home.glob(".step-*.old")):
        shutil.rmtree(entry, ignore_errors=True)
