"""In-memory checkpoints over several machines: the next machine keeps each one's part of a save as well.

The process that started a machine's ranks has threads for it, and outlives the ranks. One sends what they have saved to
the machine after this one, the last to the first; others take what the machine before sends, and give back what is
asked for. No step waits for any of it.
"""

import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.config.weights import CHECKPOINTS, RUN, present, step_name
from meshwright.runtime.devices import free_host_bytes
from meshwright.runtime.files import replace_file
from meshwright.runtime.links import own_address
from meshwright.runtime.meeting import kept_alive
from meshwright.runtime.nodes import listening
from meshwright.runtime.parts import (
    CALL_SECONDS,
    CHUNK,
    COPIED,
    KEPT,
    MOST_PART,
    PART,
    READY,
    SEAL_BYTES,
    CopyNote,
    KeeperAddress,
    MachinePart,
    PartAnswer,
    PartCall,
    PartError,
    PartNote,
    SealedWire,
    answer_on,
    called,
    copy_note,
    decoded,
    discard_steps,
    files_of,
    receive,
    send,
)
from meshwright.spec.problem import UNDECODABLE

LOOK_SECONDS = 0.1
RETRY_SECONDS = 2.0  # until a copy that failed is tried again, or the next machine is looked for
CALLS = 3  # at a machine that is to give back what this one has lost
MOST_CALLERS = 16  # at a time, who have shown that they have the key
MOST_STRANGERS = 64  # at a time, who have not; ours do at once, so of more the one that has waited longest is sent away
Say = Callable[[str], None]


class PartKeeper:
    """This machine's end: in `memory` are its own parts, and below `kept` those of the machine before it.

    `room` says how many bytes it may still take. `address` is where rank 0 listens.
    """

    def __init__(
        self, memory: Path, folder: Path, node: int, nodes: int, address: tuple[str, int], say: Say,
        room: Callable[[Path], int] | None = None,
    ) -> None:  # fmt: skip
        self.memory, self.folder, self.node, self.nodes, self.say = memory, folder, node, nodes, say
        self.room = room or free_bytes
        self.own, self.kept = memory / CHECKPOINTS, memory / KEPT / CHECKPOINTS
        self.before, self.after = (node - 1) % nodes, (node + 1) % nodes
        self.key = secrets.token_bytes(SEAL_BYTES)
        self.listener, self.where = self._listening(*address)
        self.ended = threading.Event()
        self.keeping = threading.Lock()  # one part is taken at a time
        self.callers = threading.BoundedSemaphore(MOST_CALLERS)
        self.wires: set[socket.socket] = set()
        self.strangers: dict[socket.socket, None] = {}  # of these, in the order in which they came
        self.door = threading.Lock()
        self.sent: tuple[KeeperAddress, int, int] | None = None  # to whom, and which step of which attempt
        self.failures: set[str] = set()  # why copies failed since the last that did not
        self.next_try = self.next_word = 0.0
        self.threads = [
            threading.Thread(target=work, name=f"parts-{work.__name__}", daemon=True)
            for work in (self._listen, self._recover, self._send_all)
        ]

    def start(self) -> None:
        """Begin to listen, to ask for what was lost, and to send."""
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Listen no more; what is on its way is given up."""
        self.ended.set()
        for wire in (self.listener, *self.wires):
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(CALL_SECONDS)
        if KeeperAddress.read(self.folder, self.node) == self.where:
            KeeperAddress.file(self.folder, self.node).unlink(missing_ok=True)

    def _listening(self, address: str, port: int) -> tuple[socket.socket, KeeperAddress]:
        """On the job's own network alone: at this machine's address towards rank 0."""
        public, family, _, _, _, place = own_address(address, port), *socket.getaddrinfo(address, 0)[0]
        if self.node == 0 and listening(address, place)[0] == "":  # known to itself by a loopback address alone
            public, place = address, ("", 0)
        else:
            family, _, _, _, place = socket.getaddrinfo(public, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place, family=family)
        where = KeeperAddress(address=public, port=listener.getsockname()[1], key=self.key.hex())
        return listener, where

    # What others ask of this machine.

    def _listen(self) -> None:
        while not self.ended.is_set():
            try:
                wire = self.listener.accept()[0]
            except OSError:
                return
            with self.door:
                self.strangers[wire] = None
                for oldest in list(self.strangers)[:-MOST_STRANGERS]:
                    del self.strangers[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # whoever waits for its word hears that none will come
            threading.Thread(target=self._serve, args=(wire,), name="parts-caller", daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        self.wires.add(plain)
        try:
            with plain, suppress(OSError, *UNDECODABLE, RecursionError):
                wire = SealedWire(kept_alive(plain), self.key, is_caller=False)
                call = msgspec.json.decode(wire.hear(), type=PartCall)
                self._leave_door(plain)
                if self.callers.acquire(blocking=False):
                    self._answer(wire, call)
        finally:
            self._leave_door(plain)
            self.wires.discard(plain)

    def _leave_door(self, wire: socket.socket) -> None:
        with self.door:
            self.strangers.pop(wire, None)

    def _answer(self, wire: SealedWire, call: PartCall) -> None:
        try:
            self._heed(wire, call)
        except PartError as error:
            wire.refuse(str(error))
        finally:
            self.callers.release()

    def _heed(self, wire: SealedWire, call: PartCall) -> None:
        home = {self.node: self.own, self.before: self.kept}.get(call.node)
        if call.word in ("keep", "held"):  # with two machines the one before this is the next one too
            home = self.kept if call.node == self.before else None
        if home is None:
            raise PartError(f"machine {self.node} keeps nothing of machine {call.node}")
        if call.word == "held":
            wire.send(msgspec.json.encode(PartAnswer(steps=tuple(present(home)))))
        elif call.word == "keep":
            with self.keeping:
                self._keep(wire, call)
        elif call.word == "part":
            self._give(wire, home / step_name(call.step))
        else:
            self._give_file(wire, home / step_name(call.step), call.file)

    def _keep(self, wire: SealedWire, call: PartCall) -> None:
        """Take a part of the machine before, where there is room; of those it has itself no more, none stays."""
        content = wire.hear(MOST_PART)
        part = decoded(content, PartNote)
        if (part.node, part.step) != (call.node, call.step):
            raise PartError("the list is of another part")
        self.kept.mkdir(parents=True, exist_ok=True)
        there = self.kept / step_name(part.step) / PART
        if there.exists() and there.read_bytes() == content:  # given back to this machine, and offered again
            wire.send(msgspec.json.encode(PartAnswer(has=True)))
            return
        discard_steps(self.kept, lambda step: step not in call.steps or step == call.step)
        files = files_of(part)
        needed, free = sum(file.bytes for file in files), self.room(self.memory)
        if needed > free:
            raise PartError(f"it needs {needed:,} bytes of host memory, and {free:,} are free on machine {self.node}")
        wire.send(msgspec.json.encode(PartAnswer()))
        try:
            receive(wire, part.step, files, content, self.kept)
        except OSError as error:
            if isinstance(error, ConnectionError | TimeoutError):
                raise
            raise PartError(f"machine {self.node} cannot write it: {error.strerror}") from None
        wire.send(msgspec.json.encode(PartAnswer()))

    def _give(self, wire: SealedWire, folder: Path) -> None:
        try:
            content = (folder / PART).read_bytes()
        except OSError:
            raise PartError(f"machine {self.node} has no such part") from None
        files = files_of(decoded(content, PartNote))
        wire.send(msgspec.json.encode(PartAnswer()))
        wire.send(content)
        send(wire, folder, files)

    def _give_file(self, wire: SealedWire, folder: Path, name: str) -> None:
        if not CHUNK.fullmatch(name):
            raise PartError(f"{name!r} is no chunk")
        try:
            file = open(folder / name, "rb")  # noqa: SIM115 - closed below
        except OSError:
            raise PartError(f"machine {self.node} has no {name} of that step") from None
        with file:
            size = os.fstat(file.fileno()).st_size
            wire.send(msgspec.json.encode(PartAnswer(size=size)))
            wire.send_file(file, size)

    # What this machine asks of the next one.

    def _recover(self) -> None:
        """Where another process had this machine's place, take back what the next machine has of it."""
        try:
            for _ in range(CALLS):
                where = KeeperAddress.read(self.folder, self.after)
                if where is None or self._recovered(where) or self.ended.wait(RETRY_SECONDS / CALLS):
                    return
            self.say(f"warning: machine {self.after} does not answer: what its memory may have of this one is not used")
        finally:
            replace_file(self.memory / READY, b"")

    def _recovered(self, where: KeeperAddress) -> bool:
        """Whether the next machine has answered, and said what it has."""
        try:
            with called(where, PartCall(word="held", node=self.node)) as wire:
                steps = answer_on(wire).steps
            for step in sorted({*steps} - {*present(self.own)}, reverse=True):
                self._take_back(where, step)
            return True
        except (OSError, PartError, msgspec.DecodeError):
            return False

    def _take_back(self, where: KeeperAddress, step: int) -> None:
        began = time.monotonic()
        try:
            with called(where, PartCall(word="part", node=self.node, step=step)) as wire:
                answer_on(wire)
                content = wire.hear(MOST_PART)
                part = decoded(content, PartNote)
                files = files_of(part)
                needed, free = sum(file.bytes for file in files), self.room(self.memory)
                if (part.node, part.step) != (self.node, step):
                    raise PartError("the list is of another part")
                if needed > free:
                    raise PartError(f"it needs {needed:,} bytes of host memory, and {free:,} are free")
                receive(wire, step, files, content, self.own)
        except PartError as error:  # the one before it may be good
            self.say(f"warning: {step_name(step)} in machine {self.after}'s memory cannot be used: {error}")
            return
        seconds = time.monotonic() - began
        self.say(
            f"machine {self.node}'s part of {step_name(step)} is back from machine {self.after}'s memory: "
            f"{needed:,} bytes in {seconds:.1f} s"
        )

    def _send_all(self) -> None:
        """Send what the ranks save, once it has its name, until this machine's work ends."""
        while not self.ended.wait(LOOK_SECONDS):
            if time.monotonic() >= self.next_word:
                self._publish()
            steps = present(self.own)
            if steps and (self.memory / READY).exists():
                with suppress(OSError):  # a newer one came, and this one went; or there is no room for a note yet
                    self._send_newest(steps)

    def _publish(self) -> None:
        """Say where this machine listens, in a folder that is a run's by now."""
        if not (self.folder / RUN).exists():
            return
        self.next_word = time.monotonic() + RETRY_SECONDS
        if KeeperAddress.read(self.folder, self.node) != self.where:
            with suppress(OSError):
                replace_file(KeeperAddress.file(self.folder, self.node), msgspec.json.encode(self.where), mode=0o600)

    def _send_newest(self, steps: list[int]) -> None:
        content = (self.own / step_name(steps[-1]) / PART).read_bytes()
        try:
            part = decoded(content, PartNote)
        except PartError as error:
            self._note(CopyNote(step=steps[-1], attempt=-1, failed=str(error)))
            return
        if not self._is_due(part):
            return
        self.next_try, where = time.monotonic() + RETRY_SECONDS, KeeperAddress.read(self.folder, self.after)
        words = ""
        if where is None or self.sent != (where, part.step, part.attempt):
            words = self._offer(where, part, content, tuple(steps))
            self.sent = None if where is None or words else (where, part.step, part.attempt)
        self._note(CopyNote(step=part.step, attempt=part.attempt, failed=words))

    def _is_due(self, part: MachinePart[PartNote]) -> bool:
        """Whether nobody has been told of it, or it is time to see whether it is still there."""
        note = copy_note(self.memory)
        is_told = note is not None and (note.step, note.attempt) == (part.step, part.attempt)
        return not is_told or time.monotonic() >= self.next_try

    def _note(self, note: CopyNote) -> None:
        """Tell the ranks, who wait for it before the next save; and people, once."""
        if note.failed and note.failed not in self.failures:
            self.say(
                f"warning: {step_name(note.step)} of machine {self.node} is in its own memory alone: {note.failed}"
            )
        self.failures = self.failures | {note.failed} if note.failed else set()
        if note != copy_note(self.memory):
            replace_file(self.memory / COPIED, msgspec.json.encode(note))

    def _offer(
        self, where: KeeperAddress | None, part: MachinePart[PartNote], content: bytes, steps: tuple[int, ...]
    ) -> str:
        """Why the next machine does not have it now; "" where it does."""
        if where is None:
            return f"machine {self.after} has not said where it listens"
        try:
            files = files_of(part)
            with called(where, PartCall(word="keep", node=self.node, step=part.step, steps=steps)) as wire:
                wire.send(content)
                if not answer_on(wire).has:
                    send(wire, self.own / step_name(part.step), files)
                    answer_on(wire)
            return ""
        except FileNotFoundError:
            raise
        except (PartError, msgspec.DecodeError) as error:
            return str(error)
        except OSError as error:
            return f"machine {self.after} does not answer: {(error.strerror or str(error)).lower()}"


def free_bytes(memory: Path) -> int:
    """Room in host memory: of its file system, and of the machine."""
    known = [shutil.disk_usage(memory).free, free_host_bytes()]
    return min(each for each in known if each is not None)
