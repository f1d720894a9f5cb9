"""`meshwright completion SHELL`: sourced by the real shells, which then complete what a user has begun to type."""

import shutil
import subprocess
import sys

import pytest

from meshwright.cli import completion, main
from meshwright.config import presets, schema
from meshwright.hardware.cluster import catalogue

# What a user typed, and what a shell offers for the last word.
TYPED = {
    "meshwright pl": ["plan"],
    "meshwright --": ["--help", "--version"],
    "meshwright train op": ["optim."],
    "meshwright train optim.sch": ["optim.schedule="],
    "meshwright train steps=3 --ranks 2 optim.warm": ["optim.warmup="],
    "meshwright train optim.lr=": [],
    "meshwright plan llama3-": ["llama3-8b", "llama3-70b", "llama3-405b"],
    "meshwright plan gpt2 --cluster 16xh200": ["16xh200", "16xh200-nvl"],
    "meshwright plan --cluster gh": [],
    "meshwright plan --la": ["--largest", "--layers"],
    "meshwright plan --largest ": ["model", "microbatch", "sequence"],
    "meshwright config ": ["show", "schema", "explain"],
    "meshwright config explain optim.beta": ["optim.beta1", "optim.beta2"],
    "meshwright config show plan.ze": ["plan.zero="],
    "meshwright cache clear tok": ["tokens", "tokenizers"],
    "meshwright completion ": ["bash", "zsh", "fish"],
    "meshwright report my": ["my-run"],
    "meshwright fly ": [],
}
VALUES = {  # behind an =, which bash alone takes for the beginning of a word
    "meshwright train optim.schedule=c": ["constant", "cosine"],
    "meshwright train plan.zero=": ["0", "1", "2", "3"],
    "meshwright plan arch.preset=mix": ["mixtral-8x7b", "mixtral-8x22b"],
    "meshwright plan goal.cluster=4xb2": ["4xb200"],
    "meshwright train plan.compile=t": ["true"],
}
BASH = """
source "$1"
shift
for COMP_LINE in "$@"; do
  COMP_POINT=${#COMP_LINE} COMPREPLY=()
  _meshwright
  echo "${COMPREPLY[*]}"
done
"""
ZSH = """
compdef() { :; }
source "$1"
shift
for line in "$@"; do
  echo $(_meshwright_candidates "$line")
done
"""


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """Write a shell's script, in a folder with a run in it."""
    (tmp_path / "my-run").mkdir()
    monkeypatch.chdir(tmp_path)

    def write(shell: str) -> str:
        assert main.main(["completion", shell]) == 0
        (tmp_path / "script").write_text(capsys.readouterr().out)
        return "./script"

    return write


def run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")


def test_bash_completes_what_is_typed(script):
    needs("bash")
    typed = TYPED | VALUES
    offered = run("bash", "--norc", "-c", BASH, "bash", script("bash"), *typed)
    assert dict(zip(typed, map(str.split, offered), strict=True)) == typed


def test_bash_offers_whole_words_where_an_equals_sign_breaks_none(script):
    needs("bash")
    (offered,) = run(
        "bash",
        "--norc",
        "-c",
        f"COMP_WORDBREAKS=' '\n{BASH}",
        "bash",
        script("bash"),
        "meshwright train data.source=my",
    )
    assert offered == "data.source=my-run"


def test_bash_knows_every_verb_option_key_model_and_card(script):
    needs("bash")
    keys = [key for key, kind in schema.every_key().items() if not schema.is_struct(kind)]
    lines = {f"meshwright train {key}": f"{key}=" for key in keys if key not in ("extends", "data.mix")}
    lines |= {f"meshwright plan {name}": name for name in presets.preset_names()}
    lines |= {f"meshwright plan --cluster 3x{name}": f"3x{name}" for name in catalogue().cards}
    for verb in main.VERBS:
        lines |= {f"meshwright {verb}": verb}
        lines |= {f"meshwright {verb} {flag}": flag for flag in completion.words_of(verb).options}
    offered = run("bash", "--norc", "-c", BASH, "bash", script("bash"), *lines)
    words = zip(lines.values(), map(str.split, offered), strict=True)
    assert [
        (word, found) for word, found in words if word not in found and f"{word.partition('.')[0]}." not in found
    ] == []


def test_the_script_can_be_sourced_as_the_page_says():
    needs("bash")
    program = f"{sys.executable} -m meshwright"
    assert run("bash", "--norc", "-c", f"source <({program} completion bash); complete -p meshwright") == [
        "complete -F _meshwright meshwright"
    ]


def test_zsh_completes_what_is_typed(script):
    needs("zsh")
    offered = run("zsh", "-f", "-c", ZSH, "zsh", script("zsh"), *TYPED)
    for (line, words), found in zip(TYPED.items(), map(str.split, offered), strict=True):
        last = line.rpartition(" ")[2]
        expected = [] if words == ["my-run"] else words  # files are zsh's own to find
        assert [word for word in found if word.startswith(last)] == expected


def test_fish_completes_what_is_typed(script):
    needs("fish")
    file = script("fish")
    for line, words in (
        TYPED | {"meshwright train optim.schedule=co": ["optim.schedule=constant", "optim.schedule=cosine"]}
    ).items():
        last = line.rpartition(" ")[2]
        offered = [each.partition("\t")[0] for each in run("fish", "-c", f"source {file}; complete -C '{line}'")]
        found = {word.rstrip("/") for word in offered if word.startswith(last)} - {"script", "-h"}  # it guesses besides
        if not last.startswith("-") and line not in ("meshwright fly ", "meshwright train optim.lr="):
            assert found - {"my-run"} == set(words) - {"my-run"}, line


def test_another_shell_is_a_mistake(capsys):
    with pytest.raises(SystemExit) as left:
        main.main(["completion", "tcsh"])
    assert left.value.code == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
