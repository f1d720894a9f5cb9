"""The architecture, as one table. Changing it means changing this table in a commit that says why."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "meshwright"

# package -> packages it may import. A package may always import itself.
FOUNDATION = {"spec", "hardware", "config", "runtime"}
PAPER = {"cost", "search"}
TORCH = {"kernels", "models", "data", "parallel", "optim", "checkpoint"}
MAY_IMPORT: dict[str, set[str]] = {
    "spec": set(),
    "config": {"spec"},
    "hardware": {"spec", "config"},
    "runtime": {"spec", "config"},
    "cost": FOUNDATION,
    "published": {*FOUNDATION, "cost"},
    "search": {*FOUNDATION, "cost"},
    "report": {*FOUNDATION, *PAPER},
    "launch": {*FOUNDATION, *PAPER},
    "kernels": {"spec"},
    "models": {"spec", "kernels"},
    "data": {*FOUNDATION},
    "parallel": {*FOUNDATION, "kernels", "models"},
    "optim": {*FOUNDATION, "kernels", "models", "parallel"},
    "checkpoint": {*FOUNDATION, "kernels", "models", "parallel"},
    "train": {*FOUNDATION, *TORCH, *PAPER},
    "verify": {*FOUNDATION, *TORCH, *PAPER, "train"},
    "bench": {*FOUNDATION, *TORCH, *PAPER, "train"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)  # the edge: a verb calls whatever it needs, and nobody calls a verb
NO_TORCH = {*FOUNDATION, *PAPER, "published", "report", "launch"}  # they answer at once, on a laptop
WITH_TORCH = {"data/loader.py"}  # the rest of data runs in the launcher while the ranks are still importing torch
READS_ENVIRONMENT = {"cli/env.py", "runtime/place.py"}
TOP = {"__main__.py", "__init__.py", "api.py"}  # the front door: an edge, as cli is


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.AST) -> list[str]:
    """Full names of everything imported, wherever in the file."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their package in full"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file):
    place = file.relative_to(PACKAGE)
    if str(place) in TOP:
        return
    package = place.parts[0]
    assert package in MAY_IMPORT, f"{package} is not in the architecture"
    tree = ast.parse(file.read_text())
    for name in imports(tree):
        root = name.split(".")[0]
        if root == "meshwright" and name != "meshwright.__version__":
            used = name.split(".")[1]
            assert used == package or used in MAY_IMPORT[package], f"{place} may not import {name}"
        if package in NO_TORCH or (package == "data" and str(place) not in WITH_TORCH):
            assert root != "torch", f"{place} must not reach torch"
        if package in NO_TORCH:
            assert root != "numpy", f"{place} must not reach numpy"
        if package == "models":
            assert not name.startswith("torch.distributed"), "a model does not know how it is cut"


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_the_edge_reads_the_environment(file):
    place = str(file.relative_to(PACKAGE))
    if place in READS_ENVIRONMENT:
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in ("environ", "getenv", "putenv"), f"{place} reads the environment"


def test_every_package_has_content():
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert folder.name in MAY_IMPORT
            assert any(file.name != "__init__.py" for file in folder.glob("*.*")), f"{folder.name} is empty"
    assert not [file for file in files() if not file.read_text().strip()], "no empty files"
