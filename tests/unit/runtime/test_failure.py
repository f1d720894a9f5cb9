import signal
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from meshwright.config.run import Faults
from meshwright.runtime import failure
from meshwright.runtime import failure as words
from meshwright.runtime import heartbeat as stacks
from meshwright.runtime.failure import ASKS, MEANING, Exit, Failure, table
from meshwright.runtime.heartbeat import Beat, Hang, PhaseMark, PhaseTable, RankStatus, process
from meshwright.runtime.ranks import Ranks
from meshwright.runtime.supervise import StopRequest, Watch, newest_step, set_aside

SEEN = {
    rank: RankStatus(
        rank=rank, beat=Beat(pid=7 + rank, step=3, phase="forward", waiting=rank == 0, counts=(4, 5)), now=1.0
    )
    for rank in (0, 1)
}
TABLE = PhaseTable(innermost=(PhaseMark("meshwright/data/", "", "data"),))
STACK = """Thread 0x1 (most recent call first):
  File "/x/meshwright/train/heartbeat.py", line 80 in _live

Current thread 0x2 (most recent call first):
  File "/lib/threading.py", line 327 in wait
  File "/x/meshwright/data/loader.py", line 75 in take
  File "/x/meshwright/train/loop.py", line 70 in _steps

Thread 0x3 (most recent call first):
  File "/x/other.py", line 1 in other
"""


def test_the_launcher_of_ranks_takes_what_they_take_for_a_request_to_end():
    """As `#SBATCH --signal=USR2@60` sends it, to the launcher alone."""
    numbers = (*ASKS, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            asked = StopRequest().listen()
            signal.raise_signal(number)
            assert (asked.stop, asked.interrupts) == (True, int(number == signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ranks_are_told_to_save_before_it_is_said(tmp_path):
    """Whoever reads what is said may stand still."""
    did = list[str]()
    ranks: Any = SimpleNamespace(signal=lambda number: did.append(number.name))
    launcher: Any = SimpleNamespace(
        folder=tmp_path, asked=StopRequest(stop=True), run=SimpleNamespace(faults=Faults()), say=did.append
    )
    watch = Watch(ranks, ranks, launcher)
    watch.seen = {0: RankStatus(rank=0, beat=Beat(pid=7, step=3, restored=0), now=1.0)}
    assert watch._heed() is None
    assert did[0] == "SIGTERM"
    assert "saving a checkpoint" in did[1]


def test_a_run_whose_steps_are_done_is_not_said_to_save(tmp_path):
    said, nobody, asked = list[str](), SimpleNamespace(signal=lambda number: None), StopRequest(stop=True)
    launcher: Any = SimpleNamespace(folder=tmp_path, asked=asked, run=SimpleNamespace(faults=Faults()), say=said.append)
    ranks: Any = nobody
    watch = Watch(ranks, ranks, launcher)
    watch.seen = {0: RankStatus(rank=0, beat=Beat(pid=7, step=3, restored=0), now=1.0)}
    assert watch._heed() is None
    assert "saving a checkpoint" in said[0]
    (tmp_path / "summary.json").write_text("{}")
    watch.stopping_since = 0.0
    assert watch._heed() is None
    assert "all steps are done; ending eval.command" in said[1]
    asked.interrupts = 2
    report = watch._heed()
    assert report is not None
    assert "all steps are done, and the last eval.command is not" in report.what


def test_a_report_has_six_lines_at_most_and_none_speaks_to_the_terminal():
    everything = Failure(
        kind="hang", code=11, what="w\x1b[31m\nx" * 99, where="a", since="b", cause="c", remedy="d", details="e"
    )
    lines = str(everything).splitlines()
    assert len(lines) == 6
    assert [line.split(":")[0] for line in lines] == ["what", "where", "since", "cause", "do", "details"]
    assert "\x1b" not in str(everything)
    assert max(map(len, lines)) < 180


def test_a_hang_names_rank_phase_line_and_who_waits(tmp_path):
    hang = Hang(ranks=(1,), reason="does not move", seconds=6.0, limit=5.0)
    report = failure.of_hang(hang, SEEN, {1: STACK}, TABLE, tmp_path)
    assert report.rank == 1
    assert report.phase == "data"  # the stack knows better than the last heartbeat
    assert "loader.py:75 take" in report.where
    assert "waiting for it: rank 0" in report.what
    assert report.code == Exit.RESUMABLE


def test_the_main_threads_frames_are_found_among_all():
    assert [frame.name for frame in stacks.frames(STACK)] == ["wait", "take", "_steps"]
    assert stacks.frames("no stack at all") == []


@pytest.mark.parametrize(
    ("code", "kind", "told"), [(-9, "killed", "SIGKILL"), (-7, "killed", "SIGBUS"), (1, "error", "exit code 1")]
)
def test_a_rank_without_words_is_told_by_its_exit(tmp_path, code, kind, told):
    report = failure.of_exit(1, code, SEEN[1], tmp_path)
    assert (report.kind, report.rank) == (kind, 1)
    assert told in report.what
    assert report.code == (Exit.RESUMABLE if kind == "killed" else code)


def test_a_full_disk_is_to_be_freed(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.txt").write_text(f"{OSError(28, 'No space left on device')}\n")
    remedy = failure.of_exit(1, 1, SEEN[1], tmp_path).remedy
    assert remedy == f"free some disk space, then {failure.AGAIN}"


def test_last_words_come_back(tmp_path):
    report = Failure(kind="data", code=11, what="gone", rank=3, at=5.0)
    words.write(tmp_path, report)
    assert words.read(tmp_path) == [report]
    words.write(tmp_path / "never made", report)
    assert not (tmp_path / "never made").exists()


def test_every_exit_code_has_one_meaning_and_a_line_in_help():
    assert set(MEANING) == set(Exit)
    assert [int(line.split()[0]) for line in table().splitlines()[1:]] == [0, 1, 2, 3, 10, 11, 12, 13, 14, 130]


def test_steps_in_doubt_are_set_aside_and_not_lost(tmp_path):
    for step in (4, 8, 12):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert newest_step(tmp_path) == 12
    set_aside(tmp_path, 4)
    assert newest_step(tmp_path) == 4
    assert (tmp_path / "checkpoints" / "suspect-step-8").exists()
    assert newest_step(tmp_path / "nowhere") == -1


def test_the_kernel_is_asked_about_a_process(tmp_path):
    import os

    state, seconds = process(os.getpid())
    assert state in "RS"
    assert seconds > 0
    assert process(2**22 + 1) == ("Z", 0.0)  # beyond the largest number there is


def test_reports_survive_json():
    report = Failure(kind="hang", code=11, what="x", stack=("a", "b"), good_until=3)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Failure) == report


PAGE = (Path(__file__).parents[3] / "docs" / "faults.md").read_text()


def test_the_page_has_the_table_of_exit_codes_and_the_settings_as_they_are():
    for code, meaning in MEANING.items():
        assert f"| {code.value} | {meaning} |" in PAGE
    settings = PAGE.partition("## Settings\n")[2].partition("```toml\n")[2].partition("```")[0]
    assert msgspec.convert(tomllib.loads(settings)["faults"], Faults) == Faults()
    assert set(tomllib.loads(settings)["faults"]) == set(Faults.__struct_fields__)


def test_who_has_ended_by_itself_does_not_hang_while_rank_0_is_at_its_last_command(tmp_path):
    seen = [SimpleNamespace(rank=rank, state=state) for rank, state in ((0, "S"), (1, "Z"))]
    judged = list[list[int]]()

    class Judge(Watch):
        def _judge(self, seen):
            judged.append([one.rank for one in seen])

    watch = Judge(Ranks({}), SimpleNamespace(look=lambda: seen), SimpleNamespace(folder=tmp_path))
    watch._look()
    assert judged == [[0]]
    assert watch.seen.keys() == {0, 1}
