"""Text of sources, and pieces of tokens, that lie in object storage.

Text is read from where it is, as it is needed. A file is known by its address, its size and what its storage says of
its version (an ETag, a checksum, a time of change), so that tokens are made again when it changes.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, cast

import msgspec

from meshwright.runtime.object_store import RemoteFolder, found, telling

WHOLE = "whole.json"  # of a piece in a store: put there last
READABLE = "check the address and this machine's right to read it"


class RemoteStat(NamedTuple):
    """As much as is known of a file without reading it."""

    st_size: int


@dataclass(frozen=True, order=True, slots=True)
class RemoteFile:
    """One file by its address, with as much of a Path as the readers of sources use."""

    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        return PurePosixPath(self.address).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.address).suffix

    def open(self, mode: str = "rb") -> IO[bytes]:
        """The bytes, read as they are asked for."""
        system, path = found(self.address)
        return cast("IO[bytes]", system.open(path, mode))

    def stat(self) -> RemoteStat:
        """Its size."""
        system, path = found(self.address)
        return RemoteStat(int(system.size(path) or 0))

    def version(self) -> tuple[str, int, str]:
        """What changes when the file does."""
        system, path = found(self.address)
        return self.address, self.stat().st_size, str(system.ukey(path))


File = Path | RemoteFile


def below(source: str) -> list[RemoteFile]:
    """The files at an address, sorted: one, all below a folder, or those that a glob matches; hidden ones apart."""
    system, path = found(source)
    with telling(source, READABLE):
        if glob_marks(path):
            there = [one for one in system.glob(path, detail=False) if system.isfile(one)]
        else:
            there = [path] if system.isfile(path) else system.find(path)
        names = sorted(str(system.unstrip_protocol(one)) for one in there)
    hidden = re.compile(r"/\.[^/]+")
    return [RemoteFile(name) for name in names if not hidden.search(name.partition("://")[2])]


def glob_marks(path: str) -> bool:
    """Whether a path stands for several."""
    return any(mark in path for mark in "*?[")


class PieceContent(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a piece of tokens in a store, with their sha256."""

    files: dict[str, str]


def put_piece(folder: Path, store: RemoteFolder) -> None:
    """Have a store hold a piece of tokens, whole or not at all; one that it has is left alone."""
    if f"{folder.name}/{WHOLE}" in store.names(folder.name):
        return
    files = sorted(file for file in folder.iterdir() if file.is_file())
    for file in files:
        store.send(file, f"{folder.name}/{file.name}")
    content = PieceContent(files={file.name: _sha256(file) for file in files})
    store.write(f"{folder.name}/{WHOLE}", msgspec.json.encode(content))


def has_piece(name: str, store: RemoteFolder) -> bool:
    """Whether a store has the whole of a piece."""
    return f"{name}/{WHOLE}" in store.names(name)


def drop_piece(name: str, store: RemoteFolder) -> None:
    """Have a store's piece pass for whole no longer."""
    store.remove(f"{name}/{WHOLE}")


def get_piece(name: str, store: RemoteFolder, target: Path) -> None:
    """The files of a piece, each held to its sha256."""
    content = msgspec.json.decode(store.read(f"{name}/{WHOLE}"), type=PieceContent)
    for file, digest in content.files.items():
        if Path(file).name != file:
            raise OSError(f"{store.address}/{name} names a file outside itself: {file!r}")
        store.receive(f"{name}/{file}", target / file)
        if _sha256(target / file) != digest:
            raise OSError(f"{store.address}/{name}/{file}: checksum mismatch (sha256)")


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
