"""How a machine's GPUs are: NVLinks, ECC errors, clocks and heat, asked of NVML; no GPU is used. No torch here."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from meshwright.runtime.card_memory import NVML

LONGEST_SECONDS = 2.0  # that the driver may take, before every start on several machines
MOST_LINKS = 18  # of one GPU, as NVML numbers them
SM_CLOCK, UNCORRECTED, VOLATILE, NVLINK_CAPABILITY, NAME_BYTES = 1, 1, 0, 2, 96
# Bits by which NVML says why clocks are low. Idle GPUs, power caps and boost groups are no fault.
HELD_BY_SETTING = 0x2
SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; what its driver does not tell is None, and counts of NVLinks are then 0."""

    index: int
    name: str = ""
    links: int = 0  # NVLinks that are active
    links_down: int = 0
    peers: tuple[int, ...] = ()  # GPUs of this machine that it reaches over NVLink
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    rows_pending: bool = False  # memory rows that only a reset of the GPU replaces
    rows_failed: bool = False  # and ones for which there was no spare
    clock: int | None = None  # MHz of its processors, now
    most_clock: int | None = None
    reasons: int = 0  # why that is low, in NVML's bits
    celsius: int | None = None

    @property
    def mhz(self) -> str:
        """Its clock, beside the highest where that is told."""
        return f"{self.clock or '?'} {f'of {self.most_clock} ' if self.most_clock else ''}MHz"

    @property
    def slowdowns(self) -> list[str]:
        """What holds its clocks back that should not."""
        return sorted({word for bit, word in SLOWDOWNS.items() if self.reasons & bit})


def gpu_health(library: str = NVML, seconds: float = LONGEST_SECONDS) -> tuple[GpuHealth, ...] | None:
    """Every GPU of this machine, none where there is no driver; None: the driver did not answer in time.

    It is asked beside this thread, because a GPU that has fallen off its bus can keep a call for minutes.
    """
    found: list[GpuHealth] = []
    asking = threading.Thread(target=lambda: found.extend(_asked(library)), name="nvml", daemon=True)
    asking.start()
    asking.join(seconds)
    return None if asking.is_alive() else tuple(found)


def _asked(library: str) -> list[GpuHealth]:
    try:
        driver = ctypes.CDLL(library)
        if driver.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    try:
        return _each(driver)
    finally:
        with suppress(AttributeError):
            driver.nvmlShutdown()


def _each(driver: ctypes.CDLL) -> list[GpuHealth]:
    cards: list[ctypes.c_void_p] = []
    for number in range(_number(driver, "nvmlDeviceGetCount_v2") or 0):
        card = ctypes.c_void_p()
        if _call(driver, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(card)):
            cards.append(card)
    return [_one(driver, number, cards) for number in range(len(cards))]


def _one(driver: ctypes.CDLL, index: int, cards: list[ctypes.c_void_p]) -> GpuHealth:
    card = cards[index]
    name = ctypes.create_string_buffer(NAME_BYTES)
    _call(driver, "nvmlDeviceGetName", card, name, ctypes.c_uint(NAME_BYTES))
    states = [_number(driver, "nvmlDeviceGetNvLinkState", card, ctypes.c_uint(link)) for link in range(MOST_LINKS)]
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    _call(driver, "nvmlDeviceGetRemappedRows", card, *map(ctypes.byref, rows))
    ecc = _number(driver, "nvmlDeviceGetTotalEccErrors", card, UNCORRECTED, VOLATILE, kind=ctypes.c_ulonglong)
    reasons = _number(driver, "nvmlDeviceGetCurrentClocksThrottleReasons", card, kind=ctypes.c_ulonglong)
    return GpuHealth(
        index=index,
        name=name.value.decode(errors="replace"),
        links=sum(state == 1 for state in states),
        links_down=sum(state == 0 for state in states),
        peers=tuple(_peers(driver, index, cards)),
        ecc_errors=ecc,
        rows_pending=bool(rows[2].value),
        rows_failed=bool(rows[3].value),
        clock=_number(driver, "nvmlDeviceGetClockInfo", card, SM_CLOCK),
        most_clock=_number(driver, "nvmlDeviceGetMaxClockInfo", card, SM_CLOCK),
        reasons=reasons or 0,
        celsius=_number(driver, "nvmlDeviceGetTemperature", card, 0),
    )


def _peers(driver: ctypes.CDLL, index: int, cards: list[ctypes.c_void_p]) -> Iterator[int]:
    for other in range(len(cards)):
        ask = (cards[index], cards[other], NVLINK_CAPABILITY)
        if other != index and _number(driver, "nvmlDeviceGetP2PStatus", *ask) == 0:
            yield other


def _number(driver: ctypes.CDLL, name: str, *asked: Any, kind: Callable[[], Any] = ctypes.c_uint) -> int | None:
    """A number that NVML writes behind its last argument; None where it has none to tell."""
    answer = kind()
    return int(answer.value) if _call(driver, name, *asked, ctypes.byref(answer)) else None


def _call(driver: ctypes.CDLL, name: str, *asked: Any) -> bool:
    """Whether NVML answered: older drivers lack functions, and GPUs lack what these tell."""
    with suppress(AttributeError):
        return getattr(driver, name)(*asked) == 0
    return False
