"""Terminals: how wide they are, and lines that are longer, broken between words instead of in a number."""

import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import TextIO

HANG = "    "  # before what is left of a message's line


def columns(stream: TextIO) -> int | None:
    """The columns of the terminal that a stream goes to; None for a pipe, which has as many as it takes."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except OSError:  # also of a stream without a file
        return shutil.get_terminal_size().columns


def wrapped(lines: Iterable[str], columns: int | None, hang: str = "") -> Iterator[str]:
    """Lines that are longer than the terminal, broken between words; `hang` is before what is left of one."""
    for line in lines:
        if columns is None or max(map(len, line.split("\n"))) <= columns:
            yield line
            continue
        indent = line[: len(line) - len(line.lstrip())]
        wrapper = textwrap.TextWrapper(columns, indent, indent + hang, break_long_words=False, break_on_hyphens=False)
        yield from wrapper.wrap(line.strip())


def fitted(text: str, stream: TextIO) -> str:
    """A message as its terminal can show it; in a pipe it stays as it is."""
    if (width := columns(stream)) is None:
        return text
    return "\n".join(wrapped(text.split("\n"), width, HANG))
