"""Who holds a card: asked of a driver whose answers are given, through the same calls as of a real one."""

import subprocess
import sys

import pytest

from meshwright.runtime.devices import CardProcess, others, processes
from meshwright.spec.units import GIB

UUID = "GPU-11111111-2222-3333-4444-555555555555"
NVML = """
#include <string.h>
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu; unsigned int compute; } info;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **card) { *card = (void *)7; return strcmp(uuid, "%s") ? 6 : 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned int *count, info *found) {
    if (card != (void *)7 || *count < 2) return 2;
    found[0] = (info){4000000001u, 5ull << 30, 0, 0};
    found[1] = (info){4000000002u, ~0ull, 0, 0};
    *count = 2;
    return 0;
}
"""
SAID = (
    f"{UUID}, 4000000001, /usr/bin/other, 2048\n"
    f"{UUID}, 4000000002, [Not Found], [N/A]\n"
    "GPU-other, 4000000003, /usr/bin/else, 1\n"
)


@pytest.fixture
def library(tmp_path):
    source = tmp_path / "nvml.c"
    source.write_text(NVML % UUID)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "nvml.so", source], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a C compiler")
    return str(tmp_path / "nvml.so")


def command(text):
    return [sys.executable, "-c", f"print({text!r}, end='')"]


def test_nvml_is_asked_first(library):
    found = processes(UUID, library, command(SAID))
    assert found == [
        CardProcess(pid=4000000001, name="", bytes=5 * GIB),
        CardProcess(pid=4000000002, name="", bytes=None),
    ]
    assert [str(each) for each in found] == ["process 4000000001, 5.0 GiB", "process 4000000002"]


def test_a_card_that_nvml_does_not_know_is_asked_for_elsewhere(library):
    assert processes("GPU-none", library, command("")) == []


def test_without_nvml_the_command_answers():
    assert processes(UUID, "libnone.so.1", command(SAID)) == [
        CardProcess(pid=4000000001, name="other", bytes=2 * GIB),
        CardProcess(pid=4000000002, name="", bytes=None),
    ]


@pytest.mark.parametrize(
    "query", [["no-such-program"], [sys.executable, "-c", "raise SystemExit(9)"], command("?,?,?,?")]
)
def test_where_nobody_can_be_asked_nobody_is_named(query):
    assert processes(UUID, "libnone.so.1", query) == []


def test_a_process_that_can_be_seen_has_the_name_it_was_started_by():
    with subprocess.Popen([sys.executable, "-c", "input()", "word"], stdin=subprocess.PIPE) as other:
        (found,) = processes(UUID, "libnone.so.1", command(f"{UUID}, {other.pid}, x, 1"))
        other.communicate(b"\n")
    assert found.name.startswith("python")
    assert found.name.endswith("word")


def test_this_process_is_none_of_the_others():
    mine, other = (CardProcess(pid=pid, name="", bytes=size * GIB) for pid, size in ((1, 5), (2, 50)))
    assert others([other, mine], own_pid=1, own_bytes=4 * GIB) == [other]
    assert others([other, mine], own_pid=77, own_bytes=4 * GIB) == [other]  # the driver numbers it otherwise
    assert others([other, other], own_pid=77, own_bytes=4 * GIB) == [other, other]
