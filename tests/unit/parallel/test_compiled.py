"""What is said of a compilation, and what is refused before one."""

from typing import Any

import pytest
from torch import nn

from meshwright.config.rules import plan as rules
from meshwright.parallel import compile
from meshwright.parallel.model_spec import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

NOBODY: Any = None  # one rank has no mesh


def test_off_is_identity():
    blocks = nn.ModuleList([nn.Linear(2, 2)])
    model = nn.Sequential(blocks)
    assert compile.wrap(model, Plan(microbatch=1), NOBODY, ModelSpec()) is model
    assert "forward" not in vars(blocks[0])


def test_a_rank_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setattr(rules, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(InputError, match="needs a C\\+\\+ compiler"):
        compile.wrap(nn.Linear(2, 2), Plan(microbatch=1, compile=True), NOBODY, ModelSpec())
