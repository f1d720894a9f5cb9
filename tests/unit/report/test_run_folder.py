import json

import msgspec
import pytest
from folders import attempt, run_folder, step, usual

from meshwright.report.run_data import facts, runs_in
from meshwright.runtime.failure import Failure, write
from meshwright.runtime.records import line
from meshwright.spec.problem import InputError


def refused(path) -> str:
    with pytest.raises(InputError) as error:
        facts(path)
    (problem,) = error.value.problems
    return str(problem)


def test_a_whole_folder_leaves_nothing_open(tmp_path):
    found = facts(run_folder(tmp_path / "run"))
    assert found.notes == ()
    assert found.finished
    assert (found.source_rank, len(found.records), len(found.kept)) == (0, len(usual()), 12)
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert found.ranks[0].steps == found.ranks[1].steps == 12


def test_reading_leaves_the_folder_as_it_is(tmp_path):
    folder = run_folder(tmp_path / "run")
    with (folder / "steps.rank0.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","st')  # the trainer cuts this off; a reader must not
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir()}
    assert "the last line of steps.rank0.jsonl is cut short, and left out" in facts(folder).notes
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir()} == before


DAMAGED = (
    b"\x00\x00\x00",
    b"\xff\xfe",
    b'{"kind":"step","step":"\xff"}',
    b"[]",
    b"7",
    b"null",
    b'{"kind":"dance"}',
    b'{"kind":"step","step":"x"}',
    b"",
)


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_line_is_counted_and_the_others_are_read(tmp_path, damaged):
    folder = run_folder(tmp_path / "run")
    for rank in (0, 1):
        file = folder / f"steps.rank{rank}.jsonl"
        first, rest = file.read_bytes().split(b"\n", 1)
        file.write_bytes(b"\n".join([first, damaged, rest]))
    found = facts(folder)
    assert len(found.records) == len(usual())
    assert found.ranks[0].steps == found.ranks[1].steps == 12
    assert found.notes == ("lines of steps.rank0.jsonl that are no records, and left out: 1",)


def test_numbers_that_are_not_finite_are_read(tmp_path):
    folder = run_folder(tmp_path / "run", [attempt(1.0), step(1, 2.0, loss=float("nan"), norm=float("inf"))])
    assert len(facts(folder).kept) == 1
    assert facts(folder).notes == ()


def test_ranks_whose_records_are_missing_are_named(tmp_path):
    folder = run_folder(tmp_path / "run", ranks=4)
    for rank in (0, 2):
        (folder / f"steps.rank{rank}.jsonl").unlink()
    found = facts(folder)
    assert found.source_rank == 1
    assert found.notes == (
        "records of 2 of 4 ranks are missing: 0, 2",
        "rank 0's records are missing: what follows is as rank 1 saw it",
    )


def test_a_run_that_has_not_begun_says_so(tmp_path):
    folder = run_folder(tmp_path / "run", finished=False)
    for rank in (0, 1):
        (folder / f"steps.rank{rank}.jsonl").unlink()
    (folder / "env.json").unlink()
    found = facts(folder)
    assert found.source_rank is None
    assert "no records" in found.notes[0]
    assert found.notes[1] == "env.json is missing: device and torch are not known"


def test_small_files_that_are_damaged_are_noted(tmp_path):
    folder = run_folder(tmp_path / "run")
    (folder / "env.json").write_bytes(b'{"torch":"\xff"}')
    (folder / "summary.json").write_text("{")
    (folder / "failure.rank1.json").write_text("{")
    (folder / "faults").mkdir(parents=True)
    (folder / "faults" / "ended-a-1.json").write_text("[]")
    found = facts(folder)
    assert found.finished
    assert [note.split(" is damaged")[0].split(" are damaged")[0] for note in found.notes] == [
        "env.json",
        "summary.json",
        "the failure report of a rank (failure.rank*.json)",
        "ended-a-1.json",
    ]


def test_a_summary_of_a_run_that_ended_in_no_number_is_whole(tmp_path):
    folder = run_folder(tmp_path / "run")
    (folder / "summary.json").write_text('{"state": "done", "loss": null}')
    assert facts(folder).finished
    assert facts(folder).notes == ()


def test_the_earliest_last_words_come_first(tmp_path):
    folder = run_folder(tmp_path / "run", finished=False)
    for rank, at in ((0, 2.0), (1, 1.0)):
        write(folder, Failure(kind="error", code=1, what=f"rank {rank} failed", rank=rank, at=at))
    assert [each.rank for each in facts(folder).failures] == [1, 0]


def test_checkpoints_are_known_by_their_steps(tmp_path):
    folder = run_folder(tmp_path / "run")
    for name in ("step-12", "step-4", "step-x", "suspect-step-9"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    assert facts(folder).saved == (4, 12)


def test_weights_that_the_run_began_from_need_not_be_here(tmp_path):
    folder = run_folder(tmp_path / "run")
    file = folder / "run.toml"
    file.write_text(file.read_text().replace('from = ""', 'from = "somewhere/else"'))
    assert facts(folder).notes == ()


def test_a_key_of_another_version_is_noted(tmp_path):
    folder = run_folder(tmp_path / "run")
    file = folder / "run.toml"
    file.write_text("speed = 3\n" + file.read_text())
    (note,) = facts(folder).notes
    assert "speed" in note


def test_what_is_no_run_folder_is_refused_with_a_remedy(tmp_path):
    assert refused(tmp_path / "none").startswith(f"there is no folder {tmp_path / 'none'}; give the folder of a run")
    assert f"{tmp_path} is empty;" in refused(tmp_path)
    run_folder(tmp_path / "runs" / "second")
    run_folder(tmp_path / "runs" / "first")
    assert runs_in(tmp_path / "runs") == [tmp_path / "runs" / "first", tmp_path / "runs" / "second"]
    assert runs_in(tmp_path / "runs" / "first") == []
    assert refused(tmp_path / "runs" / "first" / "run.toml").endswith(f"give its folder, {tmp_path / 'runs' / 'first'}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert "it has no run.toml" in refused(tmp_path / "other")


def test_a_run_file_that_is_damaged_is_refused(tmp_path):
    folder = run_folder(tmp_path / "run")
    (folder / "run.toml").write_text("steps = \n")
    assert refused(folder).endswith("restore it from a copy")
    for number in (9, 10):
        (folder / f"run.{number}.toml").touch()
    assert refused(folder).endswith("restore it from a copy; run.10.toml beside it is how it was before")
    (folder / "run.toml").write_bytes(b"\xff")
    assert "is not UTF-8" in refused(folder)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    folder = run_folder(tmp_path / "run", ranks=1)
    (folder / "steps.rank0.jsonl").unlink()
    (folder / "steps.rank0.jsonl").mkdir()
    assert "Is a directory; make it readable" in refused(folder)


def test_many_records_are_read_quickly_and_in_order(tmp_path):
    folder = run_folder(tmp_path / "run", [attempt(1.0)])
    record = step(1, 2.0)
    with (folder / "steps.rank0.jsonl").open("ab") as file:
        for number in range(1, 20_001):
            file.write(line(msgspec.structs.replace(record, step=number, at=2.0 + number)))
    found = facts(folder)
    assert [each.step for each in found.kept] == list(range(1, 20_001))


def test_the_environment_may_hold_anything(tmp_path):
    folder = run_folder(tmp_path / "run")
    (folder / "env.json").write_text(json.dumps({"device": 7, "torch": None}))
    assert facts(folder).environment["device"] == 7
