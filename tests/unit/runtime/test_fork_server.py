"""A fork server that somebody ends, or stops: another takes its place, and the ranks that are at work hear nothing."""

import os
import signal
import sys
from pathlib import Path

import pytest
from waiting import HANG, is_running, until

from meshwright.config import load
from meshwright.runtime import ranks
from meshwright.runtime.failure import Exit, of_fork_server
from meshwright.runtime.place import RankSpec, local
from meshwright.runtime.ranks import ForkServer, ForkServerError, Ranks
from meshwright.runtime.supervise import Supervisor

MODULE = f"""
import time

def code():
    return ""

def fetch_rest():
    pass

def serve_order(order):
    time.sleep({HANG})
"""


def server_in(folder: Path, module: str = "little") -> ForkServer:
    (folder / "little.py").write_text(MODULE)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return ForkServer(module, os.environ | {"PYTHONPATH": path}, folder / "fork_server.txt", 1)


def order_of(rank: int, folder: Path) -> RankSpec:
    place, log = local(rank, 2, folder / "store", 1), str(folder / f"rank{rank}.txt")
    return RankSpec(run="", folder=str(folder), cache="", session="", place=place, log=log, began=0.0)


def killed(server: ForkServer) -> None:
    server.process.kill()
    until(lambda: not is_running(server.process.pid), "the fork server does not end")


def test_one_that_is_gone_says_how_and_is_no_matter_while_ranks_are_at_work(tmp_path):
    server = server_in(tmp_path)
    at_work = Ranks(server.start([order_of(0, tmp_path)]))  # holds the pipe of its answers open
    try:
        killed(server)
        server.rest()
        with pytest.raises(ForkServerError, match="was ended by SIGKILL") as gone:
            server.start([order_of(1, tmp_path)])
        assert gone.value.is_lost
        assert at_work.poll() == {0: None}
    finally:
        at_work.end()
        server.close()


def test_one_that_is_ended_between_two_answers_leaves_no_rank(tmp_path, monkeypatch):
    server, found = server_in(tmp_path), list[int]()
    answer = server._answer

    def then_killed(rank: int) -> int:
        if rank == 1:
            os.kill(server.process.pid, signal.SIGSTOP)  # the second may be there already, and be answered for
            killed(server)
            os.close(server.answers)
            server.answers = os.pipe()[0]  # nothing was answered yet, and its end of the pipe is open elsewhere
        else:
            found.append(answer(rank))
            return found[-1]
        return answer(rank)

    monkeypatch.setattr(server, "_answer", then_killed)
    try:
        with pytest.raises(ForkServerError, match="was ended by SIGKILL"):
            server.start([order_of(0, tmp_path), order_of(1, tmp_path)])
        assert not is_running(found[0])
    finally:
        server.close()


def test_one_that_is_stopped_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "STOPPED_SECONDS", 1.0)
    server = server_in(tmp_path)
    os.kill(server.process.pid, signal.SIGSTOP)
    with pytest.raises(ForkServerError, match="was stopped by a signal") as stopped:
        server.start([order_of(0, tmp_path)])
    assert stopped.value.is_lost
    server.close()


@pytest.mark.parametrize(
    ("module", "said"),
    [("absent", "No module named 'absent'"), ("dying", "ended with exit code 3 and said nothing")],
)
def test_one_that_ends_by_itself_says_why_and_is_not_tried_again(tmp_path, module, said):
    (tmp_path / "dying.py").write_text("raise SystemExit(3)")
    server = server_in(tmp_path, module)
    with pytest.raises(ForkServerError, match=said) as failed:
        server.start([order_of(0, tmp_path)])
    assert not failed.value.is_lost
    server.close()


def test_a_supervisor_starts_another_and_says_so(tmp_path):
    said, made = list[str](), list[ForkServer]()

    def fork_server() -> ForkServer:
        made.append(server_in(tmp_path))
        if len(made) < 3:
            os.kill(made[-1].process.pid, signal.SIGSTOP)  # alive when it is asked, and
            os.kill(made[-1].process.pid, signal.SIGKILL)  # gone before it answers
        return made[-1]

    run = load.load(None, ["arch.preset=tiny", "data.source=my.txt"], ranks=2).run
    supervisor = Supervisor(run, tmp_path, fork_server, order_of(0, tmp_path), said.append)
    supervisor.server.is_alive = lambda: True  # it was, a moment ago
    started = Ranks(supervisor.start([0, 1], tmp_path))
    try:
        assert said == ["warning: the fork server was ended by SIGKILL; another is started"] * 2
        assert len(made) == 3
        assert started.poll() == {0: None, 1: None}
    finally:
        started.end()
        supervisor.close()


def test_who_ends_all_of_them_ends_the_run_so_that_it_can_be_resumed(tmp_path):
    lost, broken = (of_fork_server("the fork server was ended by SIGKILL", tmp_path, each) for each in (True, False))
    assert (lost.kind, lost.code) == ("killed", Exit.RESUMABLE)
    assert (broken.kind, broken.code) == ("error", Exit.FAILED)
