"""Where Triton is installed and there is no GPU, every test of our kernels runs again, in its interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.kernels import dispatch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Masks and attention of torch's own: there is no kernel of ours in these, and they take as long again.
NOT_OURS = (HERE / "test_documents.py").relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.skipif(dispatch.triton is None, reason="Triton is not installed")
@pytest.mark.skipif(dispatch.INTERPRETED, reason="this is the interpreter already")
def test_the_kernels_logic_holds_in_the_interpreter():
    # Triton decides when it is imported, so another process asks for the interpreter, and sees no GPU.
    surroundings = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--deselect", NOT_OURS, str(HERE)],
        cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
