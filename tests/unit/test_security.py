"""The static gate: nothing in the package can run what it reads. tests/unit/checkpoint/ has the hostile files."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "meshwright"

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen"), ("yaml", "load")}
OBJECT_COLLECTIVES = (
    "_object_list",
    "gather_object",
    "all_gather_object",
    "scatter_object",
    "send_object",
    "recv_object",
)
KEYWORDS = {"trust_remote_code", "shell", "allow_pickle"}


def is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def forbidden(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if name.split(".")[0] in MODULES or name in ("torch.load", "torch.save")]
            found += [name for name in names if name.endswith(OBJECT_COLLECTIVES)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in BUILTINS else []
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found += [f"{owner}.{node.attr}"] if (owner, node.attr) in ATTRIBUTES else []
            found += [node.attr] if node.attr.endswith(OBJECT_COLLECTIVES) else []
        if isinstance(node, ast.keyword) and node.arg in KEYWORDS and not is_false(node.value):
            found.append(node.arg)
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_package_has_nothing_that_runs_what_it_reads(file):
    assert forbidden(ast.parse(file.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "from torch import load",
        "eval('1')", "exec(text)", "import yaml", "dist.broadcast_object_list([])", "dist.all_gather_object(a, b)",
        "from torch.distributed import gather_object", "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "subprocess.run('ls', shell=True)", "numpy.load('x', allow_pickle=True)", "os.system('ls')",
    ],
)  # fmt: skip
def test_the_gate_would_see_it(text):
    assert forbidden(ast.parse(text))
