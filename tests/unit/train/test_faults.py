"""What a rank notices in its own numbers."""

import math
import random
import signal
import threading

import pytest
import torch

from meshwright.runtime.failure import ASKS, Failure, FailureError
from meshwright.runtime.heartbeat import PHASES
from meshwright.runtime.place import RankSpec
from meshwright.spec.problem import InputError, Problem
from meshwright.train import world
from meshwright.train.faults import Spikes, bit_sum, odd_ones, robust_z, straggler
from meshwright.train.heartbeat import RecorderEntry, deviated
from meshwright.train.loop import Stop
from meshwright.train.rank import failure_of

ORDER = RankSpec(run="run.toml", folder="here", cache="", session="s", began=0.0)


def falling(seed, steps=400):
    """Losses as clean runs have them: falling, noisy; and norms that now and then are ten times as large."""
    noise = random.Random(seed)
    for step in range(steps):
        yield 10 / (1 + step / 30) + noise.gauss(0, 0.1), math.exp(noise.gauss(0, 0.5)) * (10 if step % 97 == 60 else 1)


@pytest.mark.parametrize("seed", range(20))
def test_clean_runs_have_no_spikes(seed):
    spikes = Spikes(12.0)
    assert [words for loss, norm in falling(seed) if (words := spikes.add(loss, norm))] == []


def test_a_loss_that_jumps_is_a_spike_and_does_not_spoil_the_next_one():
    spikes = Spikes(12.0)
    for loss, norm in falling(1, 100):
        spikes.add(loss, norm)
    assert "loss" in spikes.add(50.0, 1.0)
    assert "loss" in spikes.add(50.0, 1.0)
    assert spikes.add(3.0, 1.0) == ""
    assert "norm" in spikes.add(3.0, 1e6)


def test_what_is_not_finite_is_anothers_business():
    assert Spikes(12.0).add(math.nan, 1.0) == ""


def test_deviations_are_counted_from_the_median():
    assert robust_z([1.0, 2.0, 3.0], 2.0, 1e-9) == 0.0
    assert robust_z([1.0] * 9, 2.0, 0.5) == 2.0  # the least spread stands in for none at all


def work(**seconds):
    return [seconds.get(phase, 0.0) for phase in PHASES]


def test_the_rank_that_works_while_others_wait_is_the_straggler():
    usual = work(forward=2.0, backward=4.0)
    slow = work(forward=5.0, backward=4.0)
    found = straggler([usual, usual, slow, usual], elapsed=10.0, limit=1.3)
    assert found is not None
    assert (found.rank, found.phase) == (2, "forward")
    assert found.ratio == pytest.approx(1.5)
    assert found.cost == pytest.approx(0.3)


def test_a_slow_loader_is_told_as_data():
    found = straggler([work(data=3.0, forward=4.0), work(forward=4.0)], elapsed=10.0, limit=1.3)
    assert found is not None
    assert (found.rank, found.phase) == (0, "data")


def test_ranks_that_work_alike_have_no_straggler_and_neither_has_chance():
    assert straggler([work(forward=4.0), work(forward=4.4)], elapsed=10.0, limit=1.3) is None
    assert straggler([work(forward=0.10), work(forward=0.20)], elapsed=0.5, limit=1.3) is None


def test_saving_is_nobodys_straggling():
    assert straggler([work(forward=4.0, save=9.0), work(forward=4.0)], elapsed=20.0, limit=1.3) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_single_bit_changes_the_sum(dtype):
    tensor = torch.randn(33, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = bit_sum(tensor)
    for byte in range(0, tensor.element_size() * 33, 5):
        for bit in range(8):
            flipped = tensor.clone()
            flipped.view(torch.uint8)[byte] ^= 1 << bit
            assert bit_sum(flipped) != before


def test_the_majority_is_right_and_two_cannot_tell():
    assert odd_ones([[1, 2], [1, 2], [1, 3]]) == [2]
    assert odd_ones([[1], [2]]) == [0, 1]
    assert odd_ones([[1], [1], [2], [2]]) == [0, 1, 2, 3]


def test_ranks_that_differ_are_named_with_the_key():
    said = [{"seed": "1", "torch": "2.13"}, {"seed": "1", "torch": "2.13"}, {"seed": "2", "torch": "2.13"}]
    assert world.differences(said) == ["rank 2 has seed = 2, the others 1"]
    assert world.differences([{"torch": "2.13"}, {}]) == ["rank 1 has torch = nothing, the others 2.13"]
    assert world.differences([said[0]] * 4) == []


def test_ranks_agree_through_a_store_and_all_of_them_refuse(tmp_path):
    def rank(number, mine, found):
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        try:
            world.agree(None, store, number, 2, mine)  # type: ignore[arg-type]
        except InputError as error:
            found[number] = error.problems[0].text

    found = {}
    other = threading.Thread(target=rank, args=(1, {"code": "b"}, found))
    other.start()
    rank(0, {"code": "a"}, found)
    other.join()
    assert found == {0: "rank 1 has code = b, the others a", 1: "rank 1 has code = b, the others a"}


def entry(name, at, size=4):
    return RecorderEntry(
        profiling_name=name, process_group=("0", "x"), input_sizes=[[size]], output_sizes=[[size]], time_created_ns=at
    )


def test_a_step_that_goes_as_the_last_one_went_has_not_deviated():
    last = [entry("gather", 11), entry("reduce", 12), entry("sum", 13)]
    assert not deviated([*last, entry("gather", 21), entry("reduce", 22)], [10, 20])
    assert deviated([*last, entry("reduce", 21)], [10, 20])
    assert deviated([*last, entry("gather", 21, size=8)], [10, 20])
    assert not deviated([entry("anything", 21)], [20])  # the first step has nothing to be compared with


@pytest.mark.parametrize(
    ("error", "step", "code"),
    [
        (InputError([Problem("no such file", "name one")]), -1, 2),
        (InputError([Problem("no such file", "name one")]), 5, 11),
        (torch.OutOfMemoryError("tried to allocate"), 5, 3),
        (ValueError("a bug"), 5, 1),
        (FailureError(Failure(kind="not-finite", code=13, what="six in a row")), 5, 13),
    ],
)
def test_an_error_becomes_a_report_with_its_exit_code(error, step, code):
    try:
        raise error
    except Exception as caught:
        report = failure_of(caught, ORDER, step, deviated=False)
    assert report.code == code
    assert report.rank == 0
    assert report.lines()[0].startswith("what:")
    assert report.remedy


def test_sigterm_is_heard_and_a_second_one_changes_nothing():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ASKS)}
    try:
        stop = Stop().listen()
        assert not stop.asked
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        assert stop.interrupts == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_interrupt_asks_for_a_save_and_a_second_one_does_not_wait_for_it():
    numbers = (signal.SIGINT, *ASKS)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ours = Stop().listen()
        signal.raise_signal(signal.SIGINT)  # our own launcher hears it for its ranks, which ignore it
        assert not ours.asked
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop = Stop().listen()
        signal.raise_signal(signal.SIGINT)
        assert (stop.asked, stop.interrupts) == (True, 1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        stop = Stop().listen()
        signal.raise_signal(signal.SIGUSR2)  # as mpirun passes on at once
        assert (stop.asked, stop.interrupts) == (True, 0)
    finally:
        for number in numbers:
            signal.signal(number, before[number])
