"""The README's commands, run as they stand, in the order in which they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

from commands import environment

README = Path(__file__).parents[2] / "README.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_every_command_of_the_readme_works(tmp_path):
    (tmp_path / "my").mkdir()
    for number in range(3):
        text = "\n".join(f"{line} bottles of beer on wall {number}" for line in range(400))
        (tmp_path / "my" / f"{number}.txt").write_text(text)
    (run_file,) = blocks("toml")
    (tmp_path / "my.toml").write_text(run_file)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    assert len(commands) >= 8
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment(tmp_path, PATH=programs),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_every_file_the_readme_points_to_is_there():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
