"""Who runs: the kernel, the twin, or nobody with one sentence why."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels import dispatch
from meshwright.spec.problem import InputError

ABLE = dispatch.INTERPRETED  # a kernel can run on the CPU
CPU = torch.device("cpu")


def test_plain_is_plain():
    assert not dispatch.fused(torch.zeros(2), "plain")


def test_a_cpu_is_plain_by_itself():
    assert not dispatch.fused(torch.zeros(2), "auto")


def test_what_cannot_be_fused_is_refused_in_one_sentence():
    with pytest.raises(InputError, match='kernels = "fused" cannot run here: ') as error:
        dispatch.fused(torch.zeros(2, dtype=torch.float64), "fused")
    assert len(error.value.problems) == 1
    assert "plain" in error.value.problems[0].remedy


@pytest.mark.skipif(ABLE, reason="the interpreter takes a CPU's tensors")
def test_the_reason_on_a_cpu_is_the_cpu():
    assert dispatch.unsupported(torch.zeros(2)) == "fused kernels need a GPU"


def test_a_run_on_a_cpu_is_told_why_it_is_plain():
    found = dispatch.settle("auto", CPU)
    assert (found.kind, bool(found.reason)) == (("fused", False) if ABLE else ("plain", True))


def test_a_run_that_asked_for_plain_is_told_so_and_nothing_is_tried():
    dispatch.trial.cache_clear()
    assert dispatch.settle("plain", CPU) == dispatch.KernelChoice("plain", 'plan.kernels is "plain"')
    assert dispatch.trial.cache_info().currsize == 0


def test_float64_has_no_kernels_on_any_device():
    assert dispatch.settle("auto", CPU, torch.float64).kind == "plain"
    with pytest.raises(InputError):
        dispatch.settle("fused", CPU, torch.float64)


class Broken:
    """A kernel that no compiler takes."""

    launches = 0

    def __getitem__(self, grid):
        self.launches += 1
        raise RuntimeError("ptxas: not found\nand a long trace")


@pytest.fixture
def broken(monkeypatch):
    dispatch.trial.cache_clear()
    kernel = Broken()
    monkeypatch.setattr(dispatch, "_mark", kernel)
    monkeypatch.setattr(dispatch, "unsupported", lambda x: "")
    yield kernel
    dispatch.trial.cache_clear()


def test_a_compiler_that_fails_is_found_before_the_first_step(broken):
    reason = "a trial kernel failed (ptxas: not found)"
    assert dispatch.settle("auto", CPU) == dispatch.KernelChoice("plain", reason)
    with pytest.raises(InputError, match="ptxas: not found") as error:
        dispatch.settle("fused", CPU)
    assert len(error.value.problems) == 1


def test_a_process_tries_once(broken):
    for _ in range(3):
        dispatch.settle("auto", CPU)
    assert broken.launches == 1


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 10**6))
def test_a_block_is_the_least_power_of_two_that_holds_a_row(count):
    assert dispatch.power(count) >= count > dispatch.power(count) // 2
    assert dispatch.power(count).bit_count() == 1


@settings(deadline=None, derandomize=True)
@given(st.integers(1, dispatch.ROW_LIMIT), st.integers(1, 10**6))
def test_programs_are_neither_tiny_nor_beyond_the_hardware(cols, rows):
    block = dispatch.power(cols)
    each = dispatch.rows_each(block, rows)
    assert each.bit_count() == 1
    assert each == 1 or each * block <= dispatch.TILE
    assert dispatch.warps(each * block) in (1, 2, 4, 8, 16, 32)
    assert dispatch.warps(each * block) * 32 * dispatch.EACH_THREAD * 2 >= each * block


@pytest.mark.parametrize("strides", ["dense", "slice"])
def test_rows_that_strides_allow_are_views(strides):
    x = torch.zeros(3, 4, 8) if strides == "dense" else torch.zeros(12, 9)[:, :8]
    assert dispatch.as_rows(x).data_ptr() == x.data_ptr()


def test_other_rows_are_copies_with_neighbours_beside_each_other():
    x = torch.randn(8, 3, 4).permute(1, 2, 0)
    rows = dispatch.as_rows(x)
    assert rows.stride(1) == 1
    assert torch.equal(rows, x.reshape(12, 8))
