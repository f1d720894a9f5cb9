"""Parts of the pages that are made from the sources: the keys of run files, and what stands between two marks.

A part begins with `<!-- NAME: how it is made -->` and ends with `<!-- end -->`. With `PAGES=write` in the environment
the test that compares a part writes it instead: `PAGES=write python -m pytest tests/unit/test_docs.py`.
"""

import ast
import inspect
import io
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import schema
from meshwright.config.run import Run, Source
from meshwright.spec.plan import FIELDS, Plan

# What a field is that has no comment beside it, because to a reader of the code its name says it.
SAID = {
    "extends": "another run file, whose keys these come on top of",
    "name": "of the run, and of its folder",
    "steps": "optimizer updates",
    "sequence": "tokens of a sample",
    "seed": "of the initial weights, the order of samples and every draw: dropout, router noise, rounding",
    "arch.preset": "a model of `meshwright models`, whose fields the other keys change",
    "arch.vocab": "entries of the vocabulary",
    "arch.layers": "blocks",
    "arch.hidden": "width of the residual stream",
    "arch.heads": "of attention",
    "arch.head_dim": "elements of a head",
    "arch.norm": "root mean square, or layer norm",
    "arch.norm_eps": "added to the mean square, or to the variance",
    "arch.positions": "rotary, a learned table, or none",
    "arch.mlp": "the feed-forward layer: gated, or plain with GELU",
    "arch.bias": "of the matrices",
    "arch.rope_theta": "base of the rotary wavelengths",
    "arch.rope_scaling": "of the wavelengths, for longer sequences",
    "arch.rope_factor": "what they are scaled by",
    "arch.top_k": "experts that a token is sent to",
    "arch.router": "how tokens and experts find each other",
    "data.source": "a file, a folder or a glob; `stdlib`: the Python standard library's own source",
    "data.format": "of the files; `auto`: by their ending, and how a `.bin` begins",
    "data.field": "of JSON lines and Parquet: where the text is",
    "data.mix.weight": "share of the samples, beside the other weights",
    "data.mix.format": "as `data.format`",
    "optim.name": "the optimizer",
    "optim.schedule": "how the rate falls after the warm-up",
    "optim.beta1": "decay of AdamW's first moment",
    "optim.beta2": "and of its second",
    "optim.eps": "added to the root of the second moment",
    "eval.temperature": "of the continuation",
    "log.writers": "trackers",
    "goal.cluster": "the machines to plan for, such as `64xh100`",
}
DERIVED = {  # keys that have no default, or another one than their type's, and where the value comes from
    "arch.kv_heads": "heads",
    "arch.head_dim": "hidden ÷ heads",
    "plan.replicate": "ranks ÷ the other axes",
    "plan.microbatch": "batch ÷ data ranks ÷ grad_accum",
    "plan.grad_accum": "1, or batch ÷ data ranks ÷ a stated microbatch",
    "plan.chunks": "1, or 2 where the schedule gains by it",
    "plan.stages": "balanced",
    "plan.bf16_params": "true for one rank in low precision",
}


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
    sections = ["\n".join(["Above all sections:", "", *_table(Run, "")])]
    for field in msgspec.structs.fields(Run):
        if schema.is_struct(field.type):
            sections.append(_section(f"[{field.encode_name}]", field.type, f"{field.encode_name}."))
        if field.encode_name == "data":
            sections.append(_section("[[data.mix]]", Source, "data.mix."))
    return "\n\n".join(sections)


def _section(title: str, struct: type[msgspec.Struct], prefix: str) -> str:
    about = _plainly(inspect.cleandoc(struct.__doc__ or ""))
    return "\n".join([f"### `{title}`", "", about, "", *_table(struct, prefix)])


def _plainly(comment: str) -> str:
    """Words about code as words about a file, which has no None: a key is left out."""
    return re.sub(r"\. None:", ". Left out:", comment).replace("None:", "left out:")


def _table(struct: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    affects = {field.name: ", ".join(field.affects) for field in FIELDS} if struct is Plan else {}
    yield "| key | value | default |" + (" affects |" if affects else "") + " meaning |"
    yield "|---|---|---|---|" + ("---|" if affects else "")
    extra = "extends" if not prefix else "preset" if prefix == "arch." else ""
    if extra:
        yield f"| `{extra}` | a string | | {SAID[prefix + extra]} |"
    comments = {field.name: field.help for field in FIELDS} if struct is Plan else commented(struct)
    for field in msgspec.structs.fields(struct):
        if not schema.is_struct(field.type):
            key = prefix + field.encode_name
            meaning = _plainly(comments.get(field.name) or SAID[key])
            about = (f"`{field.encode_name}`", schema.described(field.type), _default(field, key))
            cells = (*about, *([affects[field.name]] if affects else []), meaning)
            yield f"| {' | '.join(cells)} |"


def _default(field: Any, key: str) -> str:
    if key in DERIVED:
        return DERIVED[key]
    if field.required or field.default is None:
        return ""
    return f"`{schema.shown(field.default)}`"


def commented(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The comment of each field: behind it, or on the lines just above."""
    text = inspect.getsource(struct)
    behind, alone = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.strip().startswith("#")
            (alone if is_alone else behind)[token.start[0]] = token.string.lstrip("# ")
    (body,) = ast.parse(text).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = [behind[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in behind]
            found[node.target.id] = " ".join(lines or _above(alone, node.lineno))
    return found


def _above(alone: dict[int, str], line: int) -> list[str]:
    """The lines of comment that end just above a line."""
    first = line
    while first - 1 in alone:
        first -= 1
    return [alone[number] for number in range(first, line)]
