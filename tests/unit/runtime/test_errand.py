"""Commands beside a rank: they are obeyed by no shell, know nothing of its ranks, and outlive nobody."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.config import load
from meshwright.config.evaluation import command, problems_here, prompts
from meshwright.runtime import errand
from meshwright.runtime.errand import Errand, Order, Result
from meshwright.spec.problem import InputError

SECONDS = 30.0


def wait(one: Errand) -> Result:
    deadline = time.monotonic() + SECONDS
    while (result := one.poll()) is None:
        assert time.monotonic() < deadline, "it has not ended"
        time.sleep(0.02)
    return result


def python(name: str, text: str) -> tuple[str, tuple[str, ...]]:
    return name, (sys.executable, "-c", text)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_commands_run_one_after_another_and_what_nobody_needs_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "model").mkdir()
    words = "import os; print('lines before'); print({'n': [1]}); print('{\"acc\": 0.5, \"more\": {\"f1\": 1}}')"
    commands = (python("export", "import os; assert 'RANK' not in os.environ"), python("command", words))
    one = Errand(tmp_path, Order(commands=commands, seconds=SECONDS, remove=(str(tmp_path / "model"),)))
    result = wait(one)
    assert (result.state, result.name, result.code) == ("done", "command", 0), errand.last_line(
        errand.said(tmp_path, "export")
    )
    assert errand.numbers(errand.said(tmp_path, "command"), tmp_path) == {"acc": 0.5, "more/f1": 1.0}
    assert not (tmp_path / "model").exists()


def test_no_number_and_no_file_of_a_command_ends_training(tmp_path):
    said, output = tmp_path / "command.txt", tmp_path / "output"
    said.write_text('{"huge": 1' + "0" * 400 + ', "acc": 0.5}')
    assert errand.numbers(said, output) == {"acc": 0.5}
    said.write_text('{"acc": 0.5, "loss": NaN, "more": {"best": -Infinity}}')  # as Python writes them
    assert repr(errand.numbers(said, output)) == "{'acc': 0.5, 'loss': nan, 'more/best': -inf}"
    output.mkdir()
    (output / "b.json").write_text('{"acc": 0.25}')
    (output / "c.json").symlink_to("/proc/self/mem")  # not to be read, though it may be opened
    said.write_text("no numbers")
    assert errand.numbers(said, output) == {"acc": 0.25}


def test_a_command_that_says_too_much_has_its_beginning_and_its_end(tmp_path):
    file, most = tmp_path / "command.txt", 1000
    text = b"begin " + b"x" * 3 * errand.TAIL_BYTES + b'\n{"acc": 0.5}\n'
    with open(file, "wb", buffering=0) as stream, open(tmp_path / "said", "wb+", buffering=0) as source:
        source.write(text)
        source.seek(0)
        errand.keep(source, stream, most)
    kept = file.read_bytes()
    left_out = len(text) - most - errand.TAIL_BYTES
    assert kept == text[:most] + f"\n[{left_out} bytes are left out here]\n".encode() + text[-errand.TAIL_BYTES :]
    assert errand.numbers(file, tmp_path) == {"acc": 0.5}


def test_the_first_that_fails_is_the_last(tmp_path):
    commands = (python("export", "print('no room'); raise SystemExit(3)"), python("command", "print('never')"))
    result = wait(Errand(tmp_path, Order(commands=commands, seconds=SECONDS)))
    assert (result.state, result.name, result.code) == ("failed", "export", 3)
    assert errand.last_line(errand.said(tmp_path, "export")) == "no room"
    assert not errand.said(tmp_path, "command").exists()


def test_a_program_that_is_not_there_is_named(tmp_path):
    result = wait(Errand(tmp_path, Order(commands=(("command", ("no-such-program", "x")),), seconds=SECONDS)))
    assert (result.state, result.code) == ("failed", None)
    assert "no-such-program: No such file" in errand.last_line(errand.said(tmp_path, "command"))


# Starts another, says both numbers, and hears nothing of being asked to end.
STUBBORN = """
import signal, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
signal.signal(signal.SIGTERM, lambda number, frame: None)
print(other.pid, flush=True)
while True: time.sleep(1)
"""


def started(folder: Path) -> int:
    deadline = time.monotonic() + SECONDS
    while not (found := errand.last_line(errand.said(folder, "command"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(found)


def test_what_it_started_ends_with_it(tmp_path, monkeypatch):
    one = Errand(tmp_path, Order(commands=(python("command", STUBBORN),), seconds=SECONDS))
    other = started(tmp_path)
    assert one.stop().state == "stopped"
    assert not is_there(other)


# Leaves a process behind that has a session of its own and no parent.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        time.sleep(1000)
    print(pid, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_daemon_ends_with_it(tmp_path):
    assert wait(Errand(tmp_path, Order(commands=(python("command", DAEMON),), seconds=SECONDS))).state == "done"
    assert not is_there(started(tmp_path))


def test_who_is_asked_to_end_and_cannot_say_how_has_not_failed(tmp_path):
    """On a crowded machine its process is ended before it has left a word."""
    one = Errand(tmp_path, Order(commands=(python("command", "import time; time.sleep(1000)"),), seconds=SECONDS))
    one.process.kill()
    assert one.stop().state == "stopped"


def test_it_has_only_so_long(tmp_path):
    result = wait(Errand(tmp_path, Order(commands=(python("command", "import time; time.sleep(1000)"),), seconds=0.3)))
    assert result.state == "timeout"


def test_it_ends_with_the_process_that_started_it(tmp_path):
    """A rank that is killed can end nothing itself."""
    text = (
        "import sys, time; from pathlib import Path; from meshwright.runtime.errand import Errand, Order;"
        f"Errand(Path({str(tmp_path)!r}), Order(commands=(('command', (sys.executable, '-c', {STUBBORN!r})),),"
        "seconds=1000.0)); time.sleep(1000)"
    )
    rank = subprocess.Popen([sys.executable, "-c", text])
    other = started(tmp_path)
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    deadline = time.monotonic() + SECONDS
    while is_there(other):
        assert time.monotonic() < deadline, "it outlived its rank"
        time.sleep(0.05)


def a_run(*words: str):
    return load.load(None, ["arch.preset=tiny", *words]).run


def test_a_folder_with_spaces_stays_one_word():
    run = a_run("eval.command=lm_eval --args 'a b' pretrained={folder},dtype=auto $HOME '*' -o {output}/{step}.json")
    assert command(run, "my runs/x", "out put", 7) == [
        "lm_eval", "--args", "a b", "pretrained=my runs/x,dtype=auto", "$HOME", "*", "-o", "out put/7.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("eval.command=lm_eval model",), "does not say where the model's folder goes"),
        (("eval.command=lm_eval {folder} | tee log",), "which only a shell obeys"),
        (("eval.command=lm_eval '{folder}",), "cannot be split into words"),
        (("eval.command={folder}/run",), "begins with {folder}"),
        (("eval.command=a {folder}", "eval.command_seconds=0"), "eval.command_seconds = 0.0 is out of range"),
        (("eval.command_every=5",), "eval.command is not"),
        (("eval.prompts_every=5",), "eval.prompts is not"),
        (('eval.prompts=["a", " "]',), "prompt 2 of eval.prompts is empty"),
        (('eval.prompts=["a"]', "eval.sample_tokens=0"), "eval.sample_tokens = 0"),
        (('eval.prompts=["a"]', "eval.prompts_every=-1"), "eval.prompts_every"),
        (('eval.prompts=["a"]', "faults.live=true", "plan.replicate=2", "batch=2"), "some may be away"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(words, told):
    _, problems = load.examine(None, ["arch.preset=tiny", *words])
    assert any(told in problem.text for problem in problems), problems


def test_prompts_are_a_list_or_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("One\nTwo, three\n")
    assert prompts(a_run(f"eval.prompts={file}")) == ("One", "Two, three")
    assert prompts(a_run('eval.prompts=["One\\nmore", "Two"]')) == ("One\nmore", "Two")
    assert prompts(a_run()) == ()
    with pytest.raises(InputError, match="cannot be read"):
        prompts(a_run(f"eval.prompts={tmp_path}/none.txt"))
    file.write_text("One\n\n")
    found = list(problems_here(a_run(f"eval.prompts={file}", "eval.command=no-such-program {folder}")))
    assert [each.key for each in found] == ["eval.prompts", "eval.command"], found
