"""The heartbeat of a rank: one small record in shared memory, written by the rank, read by its supervisor."""

import struct

import msgspec

PHASES = ("start", "data", "forward", "backward", "optimizer", "save", "eval", "compile", "end")
MOST_GROUPS = 32  # process groups whose collectives are counted

HEAD = struct.Struct("<QQQqqQQII")
COUNTS = struct.Struct(f"<{MOST_GROUPS}Q")
LEAVE = struct.Struct("<Q")
SIZE = HEAD.size + COUNTS.size + LEAVE.size
AT_COUNTS = HEAD.size
AT_LEAVE = AT_COUNTS + COUNTS.size


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank last said. Times are of the machine's monotonic clock, which no one can set."""

    pid: int = 0  # 0: the rank has not spoken yet
    tick: float = 0.0  # when its heart last beat; old while a thread holds Python's lock, or the process is stopped
    moved: float = 0.0  # when its main thread was last seen elsewhere than before
    step: int = 0  # steps done, those before a restart included
    restored: int = -1  # the step it began from; -1: not known yet
    phase: str = "start"
    waiting: bool = False  # in a collective, for other ranks
    novel: bool = False  # waiting at a line of ours where it never was before
    steps_here: int = 0  # steps done since the process began
    counts: tuple[int, ...] = ()  # collectives begun, by process group


def pack(beat: Beat) -> bytes:
    """The record without its last word, which is the supervisor's."""
    flags = beat.waiting | beat.novel << 1
    head = HEAD.pack(
        beat.pid,
        int(beat.tick * 1e9),
        int(beat.moved * 1e9),
        beat.step,
        beat.restored,
        beat.steps_here,
        len(beat.counts),
        PHASES.index(beat.phase),
        flags,
    )
    return head + COUNTS.pack(*beat.counts[:MOST_GROUPS], *[0] * (MOST_GROUPS - len(beat.counts)))


def unpack(data: bytes) -> Beat:
    """What was packed."""
    pid, tick, moved, step, restored, steps_here, groups, phase, flags = HEAD.unpack_from(data, 0)
    return Beat(
        pid=pid,
        tick=tick / 1e9,
        moved=moved / 1e9,
        step=step,
        restored=restored,
        steps_here=steps_here,
        phase=PHASES[min(phase, len(PHASES) - 1)],
        waiting=bool(flags & 1),
        novel=bool(flags & 2),
        counts=COUNTS.unpack_from(data, AT_COUNTS)[:groups],
    )
