from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.pack import IGNORE, DocumentPacking, StreamPacking, held_count
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
