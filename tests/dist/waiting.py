"""How long tests wait for what must come: until a hang is certain, however loaded the machine is."""

import time
from collections.abc import Callable
from pathlib import Path

# Seconds. What is waited for takes a tenth of this or less on two cores that twenty processes share. Nothing that works
# ever waits so long: raising it costs no time.
HANG = 900.0


def until(condition: Callable[[], object], what: str) -> None:
    """Return as soon as the condition holds; fail with `what` did not come."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_running(process: int | str) -> bool:
    """Whether a process, by its number, is there; one that has ended may wait long for somebody to ask how."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
