"""Around the code: the form of the changelog; hooks and a workflow that run what the Makefile runs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def changelog() -> list[str]:
    return [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("#")]


def test_every_entry_of_the_changelog_is_added_changed_or_fixed():
    title, *headings = changelog()
    assert title == "# Changelog"
    versions = [heading for heading in headings if heading.startswith("## ")]
    kinds = [heading for heading in headings if not heading.startswith("## ")]
    assert versions[0] == "## Unreleased"
    assert all(re.fullmatch(r"## \d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    assert set(kinds) <= {"### Added", "### Changed", "### Fixed"}


def test_the_newest_release_of_the_changelog_is_the_packages():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    released = [heading for heading in changelog() if re.match(r"## \d", heading)]
    assert released[0].startswith(f"## {version} ")


def test_the_workflow_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    (python,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert python["python-version"] == "3.11"


def test_the_hooks_are_the_makefiles_lint_format_and_types():
    subprocess.run([BIN / "pre-commit", "validate-config"], cwd=ROOT, check=True)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    for hook in local["hooks"]:
        assert hook["language"] == "system", "a hook that is fetched is not the pinned tool"
        assert f"\t{hook['entry'].removesuffix(' --force-exclude')}" in makefile
    assert [hook["id"] for hook in local["hooks"]] == ["lint", "format", "types"]


def test_every_module_that_contributing_names_is_there():
    packages = "|".join(path.name for path in (ROOT / "meshwright").iterdir() if path.is_dir())
    named = re.findall(rf"`((?:{packages})/[a-z_]+\.py)", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / "meshwright" / name).is_file()]
