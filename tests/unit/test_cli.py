import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import info, main
from meshwright.spec.problem import install_words

QUICK = [
    ["--help"],
    ["models"],
    ["models", "--json"],
    ["config", "show"],
    ["config", "show", "steps=3", "--json"],
    ["config", "schema"],
    ["train", "--help"],
    ["config", "show", "stepz=3"],
]


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_what_needs_no_torch_imports_none(words):
    code = f"""
import sys
from pathlib import Path
from meshwright.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
heavy = {{"torch", "numpy", "rich", "tokenizers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def imported_by(words: list[str]) -> set[str]:
    """The modules that a process has imported when it has answered."""
    code = f"""
import contextlib, io, sys
from meshwright.cli.main import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main({words!r})
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def under(package: str, modules: set[str]) -> set[str]:
    return {name for name in modules if name == package or name.startswith(f"{package}.")}


HEAVY = ("torch", "numpy", "rich", "tokenizers", "meshwright.search", "meshwright.cost", "meshwright.report")


def test_help_imports_no_verb():
    modules = imported_by(["--help"])
    assert [
        package for package in (*HEAVY, "meshwright.config", "meshwright.hardware") if under(package, modules)
    ] == []
    ours = under("meshwright.cli", modules)
    assert ours == {"meshwright.cli", "meshwright.cli.main", "meshwright.cli.options"}


@pytest.mark.parametrize(
    "words", [["train", "stepz=3"], ["config", "show", "stepz=3"], ["verify", "stepz=3"]], ids=" ".join
)
def test_a_wrong_key_is_told_without_what_would_use_it(words):
    modules = imported_by(words)
    assert [package for package in (*HEAVY, "meshwright.hardware", "meshwright.data") if under(package, modules)] == []


@pytest.mark.parametrize("verb", main.VERBS)
def test_the_help_of_a_verb_imports_that_verb_alone(verb, capsys):
    with pytest.raises(SystemExit) as left:
        main.main([verb, "--help"])
    assert left.value.code == 0
    assert main.VERBS[verb].help[1:20] in capsys.readouterr().out
    modules = imported_by([verb, "--help"])
    assert not under("torch", modules) | under("numpy", modules)
    others = {f"meshwright.cli.{other.module}" for other in main.VERBS.values()} - {
        f"meshwright.cli.{main.VERBS[verb].module}"
    }
    shared = {"meshwright.cli.train"} if main.VERBS[verb].module == "verify" else set()  # reads runs as train does
    assert modules & others == shared


def test_models_are_a_json_array(capsys):
    assert main.main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["gpt2"]["parameters"] == 124_439_808
    assert rows["llama3-8b"]["arch"]["kv_heads"] == 8
    assert all(not isinstance(value, dict | list) for value in rows["mixtral-8x7b"]["arch"].values())


def test_config_shows_each_value_with_its_origin(capsys):
    assert main.main(["config", "show", "steps=3", "--ranks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("steps = 3 ") and line.endswith("# command line") for line in lines)
    assert any(line.startswith("replicate = 2 ") and line.endswith("# derived: ranks") for line in lines)


def test_config_as_json(capsys):
    assert main.main(["config", "show", "steps=3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["steps"] == 3
    assert shown["origins"]["steps"] == "command line"


def test_bad_input_is_two_and_one_sentence_each(capsys):
    assert main.main(["config", "show", "stepz=3", "optim.lr=fast"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "meshwright: 2 problems"
    assert len(told) == 3


def test_bad_input_is_one_object_for_a_program(capsys):
    assert main.main(["config", "show", "stepz=3", "--json"]) == 2
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert (answer["state"], answer["exit_code"]) == ("failed", 2)
    assert "stepz" in answer["problems"][0]["text"]
    assert "stepz" in told.err


def test_words_may_stand_before_and_after_flags(capsys):
    assert main.main(["config", "show", "steps=3", "--ranks", "2", "seed=9"]) == 0
    assert "seed = 9" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["fly"], ["train", "--fast"], [], ["train", "--ranks", "0"], ["models", "extra"]])
def test_words_the_program_does_not_know_are_two(words, capsys):
    with pytest.raises(SystemExit) as left:
        main.main(words)
    assert left.value.code == 2
    assert capsys.readouterr().err


def test_a_setting_that_is_written_as_a_flag_is_shown_as_a_word(capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "--optim.lr=1e-3"])
    assert "settings are words, such as optim.lr=1e-3" in capsys.readouterr().err


def test_training_without_torch_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    assert main.main(["train"]) == 2
    told = capsys.readouterr().err
    (line,) = told.splitlines()
    assert line.startswith("meshwright: training needs packages that are not installed: torch; run: pip install ")
    assert line.endswith("[train]'")


ORIGINS = [
    ({}, "pip install 'meshwright[train]'"),
    ({"url": "file:///home/me/a%20clone", "dir_info": {"editable": True}}, "pip install -e '/home/me/a clone[train]'"),
    ({"url": "file:///home/me/clone", "dir_info": {}}, "pip install '/home/me/clone[train]'"),
    ({"url": "file:///m.whl", "archive_info": {}}, "pip install 'meshwright[train] @ file:///m.whl'"),
    ({"url": "https://a/m.git", "vcs_info": {"vcs": "git"}}, "pip install 'meshwright[train] @ git+https://a/m.git'"),
]


@pytest.mark.parametrize(("origin", "command"), ORIGINS, ids=[command for _, command in ORIGINS])
def test_an_extra_is_installed_from_where_the_package_came(origin, command):
    assert install_words("train", origin) == command


def test_an_interruption_is_a_sentence_and_its_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(info, "models", lambda options: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as a program begins, whatever ran here before
    try:
        assert main.main(["models"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "meshwright: interrupted before it was done; run the same command again\n"


def test_a_full_disk_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(info, "models", lambda options: Path("/dev/full").write_text("something"))
    assert main.main(["models"]) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(
        r"what: +a file could not be written: no space is left.*\ndo: +free some space, then run the same command .*\n",
        told,
    )


def test_output_that_a_full_disk_does_not_take_is_a_sentence():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "meshwright", "models"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "no space is left" in done.stderr


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m meshwright models | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
