"""The house rules that a reader relies on, held by tests: names, readers of a field, size of rooms, complexity."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from meshwright.spec.plan import FIELDS, Plan

PACKAGE = Path(__file__).parents[2] / "meshwright"
FILES = sorted(PACKAGE.rglob("*.py"))
# How many files may read an optional field of a plan as plan.FIELD. In the paper tower that is cost/layout.py or
# cost/activations.py, whose tables everybody else reads.
READERS = 8
EVERY_PLAN = {  # has these: degrees, stages, the batch and its precision
    "pp", "replicate", "shard", "cp", "tp", "ep", "zero", "schedule", "chunks", "stages", "microbatch", "grad_accum",
    "precision",
}  # fmt: skip
OPTIONAL = tuple(field.name for field in FIELDS if field.name not in EVERY_PLAN)
SMALL = 60  # lines: a module below that only one other imports is a fragment of the other
COMPLEXITY = 10
CALLED_ONCE = 0.5  # of private functions at most so many have one caller: a helper has two, or a reason to be named


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@cache
def trees() -> dict[str, ast.Module]:
    return {name_of(file): ast.parse(file.read_text()) for file in FILES}


def test_no_class_name_is_defined_twice():
    found = defaultdict(list)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    assert not {name: places for name, places in found.items() if len(places) > 1}


@cache
def fields_read() -> dict[str, set[str]]:
    """Every plan.FIELD that each file reads, self.FIELD of the plan itself apart."""
    return {name: {field for node in ast.walk(tree) for field in of_plan(node)} for name, tree in trees().items()}


def of_plan(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and "plan" in (getattr(node.value, "id", ""), getattr(node.value, "attr", "")):
        yield node.attr


def reader(name: str) -> str:
    """Who reads, as it is counted: the rules between fields are one reader, however many files they are in."""
    return "config/rules" if name == "config/check.py" or name.startswith("config/rules/") else name


@pytest.mark.parametrize("field", OPTIONAL)
def test_few_files_read_an_optional_field_of_a_plan(field):
    readers = {reader(name) for name, fields in fields_read().items() if field in fields}
    assert readers, "a field that nobody reads is dead"
    assert len(readers) <= READERS, readers


def test_every_field_of_a_plan_is_described_once():
    assert sorted(field.name for field in FIELDS) == sorted(field.name for field in msgspec.structs.fields(Plan))


def test_no_small_module_serves_one_other_alone():
    """Members of a registry apart: verbs, kernels, launchers, optimizers."""
    modules = {f"meshwright.{name[:-3].replace('/', '.')}": name for name in map(name_of, FILES)}
    importers = defaultdict(set)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    importers[whole if whole in modules else node.module].add(name)
    small = [
        name
        for module, name in modules.items()
        if not name.endswith(("__init__.py", "__main__.py"))
        and name.split("/")[0] not in ("cli", "kernels", "launch", "optim")
        and len((PACKAGE / name).read_text().splitlines()) < SMALL
        and len(importers[module]) <= 1
    ]
    assert not small


def name_at(node: ast.AST) -> str:
    """The name that a node reads, whatever it is read of."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_most_private_functions_are_more_than_a_name_for_what_one_other_does():
    """Those that are values, as the rules of a table and what is called back, are not called by their name at all."""
    private, once = 0, list[str]()
    for file, tree in trees().items():
        read = Counter(map(name_at, ast.walk(tree)))
        called = Counter(name_at(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__"):
                private += 1
                once += [f"{file}: {node.name}"] if read[node.name] == called[node.name] == 1 else []
    assert private
    assert len(once) <= CALLED_ONCE * private, f"{len(once)} of {private}, among them {once[:20]}"


def test_functions_are_simple():
    """Cyclomatic complexity, as the linter counts it."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--output-format", "json", "--no-cache"]
    options = ["--config", f"lint.mccabe.max-complexity={COMPLEXITY}", str(PACKAGE)]
    answer = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    found = {
        (str(Path(each["filename"]).relative_to(PACKAGE)), each["message"].split("`")[1])
        for each in msgspec.json.decode(answer.stdout)
    }
    assert not found
