from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.pack import IGNORE, BestFitPacking, DocumentPacking, StreamPacking, best_fit, held_count
from meshwright.data.shards import Shard, Tokens, join
from meshwright.spec.problem import InputError

END = 999
ragged = st.lists(st.integers(1, 23), min_size=1, max_size=30)


def tokens_of(lengths: list[int], pieces: int = 1) -> Tokens:
    """Documents of these lengths, the end token included; every other token tells its position."""
    ends = np.cumsum(lengths)
    stream = np.arange(ends[-1], dtype=np.uint16)
    stream[ends - 1] = END
    parts = np.array_split(stream, pieces)
    shards = tuple(Shard(Path(f"{number}.bin"), part, np.zeros(0, np.int64)) for number, part in enumerate(parts))
    return Tokens(shards, ends.astype(np.int64))


def plain_stream(tokens: Tokens, sequence: int, sample: int) -> tuple[list[int], ...]:
    """The slow twin: one position after another."""
    stream, ends = tokens.read(0, tokens.total).tolist(), set(tokens.ends.tolist())
    inputs, targets, positions, documents = [], [], [], []
    position = document = 0
    for at in range(sample * sequence, (sample + 1) * sequence):
        inputs.append(stream[at])
        targets.append(IGNORE if at + 1 in ends else stream[at + 1])
        positions.append(position)
        documents.append(document)
        position, document = (0, document + 1) if at + 1 in ends else (position + 1, document)
    return inputs, targets, positions, documents


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths=ragged, sequence=st.integers(1, 9), pieces=st.integers(1, 3))
def test_masked_windows_equal_their_slow_twin(lengths, sequence, pieces):
    tokens = tokens_of(lengths, pieces)
    stream = StreamPacking(tokens, sequence, vocab=1000, mask=True)
    arrays = stream.read(np.arange(stream.count))
    assert arrays.documents is not None
    for sample in range(stream.count):
        twin = plain_stream(tokens, sequence, sample)
        rows = (arrays.tokens, arrays.targets, arrays.positions, arrays.documents)
        assert tuple(each[sample].tolist() for each in rows) == twin


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths=ragged, sequence=st.integers(1, 9), mask=st.booleans())
def test_squares_count_the_pairs_of_a_window_without_reading_it(lengths, sequence, mask):
    stream = StreamPacking(tokens_of(lengths), sequence, vocab=1000, mask=mask)
    samples = np.arange(stream.count)
    documents = stream.read(samples).documents
    for number, squares in zip(samples, stream.squares(samples), strict=True):
        row = np.zeros(sequence) if documents is None else documents[number]
        assert squares == sum(int(same) ** 2 for same in np.unique(row, return_counts=True)[1])


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths=ragged, sequence=st.integers(1, 9), mask=st.booleans())
def test_valid_counts_a_window_without_reading_it(lengths, sequence, mask):
    stream = StreamPacking(tokens_of(lengths), sequence, vocab=1000, mask=mask)
    samples = np.arange(stream.count)[::-1]
    assert np.array_equal(stream.valid(samples), (stream.read(samples).targets != IGNORE).sum(axis=1))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths=ragged, sequence=st.integers(1, 9))
def test_valid_counts_a_document_without_reading_it(lengths, sequence):
    documents = DocumentPacking(tokens_of(lengths), sequence, vocab=1000, fill=END)
    samples = np.arange(documents.count)[::-1]
    assert np.array_equal(documents.valid(samples), (documents.read(samples).targets != IGNORE).sum(axis=1))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths=ragged, sequence=st.integers(1, 9))
def test_documents_predict_every_token_but_the_first_of_each_document_once(lengths, sequence):
    tokens = tokens_of(lengths)
    packed = DocumentPacking(tokens, sequence, vocab=1000, fill=END)
    arrays = packed.read(np.arange(packed.count))
    stream, firsts = tokens.read(0, tokens.total), np.concatenate([[0], tokens.ends[:-1]])
    assert np.array_equal(arrays.targets[arrays.targets != IGNORE], np.delete(stream, firsts))
    assert np.all(arrays.tokens[arrays.targets == IGNORE] == END)
    assert packed.count == sum(-(-(length - 1) // sequence) for length in lengths)


def test_windows_without_mask_follow_one_another():
    stream = StreamPacking(tokens_of([10, 12]), 5, vocab=1000, mask=False)
    arrays = stream.read(np.array([0, 3]))
    assert stream.count == 4
    assert arrays.tokens.tolist() == [[0, 1, 2, 3, 4], [15, 16, 17, 18, 19]]
    assert arrays.targets.tolist() == [[1, 2, 3, 4, 5], [16, 17, 18, 19, 20]]
    assert arrays.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert arrays.documents is None
    assert {arrays.tokens.dtype, arrays.targets.dtype, arrays.positions.dtype} == {np.dtype(np.int64)}


def test_a_stream_of_one_window_needs_one_token_more():
    assert StreamPacking(tokens_of([8]), 8, vocab=1000, mask=False).count == 0
    assert StreamPacking(tokens_of([9]), 8, vocab=1000, mask=False).count == 1


@pytest.mark.parametrize(
    ("count", "share", "held"),
    [(1000, 0.01, 10), (1000, 0.0, 0), (10, 0.01, 1), (2, 0.5, 1), (1, 0.5, 0), (0, 0.1, 0), (101, 0.5, 50)],
)
def test_held_out_samples_are_a_share_and_at_least_one(count, share, held):
    assert held_count(count, share) == held


def test_a_token_beyond_the_vocabulary_is_named_with_its_file():
    tokens = join([Shard(Path(f"{n}.bin"), np.arange(10, dtype=np.int32), np.zeros(0, np.int64)) for n in "ab"])
    tokens.shards[1].tokens[7] = 500
    stream = StreamPacking(tokens, 3, vocab=100, mask=False)
    assert stream.read(np.array([0, 1, 2])).targets.max() == 9
    with pytest.raises(InputError, match=r"b\.bin holds token 500 at position 7, and arch\.vocab is 100"):
        stream.read(np.array([0, 5]))


def test_a_negative_token_is_refused():
    tokens = join([Shard(Path("a.bin"), np.array([1, 2, -3, 4, 5], np.int32), np.zeros(0, np.int64))])
    with pytest.raises(InputError, match="token -3 at position 2"):
        StreamPacking(tokens, 4, vocab=100, mask=False).read(np.array([0]))


def plain_best_fit(lengths: list[int], room: int) -> list[int]:
    """What is left in every bin, by the slow twin: one length after another, into the fullest bin that has room."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [number for number, free in enumerate(left) if free >= length]
        number = min(fits, key=lambda each: left[each]) if fits else len(left)
        left += [] if fits else [room]
        left[number] -= length
    return sorted(left)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60), room=st.integers(30, 60))
def test_best_fit_leaves_as_much_room_as_its_slow_twin(lengths, room):
    bins = best_fit(np.array(lengths), room)
    assert sorted((room - np.bincount(bins, lengths)).tolist()) == plain_best_fit(lengths, room)


def masked(lengths: list[int], sequence: int) -> Tokens:
    """Documents that fit a sample, of which every third token is trained, and the last."""
    lengths = [min(length + 1, sequence + 1) for length in lengths]
    bare = tokens_of(lengths)
    mask = (np.arange(bare.total) % 3 == 0).astype(np.uint8)
    mask[bare.ends - 1] = 1
    mask[bare.ends - lengths] = 0
    trained = np.add.reduceat(mask, bare.ends - lengths, dtype=np.int64)
    rows = np.stack([np.arange(len(lengths)), trained, lengths], axis=1)
    return Tokens(bare.shards, bare.ends, Tokens((Shard(Path("mask.bin"), mask, bare.ends),), bare.ends), rows)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths=ragged, sequence=st.integers(2, 24), has_mask=st.booleans())
def test_packed_documents_are_those_of_a_sample_each(lengths, sequence, has_mask):
    tokens = masked(lengths, sequence) if has_mask else tokens_of(lengths)
    alone = DocumentPacking(tokens, sequence, vocab=1000, fill=END)
    packed = BestFitPacking(alone)
    samples = np.arange(packed.count)
    arrays = packed.read(samples)
    assert arrays.documents is not None
    found = []
    for row in samples:
        for document in np.unique(arrays.documents[row]):
            at = np.flatnonzero(arrays.documents[row] == document)
            assert np.array_equal(arrays.positions[row, at], np.arange(len(at))), "positions begin at 0 in each"
            found.append((arrays.tokens[row, at].tolist(), arrays.targets[row, at].tolist()))
    each = alone.read(np.arange(alone.count))
    sizes = alone.lengths(np.arange(alone.count))
    wanted = [
        (tokens[:size].tolist(), targets[:size].tolist())
        for tokens, targets, size in zip(each.tokens, each.targets, sizes, strict=True)
    ]
    for one in wanted:
        found.remove(one)
    assert all(set(targets) == {IGNORE} for _, targets in found), "what is left is filler"
    assert np.array_equal(packed.valid(samples), (arrays.targets != IGNORE).sum(axis=1))
    assert alone.valid(np.arange(alone.count)).sum() == packed.valid(samples).sum()
    for row, squares in zip(samples, packed.squares(samples), strict=True):
        counts = np.unique(arrays.documents[row], return_counts=True)[1]
        assert squares == (counts**2).sum()
