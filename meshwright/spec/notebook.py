"""Tables for notebooks: what `_repr_html_` of plans, ledgers, search results and reports returns."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One table; every word is shown as text, whoever wrote it."""
    head = "".join(f'<th style="text-align: left">{escape(word)}</th>' for word in heads)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align: left">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    title = f'<caption style="text-align: left">{escape(caption)}</caption>'
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
