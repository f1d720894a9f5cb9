"""Sockets between machines, tried pair by pair: latency, bandwidth, and how far clocks are apart."""

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from meshwright.runtime.doctor import MIB, LinkFacts

PINGS = 50
STREAM_BYTES = 64 * MIB
SECONDS = 10.0  # that a pair may take
CLOCK = struct.Struct("<d")


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs, in rounds in which nobody is twice: a tournament by the circle method."""
    numbers: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(numbers) - 1):
        pairs = [(one, other) for one, other in zip(numbers, reversed(numbers), strict=True)][: len(numbers) // 2]
        yield [(min(one, other), max(one, other)) for one, other in pairs if one is not None and other is not None]
        numbers = [numbers[0], numbers[-1], *numbers[1:-1]]


class LinkServer:
    """This machine's end, for whoever calls: answers each byte with its clock, then takes what is sent."""

    def __init__(self, address: str) -> None:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self.listener = socket.create_server((address, 0), family=family)  # where the job is, and nowhere else
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve, name="links", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Take no more calls."""
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # which wakes whoever waits for one
        self.listener.close()
        self.thread.join(SECONDS)

    def _serve(self) -> None:
        while True:
            try:
                wire, _ = self.listener.accept()
            except OSError:
                return
            _answer(wire)  # in a round nobody is called twice


def _answer(wire: socket.socket) -> None:
    with wire:
        wire.settimeout(SECONDS)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for _ in range(PINGS):
                if wire.recv(1):
                    wire.sendall(CLOCK.pack(time.time()))
            left = STREAM_BYTES
            while left > 0 and (more := wire.recv(min(left, MIB))):
                left -= len(more)
            wire.sendall(b".")
        except OSError:
            return


def call(names: Sequence[str], pair: tuple[int, int], address: str, port: int) -> LinkFacts:
    """Measure the way to another machine, as the first of a pair."""
    first, second = names[pair[0]], names[pair[1]]
    try:
        with socket.create_connection((address, port), timeout=SECONDS) as wire:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pings = [_ping(wire) for _ in range(PINGS)]
            seconds, clock = min(pings)
            data, began = bytes(MIB), time.monotonic()
            for _ in range(STREAM_BYTES // MIB):
                wire.sendall(data)
            wire.recv(1)
            bandwidth = STREAM_BYTES / (time.monotonic() - began)
        return LinkFacts(first=first, second=second, seconds=seconds, bandwidth=bandwidth, clock=clock)
    except OSError as error:
        why = f"{address}:{port}: {(error.strerror or str(error)).lower()}"
        return LinkFacts(first=first, second=second, error=why)


def _ping(wire: socket.socket) -> tuple[float, float]:
    """Seconds there and back, and the other's clock less ours at that moment."""
    began, here = time.monotonic(), time.time()
    wire.sendall(b"?")
    answer = b""
    while len(answer) < CLOCK.size:
        more = wire.recv(CLOCK.size - len(answer))
        if not more:
            raise ConnectionResetError(0, "the other side closed")
        answer += more
    seconds = time.monotonic() - began
    return seconds, CLOCK.unpack(answer)[0] - (here + seconds / 2)
