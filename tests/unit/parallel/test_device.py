"""Moments of a device by the host's clock. The events here are of a device whose clock is given."""

from dataclasses import dataclass

import pytest

from meshwright.parallel.device import DeviceTimeline, Moment


@dataclass
class Event:
    """When a device passes, by a clock of its own."""

    seconds: float

    def elapsed_time(self, other):
        return (other.seconds - self.seconds) * 1000


def passing(at, device):
    return Moment(at, Event(device))


@pytest.fixture(autouse=True)
def later(monkeypatch):
    """Everything has long happened."""
    monkeypatch.setattr("meshwright.parallel.device.time.monotonic", lambda: 1000.0)


def test_a_host_that_is_ahead_does_not_make_a_step_shorter():
    timeline = DeviceTimeline(passing(10.0, 0.0))
    assert timeline.reached(passing(10.1, 2.0)) == pytest.approx(12.0)
    assert timeline.reached(passing(10.2, 4.0)) == pytest.approx(14.0)


def test_a_wait_that_the_device_had_work_for_cost_nothing():
    timeline = DeviceTimeline(passing(10.0, 0.0))
    asked, there = passing(10.1, 2.0), passing(11.1, 2.0)  # a second's wait, behind a step of two
    assert timeline.reached(asked) == timeline.reached(there) == pytest.approx(12.0)


def test_clocks_that_drift_agree_again_when_the_device_has_caught_up():
    timeline = DeviceTimeline(passing(0.0, 0.0))
    assert timeline.reached(passing(500.0, 499.9)) == 500.0  # it cannot have passed before the host
    assert timeline.reached(passing(999.0, 1000.9)) == 1000.0  # nor in the future


def test_without_events_the_host_is_the_device():
    timeline = DeviceTimeline(Moment(1.0))
    end = Moment(2.5)
    assert timeline.reached(end) == timeline.reached(end) == 2.5
    assert timeline.reached(Moment(2.0)) == 2.5  # never backwards
