import json
from pathlib import Path

import pages
import pytest
from commands import script

ROOT = Path(__file__).parents[3]
RECORD = json.loads((ROOT / "results" / "slow_network.json").read_text())
script("ethernet")  # which the next one imports
SLOW = script("slow_network")


def test_the_page_and_the_picture_show_the_record():
    pages.agree(ROOT / "docs" / "communication.md", "slow network", SLOW.table(RECORD))
    pages.agree(ROOT / "docs" / "communication.md", "bytes", SLOW.bytes_table(RECORD))
    assert (ROOT / "docs" / "slow-network.svg").read_text() == SLOW.drawn(RECORD)


@pytest.mark.parametrize("each", RECORD["bytes"], ids=lambda each: each["name"])
def test_interfaces_saw_what_was_planned_and_the_protocol_on_top(each):
    assert each["predicted"] == each["issued"]
    assert all(each["predicted"] < seen < 1.05 * each["predicted"] for seen in each["counted"])


@pytest.mark.parametrize("rate", RECORD["rates"], ids=lambda rate: SLOW.rate_name(rate["mbit"]))
def test_no_row_of_the_record_is_faster_than_its_link(rate):
    sent = {each["name"]: each["predicted"] for each in RECORD["bytes"]}
    exact = sent["plain replicas"]
    for row in rate["rows"]:
        if row["name"] == "1-bit Adam":  # whose warm-up, a fifth of the run, sums exactly
            sent[row["name"]] = (exact + 4 * sent[row["name"]]) / 5
        assert 8 * sent[row["name"]] / row["step_seconds"] < 1.05e6 * rate["mbit"]


def test_losses_do_not_depend_on_the_network():
    first, *others = ([[loss for _, _, loss in row["losses"]] for row in rate["rows"]] for rate in RECORD["rates"])
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("call", "local", "expected"),
    [
        (("all_reduce", [0, 1], 1000, 2), 1, 2000),
        (("all_gather", [0, 1], 1000, 1), 1, 500),
        (("all_gather", [0, 1, 2, 3], 1000, 1), 2, 750),
        (("reduce_scatter", [0, 1, 2, 3], 1000, 1), 2, 1500),  # by Gloo an all-reduce
        (("all_to_all", [0, 1], 1000, 1), 1, 500),
        (("all_to_all", [0, 1, 2, 3], 1000, 1), 2, 1000),  # two ranks, each half of what it gives
        (("all_to_all", [0, 2], 1000, 1), 2, 1000),  # and so between the other two
        (("all_gather", [0, 1], 1000, 1), 2, 0),  # neighbours
    ],
)
def test_what_leaves_a_machine(call, local, expected):
    assert SLOW.crossing([call], local) == expected
