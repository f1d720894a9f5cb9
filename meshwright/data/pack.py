"""Samples out of a stream of tokens: which tokens, which targets, and how many of them count, known without reading."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from meshwright.config.run import Run
from meshwright.data.shards import Tokens
from meshwright.spec.problem import mistake

IGNORE = -100  # the target where nothing is predicted


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
    if run.data.pack == "documents":
        return DocumentPacking(tokens, run.sequence, run.arch.vocab, 0 if end_token is None else end_token)
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
    """A document a sample; a longer one is cut into several, a shorter one is padded."""

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

    @cached_property
    def lasts(self) -> np.ndarray:
        """Samples in all documents up to and with each one: a document of L tokens predicts L - 1."""
        predicted = np.diff(self.tokens.ends, prepend=0) - 1
        return np.cumsum(-(-predicted // self.sequence))

    def valid(self, samples: np.ndarray) -> np.ndarray:
        starts, ends = self._bounds(samples)
        return np.minimum(ends - starts - 1, self.sequence)

    def squares(self, samples: np.ndarray) -> np.ndarray:
        return np.full(len(samples), self.sequence**2, np.int64)  # filler is attended to like anything else

    def read(self, samples: np.ndarray) -> Arrays:
        valid = self.valid(samples)
        starts, _ = self._bounds(samples)
        rows = self.tokens.rows(starts, valid + 1, self.sequence + 1, self.fill)
        _refuse_unknown(rows, starts, self)
        tokens, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        places = np.broadcast_to(np.arange(self.sequence), tokens.shape)
        padding = places >= valid[:, None]
        tokens[padding], targets[padding] = self.fill, IGNORE
        return Arrays(tokens, targets, places, None)

    def _bounds(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in the stream each sample begins, and where its document ends."""
        document = np.searchsorted(self.lasts, samples, side="right")
        before = document - 1  # -1, the last, is taken for the first document and then replaced
        part = samples - np.where(document > 0, self.lasts[before], 0)
        start = np.where(document > 0, self.tokens.ends[before], 0)
        return start + part * self.sequence, self.tokens.ends[document]


def _refuse_unknown(rows: np.ndarray, starts: np.ndarray, packing: Packing) -> None:
    """A token that the model has no embedding for is named with its file, before it can crash a device."""
    if rows.size == 0 or (rows.max() < packing.vocab and rows.min() >= 0):
        return
    row, column = np.argwhere((rows >= packing.vocab) | (rows < 0))[0]
    file, position = packing.tokens.place(int(starts[row] + column))
    token = rows[row, column]
    text = f"{file} holds token {token} at position {position}, and arch.vocab is {packing.vocab}"
    raise mistake(text, "use the vocabulary that the tokens were made with", "arch.vocab")
