"""What all tests of kernels use; and Triton's interpreter, made to work with the NumPy that is here."""

import sys
from pathlib import Path

import pytest

from meshwright.kernels import dispatch

sys.path.insert(0, str(Path(__file__).parent))  # the cases are beside the tests, and a GPU's tests share them


@pytest.fixture(autouse=True, scope="session")
def _numbers_from_arrays_of_one():
    """Triton 3.6 turns an array of one element into a loop's bound with int(), which NumPy 2.4 and later refuses."""
    if not dispatch.INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    yield
    interpreter._patch_lang_tensor = patch
