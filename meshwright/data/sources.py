"""Where documents come from: files, folders, globs, or the standard library of the running Python.

Text, JSON lines and Parquet hold documents; nanoGPT's, llm.c's, Megatron's and our own binary files hold tokens. A file
that cannot be read is an InputError that names it.
"""

import codecs
import difflib
import glob
import gzip
import itertools
import os
import re
import struct
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args

import msgspec
import numpy as np

from meshwright.config.run import Data, Source
from meshwright.config.schema import ADVICE, topic
from meshwright.data import remote
from meshwright.data.remote import File, RemoteFile
from meshwright.data.shards import NO_ENDS, Shard, closed, mapped, open_folder
from meshwright.spec.addresses import is_address
from meshwright.spec.problem import UNDECODABLE, InputError, Problem, install_command, mistake

TextKind = Literal["text", "jsonl", "parquet", "chat"]  # chat: JSON or Parquet whose records are conversations
ReadyKind = Literal["nanogpt", "llmc", "megatron", "folder"]  # folder: our own
Kind = TextKind | ReadyKind
Span = tuple[int, int] | None  # bytes of a file; None: all of it

BLOCK = 1 << 20  # bytes read at a time
ZSTD_WINDOW = 1 << 31  # what `zstd --long=31` may ask for
LLMC_HEADER = 1024  # bytes: 256 int32
LLMC_DTYPE = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # (magic, version); 7 is Llama 3's
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
MEGATRON_DTYPE = {3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"), 8: np.dtype("<u2")}

OFFICE = (".csv", ".tsv", ".doc", ".docx", ".odt", ".pdf", ".rtf", ".xls", ".xlsx", ".epub")  # text, but not plain text
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
CHAT = (*ENDINGS["jsonl"], ".json", ".parquet")  # of a folder with conversations
CHECKED = 100  # text files of a source whose beginning is read before a run starts; of tokens, all headers are
STDLIB_BYTES = 4_000_000
PIECE_BYTES = 256 << 20  # of text: minutes of one core, so that little is lost with a worker
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


def read_records(file: File, kind: TextKind, field: str, span: Span = None) -> Iterator[str]:
    """The documents of a file, in its order; empty ones are left out. `span`: of JSON lines, those that begin there."""
    match kind:
        case "text":
            documents = iter([_decoded(file, b"".join(_blocks(file)), whole=True)])
        case "jsonl":
            documents = _json_lines(file, field, span)
        case "parquet":
            documents = (text for _, text in _parquet(file, field))
        case "chat":
            raise AssertionError("conversations are no documents: read_objects")
    yield from filter(None, documents)


def read_objects(file: File) -> Iterator[tuple[str, Any]]:
    """The records of a file of chat data, each with its place: JSON lines, a JSON list, or the rows of a table."""
    if file.suffix.lower() == ".parquet":
        yield from _parquet(file, None)
        return
    blocks = _blocks(file)
    first = next(blocks, b"").removeprefix(codecs.BOM_UTF8)
    if first.lstrip()[:1] == b"[":
        yield from _json_list(file, b"".join([first, *blocks]))
        return
    for number, line in enumerate(_lines(itertools.chain([first], blocks)), start=1):
        if line.strip():
            yield f"{file}:{number}", _json_of(f"{file}:{number}", line)


def _json_list(file: File, data: bytes) -> Iterator[tuple[str, Any]]:
    for number, record in enumerate(_json_of(str(file), data), start=1):
        yield f"{file}, sample {number}", record


def _json_of(place: str, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (*UNDECODABLE, RecursionError) as error:
        remedy = "repair or remove it: a file of chat data is one JSON object a line, a JSON list, or Parquet"
        raise mistake(f"{place} is not JSON: {error}", remedy) from None


def record_problems(file: File, kind: TextKind, field: str) -> list[Problem]:
    """What is wrong with the beginning of a file, found without reading it all."""
    try:
        if kind == "text":
            block = next(_blocks(file), b"")
            _decoded(file, block, whole=len(block) < BLOCK)
        elif kind == "chat":
            next(read_objects(file), None)
        else:
            next(read_records(file, kind, field), None)
    except InputError as error:
        return error.problems
    return []


def _decoded(file: File, data: bytes, whole: bool) -> str:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
    except UnicodeDecodeError as error:
        what = f"{file} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        raise mistake(what, "convert it to UTF-8, or leave it out") from None
    return text.removeprefix("\ufeff")  # the byte order mark some editors write


def _json_lines(file: File, field: str, span: Span) -> Iterator[str]:
    # A type of one field: the decoder skips every other field without building it.
    only = msgspec.defstruct("Line", [("text", str)], rename={"text": field})
    decode = msgspec.json.Decoder(only).decode
    lines = _lines(_blocks(file)) if span is None else _lines_within(file, span)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            (text,) = msgspec.structs.astuple(decode(line))
        except UNDECODABLE:
            place = f"{file}:{number}" if span is None else f"{file}, line {number} after byte {span[0]}"
            raise InputError([_line_problem(place, line, field)]) from None
        yield text


def _line_problem(place: str, line: bytes, field: str) -> Problem:
    try:
        record = msgspec.json.decode(line)
    except UNDECODABLE as error:
        return Problem(f"{place} is not JSON: {error}", "repair or remove the line; every line is one JSON object")
    if not isinstance(record, dict):
        return Problem(f"{place} is not a JSON object", f'write every line as {{"{field}": "…"}}')
    if field not in record:
        found = _field_problem(place, field, list(record))
        first = place.endswith(":1")  # of a later line the field is not wrong
        return found if first else msgspec.structs.replace(found, remedy="repair or remove the line")
    return Problem(
        f"{place}: the field {field!r} holds {type(record[field]).__name__}, not text",
        "repair the line, or name another field as data.field",
    )


def _field_problem(place: str, field: str, fields: list[str]) -> Problem:
    near = difflib.get_close_matches(field, fields, n=1)
    remedy = f'set data.field = "{near[0]}"' if near else "set data.field to the one that holds the text"
    if not near and any(topic(name) == "messages" for name in fields):
        remedy = ADVICE["messages"]
    return Problem(f"{place} has no field {field!r}, only {', '.join(fields) or 'nothing'}", remedy)


def _parquet(file: File, field: str | None) -> Iterator[tuple[str, Any]]:
    """The text of every row in one column, or all columns of it as an object, with the place of the row."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise mistake(f"{file} needs pyarrow to be read", f"run: {install_command('parquet')}") from None
    try:
        with _reading(file), file.open("rb") as stream, pyarrow.parquet.ParquetFile(stream) as table:
            if field is None:
                records = (record for batch in table.iter_batches() for record in batch.to_pylist())
                yield from ((f"{file}, row {row}", record) for row, record in enumerate(records, start=1))
                return
            if field not in table.schema_arrow.names:
                raise InputError([_field_problem(str(file), field, table.schema_arrow.names)])
            rows = (text for batch in table.iter_batches(columns=[field]) for text in batch.column(0).to_pylist())
            for row, text in enumerate(rows, start=1):
                if not isinstance(text, str):
                    raise mistake(f"{file}: row {row} of {field!r} holds no text", "name another field as data.field")
                yield f"{file}, row {row}", text
    except pyarrow.ArrowException as error:
        raise mistake(f"{file} is not a whole Parquet file: {error}", "fetch or write it again") from None


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    yield rest


def _lines_within(file: File, span: tuple[int, int]) -> Iterator[bytes]:
    """The lines of a file that begin within a span, of which the last may end behind it."""
    begin, end = span
    with _reading(file), file.open("rb") as stream:
        stream.seek(max(begin - 1, 0))
        at = max(begin - 1, 0)
        lines = _lines(iter(lambda: stream.read(BLOCK), b""))
        if begin:  # what is left of a line that began before
            at += len(next(lines, b"")) + 1
        for line in lines:
            if at >= end:
                return
            yield line
            at += len(line) + 1


def _blocks(file: File) -> Iterator[bytes]:
    """The bytes of a file, unpacked when its ending says that they are packed."""
    with _reading(file):
        match file.suffix.lower():
            case ".gz":
                with file.open("rb") as packed, gzip.open(packed) as stream:
                    yield from iter(lambda: stream.read(BLOCK), b"")
            case ".zst" | ".zstd":
                with file.open("rb") as stream:
                    yield from _unpacked(file, stream)
            case _:
                with file.open("rb") as stream:
                    yield from iter(lambda: stream.read(BLOCK), b"")


def _unpacked(file: File, stream: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise mistake(f"{file} needs zstandard to be read", f"run: {install_command('zstd')}") from None
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
    frame, inside = unpacker.decompressobj(), False
    try:
        while block := stream.read(BLOCK):
            while block:  # a file may hold several frames, one after another
                yield frame.decompress(block)
                inside, block = not frame.eof, frame.unused_data
                if frame.eof:
                    frame = unpacker.decompressobj()
    except zstandard.ZstdError as error:
        raise mistake(f"{file} is not whole Zstandard data: {error}", "fetch or pack it again") from None
    if inside:
        raise EOFError("it ends inside a frame")


@contextmanager
def _reading(file: File) -> Iterator[None]:
    """What goes wrong while a file is read, as an InputError that names the file."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise mistake(f"{file} is cut short or broken: {error}", "fetch or pack it again") from None
    except PermissionError:
        raise mistake(f"{file} may not be read by this user", "change its permissions (chmod +r)") from None
    except OSError as error:
        raise mistake(f"{file} cannot be read: {error.strerror or error}", "check the path and the disk") from None


def kind(file: Path) -> ReadyKind:
    """Who wrote a .bin file, by what lies beside it and how it begins."""
    if file.name == "tokens.bin" and (file.parent / "meta.json").exists():
        return "folder"
    if file.with_suffix(".idx").exists():
        return "megatron"
    with file.open("rb") as stream:
        head = stream.read(8)
    known = len(head) == 8 and struct.unpack("<2i", head)[0] in {magic for magic, _ in LLMC_DTYPE}
    return "llmc" if known else "nanogpt"


def read_tokens(file: File, kind: ReadyKind) -> Shard:
    """One ready shard, or an InputError that says what is wrong with it."""
    if isinstance(file, RemoteFile):
        what = f"{file} holds ready tokens, which are mapped into memory from a disk"
        raise mistake(what, "copy it to a disk of this machine, or one that all machines share")
    if not file.stat().st_size:
        raise mistake(f"{file} is empty", "write it again, or leave it out")
    match kind:
        case "folder":
            return open_folder(file.parent)
        case "nanogpt":
            if (size := file.stat().st_size) % 2:
                what = f"{file} holds {size} bytes, an odd number, and its tokens have 2 bytes each"
                raise mistake(what, "write it again")
            return Shard(file, mapped(file, np.dtype("<u2")), NO_ENDS)
        case "llmc":
            return _llmc(file)
        case "megatron":
            return _megatron(file)


def _llmc(file: Path) -> Shard:
    size = file.stat().st_size
    if size < LLMC_HEADER:
        raise mistake(f"{file} holds {size} bytes, less than its header of {LLMC_HEADER}", "fetch or write it again")
    magic, version, count = np.fromfile(file, "<i4", 3).tolist()
    dtype = LLMC_DTYPE.get((magic, version))
    if dtype is None:
        what = f"{file} begins with {magic}, version {version}, which no known llm.c shard does"
        raise mistake(what, 'write it again, or set data.format = "nanogpt" if it has no header')
    expected = LLMC_HEADER + count * dtype.itemsize
    if size != expected:
        what = f"the header of {file} says {count} tokens, {expected} bytes with itself, and the file has {size} bytes"
        raise mistake(what, "fetch or write it again")
    return Shard(file, mapped(file, dtype, LLMC_HEADER), NO_ENDS)


def _megatron(file: Path) -> Shard:
    index = file.with_suffix(".idx")
    if not index.exists():
        raise mistake(f"{index} is missing beside {file.name}", "copy the .idx file that was written with it")
    dtype, sizes, documents = _index(index)
    bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    held, expected = file.stat().st_size, int(bounds[-1]) * dtype.itemsize
    if held != expected:
        raise mistake(f"{index} says {expected} bytes of tokens, and {file.name} has {held}", "copy both files again")
    if np.any(np.diff(documents, prepend=0, append=len(sizes)) < 0):
        raise mistake(f"{index} names sequences that it does not hold", "copy both files again")
    return Shard(file, mapped(file, dtype), closed(bounds[documents], int(bounds[-1])))


def _index(index: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Type of the tokens, size of every sequence, the sequence at which each document begins."""
    start = MEGATRON_HEADER.size
    with index.open("rb") as stream:
        head = stream.read(start)
    if len(head) < start or not head.startswith(MEGATRON_MAGIC):
        raise mistake(f"{index} does not begin as a Megatron index does", "copy both files again")
    _, version, code, sequences, documents = MEGATRON_HEADER.unpack(head)
    if version != 1 or code not in MEGATRON_DTYPE:
        what = f"{index} is version {version} with tokens of type {code}, not version 1 with integers"
        raise mistake(what, "write it again")
    expected, held = start + sequences * 12 + documents * 8, index.stat().st_size
    if expected != held:
        what = f"the header of {index} says {sequences} sequences, {expected} bytes, and the file has {held} bytes"
        raise mistake(what, "copy both files again")
    sizes = mapped(index, np.dtype("<i4"), start, sequences)
    # Between the two lie the byte positions of the sequences, which follow from the sizes.
    return MEGATRON_DTYPE[code], sizes, mapped(index, np.dtype("<i8"), start + sequences * 12, documents)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source, and how each is read."""

    source: Source
    kinds: Mapping[File, Kind]
    span: Span = None  # of the one file, where it is a piece of it

    @property
    def files(self) -> list[File]:
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
        return sum(file.stat().st_size for file in self.kinds) if self.span is None else self.span[1] - self.span[0]

    def documents(self) -> Iterator[str]:
        """Every document, in the order of the files."""
        for file, kind in self.kinds.items():
            yield from read_records(file, cast(TextKind, kind), self.source.field, self.span)


def cut(text: Listing, size: int | None = None) -> list[Listing]:
    """A source as pieces of about so many bytes; one that is no larger is left whole."""
    size = size or PIECE_BYTES
    if text.size <= size or text.source.format == "chat":
        return [text]
    return [*_runs(text, size)]


def _runs(text: Listing, size: int) -> Iterator[Listing]:
    files: list[File] = []
    held = 0
    for file, kind in text.kinds.items():
        length = file.stat().st_size
        is_long = length > size and kind == "jsonl" and file.suffix.lower() not in PACKED
        if files and (is_long or held + length > size):
            yield _part(text, files)
            files, held = [], 0
        if is_long:
            count = -(-length // size)
            bounds = [length * number // count for number in range(count + 1)]
            for span in pairwise(bounds):
                yield _part(text, [file], span)
        else:
            files.append(file)
            held += length
    if files:
        yield _part(text, files)


def _part(text: Listing, files: list[File], span: tuple[int, int] | None = None) -> Listing:
    return Listing(text.source, {file: text.kinds[file] for file in files}, span)


def files(source: Source) -> list[File]:
    """Every file of a source, sorted; InputError when there is none."""
    if is_address(source.source):
        return _remote(source)
    return [*_local(source)]


def _remote(source: Source) -> list[File]:
    """The files at an address that its format, or any format, knows by their ending."""
    every = remote.below(source.source)
    known = CHAT if source.format == "chat" else ()
    is_meant = len(every) == 1 or remote.glob_marks(source.source)  # whatever its ending
    found = [file for file in every if is_meant or _family(file) or file.name.lower().endswith(known)]
    if not found:
        raise mistake(f"no file is at {source.source}", "name a file, a folder or a glob of files that are there")
    return [*found]


def _local(source: Source) -> list[Path]:
    if source.source == "stdlib":
        return _stdlib()
    if not source.source:
        raise mistake("the source of the data is empty", "name a file, a folder or a glob as data.source")
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
    near = next(parent for parent in path.absolute().parents if parent.is_dir())
    raise mistake(
        f"no file matches {source.source}",
        f"the nearest folder that exists is {near}; name a file, a folder or a glob such as {near}/*.txt",
    )


def left_out(source: Source) -> Counter[str]:
    """Files of a source that is a folder and are not read, by their endings; hidden ones apart."""
    path = Path(source.source).expanduser()
    if source.source == "stdlib" or is_address(source.source) or not path.is_dir():
        return Counter()
    return endings(file for file in set(_below(path)) - set(_local(source)) if not _beside(file))


def endings(files: Iterable[File]) -> Counter[str]:
    """How many files there are of each ending."""
    return Counter(sorted(file.suffix.lower() or "without ending" for file in files))


def listing(source: Source) -> Listing:
    """The files of a source with their kinds; InputError when it has none, or both text and tokens."""
    found = Listing(source, {file: _kind(file, source) for file in files(source)})
    tokens = [file for file, kind in found.kinds.items() if kind in get_args(ReadyKind)]
    if tokens and not found.ready:
        text = next(file for file in found.files if file not in tokens)
        what = f"{source.source} mixes text ({text}) and ready tokens ({tokens[0]})"
        raise mistake(what, "name them as two sources under data.mix")
    return found


def problems(data: Data) -> list[Problem]:
    """What is wrong with the sources, as far as a look at the beginning of their files tells."""
    found = []
    for source in data.sources:
        for problem in _problems(source):
            remedy = problem.remedy
            # In a mixture the settings of a source are those of its entry.
            if data.mix and (changed := re.sub(r"\bdata\.(source|format|field)\b", r"\1", remedy)) != remedy:
                remedy = f"{changed}, in the entry of data.mix for {source.source}"
            key = problem.key or ("data.mix" if data.mix else "data.source")
            found.append(msgspec.structs.replace(problem, remedy=remedy, key=key))
    return found


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


def _file_problems(file: File, kind: Kind, field: str) -> list[Problem]:
    if kind in get_args(TextKind):
        return record_problems(file, cast(TextKind, kind), field)
    try:
        read_tokens(file, cast(ReadyKind, kind))
    except InputError as error:
        return error.problems
    except OSError as error:
        return [Problem(f"{file} cannot be read: {error.strerror}", "change its permissions (chmod +r)")]
    return []


def _kind(file: File, source: Source) -> Kind:
    """How a file of a source is read: as the source says, or by its ending."""
    if source.format != "auto":
        return source.format
    family = _family(file)
    if not family:
        remedy = 'set data.format ("text", "jsonl", "parquet", "chat", "nanogpt", "llmc" or "megatron")'
        if file.suffix.lower() in OFFICE:
            remedy = "convert it to text (.txt) or JSON lines (.jsonl)"
        raise mistake(f"{file} has an ending that says nothing about its content", remedy)
    if family != "ready":
        return cast(TextKind, family)
    return "nanogpt" if isinstance(file, RemoteFile) else kind(file)  # remote ones are refused, whoever wrote them


def _family(file: File) -> str:
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
    every = _below(folder)
    if source.format == "chat":
        found = [file for file in every if file.name.lower().endswith(CHAT)]
    else:
        found = [file for file in every if _family(file) in known and not _beside(file)]
    if found:
        return sorted(found)
    if not every:
        raise mistake(f"the folder {folder} is empty", "put files there, or name another folder")
    raise mistake(
        f"none of the {len(every)} file(s) below {folder} has a known ending",
        f'name them by a glob, such as "{folder}/**/*", and set data.format',
    )


def _below(folder: Path) -> list[Path]:
    """All files below a folder that are not hidden."""
    every: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        every += [Path(place, name) for name in names if not name.startswith(".")]
    return every


def _beside(file: Path) -> bool:
    """Whether a file only goes with another one: Megatron's index, what our own tokens have beside them."""
    if file.suffix == ".idx":
        return file.with_suffix(".bin").exists()
    return file.name in ("meta.json", "ends.bin") and (file.parent / "tokens.bin").exists()


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
