"""Files that are not on a disk of this machine: s3://, gs://, hf://, https:// and whatever else fsspec knows.

Text is read from where it is, as it is needed. A file is known by its address, its size and what its storage says of
its version (an ETag, a checksum, a time of change), so that tokens are made again when it changes.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, cast

from meshwright.spec.problem import mistake

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
INSTALLS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs"}


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
        system, path = _found(self.address)
        return cast("IO[bytes]", system.open(path, mode))

    def stat(self) -> RemoteStat:
        """Its size."""
        system, path = _found(self.address)
        return RemoteStat(int(system.size(path) or 0))

    def version(self) -> tuple[str, int, str]:
        """What changes when the file does."""
        system, path = _found(self.address)
        return self.address, self.stat().st_size, str(system.ukey(path))


File = Path | RemoteFile


def is_remote(source: str) -> bool:
    """Whether a source is an address rather than a path."""
    return ADDRESS.match(source) is not None


def below(source: str) -> list[RemoteFile]:
    """The files at an address, sorted: one, all below a folder, or those that a glob matches; hidden ones apart."""
    system, path = _found(source)
    with telling(source):
        if glob_marks(path):
            found = [one for one in system.glob(path, detail=False) if system.isfile(one)]
        else:
            found = [path] if system.isfile(path) else system.find(path)
        names = sorted(str(system.unstrip_protocol(one)) for one in found)
    hidden = re.compile(r"/\.[^/]+")
    return [RemoteFile(name) for name in names if not hidden.search(name.partition("://")[2])]


def glob_marks(path: str) -> bool:
    """Whether a path stands for several."""
    return any(mark in path for mark in "*?[")


@contextmanager
def telling(source: str) -> Iterator[None]:
    """What goes wrong on the way there, in one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        what = f"{source} cannot be reached: {' '.join(str(error).split()) or type(error).__name__}"
        raise mistake(what, "check the address and this machine's right to read it") from None


def _found(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path there."""
    import fsspec

    kind = address.partition("://")[0].lower()
    try:
        return fsspec.url_to_fs(address)
    except ImportError:
        package = INSTALLS.get(kind, f"fsspec's package for {kind}")
        raise mistake(f"{address} needs {package} to be read", f"run: pip install {package}") from None
    except ValueError:
        raise mistake(
            f"{address} is of a kind that fsspec does not know", "use s3://, gs://, hf:// or a path"
        ) from None
