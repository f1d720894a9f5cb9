import math

import msgspec
import pytest

from meshwright.config import load
from meshwright.config.run import digests
from meshwright.config.weights import RECORDS, best_step
from meshwright.runtime import run_folder as folders
from meshwright.runtime.records import Summary
from meshwright.runtime.run_folder import Claim, document_tokens
from meshwright.spec.problem import InputError

RUN = load.load(None).run
OTHER = load.load(None, ["seed=2", "optim.lr=0.5"]).run
SUMMARY = Summary(
    step=1, first_loss=2.0, loss=1.0, validation_loss=None, tokens_per_second=1.0, seconds_to_first_loss=1.0,
    seconds=2.0, peak_bytes=1, parameters=1, ranks=1, folder="x",
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
    with pytest.raises(InputError, match=r"optim\.lr 0\.002 → 0\.5; seed 1 → 2"):
        claim(tmp_path / "a", OTHER)


def test_a_setting_that_counts_in_one_run_alone_is_told_only_where_nothing_else_differs(tmp_path):
    replicas = ["plan.replicate=2"]
    claim(tmp_path / "a", load.load(None, [*replicas, "plan.powersgd=4"]).run)
    with pytest.raises(InputError, match=r"belongs to another run \(plan\.powersgd 4 → 0\); "):
        claim(tmp_path / "a", load.load(None, replicas).run)

    rounded = ["plan.shard=2", "plan.grad_reduce=int8"]
    claim(tmp_path / "b", load.load(None, [*rounded, "plan.zero=1"]).run)
    with pytest.raises(InputError, match=r"\(plan\.microbatch = \d+, which is part of the mathematics of one of them"):
        claim(tmp_path / "b", load.load(None, [*rounded, "plan.zero=3"]).run)


def test_a_finished_run_is_recognised_and_kept(tmp_path):
    claim(tmp_path / "a")
    folders.write_summary(tmp_path / "a", SUMMARY)
    assert claim(tmp_path / "a").finished == msgspec.structs.replace(SUMMARY, folder=str(tmp_path / "a"))


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
    assert found.folder == str(tmp_path)  # where it is, not where it was trained
    assert msgspec.structs.replace(found, first_loss=2.0, loss=1.0, folder=SUMMARY.folder) == SUMMARY


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 3}'])
def test_a_damaged_summary_is_told_with_what_to_do(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(InputError, match=r"summary\.json is damaged: .*delete it"):
        folders.read_summary(tmp_path)


def longer(*words, **options):
    return load.load(None, list(words), **options).run


@pytest.fixture
def done(tmp_path):
    """A folder whose run has made all its 440 steps, and saved the last."""
    claim(tmp_path / "a")
    (tmp_path / "a" / "checkpoints" / "step-440").mkdir(parents=True)
    (tmp_path / "a" / "steps.rank0.jsonl").write_text("{}\n")
    (tmp_path / "a" / "data.json").write_text("[]")
    folders.write_summary(tmp_path / "a", msgspec.structs.replace(SUMMARY, step=440))
    return tmp_path / "a"


def test_more_steps_alone_go_on_and_what_was_is_kept(done):
    made = claim(done, longer("steps=500"))
    assert (made.finished, [str(change) for change in made.changes]) == (None, ["steps 440 → 500"])
    assert load.load(done / "run.1.toml").run == RUN
    assert load.load(done / "run.toml").run.steps == 500
    assert msgspec.json.decode((done / "summary.1.json").read_bytes())["step"] == 440
    assert not (done / "summary.json").exists()
    assert (done / "data.json").exists()
    assert claim(done, longer("steps=500")).changes == []  # the same command after a crash


def test_an_extension_that_never_began_is_undone(done):
    before = {file.name: file.read_bytes() for file in done.glob("*.*")}
    claim(done, longer("steps=500", "optim.lr=1e-4"), extend=True).abandon()
    assert {file.name: file.read_bytes() for file in done.glob("*.*")} == before
    made = claim(done, longer("steps=500"))
    (done / "steps.rank0.jsonl").write_text("{}\n{}\n")
    made.abandon()  # a step was made
    assert load.load(done / "run.toml").run.steps == 500


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["steps=500", "optim.lr=1e-4"], r"optim\.lr 0\.002 → 0\.0001; steps 440 → 500\); add --extend"),
        (["steps=500", "data.source=else"], r"data\.source stdlib → else; optim\.warmup 20 → 22; steps .*--extend"),
        (["steps=500", "batch=16", "optim.schedule=linear"], r"batch 8 → 16; optim\.schedule cosine → linear"),
        (["steps=500", "plan.precision=bf16"], r"plan\.precision fp32 → bf16; steps .*--extend"),
    ],
)
def test_other_mathematics_go_on_only_when_asked_to(done, words, told):
    with pytest.raises(InputError, match=told):
        claim(done, longer(*words))
    assert (done / "summary.json").exists()
    assert {change.key for change in claim(done, longer(*words), extend=True).changes} >= {"steps"}
    assert not (done / "data.json").exists()  # it is remembered anew
    assert folders.earlier(done) == dict.fromkeys(digests(RUN), RUN)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["steps=400"], "has made 440 steps, and steps = 400 asks for no more; ask for more than 440 steps"),
        (["steps=500", "arch.layers=3"], r"arch\.layers is \d+ there and 3 here \(its weights have other shapes\)"),
        (["steps=500", "optim.name=sgd"], r"optim\.name adamw → sgd \(its optimizer state is of another kind\)"),
        (["steps=500", "plan.precision=fp64"], r"plan\.precision fp32 → fp64 \(its weights are saved in another form"),
    ],
)
def test_what_cannot_go_on_is_refused_with_the_reason_whatever_is_asked(done, words, told):
    for extend in (False, True):
        with pytest.raises(InputError, match=told):
            claim(done, longer(*words), extend=extend)
    assert claim(done).finished is not None


def test_a_finished_run_needs_more_steps_beside_the_flag(done):
    with pytest.raises(InputError, match=r"0\.0001\); ask for more than 440 steps and add --extend"):
        claim(done, longer("optim.lr=1e-4"))
    with pytest.raises(InputError, match="has made 440 steps, and steps = 440 asks for no more"):
        claim(done, longer("optim.lr=1e-4"), extend=True)


def test_a_shorter_end_of_a_run_on_its_way_is_a_change_as_any_other(done):
    (done / "summary.json").unlink()
    (done / "checkpoints" / "step-440").rename(done / "checkpoints" / "step-100")
    with pytest.raises(InputError, match=r"steps 440 → 200\); add --extend"):
        claim(done, longer("steps=200"))
    claim(done, longer("steps=200"), extend=True)
    with pytest.raises(InputError, match="has made 100 steps"):
        claim(done, longer("steps=50"), extend=True)


def test_a_run_that_finished_without_a_checkpoint_cannot_go_on(done):
    (done / "checkpoints" / "step-440").rmdir()
    with pytest.raises(InputError, match=r"has finished without a checkpoint to resume from; .*init\.from="):
        claim(done, longer("steps=500"))


def test_nobody_need_name_the_folder_of_a_run_that_goes_on(done, monkeypatch):
    monkeypatch.chdir(done.parent)
    home = folders.default(RUN)
    home.parent.mkdir()
    done.rename(home)
    assert folders.find(longer("steps=500")) == home
    assert folders.find(longer("steps=500"), fresh=True) == folders.default(longer("steps=500")) != home
    assert folders.find(longer("steps=400")) == folders.default(longer("steps=400"))  # shorter: a run of its own
    assert folders.find(longer("optim.lr=1e-4")) == folders.default(longer("optim.lr=1e-4"))
    assert folders.find(longer("optim.lr=1e-4", "steps=500"), extend=True) == home
    claim(home, longer("optim.lr=1e-4", "steps=500"), extend=True)
    assert folders.find(longer("optim.lr=1e-4", "steps=500")) == home  # the same command, the flag forgotten
    claim(folders.default(OTHER), OTHER)
    with pytest.raises(InputError, match=r"2 runs are called starter: .*; name its folder with --folder"):
        folders.find(longer("optim.lr=1e-3"), extend=True)
    with pytest.raises(InputError, match="no run to extend"):
        folders.find(longer("name=else"), extend=True)
    claim(home, longer("steps=500"), fresh=True)  # what was set aside is gone on with by nobody
    assert folders.find(longer("optim.lr=1e-4", "steps=500")) == folders.default(longer("optim.lr=1e-4", "steps=500"))


def test_a_longer_run_of_own_text_goes_on_though_its_warm_up_follows_from_its_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("a text")
    own = [load.load(None, ["data.source=my.txt", f"steps={steps}"]).run for steps in (440, 880)]
    home = folders.default(own[0])
    claim(home, own[0])
    assert folders.find(own[1]) == home
    assert [str(each) for each in claim(home, own[1]).changes] == ["optim.warmup 20 → 40", "steps 440 → 880"]
    written = load.load(None, ["data.source=my.txt", "steps=1760", "optim.warmup=9"]).run
    assert folders.find(written) != home  # what somebody has written is a change as any other
    with pytest.raises(InputError, match=r"optim\.warmup 40 → 9; steps 880 → 1760"):
        claim(home, written)


def test_damaged_records_and_facts_leave_the_rest_as_it_is(tmp_path):
    """A save that looks for the best step, and a plan that asks for the length of documents, go on."""
    lines = [b'{"kind":"held","step":%d,"loss":%d}\n' % each for each in ((1, 3), (2, 1), (3, 2))]
    (tmp_path / RECORDS).write_bytes(b'{"kind":"held","step":"\xff"}\n{"kind":"held"}\n'.join(lines))
    assert best_step(tmp_path, [1, 2, 3]) == 2
    for damaged in (b"", b"[7]", b'[{"source":"\xff"}]'):
        (tmp_path / "data.json").write_bytes(damaged)
        assert document_tokens(tmp_path) is None
