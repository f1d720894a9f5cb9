"""Tokens for measurements: drawn at random, in a file that the loader reads like any other."""

import os
from pathlib import Path

import numpy as np

LARGEST = 2**16  # tokens of two bytes; a larger vocabulary is used in part, which costs the same


def write_tokens(file: Path, vocab: int, count: int, seed: int = 1) -> None:
    """A shard of random tokens in nanoGPT's layout."""
    draws = np.random.default_rng(seed).integers(0, min(vocab, LARGEST), count, dtype=np.uint16)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")  # launched ranks may all write the same
    draws.astype("<u2").tofile(temporary)
    temporary.replace(file)
