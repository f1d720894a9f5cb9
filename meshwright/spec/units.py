"""Units in which sizes are shown (inside the program they are bytes), counts as they are written; notebook tables."""

from collections.abc import Iterable, Sequence
from html import escape

GIB = 2**30  # bytes


def gib(size: float) -> str:
    """Bytes in GiB, to a tenth."""
    return f"{size / GIB:.1f}"


def plural(number: int, noun: str) -> str:
    """A count with its noun, as in 1 rank and 2,000 samples."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def html_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One table; every word is shown as text, whoever wrote it."""
    head = "".join(f'<th style="text-align: left">{escape(word)}</th>' for word in heads)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align: left">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    title = f'<caption style="text-align: left">{escape(caption)}</caption>'
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
