"""Parts of the pages that are made from the sources: the keys of run files, and what stands between two marks.

A part begins with `<!-- NAME: how it is made -->` and ends with `<!-- end -->`. With `PAGES=write` in the environment
the test that compares a part writes it instead: `PAGES=write python -m pytest tests/unit/test_docs.py`.
"""

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.config import explain


def part(page: str, name: str) -> str:
    """What stands between a page's marks of that name."""
    found = re.search(rf"<!-- {name}: .*? -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found is not None, f"no part is called {name}"
    return found[1]


def agree(page: Path, name: str, made: str) -> None:
    """A page shows what is made from the sources; or is made to."""
    text = page.read_text()
    if os.environ.get("PAGES") == "write":
        begin = text.index("\n", text.index(f"<!-- {name}: ")) + 1
        end = text.index("<!-- end -->", begin)
        text = f"{text[:begin]}{made}\n{text[end:]}"
        page.write_text(text)
    assert part(text, name) == f"{made}\n", f"{page.name} is not up to date: run this test with PAGES=write"


def keys() -> str:
    """Every key of a run file, a table for each section."""
    sections = ["\n".join(["Above all sections:", "", *_table("")])]
    for struct, prefix in explain.tables():
        title = f"[[{prefix[:-1]}]]" if prefix == "data.mix." else f"[{prefix[:-1]}]"
        about = explain.plainly(inspect.cleandoc(struct.__doc__ or ""))
        sections.append("\n".join([f"### `{title}`", "", about, "", *_table(prefix)]))
    return "\n\n".join(sections)


def _table(prefix: str) -> Iterator[str]:
    affects = prefix == "plan."
    yield "| key | value | default |" + (" affects |" if affects else "") + " meaning |"
    yield "|---|---|---|---|" + ("---|" if affects else "")
    for key, each in explain.keys().items():
        table, dot, name = key.rpartition(".")
        if table + dot == prefix:
            derived = each.default.removeprefix("derived: ")
            default = f"`{derived}`" if derived == each.default != "" else derived
            cells = (f"`{name}`", each.value, default, *([", ".join(each.affects)] if affects else []), each.meaning)
            yield f"| {' | '.join(cells)} |"
