"""This rank's tensors: the samples of any step, read ahead in a thread."""

import copy
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from meshwright.config.run import Run
from meshwright.data.order import in_turn, locate
from meshwright.data.pack import Arrays, BestFitPacking, held_count, packing
from meshwright.data.prepare import Corpus
from meshwright.spec.problem import mistake

AHEAD = 2  # steps that are read before they are asked for


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch; every tensor is int64 (microbatch, sequence)."""

    tokens: Tensor
    targets: Tensor  # IGNORE where nothing is predicted
    positions: Tensor  # in the document; shared between microbatches where documents are not masked
    documents: Tensor | None  # which document each position belongs to; None: one document a sample
    index: Tensor  # global token index, unique in all of training: global sample index · sequence + offset


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank computes in one step."""

    microbatches: tuple[Batch, ...]
    tokens: int  # valid tokens of an update: of the whole step, or of a replica that makes updates of its own
    wait_seconds: float  # how long the trainer waited for it
    span: float = 0.0  # mean over all positions of the step of the document that each is in; 0: nobody counted
    job_tokens: int = 0  # valid tokens of the whole step, over all ranks
    pairs: int = 0  # of preferences, over all ranks: what their loss is divided by, in the place of tokens

    @property
    def together(self) -> "StepBatch":
        """The same for an update that all replicas make together."""
        return replace(self, tokens=self.pairs or self.job_tokens)


@dataclass(frozen=True, slots=True)
class Rows:
    """This rank's samples of a step, before they are cut into microbatches and sent to the device."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None
    documents: Tensor | None
    starts: Tensor  # global token index of each row's first token
    valid: int  # targets that count, over all ranks
    valid_here: int  # and over those that make an update together
    span: float  # as of a StepBatch
    pairs: int = 0


class Loader:
    """Samples by step, for one data rank. It keeps no position: any step can be taken at any time."""

    def __init__(self, corpus: Corpus, run: Run, data_rank: int, device: torch.device, start: int = 0) -> None:
        assert 0 <= data_rank < run.plan.data
        assert run.plan.batch == run.batch
        self.run = run
        self.device = device
        self.packings = tuple(packing(tokens, run, corpus.end_token) for tokens in corpus.sources)
        self.held_counts = tuple(held_count(each.count, run.data.eval_fraction) for each in self.packings)
        self.train_counts = tuple(each.count - held for each, held in zip(self.packings, self.held_counts, strict=True))
        self.weights = tuple(source.weight for source in run.data.sources)
        size = run.plan.microbatch * run.plan.grad_accum
        self.mine = slice(data_rank * size, (data_rank + 1) * size)  # a rank's global microbatches are consecutive
        share = run.batch // run.plan.parts
        part = data_rank * run.plan.parts // run.plan.data
        self.ours = slice(part * share, (part + 1) * share)  # of the ranks that make an update together
        self.offsets = torch.arange(run.sequence, device=device).expand(run.plan.microbatch, -1).contiguous()
        self.reader = ThreadPoolExecutor(1, "loader", _use_device, (self.offsets.device,))
        self.shift = 0  # samples that the order is ahead of the steps: see `start_at`
        self.ahead: dict[int, Future[Rows]] = {}
        self._read_ahead(start)

    def of(self, data_rank: int) -> "Loader":
        """The same samples as another data rank reads them; it reads ahead by itself."""
        other = copy.copy(self)
        size = self.run.plan.microbatch * self.run.plan.grad_accum
        other.mine = slice(data_rank * size, (data_rank + 1) * size)
        other.reader = ThreadPoolExecutor(1, "loader", _use_device, (self.offsets.device,))
        other.ahead = {}
        return other

    @property
    def holds_out(self) -> bool:
        """Whether any sample is never trained on."""
        return any(self.held_counts)

    def start_at(self, sample: int, step: int) -> None:
        """Have a step begin with a sample of the order: not the usual one where the batch or the data has changed."""
        self.shift = sample - step * self.run.batch
        self._forget(self.ahead)

    def take(self, step: int) -> StepBatch:
        """This rank's part of a step, which counts from 0. What went wrong in the thread is raised here."""
        began = time.perf_counter()
        self._read_ahead(step)
        rows = self.ahead.pop(step).result()
        return self._on_device(rows, time.perf_counter() - began)

    def held(self, batch: int) -> StepBatch:
        """This rank's part of a global batch that is never trained on: in order, from the start again after the end."""
        began = time.perf_counter()
        indices = self._indices(batch)
        sources, samples = self._held_places(indices)
        rows = self._rows(indices, sources, samples + np.asarray(self.train_counts)[sources])
        return self._on_device(rows, time.perf_counter() - began)

    def held_samples(self, batches: int) -> int:
        """How many different samples so many batches of them have."""
        sources, samples = self._held_places(np.arange(batches * self.run.batch))
        return len(set(zip(sources.tolist(), samples.tolist(), strict=True)))

    def _held_places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each validation sample, and its number among those that the source holds out."""
        kept = [number for number, count in enumerate(self.held_counts) if count]
        if not kept:
            raise mistake(
                "there are no validation samples",
                "set data.eval_fraction above 0, or use more data",
                "data.eval_fraction",
            )
        counts = tuple(self.held_counts[number] for number in kept)
        places, samples = in_turn(indices, counts, tuple(self.weights[number] for number in kept))
        return np.asarray(kept)[places], samples

    def close(self) -> None:
        """End the thread; what it has not begun is dropped."""
        self.reader.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self, step: int) -> None:
        """Have the thread at work on a step and the next ones, and forget all others."""
        wanted = range(step, step + 1 + AHEAD)
        self._forget(other for other in self.ahead if other not in wanted)
        for each in wanted:
            if each not in self.ahead:
                self.ahead[each] = self.reader.submit(self._step, each)

    def _forget(self, steps: Iterable[int]) -> None:
        for step in list(steps):
            self.ahead.pop(step).cancel()

    def _indices(self, step: int) -> np.ndarray:
        return np.arange(step * self.run.batch, (step + 1) * self.run.batch)

    def _step(self, step: int) -> Rows:
        indices = self._indices(step) + self.shift
        return self._rows(indices, *locate(indices, self.run.seed, self.train_counts, self.weights))

    def _rows(self, indices: np.ndarray, sources: np.ndarray, samples: np.ndarray) -> Rows:
        """Count the whole batch, read this rank's part of it."""
        valid = self._valid(sources, samples)
        here = valid if self.run.plan.parts == 1 else max(self._valid(sources[self.ours], samples[self.ours]), 1)
        squares = sum(int(each.squares(samples[sources == number]).sum()) for number, each in enumerate(self.packings))
        arrays = self._read(sources[self.mine], samples[self.mine])
        return Rows(
            tokens=self._host(arrays.tokens),
            targets=self._host(arrays.targets),
            positions=self._host(arrays.positions) if arrays.documents is not None else None,
            documents=self._host(arrays.documents) if arrays.documents is not None else None,
            starts=self._host(indices[self.mine] * self.run.sequence),
            valid=valid,
            valid_here=here,
            span=squares / (len(indices) * self.run.sequence),
            pairs=self._pairs(sources, samples),
        )

    def _pairs(self, sources: np.ndarray, samples: np.ndarray) -> int:
        """Pairs of answers in some samples."""
        paired = [(number, each) for number, each in enumerate(self.packings) if isinstance(each, BestFitPacking)]
        return sum(each.pairs(samples[sources == number]) for number, each in paired)

    def _valid(self, sources: np.ndarray, samples: np.ndarray) -> int:
        """Targets that count in some samples."""
        return sum(int(each.valid(samples[sources == number]).sum()) for number, each in enumerate(self.packings))

    def _read(self, sources: np.ndarray, samples: np.ndarray) -> Arrays:
        """The samples of several sources, in the order asked for."""
        present = np.unique(sources).tolist()
        if len(present) == 1:
            return self.packings[present[0]].read(samples)
        parts = [self.packings[number].read(samples[sources == number]) for number in present]
        back = np.argsort(np.argsort(sources, kind="stable"), kind="stable")
        documents = [part.documents for part in parts if part.documents is not None]
        return Arrays(
            tokens=np.concatenate([part.tokens for part in parts])[back],
            targets=np.concatenate([part.targets for part in parts])[back],
            positions=np.concatenate([part.positions for part in parts])[back],
            documents=np.concatenate(documents)[back] if documents else None,
        )

    def _host(self, array: np.ndarray) -> Tensor:
        """A tensor over the array; for a GPU in pinned memory, so that copying does not hold up the host."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _on_device(self, rows: Rows, wait_seconds: float) -> StepBatch:
        """Copies are queued by the caller's thread, in the order of its own work on the device."""
        size, parts = self.run.plan.microbatch, self.run.plan.grad_accum

        def split(tensor: Tensor) -> tuple[Tensor, ...]:
            return tensor.to(self.device, non_blocking=True).split(size)

        positions = (self.offsets,) * parts if rows.positions is None else split(rows.positions)
        documents = (None,) * parts if rows.documents is None else split(rows.documents)
        cut = zip(split(rows.tokens), split(rows.targets), positions, documents, split(rows.starts), strict=True)
        microbatches = tuple(
            Batch(tokens, targets, places, numbers, index=start[:, None] + self.offsets)
            for tokens, targets, places, numbers, start in cut
        )
        counted = rows.pairs or rows.valid_here
        return StepBatch(microbatches, counted, wait_seconds, rows.span, rows.valid, rows.pairs)


def _use_device(device: torch.device) -> None:
    """A new thread begins on GPU 0, and pinning memory there would hold some of it for every rank of the machine."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
