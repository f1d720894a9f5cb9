"""A machine is lost: the other one says which and since when, leaves so that it can go on, and goes on alone."""

import pytest
from commands import SMALL, environment, meshwright, script, write_text

from meshwright.verify.rehearse import model_digest

GIVEN_UP = 200.0  # seconds: a collective would wait for the lost machine for five minutes

RUN = [
    *SMALL, "arch.layers=3", "steps=80", "data.source=my/*.txt", "checkpoint.every=10", "eval.every=0",
    "plan.deterministic=true", "plan.microbatch=1",
]  # fmt: skip


two_nodes = script("two_nodes")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(two_nodes.lacking()), reason=two_nodes.lacking())]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder with a little text, and what an undisturbed run makes of it."""
    folder = tmp_path_factory.mktemp("user")
    write_text(folder)
    done = meshwright("train", *RUN, "--folder", "reference", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("how", ["kill", "cable"])
def test_the_machine_that_stays_names_the_lost_one_and_goes_on_alone_with_the_same_weights(user, tmp_path, how):
    (tmp_path / "my").symlink_to(user / "my")
    around = environment(user)
    with two_nodes.machines() as here:
        loss = two_nodes.lose(here, how, RUN, tmp_path, around)
        assert loss.code == 11, loss.said
        assert loss.seconds < GIVEN_UP, loss.said
        assert "(rank 1) is unreachable" in loss.said
        assert " s ago, at " in loss.said
        if how == "cable":  # the other side lives, and says the same of this one
            assert loss.other_code == 11, loss.other_said
            assert "(rank 0) is unreachable" in loss.other_said
        ((code, said),) = two_nodes.train(here, 1, RUN, tmp_path, around)
    assert code == 0, said
    assert model_digest(tmp_path / "run") == model_digest(user / "reference") != ""


def test_a_machine_that_fails_says_why_and_one_that_is_done_is_not_missed(user, tmp_path):
    (tmp_path / "my").symlink_to(user / "my")
    around = environment(user)
    with two_nodes.machines() as here:
        (first, said), (second, _) = two_nodes.train(here, 2, [*RUN, "--inject", "error:1:12"], tmp_path, around)
        assert (first, second) == (11, 1), said
        assert "(rank 1) has ended: rank 1 failed: RuntimeError: injected" in said
        both = two_nodes.train(here, 2, RUN, tmp_path, around)
    assert [code for code, _ in both] == [0, 0], both
    assert not [line for _, said in both for line in said.splitlines() if line.startswith("what:")]
    assert model_digest(tmp_path / "run") == model_digest(user / "reference") != ""
