"""Where documents come from: files, folders, globs, or the standard library of the running Python."""

import glob
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import msgspec

from meshwright.data import ready, records
from meshwright.data.mistake import mistake
from meshwright.data.ready import ReadyKind
from meshwright.data.records import TextKind
from meshwright.spec.check import InputError, Problem
from meshwright.spec.run import Data, Source

Kind = TextKind | ReadyKind

PACKED = (".gz", ".zst", ".zstd")
PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml")
CODE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".js", ".jsx", ".ts", ".tsx", ".css"),
    *(".rs", ".go", ".rb", ".pl", ".lua", ".jl", ".r", ".scala", ".kt", ".swift", ".cs", ".sh", ".sql", ".toml"),
)
ENDINGS: dict[str, tuple[str, ...]] = {
    "text": PROSE + CODE,
    "jsonl": (".jsonl", ".ndjson", ".json.gz", ".json.zst"),  # a plain .json is rarely one object a line
    "parquet": (".parquet",),
    "ready": (".bin",),
}
CHECKED = 100  # text files of a source whose beginning is read before a run starts; of tokens, all headers are
STDLIB_BYTES = 4_000_000
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source, and how each is read."""

    source: Source
    kinds: dict[Path, Kind]

    @property
    def files(self) -> list[Path]:
        return list(self.kinds)

    @property
    def ready(self) -> bool:
        """Tokens rather than text."""
        return all(kind in get_args(ReadyKind) for kind in self.kinds.values())

    @property
    def plain(self) -> bool:
        """Text as it is: as many bytes as its files have."""
        return set(self.kinds.values()) == {"text"} and not any(file.suffix.lower() in PACKED for file in self.kinds)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.kinds)

    def documents(self) -> Iterator[str]:
        """Every document, in the order of the files."""
        for file, kind in self.kinds.items():
            yield from records.read(file, cast(TextKind, kind), self.source.field)


def files(source: Source) -> list[Path]:
    """Every file of a source, sorted; InputError when there is none."""
    if source.source == "stdlib":
        return _stdlib()
    path = Path(source.source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return _folder(path, source)
    prefix = path.with_name(path.name + ".bin")  # Megatron names a pair of files by what their names share
    if prefix.is_file():
        return [prefix]
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    if found := [file for file in found if file.is_file() and not _beside(file)]:
        return found
    near = _nearest(path)
    raise mistake(
        f"no file matches {source.source}",
        f"the nearest folder that exists is {near}; name a file, a folder or a glob such as {near}/*.txt",
    )


def listing(source: Source) -> Listing:
    """The files of a source with their kinds; InputError when it has none, or both text and tokens."""
    found = Listing(source, {file: _kind(file, source) for file in files(source)})
    tokens = [file for file, kind in found.kinds.items() if kind in get_args(ReadyKind)]
    if tokens and not found.ready:
        text = next(file for file in found.files if file not in tokens)
        raise mistake(
            f"{source.source} mixes text ({text}) and ready tokens ({tokens[0]})",
            "name them as two sources under data.mix",
        )
    return found


def documents(source: Source) -> Iterator[str]:
    """Every document of a text source, in the order of its files."""
    return listing(source).documents()


def problems(data: Data) -> list[Problem]:
    """What is wrong with the sources, as far as a look at the beginning of their files tells."""
    key = "data.mix" if data.mix else "data.source"
    found = [(problem, source) for source in data.sources for problem in _problems(source)]
    told = [_of_entry(problem, source) if data.mix else problem for problem, source in found]
    return [problem if problem.key else msgspec.structs.replace(problem, key=key) for problem in told]


def _of_entry(problem: Problem, source: Source) -> Problem:
    """In a mixture the settings of a source are those of its entry."""
    remedy = re.sub(r"\bdata\.(source|format|field)\b", r"\1", problem.remedy)
    if remedy == problem.remedy:
        return problem
    return msgspec.structs.replace(problem, remedy=f"{remedy}, in the entry of data.mix for {source.source}")


def _problems(source: Source) -> list[Problem]:
    try:
        found = listing(source)
        if not found.size:
            raise mistake(f"all {len(found.files)} file(s) of {source.source} are empty", "name files with content")
    except InputError as error:
        return error.problems
    except OSError as error:
        return [Problem(f"{error.filename} cannot be read: {error.strerror}", "check the path and its permissions")]
    looked_at = itertools.islice(found.kinds.items(), None if found.ready else CHECKED)
    return [problem for file, kind in looked_at for problem in _file_problems(file, kind, source.field)]


def _file_problems(file: Path, kind: Kind, field: str) -> list[Problem]:
    if kind in get_args(TextKind):
        return records.problems(file, cast(TextKind, kind), field)
    try:
        ready.read(file, cast(ReadyKind, kind))
    except InputError as error:
        return error.problems
    except OSError as error:
        return [Problem(f"{file} cannot be read: {error.strerror}", "change its permissions (chmod +r)")]
    return []


def _kind(file: Path, source: Source) -> Kind:
    """How a file of a source is read: as the source says, or by its ending."""
    if source.format != "auto":
        return source.format
    family = _family(file)
    if not family:
        raise mistake(
            f"{file} has an ending that says nothing about its content",
            'set data.format ("text", "jsonl", "parquet", "nanogpt", "llmc" or "megatron")',
        )
    return ready.kind(file) if family == "ready" else cast(TextKind, family)


def _family(file: Path) -> str:
    """Text, jsonl, parquet or ready, by the ending of a name; empty when it tells nothing."""
    name = file.name.lower()
    unpacked = name.removesuffix(file.suffix.lower()) if file.suffix.lower() in PACKED else name
    for family, endings in ENDINGS.items():
        if name.endswith(endings) or (family in ("text", "jsonl") and unpacked.endswith(endings)):
            return family
    return ""


def _folder(folder: Path, source: Source) -> list[Path]:
    """All files below a folder that its format, or any format, knows by their ending; hidden ones are left out."""
    known = {source.format} & set(ENDINGS) or (set(ENDINGS) if source.format == "auto" else {"ready"})
    every: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        every += [Path(place, name) for name in names if not name.startswith(".")]
    if found := sorted(file for file in every if _family(file) in known and not _beside(file)):
        return found
    if not every:
        raise mistake(f"the folder {folder} is empty", "put files there, or name another folder")
    raise mistake(
        f"none of the {len(every)} file(s) below {folder} has a known ending",
        f'name them by a glob, such as "{folder}/**/*", and set data.format',
    )


def _beside(file: Path) -> bool:
    """Whether a file only goes with another one: Megatron's index, what our own tokens have beside them."""
    if file.suffix == ".idx":
        return file.with_suffix(".bin").exists()
    return file.name in ("meta.json", "ends.bin") and (file.parent / "tokens.bin").exists()


def _nearest(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def _stdlib() -> list[Path]:
    """Modules and then modules in packages, by name, as many as fit: no tests, nothing installed or configured."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = [file for file in sorted(root.glob("*.py")) if not file.name.startswith(("_sysconfigdata", "sitecustom"))]
    packages = [file for file in sorted(root.glob("*/*.py")) if file.parent.name not in NOT_LIBRARY]
    sizes = itertools.accumulate(file.stat().st_size for file in modules + packages)
    found = [file for file, size in zip(modules + packages, sizes, strict=True) if size <= STDLIB_BYTES]
    if not found:
        raise mistake(f"this Python keeps no source of its library in {root}", "name a file or folder as data.source")
    return found
