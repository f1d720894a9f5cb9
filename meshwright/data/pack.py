"""Samples out of a stream of tokens: which tokens, which targets, and how many of them count, known without reading."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from meshwright.config.run import Run
from meshwright.data.order import root, shuffled
from meshwright.data.shards import SAMPLE_COLUMNS, Tokens
from meshwright.spec.problem import mistake

IGNORE = -100  # the target where nothing is predicted
TRAINED = SAMPLE_COLUMNS.index("trained")


@dataclass(frozen=True, slots=True)
class Arrays:
    """Samples, one a row; every array is int64 [samples, sequence]."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray  # in the document, as far as the sample shows it
    documents: np.ndarray | None  # number of the document within the sample; None: one document a sample


class Packing(Protocol):
    """One way to make samples."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def vocab(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def predicted(self) -> int:
        """Targets of all samples together that are not filler."""
        ...

    def valid(self, samples: np.ndarray) -> np.ndarray:
        """How many targets of each sample are not IGNORE."""
        ...

    def squares(self, samples: np.ndarray) -> np.ndarray:
        """Of each sample, its documents' lengths squared and summed: the pairs of positions that attention may see."""
        ...

    def read(self, samples: np.ndarray) -> Arrays: ...


def packing(tokens: Tokens, run: Run, end_token: int | None) -> Packing:
    """The samples of a stream of tokens, as a run wants them."""
    fill = 0 if end_token is None else end_token
    if run.data.pack == "documents":
        return DocumentPacking(tokens, run.sequence, run.arch.vocab, fill)
    if run.data.pack == "best_fit":
        alone = DocumentPacking(tokens, run.sequence, run.arch.vocab, fill)
        return BestFitPacking(alone, together=2 if run.objective == "dpo" else 1)
    return StreamPacking(tokens, run.sequence, run.arch.vocab, run.data.mask_documents)


def held_count(count: int, share: float) -> int:
    """How many samples, the last ones, are never trained on."""
    if share <= 0 or count < 2:
        return 0
    return min(max(round(share * count), 1), count - 1)


@dataclass(frozen=True)
class StreamPacking:
    """Windows of one long stream: sample i begins at token i · sequence. What is left at the end is dropped."""

    tokens: Tokens
    sequence: int
    vocab: int
    mask: bool  # neither attention nor prediction crosses the end of a document

    @property
    def count(self) -> int:
        return max(self.tokens.total - 1, 0) // self.sequence

    @property
    def predicted(self) -> int:
        return self.count * self.sequence

    def valid(self, samples: np.ndarray) -> np.ndarray:
        first, last = self._ends(samples)
        return self.sequence - (last - first)

    def squares(self, samples: np.ndarray) -> np.ndarray:
        row, cut = self._cuts(samples)
        before = np.where(np.diff(row, prepend=-1) == 0, np.roll(cut, 1), 0)  # where the document before it began
        found, last = np.zeros(len(samples), np.int64), np.zeros(len(samples), np.int64)
        np.add.at(found, row, (cut - before) ** 2)
        np.maximum.at(last, row, cut)
        return found + (self.sequence - last) ** 2

    def read(self, samples: np.ndarray) -> Arrays:
        starts, width = samples * self.sequence, self.sequence + 1
        rows = self.tokens.rows(starts, np.full(len(samples), width), width, 0)
        _refuse_unknown(rows, starts, self)
        tokens, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        places = np.broadcast_to(np.arange(self.sequence), tokens.shape)
        if not self.mask:
            return Arrays(tokens, targets, places, None)
        row, cut = self._cuts(samples)
        targets[row, cut - 1] = IGNORE
        begins = np.zeros((len(samples), self.sequence + 1), np.int64)
        begins[row, cut] = cut
        begins = np.maximum.accumulate(begins[:, :-1], axis=1)
        documents = np.cumsum(begins[:, 1:] != begins[:, :-1], axis=1, dtype=np.int64)
        return Arrays(tokens, targets, places - begins, np.pad(documents, ((0, 0), (1, 0))))

    def _cuts(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row and column at which each new document begins; a column of `sequence` lies just behind the sample."""
        first, last = self._ends(samples)
        row = np.repeat(np.arange(len(samples)), last - first)
        within = np.arange(len(row)) - np.repeat(np.cumsum(last - first) - (last - first), last - first)
        return row, self.tokens.ends[first[row] + within] - samples[row] * self.sequence

    def _ends(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the stream's document ends fall on a target of each sample: from, to."""
        if not self.mask:
            return np.zeros_like(samples), np.zeros_like(samples)
        first = np.searchsorted(self.tokens.ends, samples * self.sequence, side="right")
        return first, np.searchsorted(self.tokens.ends, (samples + 1) * self.sequence, side="right")


@dataclass(frozen=True)
class DocumentPacking:
    """A document a sample; a longer one is cut into several, a shorter one is padded.

    Of documents with a mask, which were cut to a sample before, only the tokens that are trained are targets.
    """

    tokens: Tokens
    sequence: int
    vocab: int
    fill: int  # the input where there is no document

    @property
    def count(self) -> int:
        return int(self.lasts[-1]) if len(self.lasts) else 0

    @property
    def predicted(self) -> int:
        return int(self.tokens.ends[-1]) - len(self.tokens.ends) if len(self.tokens.ends) else 0

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Positions of each sample that are not filler."""
        starts, ends = self._bounds(samples)
        return np.minimum(ends - starts - 1, self.sequence)

    @cached_property
    def lasts(self) -> np.ndarray:
        """Samples in all documents up to and with each one: a document of L tokens predicts L - 1."""
        predicted = np.diff(self.tokens.ends, prepend=0) - 1
        return np.cumsum(-(-predicted // self.sequence))

    def valid(self, samples: np.ndarray) -> np.ndarray:
        if self.tokens.samples is None:
            return self.lengths(samples)
        return self.tokens.samples[np.searchsorted(self.lasts, samples, side="right"), TRAINED]

    def squares(self, samples: np.ndarray) -> np.ndarray:
        return np.full(len(samples), self.sequence**2, np.int64)  # filler is attended to like anything else

    def read(self, samples: np.ndarray) -> Arrays:
        lengths = self.lengths(samples)
        starts, _ = self._bounds(samples)
        rows = self.tokens.rows(starts, lengths + 1, self.sequence + 1, self.fill)
        _refuse_unknown(rows, starts, self)
        tokens, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        places = np.broadcast_to(np.arange(self.sequence), tokens.shape)
        padding = places >= lengths[:, None]
        tokens[padding], targets[padding] = self.fill, IGNORE
        if self.tokens.mask is not None:
            mask = self.tokens.mask.rows(starts, lengths + 1, self.sequence + 1, 0)
            targets[mask[:, 1:] == 0] = IGNORE
        return Arrays(tokens, targets, places, None)

    def _bounds(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in the stream each sample begins, and where its document ends."""
        document = np.searchsorted(self.lasts, samples, side="right")
        before = document - 1  # -1, the last, is taken for the first document and then replaced
        part = samples - np.where(document > 0, self.lasts[before], 0)
        start = np.where(document > 0, self.tokens.ends[before], 0)
        return start + part * self.sequence, self.tokens.ends[document]


@dataclass(frozen=True)
class BestFitPacking:
    """As many documents, or parts of one, in a sample as fit: each goes where it leaves the least room.

    Longest first, into the fullest sample that has room for it (best-fit decreasing, at most 11/9 of the best and one
    more; Johnson et al. 1974). None sees another, and positions begin at 0 in each.
    """

    documents: DocumentPacking
    together: int = 1  # neighbours that are never parted: of preferences two, the chosen and the rejected

    @property
    def tokens(self) -> Tokens:
        return self.documents.tokens

    @property
    def vocab(self) -> int:
        return self.documents.vocab

    @property
    def count(self) -> int:
        return len(self.bins) - 1

    @property
    def predicted(self) -> int:
        return self.documents.predicted

    @cached_property
    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """All documents in the order of the samples that they are in, and where each sample begins among them."""
        lengths = self.documents.lengths(np.arange(self.documents.count))
        bins = best_fit(lengths.reshape(-1, self.together).sum(1), self.documents.sequence)
        count = int(bins.max(initial=-1)) + 1
        # The last samples are held out, and would be those of the shortest documents.
        bins = shuffled(bins, count, root(0, "best fit")) if count else bins
        order = np.argsort(bins, kind="stable")
        firsts = np.searchsorted(bins[order], np.arange(count + 1)) * self.together
        return (order[:, None] * self.together + np.arange(self.together)).reshape(-1), firsts

    def pairs(self, samples: np.ndarray) -> int:
        """How many pairs some samples have, where documents are in pairs."""
        return int((self.bins[samples + 1] - self.bins[samples]).sum()) // 2 if self.together == 2 else 0

    @property
    def bins(self) -> np.ndarray:
        return self.packed[1]

    def valid(self, samples: np.ndarray) -> np.ndarray:
        units, rows = self._units(samples)
        return np.bincount(rows, self.documents.valid(units), len(samples)).astype(np.int64)

    def squares(self, samples: np.ndarray) -> np.ndarray:
        units, rows = self._units(samples)
        lengths = self.documents.lengths(units)
        filler = self.documents.sequence - np.bincount(rows, lengths, len(samples))
        return (np.bincount(rows, lengths.astype(np.float64) ** 2, len(samples)) + filler**2).astype(np.int64)

    def read(self, samples: np.ndarray) -> Arrays:
        sequence, (units, rows) = self.documents.sequence, self._units(samples)
        arrays, lengths = self.documents.read(units), self.documents.lengths(units)
        firsts = np.searchsorted(rows, rows)  # of each unit, the first one in its row
        offsets = np.cumsum(lengths) - lengths
        offsets -= offsets[firsts]
        shape = (len(samples), sequence)
        begins = np.zeros((len(samples), sequence + 1), np.int64)
        used = np.bincount(rows, lengths, len(samples)).astype(np.int64)
        begins[rows, offsets] = offsets
        begins[np.arange(len(samples)), used] = used  # filler sees no document, and none sees it
        begins = np.maximum.accumulate(begins[:, :-1], axis=1)
        documents = np.cumsum(np.diff(begins, axis=1, prepend=0) > 0, axis=1)
        places = np.arange(sequence)
        inside = places < lengths[:, None]
        row = np.repeat(rows, lengths)
        column = np.repeat(offsets, lengths) + np.broadcast_to(places, inside.shape)[inside]
        tokens, targets = np.full(shape, self.documents.fill, np.int64), np.full(shape, IGNORE, np.int64)
        tokens[row, column], targets[row, column] = arrays.tokens[inside], arrays.targets[inside]
        return Arrays(tokens, targets, places - begins, documents.astype(np.int64))

    def _units(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The documents of some samples, and the row of each."""
        order, bins = self.packed
        counts = bins[samples + 1] - bins[samples]
        rows = np.repeat(np.arange(len(samples)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return order[bins[samples][rows] + within], rows


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each length, by best-fit decreasing; lengths that are alike are placed together."""
    bins, made = np.zeros(len(lengths), np.int64), 0
    room: dict[int, list[np.ndarray]] = {}  # by how much is left: bins
    rooms: list[int] = []  # those that have any, rising
    order = np.argsort(-lengths, kind="stable")
    firsts = np.flatnonzero(np.diff(lengths[order], prepend=-1))
    for first, last in pairwise([*firsts.tolist(), len(order)]):
        length, items = int(lengths[order[first]]), order[first:last]
        while len(items):
            at = bisect_left(rooms, length)
            if at < len(rooms):
                left = rooms.pop(at)
                open_bins = np.concatenate(room.pop(left))
            else:  # as many new ones as the rest of these lengths fill
                left = capacity
                open_bins = np.arange(made, made + -(-len(items) // (capacity // length)))
                made += len(open_bins)
            each = left // length  # the bin that was just filled further is again the fullest
            wanted = -(-len(items) // each)
            taken, others = open_bins[:wanted], open_bins[wanted:]
            counts = np.full(len(taken), each)
            counts[-1] = min(len(items) - each * (wanted - 1), each) if len(taken) == wanted else each
            placed = int(counts.sum())
            bins[items[:placed]] = np.repeat(taken, counts)
            items = items[placed:]
            last = left - int(counts[-1]) * length
            for rest, group in ((left, others), (left - each * length, taken[:-1]), (last, taken[-1:])):
                if rest and len(group):
                    if rest not in room:
                        insort(rooms, rest)
                    room.setdefault(rest, []).append(group)
    return bins


def _refuse_unknown(rows: np.ndarray, starts: np.ndarray, packing: Packing) -> None:
    """A token that the model has no embedding for is named with its file, before it can crash a device."""
    if rows.size == 0 or (rows.max() < packing.vocab and rows.min() >= 0):
        return
    row, column = np.argwhere((rows >= packing.vocab) | (rows < 0))[0]
    file, position = packing.tokens.place(int(starts[row] + column))
    token = rows[row, column]
    text = f"{file} holds token {token} at position {position}, and arch.vocab is {packing.vocab}"
    raise mistake(text, "use the vocabulary that the tokens were made with", "arch.vocab")
