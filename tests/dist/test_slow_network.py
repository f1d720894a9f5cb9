"""Bytes between two machines: as planned, as issued, and as the kernel counted them at the ends of the cable."""

import pytest
from commands import SMALL, script, write_text

ETHERNET = script("ethernet")
SLOW = script("slow_network")
MOST = 0.12  # headers, acknowledgements and two barriers, of messages of some kilobytes
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(ETHERNET.lacking()), reason=ETHERNET.lacking() or "none")]


@pytest.mark.parametrize("name", ["plain replicas", "DiLoCo, int4"])
def test_the_interfaces_see_what_was_planned_and_issued(tmp_path, monkeypatch, name):
    write_text(tmp_path)
    job = [*(word for word in SMALL if not word.startswith("steps=")), f"data.source={tmp_path}/my/*.txt"]
    words = ("arch.layers=6", "arch.vocab=2048", "checkpoint.every=0", "faults.compare_every=0")
    monkeypatch.setattr(SLOW, "JOB", (*job, *words))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    method = next(each for each in SLOW.METHODS if each.name == name)
    with ETHERNET.two_nodes(10.0) as nodes:
        found = SLOW.bytes_of(nodes, method, tmp_path)  # raises where a rank issues other calls than were planned
    assert found["predicted"] > 10_000
    assert all(found["predicted"] <= seen <= (1 + MOST) * found["predicted"] for seen in found["counted"]), found
