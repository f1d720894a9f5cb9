"""Documents out of one file of text, JSON lines or Parquet. What is broken is named by file and line."""

import codecs
import difflib
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import msgspec

from meshwright.data.mistake import mistake
from meshwright.spec.check import InputError, Problem

TextKind = Literal["text", "jsonl", "parquet"]
BLOCK = 1 << 20  # bytes read at a time
ZSTD_WINDOW = 1 << 31  # what `zstd --long=31` may ask for


def read(file: Path, kind: TextKind, field: str) -> Iterator[str]:
    """The documents of a file, in its order; empty ones are left out."""
    match kind:
        case "text":
            documents = _text(file)
        case "jsonl":
            documents = _json_lines(file, field)
        case "parquet":
            documents = _parquet(file, field)
    return (document for document in documents if document)


def problems(file: Path, kind: TextKind, field: str) -> list[Problem]:
    """What is wrong with the beginning of a file, found without reading it all."""
    try:
        if kind == "text":
            block = next(_blocks(file), b"")
            _decoded(file, block, whole=len(block) < BLOCK)
        else:
            next(read(file, kind, field), None)
    except InputError as error:
        return error.problems
    return []


def _text(file: Path) -> Iterator[str]:
    yield _decoded(file, b"".join(_blocks(file)), whole=True)


def _decoded(file: Path, data: bytes, whole: bool) -> str:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise mistake(
            f"{file} is not UTF-8: byte 0x{byte:02x} at offset {error.start}", "convert it to UTF-8, or leave it out"
        ) from None
    return text.removeprefix("\ufeff")  # the byte order mark some editors write


def _json_lines(file: Path, field: str) -> Iterator[str]:
    # A type of one field: the decoder skips every other field without building it.
    only = msgspec.defstruct("Line", [("text", str)], rename={"text": field})
    decode = msgspec.json.Decoder(only).decode
    for number, line in enumerate(_lines(_blocks(file)), start=1):
        if not line.strip():
            continue
        try:
            (text,) = msgspec.structs.astuple(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise InputError([_line_problem(f"{file}:{number}", line, field)]) from None
        yield text


def _line_problem(place: str, line: bytes, field: str) -> Problem:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Problem(f"{place} is not JSON: {error}", "repair or remove the line; every line is one JSON object")
    if not isinstance(record, dict):
        return Problem(f"{place} is not a JSON object", f'write every line as {{"{field}": "…"}}')
    if field not in record:
        return _field_problem(place, field, list(record))
    return Problem(
        f"{place}: the field {field!r} holds {type(record[field]).__name__}, not text",
        "repair the line, or name another field as data.field",
    )


def _field_problem(place: str, field: str, fields: list[str]) -> Problem:
    near = difflib.get_close_matches(field, fields, n=1)
    return Problem(
        f"{place} has no field {field!r}, only {', '.join(fields) or 'nothing'}",
        f'set data.field = "{near[0]}"' if near else "set data.field to the one that holds the text",
    )


def _parquet(file: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise mistake(f"{file} needs pyarrow to be read", "run: pip install 'meshwright[parquet]'") from None
    try:
        with _reading(file), pyarrow.parquet.ParquetFile(file) as table:
            if field not in table.schema_arrow.names:
                raise InputError([_field_problem(str(file), field, table.schema_arrow.names)])
            rows = (text for batch in table.iter_batches(columns=[field]) for text in batch.column(0).to_pylist())
            for row, text in enumerate(rows, start=1):
                if not isinstance(text, str):
                    raise mistake(f"{file}: row {row} of {field!r} holds no text", "name another field as data.field")
                yield text
    except pyarrow.ArrowException as error:
        raise mistake(f"{file} is not a whole Parquet file: {error}", "fetch or write it again") from None


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    yield rest


def _blocks(file: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked when its ending says that they are packed."""
    with _reading(file):
        match file.suffix.lower():
            case ".gz":
                with gzip.open(file) as stream:
                    yield from iter(lambda: stream.read(BLOCK), b"")
            case ".zst" | ".zstd":
                with file.open("rb") as stream:
                    yield from _unpacked(file, stream)
            case _:
                with file.open("rb") as stream:
                    yield from iter(lambda: stream.read(BLOCK), b"")


def _unpacked(file: Path, stream: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise mistake(f"{file} needs zstandard to be read", "run: pip install 'meshwright[zstd]'") from None
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
def _reading(file: Path) -> Iterator[None]:
    """What goes wrong while a file is read, as an InputError that names the file."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise mistake(f"{file} is cut short or broken: {error}", "fetch or pack it again") from None
    except PermissionError:
        raise mistake(f"{file} may not be read by this user", "change its permissions (chmod +r)") from None
    except OSError as error:
        raise mistake(f"{file} cannot be read: {error.strerror or error}", "check the path and the disk") from None
