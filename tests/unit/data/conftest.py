"""What the tests of data share: a run of any shape, and ready tokens on disk."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.config.run import Data, Run
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan


@pytest.fixture
def make_run() -> Callable[..., Run]:
    def make(data: Data, *, vocab: int = 300, sequence: int = 16, plan: Plan | None = None, seed: int = 1) -> Run:
        arch = Arch(vocab=vocab, layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, context=sequence)
        plan = plan or Plan(microbatch=4)
        return Run(arch=arch, data=data, sequence=sequence, batch=plan.batch, seed=seed, plan=plan)

    return make


@pytest.fixture
def make_tokens(tmp_path) -> Callable[..., Path]:
    """Counted tokens as a nanoGPT shard: the token at a position tells the position (below 60 000)."""

    def make(name: str, count: int, first: int = 0) -> Path:
        np.arange(first, first + count).astype("<u2").tofile(tmp_path / name)
        return tmp_path / name

    return make
