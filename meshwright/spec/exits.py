"""The one table of exit codes: what a script may rely on."""

from enum import IntEnum


class Exit(IntEnum):
    """How the program ended."""

    DONE = 0
    FAILED = 1
    INPUT = 2
    DOES_NOT_FIT = 3
    PREEMPTED = 10
    RESUMABLE = 11
    CORRUPT = 12
    NOT_FINITE = 13
    HARDWARE = 14
    INTERRUPTED = 130


MEANING = {
    Exit.DONE: "done",
    Exit.FAILED: "failed: a rank's error, a check that did not hold, or a fault of ours",
    Exit.INPUT: "bad input: every problem is listed with its remedy",
    Exit.DOES_NOT_FIT: "the plan does not fit the memory there is",
    Exit.PREEMPTED: "asked to end (SIGTERM), and saved: the same command goes on",
    Exit.RESUMABLE: "ended by a fault (a killed or hung rank, data gone): the same command goes on",
    Exit.CORRUPT: "a checkpoint is damaged, and there is no older one",
    Exit.NOT_FINITE: "too many gradients in a row were not finite",
    Exit.HARDWARE: "replicas disagree: suspected hardware",
    Exit.INTERRUPTED: "interrupted",
}


def table() -> str:
    """The codes and their meaning, as `--help` shows them."""
    return "\n".join(["exit codes:", *(f"  {code.value:<4} {text}" for code, text in MEANING.items())]) + "\n"
