"""How GPUs are: asked of a driver whose answers are given, through the same calls as of a real one."""

import subprocess
import time

import msgspec
import pytest

from meshwright.runtime.devices import GpuHealth, gpu_health
from meshwright.runtime.doctor import RankFacts, findings
from meshwright.spec.units import GIB

# Two GPUs: the first is well; the second has a link down, ECC errors, a row to be replaced, and is hot. No temperature
# of the first is told, and the function that tells clocks' maxima is missing, as in an old driver.
NVML = """
#include <string.h>
#include <unistd.h>
static long second(void *card) { return card == (void *)2; }
int nvmlInit_v2(void) { sleep(SLEEP); return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **card) { *card = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *card, char *name, unsigned length) { strncpy(name, "NVIDIA H100", length); return 0; }
int nvmlDeviceGetNvLinkState(void *card, unsigned link, unsigned *up) {
    *up = !(second(card) && link == 3); return link < 4 ? 0 : 2;
}
int nvmlDeviceGetP2PStatus(void *card, void *other, unsigned what, unsigned *status) {
    *status = 0; return what == 2 && card != other ? 0 : 2;
}
int nvmlDeviceGetTotalEccErrors(void *card, unsigned type, unsigned counter, unsigned long long *count) {
    *count = second(card) ? 5 : 0; return type == 1 && counter == 0 ? 0 : 2;
}
int nvmlDeviceGetRemappedRows(void *card, unsigned *few, unsigned *bad, unsigned *pending, unsigned *failed) {
    *few = 0, *bad = 0, *pending = second(card), *failed = 0; return 0;
}
int nvmlDeviceGetClockInfo(void *card, unsigned type, unsigned *mhz) {
    *mhz = second(card) ? 345 : 1980; return type == 1 ? 0 : 2;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *card, unsigned long long *why) {
    *why = second(card) ? 0x40 | 0x4 : 0x1; return 0;
}
int nvmlDeviceGetTemperature(void *card, unsigned sensor, unsigned *celsius) {
    *celsius = 91; return second(card) ? 0 : 3;
}
"""
WELL = GpuHealth(index=0, name="NVIDIA H100", links=4, peers=(1,), ecc_errors=0, clock=1980, reasons=1)
ILL = GpuHealth(
    index=1, name="NVIDIA H100", links=3, links_down=1, peers=(0,), ecc_errors=5, rows_pending=True, clock=345,
    reasons=0x44, celsius=91,
)  # fmt: skip
FACTS = RankFacts(host="a", node="a", files=65536, shm=64 * GIB)


def library(folder, seconds=0):
    source = folder / "nvml.c"
    source.write_text(NVML)
    try:
        subprocess.run(["cc", f"-DSLEEP={seconds}", "-shared", "-fPIC", "-o", folder / "nvml.so", source], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a C compiler")
    return str(folder / "nvml.so")


def test_every_gpu_is_asked_and_what_an_old_driver_lacks_is_left_open(tmp_path):
    assert gpu_health(library(tmp_path)) == (WELL, ILL)


def test_without_a_driver_there_is_nothing_to_say():
    assert gpu_health("libnone.so.1") == ()
    assert findings([FACTS], [], {}) == []


def test_a_driver_that_hangs_keeps_nobody(tmp_path):
    began = time.monotonic()
    assert gpu_health(library(tmp_path, seconds=30), seconds=0.05) is None
    assert time.monotonic() - began < 20  # a hang, not a speed
    (found,) = findings([msgspec.structs.replace(FACTS, health=None)], [], {})
    assert found.text == "the GPU driver of a did not answer within 2 s"


def test_what_is_wrong_with_a_gpu_is_named_with_its_number():
    found = findings([msgspec.structs.replace(FACTS, health=(WELL, ILL))], [], {})
    assert [one.text for one in found] == [
        "GPU 1 of a has had 5 uncorrected ECC errors since its driver was loaded",
        "GPU 1 of a has broken rows of memory to be replaced",
        "GPU 1 of a has 3 of 4 NVLinks up",
        "GPU 1 of a is held at 345 MHz by heat, at 91 °C",
    ]
    assert {one.kind for one in found} == {"problem"}
    assert findings([msgspec.structs.replace(FACTS, health=(WELL, WELL))], [], {}) == []


def test_pairs_of_bridges_and_held_clocks_are_advice():
    four = [GpuHealth(index=number, links=4, peers=(number ^ 1,)) for number in range(4)]
    four[2] = msgspec.structs.replace(four[2], reasons=0x2, clock=1200, most_clock=1980)
    found = findings([msgspec.structs.replace(FACTS, health=tuple(four))], [], {})
    assert [one.kind for one in found] == ["advice", "advice"]
    assert found[0].text == "a setting holds GPU 2 of a at 1200 of 1980 MHz"
    assert "peers: 0: 1; 1: 0; 2: 3; 3: 2)" in found[1].text
