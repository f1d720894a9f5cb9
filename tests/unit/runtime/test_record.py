import pytest

from meshwright.hardware.cluster import peak_flops_per_second
from meshwright.runtime.records import EvalRecord, StepRecord, line, read_line, read_lines

STEP = StepRecord(
    step=1, loss=2.0, norm=1.0, rate=1e-3, tokens=64, seconds=0.5, data_seconds=0.0, memory_bytes=1, flops=1e9
)
HELD = EvalRecord(step=1, loss=2.0, tokens=64, seconds=0.5)


@pytest.mark.parametrize("record", [STEP, HELD])
def test_a_record_is_one_line_and_comes_back(record):
    text = line(record)
    assert text.count(b"\n") == 1
    assert text.endswith(b"\n")
    assert read_line(text) == record


def test_lines_that_are_no_records_are_counted_and_the_others_are_read():
    """A disk that lost power may give back zeros, other files' bytes, and halves of lines."""
    none = (
        b"",
        b"\x00" * 9,
        b"[1]",
        b"7",
        b'"\xff"',
        b'{"kind":"step","step":"\xff"}',
        line(STEP)[:40],
        b'{"kind":"x"}',
    )
    assert read_lines([line(STEP), *none, line(HELD)]) == ([STEP, HELD], len(none))


def test_a_known_device_has_its_data_sheets_peak():
    assert peak_flops_per_second("NVIDIA H200", "bf16") == 989e12
    assert peak_flops_per_second("NVIDIA H200 NVL", "bf16") == 840e12
    assert peak_flops_per_second("NVIDIA A100-SXM4-80GB", "fp16") == 312e12


def test_an_unknown_device_or_rate_has_no_peak():
    assert peak_flops_per_second("NVIDIA GeForce RTX 9999", "bf16") is None
    assert peak_flops_per_second("Tesla V100-SXM2-16GB", "bf16") is None  # the chip has no bf16
    assert peak_flops_per_second("NVIDIA H200", "fp64") is None  # not in the catalogue
