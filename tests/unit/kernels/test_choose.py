"""Who runs: the kernel, the twin, or nobody with one sentence why."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels import choose
from meshwright.spec.problem import InputError

ABLE = choose.INTERPRETED  # a kernel can run on the CPU


def test_plain_is_plain():
    assert not choose.fused(torch.zeros(2), "plain")


def test_a_cpu_is_plain_by_itself():
    assert not choose.fused(torch.zeros(2), "auto")


def test_what_cannot_be_fused_is_refused_in_one_sentence():
    with pytest.raises(InputError, match='kernels = "fused", but fused kernels cannot run here: ') as error:
        choose.fused(torch.zeros(2, dtype=torch.float64), "fused")
    assert len(error.value.problems) == 1
    assert "plain" in error.value.problems[0].remedy


@pytest.mark.skipif(not choose.triton_available() or ABLE, reason="says what is wrong where there is Triton and no GPU")
def test_the_reason_on_a_cpu_is_the_cpu():
    assert choose.obstacle(torch.zeros(2)) == "the tensors are not on a GPU"


@pytest.mark.skipif(choose.triton_available(), reason="Triton is installed")
def test_the_reason_without_triton_is_triton():
    assert choose.obstacle(torch.zeros(2)) == "Triton is not installed"


def test_a_run_on_a_cpu_is_told_why_it_is_plain():
    said = []
    found = choose.settle("auto", torch.device("cpu"), said.append)
    assert (found, len(said)) == (("fused", 0) if ABLE else ("plain", 1))
    assert choose.settle("plain", torch.device("cpu"), said.append) == "plain"


@pytest.mark.skipif(not choose.triton_available(), reason="needs Triton")
def test_a_compiler_that_fails_is_found_before_the_first_step(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("ptxas: not found\nand a long trace")

    monkeypatch.setattr(choose, "_mark", Broken())
    monkeypatch.setattr(choose, "obstacle", lambda x: "")
    said = []
    assert choose.settle("auto", torch.device("cpu"), said.append) == "plain"
    assert said == ["kernels: plain, because fused ones cannot run here: a trial kernel failed (ptxas: not found)"]
    with pytest.raises(InputError, match="ptxas: not found"):
        choose.settle("fused", torch.device("cpu"), said.append)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 10**6))
def test_a_block_is_the_least_power_of_two_that_holds_a_row(count):
    assert choose.power(count) >= count > choose.power(count) // 2
    assert choose.power(count).bit_count() == 1


@settings(deadline=None, derandomize=True)
@given(st.integers(1, choose.ROW_LIMIT), st.integers(1, 10**6))
def test_programs_are_neither_tiny_nor_beyond_the_hardware(cols, rows):
    block = choose.power(cols)
    each = choose.rows_each(block, rows)
    assert each.bit_count() == 1
    assert each == 1 or each * block <= choose.TILE
    assert choose.warps(each * block) in (1, 2, 4, 8, 16, 32)
    assert choose.warps(each * block) * 32 * choose.EACH_THREAD * 2 >= each * block


@pytest.mark.parametrize("strides", ["dense", "slice"])
def test_rows_that_strides_allow_are_views(strides):
    x = torch.zeros(3, 4, 8) if strides == "dense" else torch.zeros(12, 9)[:, :8]
    assert choose.as_rows(x).data_ptr() == x.data_ptr()


def test_other_rows_are_copies_with_neighbours_beside_each_other():
    x = torch.randn(8, 3, 4).permute(1, 2, 0)
    rows = choose.as_rows(x)
    assert rows.stride(1) == 1
    assert torch.equal(rows, x.reshape(12, 8))
