"""Who of two was wrong, from what both had and what they have now."""

from meshwright.train.faults import wrong


def test_the_one_that_is_far_from_the_truth_was_wrong_though_both_were_disturbed():
    assert wrong([0.500001, 2.0], 0.5) == 1
    assert wrong([2.0, 0.500001], 0.5) == 0
    assert wrong([0.5, 0.5000001], 0.5) == 1


def test_what_is_no_number_was_wrong():
    assert wrong([0.1, None], 0.5) == 1
    assert wrong([None, 0.1], 0.5) == 0


def test_two_that_are_about_as_far_leave_it_open():
    assert wrong([0.4, 0.6], 0.5) is None
    assert wrong([0.4, 0.7], 0.5) is None
    assert wrong([None, None], 0.5) is None
