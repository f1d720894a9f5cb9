"""The wheel as a stranger has it, made and tried without the net; and the Dockerfile, as far as no Docker is needed."""

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import msgspec
import pytest

import meshwright

ROOT = Path(__file__).parents[2]
SOURCES = ("meshwright", "recipes", "pyproject.toml", "README.md", "LICENSE")
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, made by this environment's setuptools from a copy of the sources."""
    pytest.importorskip(
        "setuptools", "77", reason="setuptools 77 or later, which makes the wheel, is not installed here"
    )
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    made = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, check=True)
    return copy / "dist" / made.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Runs Python with the wheel and msgspec alone, in a folder that knows of no clone."""
    site, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words: str) -> str:
        command = [sys.executable, "-S", *words]  # without this environment's packages
        environment = kept | {"PYTHONPATH": str(site)}
        return subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True
        ).stdout

    return run


def test_the_wheel_has_every_module_its_data_its_types_and_the_recipes(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tree = [path for path in (ROOT / "meshwright").rglob("*") if path.suffix in (".py", ".toml", ".typed")]
    assert {str(path.relative_to(ROOT)) for path in tree} <= names
    assert "meshwright/py.typed" in names
    recipes = {name.rpartition("/")[2] for name in names if "/share/meshwright/recipes/" in name}
    assert recipes == {path.name for path in (ROOT / "recipes").glob("*.toml")}
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]


def test_the_wheel_says_what_it_is_and_what_training_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        said = HeaderParser().parsestr(archive.read(name).decode())
    assert said["Version"] == meshwright.__version__
    assert "train" in said.get_all("Provides-Extra", [])
    needs = said.get_all("Requires-Dist", [])
    assert [each for each in needs if "extra ==" not in each] == ["msgspec>=0.19"]
    assert any(each.startswith("torch") and "extra == 'train'" in each.replace('"', "'") for each in needs)


def test_a_bare_environment_plans_and_explains_without_torch(bare):
    assert bare("-c", "import meshwright; print(meshwright.__file__)").startswith("/")
    assert str(ROOT) not in bare("-c", "import meshwright; print(meshwright.__file__)")
    assert "gpt2" in bare("-m", "meshwright", "plan", "gpt2", "--cluster", "8xa100-80g")
    assert "steps = 5 " in bare("-m", "meshwright", "config", "show", "steps=5")
    assert "the peak learning rate" in bare("-m", "meshwright", "config", "explain", "optim.lr")
    assert "complete -F" in bare("-m", "meshwright", "completion", "bash")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        bare("-m", "meshwright", "train")
    assert refused.value.returncode == 2
    assert "torch" in refused.value.stderr


def instructions() -> list[tuple[str, list[str]]]:
    """The Dockerfile's instructions with their words."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], shlex.split(line)[1:]) for line in text.splitlines() if line.strip()]


def test_what_the_image_copies_is_there_and_sent_to_it():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        word for name, words in instructions() if name == "COPY" and "--from=build" not in words for word in words[:-1]
    ]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert sorted(copied) == sorted(kept)
    assert not any(fnmatch.fnmatch(".git", pattern) for pattern in kept)


def test_the_image_runs_the_program_and_not_as_root():
    last = dict(instructions())
    assert last["ENTRYPOINT"] == ["[meshwright]"]
    assert int(last["USER"][0]) > 0
    froms = [words for name, words in instructions() if name == "FROM"]
    assert [words[0] for words in froms] == ["${BASE}"] * 2


def test_the_dockerfile_passes_its_linter():
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed here; `make package` runs it")
    done = subprocess.run([linter, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
