"""What a start was spent on, as the report has it."""

import msgspec

from meshwright.report.run_summary import Saves, attempts
from meshwright.report.run_text import of_saves, start_words
from meshwright.runtime.records import AttemptRecord, StepRecord, line, read_line

PHASES = {"launch": 3.0, "data": 0.0, "meet": 1.5, "build": 0.5}


def step(number, ended, at):
    figures = {"loss": 1.0, "norm": 1.0, "rate": 0.1, "tokens": 1, "seconds": 1.0, "data_seconds": 0.0}
    return StepRecord(step=number, **figures, memory_bytes=1, flops=1.0, ended=ended, at=at)


def test_an_attempt_has_the_phases_of_its_start_and_when_its_first_loss_was_there():
    head = AttemptRecord(step=0, session="a", number=1, began=100.0, at=105.0, phases=PHASES)
    (found,) = attempts([head, step(1, ended=112.0, at=113.0), step(2, ended=113.0, at=113.5)], {})
    assert found.phases == PHASES
    assert sum(found.phases.values()) == found.at
    assert found.first_loss == 7.0


def test_records_of_older_versions_have_no_phases():
    old = b'{"kind":"attempt","step":0,"session":"a","number":1,"began":0.0,"at":5.0}'
    head = read_line(old)
    assert isinstance(head, AttemptRecord)
    assert head.phases == {}
    assert read_line(line(head)) == head
    assert attempts([head], {})[0].first_loss is None


def test_words_about_a_start_leave_out_what_took_no_time():
    head = AttemptRecord(step=0, session="a", number=1, began=100.0, at=105.0, phases=PHASES)
    (found,) = attempts([head, step(1, ended=112.0, at=113.0)], {})
    assert start_words(found) == "launch 3.0 s, meet 1.5 s, build 500 ms; first loss 7.0 s later"


def test_a_save_has_a_rate_where_it_is_large_enough_for_one():
    rate = {"bytes": 4_367_240, "bytes_per_second": 2e7, "bound": "hashing"}
    small = Saves(count=1, seconds=0.02, longest=0.02, newest=20, **rate)
    paused, written = of_saves(small)
    assert "paused training for 20 ms in total" in paused
    assert written.split(maxsplit=1)[1] == "4.37 MB a save"
    large = msgspec.structs.replace(small, bytes=18 * 10**9, bytes_per_second=1.2e9, bound="disk")
    assert list(of_saves(large))[1].split(maxsplit=1)[1] == "18 GB a save, at 1.20 GB/s, bound by the disk"
