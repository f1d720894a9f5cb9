"""Files that are not on a disk of this machine: s3://, gs://, hf:// and whatever else fsspec knows.

An object store puts a file there whole or not at all, but not several files. So whoever puts a set there removes the
file that makes it whole first, and puts it there last.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config.weights import CHECKPOINTS, MANIFEST, STEP, step_name
from meshwright.spec.problem import UNDECODABLE, InputError, mistake

INSTALLS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs"}
# Where folders are real. Of an object store a folder may be a bucket: one that is mistyped must not be made.
WITH_FOLDERS = {"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs"}
BLOCK_BYTES = 4 * 2**20
MOST_PARTS = 9_000  # of one object: S3 takes 10,000
RIGHTS = "check the address, and this machine's credentials (their own files or variables, never the address)"
Count = Callable[[int], None]


def found(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path there."""
    import fsspec

    kind = address.partition("://")[0].lower()
    try:
        return fsspec.url_to_fs(address)
    except ImportError as error:
        if (package := INSTALLS.get(kind)) is None:
            what = f"{address} needs a package of its own: {words_of(error)}"
            raise mistake(what, "install what is named there") from None
        raise mistake(f"{address} needs {package} to be read", f"run: pip install {package}") from None
    except ValueError:
        raise mistake(
            f"{address} is of a kind that fsspec does not know", "use s3://, gs://, hf:// or a path"
        ) from None


@contextmanager
def telling(address: str, remedy: str = RIGHTS) -> Iterator[None]:
    """What goes wrong on the way there, in one sentence."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each store has errors of its own, for want of credentials above all
        raise mistake(f"{address} cannot be reached: {words_of(error)}", remedy) from None


def words_of(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


class SavedBy(msgspec.Struct, frozen=True):
    """What is read of a manifest here."""

    run: str


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """What lies below an address. Names are relative, with slashes; every operation is done, or raises."""

    address: str

    def at(self, name: str) -> tuple[Any, str]:
        """The file system, and the path of a name on it."""
        system, path = found(self.address)
        return system, f"{path.rstrip('/')}/{name}" if name else path

    def names(self, below: str = "") -> list[str]:
        """All files below a name, sorted."""
        system, path = self.at(below)
        system.invalidate_cache()  # others write there too
        if not system.exists(path):
            return []
        root = self.at("")[1].rstrip("/")
        return sorted(str(one).removeprefix(root).lstrip("/") for one in system.find(path))

    def read(self, name: str) -> bytes:
        """A whole file."""
        system, path = self.at(name)
        return bytes(system.cat_file(path))

    def write(self, name: str, content: bytes) -> None:
        """A whole file, replacing an earlier one."""
        system, path = self._ready(name)
        system.pipe_file(path, content)

    def remove(self, name: str) -> None:
        """A file, if it is there."""
        system, path = self.at(name)
        with suppress(FileNotFoundError):
            system.rm_file(path)

    def send(self, file: Path, name: str, count: Count = lambda size: None) -> None:
        """A file of this machine, under a name; `count` is told of every block. Its size is asked for afterwards."""
        system, path = self._ready(name)
        part_bytes = max(4 * BLOCK_BYTES, file.stat().st_size // MOST_PARTS)
        with open(file, "rb") as source, system.open(path, "wb", block_size=part_bytes) as target:
            while block := source.read(BLOCK_BYTES):
                target.write(block)
                count(len(block))
        system.invalidate_cache()
        size = file.stat().st_size
        if (there := int(system.size(path) or 0)) != size:
            raise OSError(f"{self.address}/{name} has {there} bytes, not the {size} that were sent")

    def receive(self, name: str, file: Path) -> None:
        """A file of that name, on this machine."""
        system, path = self.at(name)
        with system.open(path, "rb") as source, open(file, "wb") as target:
            while block := source.read(BLOCK_BYTES):
                target.write(block)

    def saved_steps(self) -> list[int]:
        """The steps whose manifest is there, oldest first: it is sent last."""
        return sorted(step for step, names in self._steps().items() if MANIFEST in names)

    def cut_short(self) -> list[int]:
        """Steps of which there is something, and no manifest."""
        return sorted(step for step, names in self._steps().items() if MANIFEST not in names)

    def _steps(self) -> dict[int, set[str]]:
        """The files of each step."""
        found: dict[int, set[str]] = {}
        for name in self.names(CHECKPOINTS):
            place = name.split("/")
            if len(place) == 3 and (step := STEP.fullmatch(place[1])):
                found.setdefault(int(step[1]), set()).add(place[2])
        return found

    def owner(self, step: int) -> str:
        """The digest of the run that saved a step, by its manifest, which is not checked here; "" if it is damaged."""
        content = self.read(f"{CHECKPOINTS}/{step_name(step)}/{MANIFEST}")
        try:
            return msgspec.json.decode(content, type=SavedBy).run
        except UNDECODABLE:
            return ""

    def _ready(self, name: str) -> tuple[Any, str]:
        system, path = self.at(name)
        kinds = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
        if kinds & WITH_FOLDERS:
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
        return system, path


def require_writable(address: str) -> RemoteFolder:
    """The folder at an address, which takes, gives back and removes a file; else a refusal."""
    folder, trial = RemoteFolder(address), f".trial-{secrets.token_hex(8)}"
    with telling(address):
        folder.write(trial, trial.encode())
        try:
            if folder.read(trial) != trial.encode():
                raise OSError("it gives back other bytes than it was given")
        finally:
            folder.remove(trial)
    return folder
