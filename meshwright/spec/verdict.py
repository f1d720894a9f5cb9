"""How something ended and what to do about it, in at most six lines."""

from pathlib import Path
from typing import Literal

import msgspec

from meshwright.spec.exits import Exit

Kind = Literal["killed", "hang", "error", "input", "data", "not-finite", "replicas", "memory", "corrupt", "stopped"]
RESTARTABLE: tuple[Kind, ...] = ("killed", "hang")  # the rest would only happen again
# What Gloo, NCCL and sockets say when the other side is gone.
BROKEN = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Connection refused")
WIDEST = 160  # characters of a line on the screen; all of it is in the file


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The last thing on the screen of a failure."""

    kind: Kind
    code: int
    what: str
    where: str = ""
    since: str = ""
    cause: str = ""
    remedy: str = ""
    details: str = ""  # where they are
    rank: int | None = None
    phase: str = ""
    step: int | None = None
    good_until: int | None = None  # the last step whose state is beyond doubt; checkpoints after it are set aside
    stack: tuple[str, ...] = ()
    deviated: bool = False  # its last collectives were not those of the step before
    at: float = 0.0  # wall clock; of several the earliest is the cause, the others are its victims

    def lines(self) -> list[str]:
        """What, where, since when, likely cause, what to do, where the details are."""
        named = {
            "what": self.what,
            "where": self.where,
            "since": self.since,
            "cause": self.cause,
            "do": self.remedy,
            "details": self.details,
        }
        return [f"{name + ':':<9}{_one_line(text)}" for name, text in named.items() if text]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class FaultError(RuntimeError):
    """Something that ends a run with a verdict of its own."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.what)
        self.verdict = verdict


def write(folder: Path, verdict: Verdict) -> None:
    """A rank's last words, for whoever watches; a folder that was never made is left so."""
    if not folder.is_dir():
        return
    file = folder / f"failure.rank{verdict.rank}.json"
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(verdict))
    temporary.replace(file)


def read(folder: Path) -> list[Verdict]:
    """The last words of all ranks that had any."""
    return [msgspec.json.decode(file.read_bytes(), type=Verdict) for file in folder.glob("failure.rank*.json")]


def of_code(code: int) -> Kind:
    """What kind of ending an exit code means."""
    kinds: dict[int, Kind] = {
        Exit.INPUT: "input",
        Exit.DOES_NOT_FIT: "memory",
        Exit.PREEMPTED: "stopped",
        Exit.RESUMABLE: "data",
        Exit.CORRUPT: "corrupt",
        Exit.NOT_FINITE: "not-finite",
        Exit.HARDWARE: "replicas",
    }
    return "killed" if code < 0 else kinds.get(code, "error")


def is_broken(text: str) -> bool:
    """Whether words are those of a rank that others left alone in a collective."""
    return any(word in text for word in BROKEN)


def _one_line(text: str) -> str:
    """No line may be mistaken for two, and none may speak to the terminal."""
    plain = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return plain if len(plain) <= WIDEST else plain[: WIDEST - 1] + "…"
