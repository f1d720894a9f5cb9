"""Sockets between machines: on which interface they are, and pair by pair their latency, bandwidth and clocks."""

import fcntl
import hashlib
import hmac
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from meshwright.runtime.doctor import MIB, LinkFacts

PINGS = 50
STREAM_BYTES = 64 * MIB
SECONDS = 10.0  # that a pair may take
SEAL_BYTES = 32
SIOCGIFADDR = 0x8915  # Linux's request for the address of an interface
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
CLOCK = struct.Struct("<d")


def own_address(address: str, port: int) -> str:
    """The address of this machine on the network where another is; "" where there is no way. Nothing is sent."""
    with suppress(OSError):
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as wire:
            wire.connect(where)
            return str(wire.getsockname()[0])
    return ""


def interface_towards(address: str, port: int, is_whole: bool) -> str:
    """The interface on which the job's sockets should listen, "" where any must; `is_whole`: the job is here alone.

    A machine may know its own name by a loopback address, where others would not find it.
    """
    own = own_address(address, port)
    if not own:
        return ""
    if ip_address(own.partition("%")[0]).is_loopback:
        return LOOPBACK if is_whole else ""
    return interfaces().get(own.partition("%")[0], "")


def is_loopback(address: str) -> bool:
    """Whether an address as somebody wrote it is this machine's own, so that all who use it are on one."""
    with suppress(ValueError):
        return ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def interfaces(system: Path = Path("/")) -> dict[str, str]:
    """Addresses of this machine, and the interface of each."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in (system / "proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(IPv6Address(int(digits, 16)))] = name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                told = fcntl.ioctl(wire.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(told[20:24])] = name
    return found


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs, in rounds in which nobody is twice: a tournament by the circle method."""
    numbers: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(numbers) - 1):
        pairs = [(one, other) for one, other in zip(numbers, reversed(numbers), strict=True)][: len(numbers) // 2]
        yield [(min(one, other), max(one, other)) for one, other in pairs if one is not None and other is not None]
        numbers = [numbers[0], numbers[-1], *numbers[1:-1]]


class LinkServer:
    """This machine's end, for callers of its job: answers each byte with its clock, then takes what is sent."""

    def __init__(self, address: str, secret: bytes) -> None:
        self.secret = secret
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
            _answer(wire, self.secret)  # in a round nobody is called twice


def _answer(wire: socket.socket, secret: bytes) -> None:
    with wire:
        wire.settimeout(SECONDS)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            wire.sendall(asked := secrets.token_bytes(SEAL_BYTES))
            if not hmac.compare_digest(_take(wire, SEAL_BYTES), _seal(secret, asked)):
                return  # a stranger
            for _ in range(PINGS):
                if wire.recv(1):
                    wire.sendall(CLOCK.pack(time.time()))
            left = STREAM_BYTES
            while left > 0 and (more := wire.recv(min(left, MIB))):
                left -= len(more)
            wire.sendall(b".")
        except OSError:
            return


def _seal(secret: bytes, asked: bytes) -> bytes:
    """What only a rank of the same job can answer."""
    return hmac.digest(secret, asked, hashlib.sha256)


def _take(wire: socket.socket, size: int) -> bytes:
    """So many bytes."""
    taken = b""
    while len(taken) < size:
        more = wire.recv(size - len(taken))
        if not more:
            raise ConnectionResetError(0, "the other side closed")
        taken += more
    return taken


def call(names: Sequence[str], pair: tuple[int, int], address: str, port: int, secret: bytes) -> LinkFacts:
    """Measure the way to another machine, as the first of a pair."""
    first, second = names[pair[0]], names[pair[1]]
    try:
        with socket.create_connection((address, port), timeout=SECONDS) as wire:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.sendall(_seal(secret, _take(wire, SEAL_BYTES)))
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
    answer = _take(wire, CLOCK.size)
    seconds = time.monotonic() - began
    return seconds, CLOCK.unpack(answer)[0] - (here + seconds / 2)
