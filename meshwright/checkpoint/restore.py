"""Going on from a saved step under any plan: each rank reads the slices that meet its own parts."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from meshwright.checkpoint import agree, steps
from meshwright.checkpoint import slices as regions
from meshwright.checkpoint.chunk import DTYPES
from meshwright.checkpoint.corrupt import CorruptError, Damage
from meshwright.checkpoint.holding import Holding
from meshwright.checkpoint.manifest import MANIFEST, Manifest, Slice
from meshwright.checkpoint.read import StepReader
from meshwright.parallel.mesh import Mesh
from meshwright.spec.run import Run, digest

Say = Callable[[str], None]
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def newest(home: Path, run: Run | None, mesh: Mesh, holdings: Sequence[Holding], say: Say) -> Manifest | None:
    """Fill what this rank holds from the newest step that every rank can read whole; None if nothing was ever saved.

    Each step that fails is said loudly, then the one before is tried. If all fail, every rank raises. Without a run, a
    step of any run will do that has the tensors.
    """
    seen: list[str] = []
    below = sys.maxsize if run is None else run.steps + 1
    while (step := agree.number_of_first(_before(home, below), mesh)) >= 0:
        manifest, words = _tried(home / steps.name(step), run, holdings)
        words = agree.first_words(words, mesh)
        if words is None:
            assert manifest is not None
            _tell_pointer(home, manifest, say)
            return manifest
        say(f"warning: {steps.name(step)} cannot be used: {words}")
        seen.append(words)
        below = step
    if seen:
        raise CorruptError([Damage(file=str(home), text=f"no step in it can be used: {'; '.join(seen)}")])
    return None


def _before(home: Path, below: int) -> int:
    """The newest step before another, −1 if there is none."""
    return max((step for step in steps.present(home) if step < below), default=-1)


def _tried(folder: Path, run: Run | None, holdings: Sequence[Holding]) -> tuple[Manifest | None, str | None]:
    try:
        with StepReader(folder) as reader:
            if run is not None:
                check_run(reader.manifest, folder, run)
            check_tensors(reader.manifest, folder, holdings)
            fill(reader, holdings)
            return reader.manifest, None
    except CorruptError as error:
        return None, str(error)


def check_run(manifest: Manifest, folder: Path, run: Run) -> None:
    """A step must be of this run."""
    file = str(folder / MANIFEST)
    if folder.name != steps.name(manifest.progress.step):
        raise CorruptError([Damage(file=file, text=f"is the manifest of step {manifest.progress.step}")])
    if manifest.run != digest(run):
        raise CorruptError([Damage(file=file, text=f"is of another run ({manifest.run}, not {digest(run)})")])
    progress = manifest.progress
    if (progress.seed, progress.samples) != (run.seed, progress.step * run.batch):
        raise CorruptError([Damage(file=file, text=f"{progress.samples} samples are not those of its steps and seed")])


def check_tensors(manifest: Manifest, folder: Path, holdings: Sequence[Holding]) -> None:
    """It must have this rank's tensors."""
    file = str(folder / MANIFEST)
    there = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
    for holding in holdings:
        if there.get(holding.name) != (holding.dtype, holding.shape):
            text = f"is {there.get(holding.name, 'not there')}, not {(holding.dtype, holding.shape)}"
            raise CorruptError([Damage(file=file, text=text, tensor=holding.name)])


@torch.no_grad()
def fill(reader: StepReader, holdings: Sequence[Holding]) -> None:
    """Copy into each holding what the slices have of it. A slice that fails leaves a mixture, to be filled again."""
    wanted = list(meetings(reader.manifest, holdings))
    contents = reader.slices(each for each, _ in wanted)
    with _one_thread():
        for (each, holding), (_, content) in zip(wanted, contents, strict=True):
            both = regions.overlap(each.region, holding.region)
            assert both is not None
            whole = torch.frombuffer(content, dtype=TORCH_DTYPES[holding.dtype]).view(regions.shape_of(each.region))
            part = whole[regions.inside(both, each.region)]
            holding.tensor[regions.inside(both, holding.region)].copy_(part)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copies by one thread: torch's others would spin where those that read and hash should run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def meetings(manifest: Manifest, holdings: Sequence[Holding]) -> Iterator[tuple[Slice, Holding]]:
    """Every slice with every holding that it has something of."""
    by_tensor: dict[str, list[Slice]] = {}
    for each in manifest.slices:
        by_tensor.setdefault(manifest.tensors[each.tensor].name, []).append(each)
    for holding in holdings:
        for each in by_tensor.get(holding.name, ()):
            if regions.overlap(each.region, holding.region) is not None:
                yield each, holding


def _tell_pointer(home: Path, manifest: Manifest, say: Say) -> None:
    fault = steps.pointer_fault(home, manifest.progress.step, manifest.sha256)
    if fault is not None:
        say(f"warning: {fault}")
