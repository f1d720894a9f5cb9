"""The commands of the README and of the tutorial, run as they stand, in the order in which they stand."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from commands import environment
from waiting import HANG

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# A block that needs a machine or minutes which a test has not is marked on the line before, with the reason.
BLOCK = re.compile(r"(^<!-- not run by the tests: [^\n]+ -->\n)?^```(sh|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, kind: str) -> list[str]:
    return [text for mark, found, text in BLOCK.findall(page.read_text()) if found == kind and not mark]


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "tutorial.md"], ids=lambda page: page.stem)
def test_every_command_of_the_page_works(page, tmp_path):
    (tmp_path / "my").mkdir()
    for number in range(3):
        text = "\n".join(f"{line} bottles of beer on wall {number}" for line in range(400))
        (tmp_path / "my" / f"{number}.txt").write_text(text)
    for run_file in blocks(page, "toml"):
        name = re.match(r"# (\S+\.toml)\n", run_file)
        assert name is not None, "a run file begins with its name"
        (tmp_path / name[1]).write_text(run_file)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]
    assert len(commands) >= 3
    assert not [command for command in commands if re.search(r"[|&;<>$`]", command)], "not for a shell alone"
    for number, command in enumerate(commands):
        program, *words = shlex.split(command, comments=True)
        around = environment(tmp_path, PATH=programs)
        if number > 0 and program == "meshwright":  # the first shows that the program is where a shell finds it
            done = forked.run(words, tmp_path, around)
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=around,
                capture_output=True,
                text=True,
                timeout=HANG,
                check=False,
            )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_every_file_the_readme_points_to_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
