"""Where the ranks of one machine come from: a process that has torch already, and forks one on request.

It is the spare that makes a restart quick: a rank forked here is at work in a tenth of a second, one that must import
torch in three. It never touches a GPU, so that its children may.
"""

import ctypes
import gc
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from meshwright.runtime.place import RankSpec

SET_PARENT_DEATH_SIGNAL, SET_NAME = 1, 15  # of Linux's prctl
# What a rank imports on its way to the first step: had here, it need not be had again.
LATER = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "safetensors.torch", "tokenizers")


def main(answers: int) -> None:
    """Read orders from standard input until it closes; answer each with the process's number."""
    launcher = os.getppid()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module("meshwright.train.rank")
    importlib.import_module("meshwright.train.world").code()  # ranks run what is imported here, whatever becomes of it
    gc.freeze()  # so that children do not copy pages by counting references in them
    for line in sys.stdin.buffer:
        if line.strip() == b"rest":  # the ranks are at work: time to fetch what only restarts will use
            for name in LATER:
                importlib.import_module(name)
            continue
        order = msgspec.json.decode(line, type=RankSpec)
        os.write(answers, f"{order.place.rank} {fork(order, launcher)}\n".encode())


def fork(order: RankSpec, launcher: int) -> int:
    """A rank whose parent is the launcher: the process between them ends at once, and the launcher adopts."""
    reading, writing = os.pipe()
    if between := os.fork():
        os.close(writing)
        os.waitpid(between, 0)
        with open(reading, "rb") as said:
            return int(said.read())
    if pid := os.fork():
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    _become(order, launcher)
    return 0


def _become(order: RankSpec, launcher: int) -> None:
    """Be the rank, to the end of the process."""
    code = 1
    try:
        while os.getppid() != launcher:  # the signal below follows the parent of the moment
            if os.getppid() == 1:
                os._exit(1)  # the launcher is gone
            time.sleep(0.001)
        _die_with_parent()
        _take_name(f"rank{order.place.rank}")
        _redirect(order)
        from meshwright.config.load import load
        from meshwright.train.rank import serve

        code = serve(order, load(Path(order.run)).run)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # what torch would do on the way out is not needed


def _redirect(order: RankSpec) -> None:
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 2)
    if not order.speaks:
        os.dup2(log, 1)
    os.close(log)
    os.close(nothing)
    print(f"attempt {order.attempt}, process {os.getpid()}", file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """Ask the kernel to end this process when its parent is gone, however that went."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _take_name(name: str) -> None:
    """What `ps` and `top` call this process."""
    ctypes.CDLL(None).prctl(SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent]
    main(int(sys.argv[1]))
