import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import script

from meshwright.hardware.profile import CollectiveFit

ROOT = Path(__file__).parents[3]
RECORD = json.loads((ROOT / "results" / "ethernet.json").read_text())


ETHERNET = script("ethernet")


def test_the_page_shows_the_record():
    page = (ROOT / "docs" / "bench.md").read_text()
    assert ETHERNET.table(RECORD) in page
    assert ETHERNET.links(RECORD) in page
    assert ETHERNET.shown(page, RECORD) == page


@pytest.mark.parametrize("rate", RECORD["rates"], ids=lambda rate: f"{rate['gbit']:g} Gbit/s")
def test_nothing_in_the_record_is_faster_than_its_link(rate):
    most = rate["gbit"] * 1.05  # what may pass at once is on top of the rate
    assert max(rate["tcp_gbit"].values()) < most
    messages = [each for each in rate["collectives"] if each["kind"] == "send" and each["bytes"] > 2**22]
    assert messages
    assert max(each["bytes"] * 8e-9 / each["seconds"] for each in messages) < most


def test_what_a_plan_sends_is_priced_by_its_fits():
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
    fits = tuple(CollectiveFit(kind=kind, ranks=2, latency=0.0, bandwidth=1e9, error=0.0) for kind in kinds)
    slower = tuple(CollectiveFit(kind=kind, ranks=2, latency=0.0, bandwidth=1e8, error=0.0) for kind in kinds)
    sums = ETHERNET.sent_seconds("replicate=2", fits)
    # Every gradient once, in four bytes; beyond them only a few numbers of the step's verdict.
    assert sums == pytest.approx(4 * RECORD["parameters"] / 1e9, rel=1e-3)
    assert ETHERNET.sent_seconds("replicate=2", slower) == pytest.approx(10 * sums)
    assert ETHERNET.sent_seconds("shard=2,zero=3", fits) > ETHERNET.sent_seconds("shard=2,zero=1", fits)


def test_a_machine_without_the_tools_is_told_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["ethernet.py"])
    assert ETHERNET.main() == 2
    assert capsys.readouterr().err == "ethernet.py: ip and tc not found; install iproute2\n"


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def interrupted(seen: list[str]) -> None:
    with ETHERNET.two_nodes(1.0) as nodes:
        seen += [node for node in nodes if node in namespaces()]
        raise KeyboardInterrupt


@pytest.mark.skipif(bool(ETHERNET.lacking()), reason="needs root, ip and tc")
def test_namespaces_are_gone_when_the_work_is_interrupted():
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(seen)
    assert len(seen) == 2
    assert not [node for node in seen if node in namespaces()]
