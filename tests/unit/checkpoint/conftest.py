from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.tiny import weights_of
from meshwright.checkpoint.model_folder import save_native
from meshwright.spec.arch import Arch


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def native(tmp_path) -> Callable[..., Path]:
    """Writes a model folder of ours and returns its path."""

    def make(arch: Arch, dtype: torch.dtype = torch.float32, tokenizer: Path | None = None) -> Path:
        save_native(tmp_path / "native", arch, weights_of(arch, dtype).items(), tokenizer)
        return tmp_path / "native"

    return make


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module
