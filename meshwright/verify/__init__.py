"""Proofs: that a plan computes what one device would, and sends what the arithmetic says."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.verify.prove_module import parity as parity


def __getattr__(name: str) -> Any:
    """`parity`, which has torch, is imported by its first use: the verb's own process does without."""
    if name != "parity":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from meshwright.verify.prove_module import parity

    return parity
