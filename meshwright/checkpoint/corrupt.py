"""What is wrong with a checkpoint, as a value that names the place."""

import msgspec

from meshwright.spec.exits import Exit


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in a checkpoint that is not what was written."""

    file: str
    text: str
    tensor: str = ""  # where a tensor's bytes are hit
    begin: int = 0  # bytes of the file
    end: int = 0

    def __str__(self) -> str:
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        place = f", bytes {self.begin}–{self.end}" if self.end else ""
        return f"{self.file}{tensor}{place}: {self.text}"


class CorruptError(RuntimeError):
    """A checkpoint cannot be trusted. Ends a command if there is no older one to fall back to."""

    code = Exit.CORRUPT

    def __init__(self, damages: list[Damage]) -> None:
        super().__init__("\n".join(str(damage) for damage in damages))
        self.damages = damages
