import math

import msgspec
import pytest

from meshwright.config import load
from meshwright.runtime import run_folder as folders
from meshwright.runtime.records import Summary
from meshwright.runtime.run_folder import Claim
from meshwright.spec.problem import InputError

RUN = load.load(None).run
OTHER = load.load(None, ["seed=2", "optim.lr=0.5"]).run
SUMMARY = Summary(
    step=1, first_loss=2.0, loss=1.0, held_out_loss=None, tokens_per_second=1.0, seconds_to_first_loss=1.0, seconds=2.0,
    peak_bytes=1, parameters=1, ranks=1, folder="x",
)  # fmt: skip


def claim(folder, run=RUN, **options):
    made = Claim(folder, run, **options)
    made.release()
    return made


def test_the_same_mathematics_lives_in_the_same_folder():
    assert folders.default(RUN) == folders.default(load.load(None, ["plan.grad_accum=2", "log.every=3"]).run)
    assert folders.default(RUN) != folders.default(OTHER)


def test_a_claimed_folder_holds_the_run(tmp_path):
    claim(tmp_path / "a")
    assert load.load(tmp_path / "a" / "run.toml").run == RUN


def test_a_changed_plan_may_go_on_in_the_folder_but_other_mathematics_may_not(tmp_path):
    claim(tmp_path / "a")
    claim(tmp_path / "a", load.load(None, ["plan.grad_accum=2"]).run)
    with pytest.raises(InputError, match=r"optim\.lr 0\.002 there, 0\.5 here; seed 1 there, 2 here"):
        claim(tmp_path / "a", OTHER)


def test_a_finished_run_is_recognised_and_kept(tmp_path):
    claim(tmp_path / "a")
    folders.write_summary(tmp_path / "a", SUMMARY)
    assert claim(tmp_path / "a").finished == SUMMARY


def test_what_an_unfinished_attempt_recorded_and_saved_is_kept_but_its_last_words_are_not(tmp_path):
    claim(tmp_path / "a")
    (tmp_path / "a" / "steps.rank0.jsonl").write_text("old")
    (tmp_path / "a" / "checkpoints" / "step-3").mkdir(parents=True)
    (tmp_path / "a" / "failure.rank1.json").write_text("{}")
    claim(tmp_path / "a")
    assert (tmp_path / "a" / "steps.rank0.jsonl").read_text() == "old"
    assert (tmp_path / "a" / "checkpoints" / "step-3").is_dir()
    assert not (tmp_path / "a" / "failure.rank1.json").exists()


def test_the_plan_before_is_kept_beside_the_plan_that_goes_on(tmp_path):
    other = load.load(None, ["plan.grad_accum=2"]).run
    for run in (RUN, RUN, other, RUN):
        claim(tmp_path / "a", run)
    there = [load.load(tmp_path / "a" / name).run for name in ("run.1.toml", "run.2.toml", "run.toml")]
    assert there == [RUN, other, RUN]
    assert not (tmp_path / "a" / "run.3.toml").exists()


def test_how_often_is_saved_is_not_mathematics(tmp_path):
    claim(tmp_path / "a")
    claim(tmp_path / "a", load.load(None, ["checkpoint.every=3", "checkpoint.async=false"]).run)


def test_fresh_sets_aside_and_loses_nothing(tmp_path):
    for number in range(3):
        made = claim(tmp_path / "a", fresh=True)
        assert made.finished is None
        (tmp_path / "a" / f"kept{number}").touch()
        folders.write_summary(tmp_path / "a", SUMMARY)
    assert (tmp_path / "a.1" / "kept0").exists()
    assert (tmp_path / "a.2" / "kept1").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_somebodys_other_folder_is_never_touched(tmp_path, fresh):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError):
        claim(tmp_path, fresh=fresh)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_claims_at_once_are_refused_by_name(tmp_path):
    first = Claim(tmp_path / "a", RUN)
    with pytest.raises(InputError, match="in use by process"):
        Claim(tmp_path / "a", RUN)
    first.release()
    claim(tmp_path / "a")


def test_a_folder_in_use_is_not_set_aside(tmp_path):
    first = Claim(tmp_path / "a", RUN)
    with pytest.raises(InputError, match="in use by process"):
        Claim(tmp_path / "a", RUN, fresh=True)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    first.release()
    claim(tmp_path / "a", fresh=True)
    assert (tmp_path / "a.1").exists()


def test_a_folder_whose_claim_came_no_further_may_be_taken(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "lock").touch()
    claim(tmp_path / "a", fresh=True)
    claim(tmp_path / "a")


def test_a_place_that_is_no_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("precious")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot be written: Not a directory; name another --folder"):
            claim(place)
        with pytest.raises(InputError):
            claim(place, fresh=True)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_run_that_never_began_leaves_nothing(tmp_path):
    made = claim(tmp_path / "a")
    made.abandon()
    assert not (tmp_path / "a").exists()
    made = claim(tmp_path / "b")
    (tmp_path / "b" / "steps.rank0.jsonl").touch()
    made.abandon()
    assert (tmp_path / "b").exists()


def test_a_summary_is_plain_json(tmp_path):
    folders.write_summary(tmp_path, SUMMARY)
    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes())["loss"] == 1.0


def test_a_summary_may_hold_losses_that_are_not_finite(tmp_path):
    folders.write_summary(tmp_path, msgspec.structs.replace(SUMMARY, first_loss=math.inf, loss=math.nan))
    found = folders.read_summary(tmp_path)
    assert found is not None
    assert math.isnan(found.loss)
    assert msgspec.structs.replace(found, first_loss=2.0, loss=1.0) == SUMMARY


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 3}'])
def test_a_damaged_summary_is_told_with_what_to_do(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(InputError, match=r"summary\.json is damaged: .*delete it"):
        folders.read_summary(tmp_path)
