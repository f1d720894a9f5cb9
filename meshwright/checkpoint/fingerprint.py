"""One name for a logical state, however it is cut: ranks add up what their slices contribute.

Every element, read as an integer, is multiplied with an odd 64-bit weight that belongs to its tensor's name and its
index, and all products are added modulo 2⁶⁴; a second set of weights makes it 128 bits. Addition does not care who
holds what. An odd weight lets no single flipped bit vanish. It tells equal states from different ones, and is no proof
against a forger: the sha256 of the bytes stand beside it.
"""

import hashlib

import numpy as np

from meshwright.checkpoint.slices import Region

LANES = 2
WORD = 2**64

# splitmix64 (Steele, Lea and Flood 2014)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
LAST_SHIFT = np.uint64(31)

Share = tuple[int, ...]  # one number a lane
NOTHING: Share = (0,) * LANES


def share(name: str, region: Region, bits: np.ndarray) -> Share:
    """What a slice contributes; bits are its elements as unsigned integers, in the shape of the region."""
    wide = bits.astype(np.uint64)
    return tuple(_lane(f"{name}/{lane}", region, wide) for lane in range(LANES))


def add(one: Share, other: Share) -> Share:
    """Two contributions together."""
    return tuple((left + right) % WORD for left, right in zip(one, other, strict=True))


def text(total: Share) -> str:
    """A sum of contributions as hexadecimal digits."""
    return "".join(f"{lane:016x}" for lane in total)


def _lane(key: str, region: Region, bits: np.ndarray) -> int:
    # The weight of an element is the product of one odd number a dim: as good here, and a pass costs one product each.
    for dim in reversed(range(len(region))):
        bits = bits @ _weights(f"{key}/{dim}", *region[dim])
    return int(bits) * (int(_weights(key, 0, 1)[0])) % WORD


def _weights(key: str, begin: int, end: int) -> np.ndarray:
    """Odd numbers, each a pure function of the key and its index."""
    start = np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    state = np.arange(begin, end, dtype=np.uint64) * GOLDEN + start
    for shift, factor in MIX:
        state = (state ^ (state >> shift)) * factor
    return (state ^ (state >> LAST_SHIFT)) | np.uint64(1)
