"""Machines that listen for each other: a datagram twice a second, between the watcher of rank 0 and every other.

A datagram is JSON behind a digest that only this run's watchers can make: their key is a file in the run folder. All
else that arrives is thrown away. Nothing listens unless there are several machines, and then only where rank 0 does.
"""

import hashlib
import hmac
import secrets
import socket
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from meshwright.runtime.files import replace_file
from meshwright.spec.problem import UNDECODABLE

KEY = "nodes.key"
KEY_BYTES = 32
MOST_BYTES = 1200  # of a datagram: less than any network cuts
MOST_TEXT = 160  # characters of somebody's words
MOST_AT_ONCE = 256  # datagrams taken at one look, so that a flood does not stop the watching
BEAT_SECONDS = 0.5
LOST_SECONDS = 5.0  # ten datagrams in a row that did not come
LATE_SECONDS = 2.0  # between two looks of our own: then it was this machine that slept
GOODBYES = 3  # any of them may get lost

Address = tuple[Any, ...]  # as the family of the socket writes it


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine of a job."""

    first: int  # its first rank
    ranks: int
    host: str
    listed: str = ""  # its ranks in words, where they are not one after another

    def __str__(self) -> str:
        if self.listed:
            return f"{self.host} ({self.listed})"
        last = self.first + self.ranks - 1
        return f"{self.host} ({f'rank {self.first}' if self.ranks == 1 else f'ranks {self.first} to {last}'})"


class Lost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine that is not there any more."""

    node: Node
    seconds: float  # since it was last heard
    said: str = ""  # its failure report; empty: it went without any


class NodeMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one watcher tells another."""

    node: Node
    number: int  # grows: a datagram that comes twice is heard once
    state: Literal["here", "done", "failed"] = "here"
    said: str = ""
    lost: Lost | None = None  # what the first machine knows of the others


class NodeList:
    """Who was heard, and when. Only who was heard once can be missed."""

    def __init__(self) -> None:
        self.heard: dict[int, tuple[NodeMessage, float]] = {}
        self.looked: float | None = None

    def hear(self, word: NodeMessage, now: float) -> bool:
        """Whether it is news."""
        before = self.heard.get(word.node.first)
        if before is not None and word.number <= before[0].number:
            return False
        self.heard[word.node.first] = word, now
        return True

    def missing(self, now: float) -> Lost | None:
        """A machine that failed, that was reported lost, or that has been silent for too long."""
        if self.looked is not None and now - self.looked > LATE_SECONDS:
            self.heard = {first: (word, now) for first, (word, _) in self.heard.items()}
        self.looked = now
        for word, at in self.heard.values():
            if word.state == "failed":
                return Lost(node=word.node, seconds=now - at, said=word.said or "it failed")
            if word.lost is not None:
                return word.lost
            if word.state == "here" and now - at > LOST_SECONDS:
                return Lost(node=word.node, seconds=now - at)
        return None


class Nodes:
    """This machine's end of the wire."""

    def __init__(self, node: Node, address: str, port: int, folder: Path) -> None:
        self.node = node
        self.folder = folder
        self.roll = NodeList()
        self.is_first = node.first == 0
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.others: dict[int, Address] = {}  # first rank -> where its datagrams come from
        if self.is_first:
            try:
                self.socket.bind(listening(address, place))
            except OSError:
                self.socket.close()
                raise
            self.key = secrets.token_bytes(KEY_BYTES)  # of this attempt
            replace_file(folder / KEY, self.key, mode=0o600)
        else:
            self.others[0] = place
            self.key = b""  # read until the first machine is heard: an earlier attempt may have left its own
        self.next_beat = 0.0

    def look(self, now: float) -> Lost | None:
        """Hear everyone, say that this machine is here, and tell who is missing."""
        self._hear(now)
        if now >= self.next_beat:
            self.next_beat = now + BEAT_SECONDS
            self._send(self._word())
        return self.roll.missing(now)

    def pass_on(self, lost: Lost) -> None:
        """Rank 0's watcher tells everybody else what it knows."""
        if self.is_first:
            self._send_surely(self._word(lost=lost))

    def leave(self, said: str = "") -> None:
        """Say goodbye: the work is done, or why it is not."""
        self._send_surely(self._word(state="failed" if said else "done", said=said[:MOST_TEXT]))

    def close(self) -> None:
        """Listen no more."""
        if self.is_first:  # before the port is free: whoever takes it next has a key of its own
            (self.folder / KEY).unlink(missing_ok=True)
        self.socket.close()

    def _word(
        self, state: Literal["here", "done", "failed"] = "here", said: str = "", lost: Lost | None = None
    ) -> NodeMessage:
        return NodeMessage(node=self.node, number=time.monotonic_ns(), state=state, said=said, lost=lost)

    def _hear(self, now: float) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                datagram, source = self.socket.recvfrom(MOST_BYTES + 1)
            except OSError:  # none is left; or an earlier one of ours did not arrive, which is no news
                return
            word = opened(datagram, self.key, NodeMessage)
            if word is not None and self.roll.hear(word, now) and self.is_first:
                self.others[word.node.first] = source

    def _send(self, word: NodeMessage) -> None:
        if not self.is_first and not self.roll.heard:
            with suppress(OSError):  # the first machine may not have written it yet
                self.key = (self.folder / KEY).read_bytes()[:KEY_BYTES]
        datagram = sealed(word, self.key)
        for place in self.others.values() if self.key else ():
            try:
                self.socket.sendto(datagram, place)
            except OSError:
                continue  # the network is down: silence says so

    def _send_surely(self, word: NodeMessage) -> None:
        for _ in range(GOODBYES):
            self._send(word)
            time.sleep(0.05)


def listening(address: str, place: Address) -> Address:
    """Where the first machine hears the others: at its address, or anywhere if only itself can reach it there.

    Many a machine's own list of hosts has its name on a loopback address, which the others' lists do not.
    """
    named = address != "localhost" and not _is_number(address)
    return ("", *place[1:]) if named and ip_address(place[0]).is_loopback else place


def _is_number(address: str) -> bool:
    try:
        ip_address(address)
    except ValueError:
        return False
    return True


def sealed(word: msgspec.Struct, key: bytes) -> bytes:
    """A datagram: the digest, then the word."""
    content = msgspec.json.encode(word)
    return hmac.digest(key, content, hashlib.sha256) + content


Word = TypeVar("Word", bound=msgspec.Struct)


def opened(datagram: bytes, key: bytes, kind: type[Word]) -> Word | None:
    """The word in a datagram; None when it is not one of ours."""
    if not key or len(datagram) > MOST_BYTES:
        return None
    seal, content = datagram[:32], datagram[32:]
    if not hmac.compare_digest(seal, hmac.digest(key, content, hashlib.sha256)):
        return None
    try:
        return msgspec.json.decode(content, type=kind)
    except (*UNDECODABLE, RecursionError):
        return None
