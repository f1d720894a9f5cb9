"""Reading a saved step: no byte is used before its sha256 fits."""

import hashlib
import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from meshwright.checkpoint import format, storage, write
from meshwright.checkpoint.format import MANIFEST, Manifest, Slice
from meshwright.checkpoint.state import (
    SLICE_BYTES,
    STATE_DTYPES,
    TORCH_DTYPES,
    Shape,
    TensorShard,
    inside,
    overlap,
    region_shape,
    region_text,
)
from meshwright.checkpoint.storage import READ_BYTES, THREADS, CorruptError, Damage, Item
from meshwright.config.run import Run, digests
from meshwright.parallel.mesh import Mesh
from meshwright.spec.communication import ANCHOR, FEEDBACK, MOMENTUM, kind_of, of_part, part_of
from meshwright.spec.optimizers import saved_by
from meshwright.spec.problem import InputError, Problem

WEIGHT = "weight/"  # how the names of weights begin, among those of optimizer states
MOST_OPEN = 64  # chunks at a time, more than are ever at work; systems allow a process about a thousand files
Say = Callable[[str], None]


class StepReader:
    """An open step: its manifest, and the chunks that were used last. `pinned`: what it reads goes to a GPU.

    Of a step that was put together from parts the manifest is given, and only the chunks that are read need be there.
    """

    def __init__(self, folder: Path, *, pinned: bool = False, manifest: Manifest | None = None) -> None:
        self.folder, self.pinned = folder, pinned
        self._own = threading.local()  # each thread's buffer
        self.manifest: Manifest = manifest or format.read(folder)
        self._open: OrderedDict[int, tuple[AbstractContextManager[int], int]] = OrderedDict()  # chunk -> descriptor

    def __enter__(self) -> "StepReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._close_oldest()

    def each(self, wanted: Iterable[tuple[Slice, Item]], use: Callable[[Slice, Item, memoryview], None]) -> None:
        """Have threads read and check slices, and use the bytes of each, which are gone after that."""
        todo = iter(wanted)
        with ThreadPoolExecutor(THREADS, "checkpoint") as pool:
            waiting = deque(self._begun(each, use, pool) for each in islice(todo, 2 * THREADS))
            while waiting:
                waiting.popleft().result()
                waiting += [self._begun(each, use, pool) for each in islice(todo, 1)]

    def _begun(
        self,
        wanted: tuple[Slice, Item],
        use: Callable[[Slice, Item, memoryview], None],
        pool: ThreadPoolExecutor,
    ) -> Future[None]:
        each, item = wanted
        descriptor = self._chunk(each.chunk)  # open before a thread is: only this one opens and closes
        return pool.submit(lambda: use(each, item, self.checked(each, descriptor)))

    def checked(self, each: Slice, descriptor: int) -> memoryview:
        """The bytes of one slice, out of its open chunk; in memory that this thread uses again for the next."""
        content = self._buffer()[: each.end - each.begin]
        whole, filled = hashlib.sha256(), 0
        try:
            for begin in range(0, len(content), READ_BYTES):
                part = content[begin : begin + READ_BYTES]
                filled += storage.read_into(descriptor, each.begin + begin, part)
                whole.update(part)
        except OSError as error:
            raise CorruptError([self._damage(each, f"cannot be read: {error.strerror}")]) from None
        if filled < len(content) or whole.hexdigest() != each.sha256:
            raise CorruptError([self._damage(each, "checksum mismatch (sha256): is not what was written")])
        return content

    def _buffer(self) -> memoryview:
        if not hasattr(self._own, "buffer"):
            room = torch.empty(SLICE_BYTES, dtype=torch.uint8, pin_memory=self.pinned)
            self._own.buffer = room.numpy().data
        return self._own.buffer

    @contextmanager
    def chunk(self, number: int) -> Iterator[int]:
        """A chunk, open for reading, whose size and header are those that were written."""
        chunk = self.manifest.chunks[number]
        file = str(self.folder / chunk.file)
        with storage.opened(self.folder, chunk.file) as descriptor:
            if (size := storage.size_of(descriptor)) != chunk.bytes:
                text, begin, end = f"has {size} bytes, not {chunk.bytes}", *sorted((size, chunk.bytes))
                raise CorruptError([Damage(file=file, text=text, begin=begin, end=end)])
            if format.sha256(storage.read_range(descriptor, 0, chunk.header_bytes)) != chunk.header_sha256:
                text = "checksum mismatch (sha256): the header is not what was written"
                raise CorruptError([Damage(file=file, text=text, begin=0, end=chunk.header_bytes)])
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield descriptor

    def _chunk(self, number: int) -> int:
        """The same, kept open for the next slice."""
        if number not in self._open:
            if len(self._open) == MOST_OPEN:
                self._close_oldest()
            context = self.chunk(number)
            self._open[number] = context, context.__enter__()
        self._open.move_to_end(number)
        return self._open[number][1]

    def _close_oldest(self) -> None:
        _, (context, _) = self._open.popitem(last=False)
        context.__exit__(None, None, None)

    def _damage(self, each: Slice, text: str) -> Damage:
        return Damage(
            file=str(self.folder / self.manifest.chunks[each.chunk].file),
            text=text,
            tensor=self.manifest.tensors[each.tensor].name + region_text(each.region),
            begin=each.begin,
            end=each.end,
        )


class StepWeights:
    """The weights of a saved step by name, each whole, under whatever plan they were saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = StepReader(folder)
        tensors = (each for each in self._reader.manifest.tensors if each.name.startswith(WEIGHT))
        self._tensors = {each.name.removeprefix(WEIGHT): each for each in tensors}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> Shape:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype | None:
        return TORCH_DTYPES[self._tensors[name].dtype]

    def load(self, name: str) -> Tensor:
        """Read a weight out of its slices, each checked by its sha256."""
        whole = torch.empty(self.shape(name), dtype=self.dtype(name))
        region = tuple((0, length) for length in whole.shape)
        with self._reader as reader:  # closes the chunks, and opens them for the next one
            fill(reader, [TensorShard(WEIGHT + name, tuple(whole.shape), region, whole, writes=False)])
        return whole


def newest(
    home: Path,
    run: Run | None,
    mesh: Mesh,
    holdings: Sequence[TensorShard],
    say: Say,
    *,
    only: int | None = None,
    earlier: Collection[str] = (),
) -> Manifest | None:
    """Fill what this rank holds from the newest step that every rank can read whole; None if nothing was ever saved.

    Each step that fails is said loudly, then the one before is tried. If all fail, every rank raises. Without a run, a
    step of any run will do that has the tensors, or `only` one. `earlier` are digests that the run had before it was
    extended.
    """
    seen: list[str] = []
    last = math.inf if run is None else run.steps
    steps = [step for step in format.present(home) if step <= last and only in (None, step)]
    while (step := write.number_of_first(steps.pop() if steps else -1, mesh)) >= 0:
        manifest, words = tried(home / format.name(step), run, holdings, earlier)
        words = write.first_words(words, mesh)
        if words is None:
            assert manifest is not None
            if fault := format.pointer_fault(home, manifest.progress.step, manifest.sha256):
                say(f"warning: {fault}")
            return manifest
        say(f"warning: {format.name(step)} cannot be used: {words}")
        seen.append(words)
    if seen:
        raise CorruptError([Damage(file=str(home), text=f"no step in it can be used: {'; '.join(seen)}")])
    return None


def tried(
    folder: Path,
    run: Run | None,
    holdings: Sequence[TensorShard],
    earlier: Collection[str],
    manifest: Manifest | None = None,
) -> tuple[Manifest | None, str | None]:
    """Fill what this rank holds from one step; its manifest, or why it cannot be used."""
    is_pinned = any(holding.tensor.is_cuda for holding in holdings)
    try:
        with StepReader(folder, pinned=is_pinned, manifest=manifest) as reader:
            holdings = as_saved(reader.manifest, holdings)
            check_optimizer(reader.manifest, folder, holdings)
            if run is not None:
                check_run(reader.manifest, folder, run, earlier)
            else:
                check_state_dtype(reader.manifest, folder, holdings)
            check_tensors(reader.manifest, folder, holdings)
            fill(reader, holdings)
            return reader.manifest, None
    except CorruptError as error:
        return None, str(error)


def as_saved(manifest: Manifest, holdings: Sequence[TensorShard]) -> list[TensorShard]:
    """What to fill from a step whose replicas were others: theirs are taken in turn, and outer states begin anew.

    So does what lossy reductions of gradients were owed, or factored with, where it was another's.

    Replicas that sync rarely have each saved what they alone had.
    """
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    there = set(shapes)
    parts = 1 + max((part_of(name) for name in there if kind_of(name) not in FEEDBACK), default=0)
    found = []
    for holding in holdings:
        kind, name = kind_of(holding.name), holding.name.partition("/")[2]
        if kind in FEEDBACK:
            found += [holding] if shapes.get(holding.name) == holding.shape else []
            continue
        saved = f"{of_part(kind, part_of(holding.name) % parts)}/{name}"
        if saved not in there:
            saved = f"{kind}/{name}"  # all replicas had the same
        if saved in there or kind not in (ANCHOR, MOMENTUM):
            found.append(replace(holding, name=saved))
    return found


def check_optimizer(manifest: Manifest, folder: Path, holdings: Sequence[TensorShard]) -> None:
    """Its optimizer states must be of the kinds that this rank holds; else no step of the run can be used."""
    saved = saved_by(kind_of(tensor.name) for tensor in manifest.tensors)
    here = saved_by(kind_of(holding.name) for holding in holdings)
    if saved is not None and here is not None and saved.states != here.states:
        what = f"{folder} was saved by {saved.label}, whose states {here.label} cannot use"
        remedy = f"set optim.name = {saved.name}, or start another run from its weights by init.from"
        raise InputError([Problem(what, remedy, "optim.name")])


def check_state_dtype(manifest: Manifest, folder: Path, holdings: Sequence[TensorShard]) -> None:
    """Optimizer states of another run must be in the dtype that this one has: none are converted."""
    there = {tensor.name: tensor for tensor in manifest.tensors}
    for holding in holdings:
        saved = there.get(holding.name)
        if saved is not None and (saved.dtype, saved.shape[-1:]) != (holding.dtype, holding.shape[-1:]):
            what = f"{folder} has optimizer states of another optim.state_dtype: {holding.name} is {saved.dtype}"
            remedy = "set optim.state_dtype as the run has it that saved them, or leave init.optimizer_state out"
            raise InputError([Problem(what, remedy, "init.optimizer_state")])


def check_run(manifest: Manifest, folder: Path, run: Run, earlier: Collection[str] = ()) -> None:
    """A step must be of this run, or of what it was before it was extended."""
    file, progress, names = str(folder / MANIFEST), manifest.progress, digests(run)
    if folder.name != format.name(progress.step):
        raise CorruptError([Damage(file=file, text=f"is the manifest of step {progress.step}")])
    if manifest.run not in (*names, *earlier):
        raise CorruptError([Damage(file=file, text=f"is of another run ({manifest.run}, not {names[0]})")])
    if not earlier and (progress.seed, progress.samples) != (run.seed, progress.step * run.batch):
        raise CorruptError([Damage(file=file, text=f"{progress.samples} samples are not those of its steps and seed")])


def check_tensors(manifest: Manifest, folder: Path, holdings: Sequence[TensorShard]) -> None:
    """It must have this rank's tensors."""
    file = str(folder / MANIFEST)
    there = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
    for holding in holdings:
        if there.get(holding.name) != (holding.dtype, holding.shape):
            text = f"is {there.get(holding.name, 'not there')}, not {(holding.dtype, holding.shape)}"
            raise CorruptError([Damage(file=file, text=text, tensor=holding.name)])


def fill(reader: StepReader, holdings: Sequence[TensorShard]) -> None:
    """Copy into each holding what the slices have of it. A slice that fails leaves a mixture, to be filled again."""
    with _one_thread():
        reader.each(meetings(reader.manifest, holdings), _copy)


@torch.inference_mode()  # of whoever loads, this thread knows nothing: any tensor may be filled in this mode
def _copy(each: Slice, holding: TensorShard, content: memoryview) -> None:
    both = overlap(each.region, holding.region)
    assert both is not None
    whole = torch.frombuffer(content, dtype=STATE_DTYPES[holding.dtype]).view(region_shape(each.region))
    holding.tensor[inside(both, holding.region)].copy_(whole[inside(both, each.region)])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copies by one thread: torch's others would spin where those that read and hash should run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def meetings(manifest: Manifest, holdings: Sequence[TensorShard]) -> Iterator[tuple[Slice, TensorShard]]:
    """Every slice with every holding that it has something of."""
    by_tensor: dict[str, list[Slice]] = {}
    for each in manifest.slices:
        by_tensor.setdefault(manifest.tensors[each.tensor].name, []).append(each)
    for holding in holdings:
        for each in by_tensor.get(holding.name, ()):
            if overlap(each.region, holding.region) is not None:
                yield each, holding
