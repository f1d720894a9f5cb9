"""The file of a rank's records: on disk at once, and no reason to stop training when the disk takes no more."""

from collections.abc import Callable
from pathlib import Path


class RecordFile:
    """Lines in the order they came. What a full disk refuses waits for the next time; that is said once."""

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        self.file = file
        self.say = say
        self.stream = open(file, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self.waiting = b""
        self.told = False

    def write(self, line: bytes) -> None:
        """Whoever kills this process does not take the line along."""
        self.waiting += line
        try:
            while self.waiting:
                written = self.stream.write(self.waiting) or 0  # a disk that is nearly full takes a part
                self.waiting = self.waiting[written:]
        except OSError as error:
            if not self.told:
                self.told = True
                self.say(
                    f"warning: {self.file} cannot be written: {error.strerror}. "
                    "Training goes on; records wait in memory until they can be"
                )

    def close(self) -> None:
        """A last try for what waits."""
        self.write(b"")
        self.stream.close()
