import io
import os
import re
from contextlib import suppress

import msgspec
import pytest

from meshwright.runtime.records import EvalRecord, StepRecord
from meshwright.train.log import LiveBar, PlainLines, duration, humane, screen, step_line

RECORD = StepRecord(
    step=10,
    loss=5.2014,
    norm=2.1,
    rate=3e-4,
    tokens=4096,
    seconds=0.5,
    data_seconds=0.0,
    memory_bytes=2**30,
    flops=5e11,
)


STEERING = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_step_line_holds_the_usual_fields_in_the_usual_order():
    line = step_line(RECORD, 100, peak=10e12)
    assert line == "step 10/100  loss 5.2014  norm 2.100  lr 3.0e-04  8,192 tok/s  MFU 10.0%"
    line = step_line(msgspec.structs.replace(RECORD, tokens=10**6), 100, None, seconds_left=45.0)
    assert line == "step 10/100  loss 5.2014  norm 2.100  lr 3.0e-04  1.0 GiB  2M tok/s  ETA 45 s"


@pytest.mark.parametrize("seconds_left", [None, 45.0, 4e6])
@pytest.mark.parametrize("peak", [None, 9.89e17])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"step": 99_999, "loss": 11.2345, "norm": 1234.5, "tokens": 16_000_000, "flops": 4e17, "memory_bytes": 2**36},
        {"step": 99_999, "balance": 12.345, "norm": 1e-9, "tokens": 3, "memory_bytes": 191 << 30},
        {"step": 99_999, "skipped": True, "loss": float("nan"), "norm": float("inf"), "loss_scale": 2.0**-24},
    ],
)
def test_a_step_line_fits_80_columns(fields, peak, seconds_left):
    line = step_line(msgspec.structs.replace(RECORD, **fields), 100_000, peak, seconds_left)
    assert len(line) <= 80
    assert ("ETA" in line) is (seconds_left is not None and "skipped" not in fields)


@pytest.mark.parametrize("columns", [30, 40, 60])
def test_on_a_narrow_terminal_a_step_is_one_line_and_a_message_is_broken_between_words(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = "data: my/*.txt: 1 .txt read; 2,801 tokens, 87 samples of 32 (1 for validation, 0% filler)"
    for kind in (PlainLines, LiveBar):
        stream, pipe = Terminal(), io.StringIO()
        for view in (kind(stream, every=1), PlainLines(pipe, every=1)):
            view.say(text)
            view.step(RECORD, 100, 10e12)
            view.close()
        told = STEERING.sub("", stream.getvalue()).replace("\r", "\n").splitlines()
        lines = [line for line in told if line and not line.startswith("training")]  # the bar
        assert lines.pop().strip() == step_line(RECORD, 100, 10e12, None, columns)
        assert " ".join(lines).split() == text.split()
        assert max(map(len, told)) <= columns
        assert pipe.getvalue() == f"{text}\n{step_line(RECORD, 100, 10e12)}\n"


def test_the_time_left_is_told_in_plain_lines_from_the_second_step_on():
    stream = io.StringIO()
    view = PlainLines(stream, every=1)
    for step, seconds in enumerate((30.0, 2.0, 2.0), start=1):
        view.step(msgspec.structs.replace(RECORD, step=step, seconds=seconds), 100, None)
    first, second, third = stream.getvalue().splitlines()
    assert "ETA" not in first
    assert second.endswith("ETA 3 min")
    assert third.endswith("ETA 3 min")  # 97 steps of 2 s: the first, which warmed up, does not count


def test_a_reader_who_stands_still_holds_up_no_step():
    """A terminal after Ctrl-S, a pager, an mpirun that sleeps: a pipe that is full. What was said meanwhile follows."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with open(writer, "w") as stream:
        view = PlainLines(stream, every=1)
        for step in range(1, 31):
            view.step(msgspec.structs.replace(RECORD, step=step), 30, None)  # waits for ever if it waits for the reader
        assert not view.speaker.last.is_set()
        heard = bytearray()
        while heard.count(b"\n") < 30:
            heard += os.read(reader, 65536)
        view.close()
    assert heard.decode().splitlines()[-1].startswith("step 30/30")
    os.close(reader)


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "59 s"), (3599, "59 min"), (3700, "1 h 01 min"), (90_000, "1 d 1 h")]
)
def test_times_are_in_their_two_largest_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(8192, "8,192"), (12_345, "12.3k"), (2e6, "2M"), (999_950, "1M"), (3.21e9, "3.21G")]
)
def test_counts_have_three_digits_or_so(number, text):
    assert humane(number) == text


def test_without_a_known_peak_no_utilization_is_guessed():
    assert "MFU" not in step_line(RECORD, 100, peak=None)


def test_a_skipped_step_says_so():
    assert "not finite" in step_line(msgspec.structs.replace(RECORD, skipped=True, loss_scale=512.0), 100, None)


def test_a_pipe_gets_plain_lines_at_most_every_few_steps():
    stream = io.StringIO()
    view = screen(stream, every=10)
    assert type(view) is PlainLines
    for step in range(1, 31):
        view.step(msgspec.structs.replace(RECORD, step=step), 30, None)
    view.held(EvalRecord(step=30, loss=4.0, tokens=1, seconds=1.0))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/30", "10/30", "20/30", "30/30"]
    assert lines[-1] == "validation loss 4.0000 after step 30"
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_bar_that_ends_cleanly(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    view = screen(stream, every=1)
    assert isinstance(view, LiveBar)
    view.say("building [bold]1[/bold]")
    view.step(RECORD, 100, None)
    view.close()
    assert "10/100" in stream.getvalue()
    assert "building [bold]1[/bold]" in stream.getvalue()  # words are words, not markup


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    view = screen(stream, every=1)
    view.step(RECORD, 100, None)
    view.close()
    assert "\x1b[3" not in stream.getvalue()  # no colour is ever set


class Left(io.StringIO):
    """A pipe whose reader leaves after the first line."""

    def write(self, text):
        if "\n" in self.getvalue():
            raise BrokenPipeError
        return super().write(text)

    def flush(self):
        if "\n" in self.getvalue():
            raise BrokenPipeError


def test_a_reader_that_leaves_is_not_told_and_nothing_fails():
    stream = Left()
    view = PlainLines(stream, every=1)
    for step in range(1, 4):
        view.step(msgspec.structs.replace(RECORD, step=step), 3, None)
    view.close()
    assert stream.getvalue().count("\n") == 1


def test_other_ranks_are_silent():
    stream = io.StringIO()
    view = screen(stream, every=1, quiet=True)
    view.say("x")
    view.step(RECORD, 1, None)
    view.close()
    assert stream.getvalue() == ""
