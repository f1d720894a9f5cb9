"""The order of samples: a pure function of the seed and the global sample index, the same for any number of ranks.

Nothing is stored and nothing is counted, so any step is reached at once and the number of ranks may change between two
steps. An epoch is a keyed permutation (a Feistel network); a mixture is a pattern of sources, shuffled by the seed,
that every block of samples repeats.
"""

import hashlib
from functools import lru_cache

import numpy as np

BLOCK = 4096  # samples over which a mixture keeps its proportions exactly; the finest share is one of these
ROUNDS = 6  # three on each half: four already pass as random (Luby and Rackoff), two more for very small counts
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 ÷ the golden ratio, the stride of splitmix64


def shuffled(indices: np.ndarray, count: int, key: int | np.ndarray) -> np.ndarray:
    """Where a permutation of `count` things puts each index; a key for all of them, or one for each."""
    assert not indices.size or (indices.min() >= 0 and indices.max() < count), "else the walk below might not end"
    bits = max(count - 1, 1).bit_length()
    left_bits, right_bits = bits // 2, bits - bits // 2
    keys = np.broadcast_to(np.asarray(key, np.uint64), indices.shape)
    values = _feistel(indices.astype(np.uint64), left_bits, right_bits, keys)
    # The network permutes a power of two less than twice the count. Whoever lands outside walks on along its cycle,
    # which must come back inside, so what is left is a permutation of the count (Black and Rogaway's cycle walking).
    outside = np.flatnonzero(values >= count)
    while outside.size:
        values[outside] = _feistel(values[outside], left_bits, right_bits, keys[outside])
        outside = outside[values[outside] >= count]
    return values.astype(np.int64)


def locate(
    indices: np.ndarray, seed: int, counts: tuple[int, ...], weights: tuple[float, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Source and sample of each global index: sources mixed by weight, each reshuffled in every epoch of its own."""
    sources, ordinals = mixed(indices, root(seed, "mixture"), weights)
    samples = np.empty_like(ordinals)
    for source, count in enumerate(counts):
        mine = np.flatnonzero(sources == source)
        epochs, places = np.divmod(ordinals[mine], count)
        samples[mine] = shuffled(places, count, keys(root(seed, f"source {source}"), epochs))
    return sources, samples


def in_turn(indices: np.ndarray, counts: tuple[int, ...], weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Source and sample of each index, mixed like `locate` but every source read in its own order, again and again."""
    sources, ordinals = mixed(indices, 0, weights)
    return sources, ordinals % np.asarray(counts)[sources]


def mixed(indices: np.ndarray, key: int, weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Source of each index, and how many samples that source gave before it."""
    sources, ranks, share = _pattern(key, weights)
    blocks, places = np.divmod(indices.astype(np.int64), BLOCK)
    return sources[places], blocks * share[sources[places]] + ranks[places]


@lru_cache(maxsize=16)
def _pattern(key: int, weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One block: the source at each place, how often it came before in the block, and how often each comes in all."""
    share = slots(weights)
    sources = np.repeat(np.arange(len(weights)), share)[shuffled(np.arange(BLOCK), BLOCK, key)]
    ranks = np.empty(BLOCK, np.int64)
    for source in range(len(weights)):
        ranks[sources == source] = np.arange(share[source])
    return sources, ranks, share


def slots(weights: tuple[float, ...]) -> np.ndarray:
    """Slots of each source in a block: proportional by largest remainder, and never none."""
    assert len(weights) <= BLOCK
    quota = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    share = np.maximum(np.floor(quota), 1).astype(np.int64)
    while share.sum() < BLOCK:
        share[np.argmax(quota - share)] += 1
    while share.sum() > BLOCK:  # sources raised to one slot are paid for by the one most above its quota
        share[np.argmax(np.where(share > 1, share - quota, -np.inf))] -= 1
    return share


def root(seed: int, purpose: str) -> int:
    """A 64-bit key for one use of the seed: BLAKE2b of both, so that no two uses are related."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest(), "little")


def keys(root: int, numbers: np.ndarray) -> np.ndarray:
    """The outputs of splitmix64 at the given places of the stream that begins at `root`."""
    return _mix(np.uint64(root) + (numbers.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def _feistel(values: np.ndarray, left_bits: int, right_bits: int, keys: np.ndarray) -> np.ndarray:
    """Permute the numbers of left_bits + right_bits bits: each half in turn is changed by a hash of the other."""
    left_mask, right_mask = np.uint64((1 << left_bits) - 1), np.uint64((1 << right_bits) - 1)
    left, right = values >> np.uint64(right_bits), values & right_mask
    for number in range(0, ROUNDS, 2):
        left ^= _mix(right + keys + _stride(number)) & left_mask
        right ^= _mix(left + keys + _stride(number + 1)) & right_mask
    return (left << np.uint64(right_bits)) | right


def _stride(number: int) -> np.uint64:
    return np.uint64(number * int(GOLDEN) & 0xFFFF_FFFF_FFFF_FFFF)


def _mix(state: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): every input bit moves every output bit."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
