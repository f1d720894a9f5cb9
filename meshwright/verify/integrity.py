"""Whether what a run has saved is still what was written: every byte of every step is read and hashed. No torch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from meshwright.checkpoint import format, storage
from meshwright.checkpoint.format import MANIFEST, Manifest, Slice
from meshwright.checkpoint.read import StepReader
from meshwright.checkpoint.storage import CorruptError, Damage, side_by_side
from meshwright.config.huggingface import PICKLES, a_pickle
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.units import plural


class ChunkIntegrity(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a step."""

    file: str
    bytes: int
    sound: bool


class StepIntegrity(msgspec.Struct, frozen=True, kw_only=True):
    """One saved step."""

    folder: str
    step: int | None  # None: the manifest cannot be read
    sound: bool
    state: str  # the logical digest that the manifest carries
    chunks: tuple[ChunkIntegrity, ...]
    damages: tuple[Damage, ...]


class IntegrityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything under a folder."""

    sound: bool
    steps: tuple[StepIntegrity, ...]
    damages: tuple[Damage, ...]  # of what belongs to no step: the pointer


def verify(path: Path, say: Callable[[str], None]) -> IntegrityReport:
    """Check one step, or all steps of a run folder."""
    found, home = find(path)
    steps = []
    for folder in found:
        step = verify_step(folder)
        steps.append(step)
        size = sum(chunk.bytes for chunk in step.chunks)
        whole = f"{plural(len(step.chunks), 'chunk')}, {plural(size, 'byte')}, all sound; state {step.state}"
        say(f"{step.folder}: {whole if step.sound else 'DAMAGED'}")
        for damage in step.damages:
            say(f"  {damage}")
    loose = tuple(_pointer(home, steps)) if home is not None else ()
    for damage in loose:
        say(str(damage))
    return IntegrityReport(sound=not loose and all(each.sound for each in steps), steps=tuple(steps), damages=loose)


def find(path: Path) -> tuple[list[Path], Path | None]:
    """The steps under a path, and their home if it is more than one step that was asked for."""
    if (path / MANIFEST).exists() or (format.STEP.fullmatch(path.absolute().name) and path.is_dir()):
        return [path], None
    if path.name == format.LATEST and path.is_file():
        pointed = format.pointed(path.parent)
        assert pointed is not None, "the file is there"
        return [path.parent / format.name(pointed[0])], None
    home = path if path.name == format.CHECKPOINTS else format.home(path)
    found = [home / format.name(step) for step in format.present(home)]
    if not found and not (home / format.LATEST).exists():
        what = "holds no checkpoint" if path.is_dir() else "is not a folder"
        nothing = Problem(f"{path} {what}", "give a run folder, or one of its checkpoints/step-N")
        raise InputError([a_pickle(path) if path.suffix in PICKLES else nothing])
    return found, home


def verify_step(folder: Path) -> StepIntegrity:
    """Read every byte of a step."""
    try:
        with StepReader(folder) as reader:
            manifest = reader.manifest
            damages = [_chunk(reader, number) for number in range(len(manifest.chunks))]
            found = [*_strays(folder, manifest), *(damage for each in damages for damage in each)]
    except CorruptError as error:
        damages = tuple(error.damages)
        return StepIntegrity(folder=str(folder), step=None, sound=False, state="", chunks=(), damages=damages)
    return StepIntegrity(
        folder=str(folder),
        step=manifest.progress.step,
        sound=not found,
        state=manifest.state,
        chunks=tuple(
            ChunkIntegrity(file=chunk.file, bytes=chunk.bytes, sound=not each)
            for chunk, each in zip(manifest.chunks, damages, strict=True)
        ),
        damages=tuple(found),
    )


def _chunk(reader: StepReader, number: int) -> list[Damage]:
    """What is wrong with one chunk; its slices are checked side by side."""
    chunk = reader.manifest.chunks[number]
    try:
        with reader.chunk(number) as descriptor:

            def check(each: Slice) -> list[Damage]:
                try:
                    reader.checked(each, descriptor)
                except CorruptError as error:
                    return error.damages
                return []

            slices = [each for each in reader.manifest.slices if each.chunk == number]
            found = [damage for damages in side_by_side(check, slices) for damage in damages]
            if found or reader.manifest.format == format.FORMAT or storage.file_sha256(descriptor) == chunk.sha256:
                return found
    except CorruptError as error:
        return error.damages
    text = "checksum mismatch (sha256) of the file, though its slices match"
    return [Damage(file=str(reader.folder / chunk.file), text=text)]


def _strays(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    """A step is named after its number, and holds what its manifest lists."""
    if format.STEP.fullmatch(folder.absolute().name) and folder.absolute().name != format.name(manifest.progress.step):
        yield Damage(file=str(folder / MANIFEST), text=f"is the manifest of step {manifest.progress.step}")
    known = {MANIFEST, *(chunk.file for chunk in manifest.chunks)}
    for entry in sorted(folder.iterdir()):
        if entry.name not in known:
            yield Damage(file=str(entry), text="is not in the manifest")


def _pointer(home: Path, steps: list[StepIntegrity]) -> Iterator[Damage]:
    whole = [step for step in steps if step.sound]
    if whole:
        with StepReader(Path(whole[-1].folder)) as reader:
            fault = format.pointer_fault(home, reader.manifest.progress.step, reader.manifest.sha256)
        if fault is not None:
            yield fault
    elif not steps:
        yield Damage(file=str(home / format.LATEST), text="points to a step, and none is there")
