"""Writing TOML, and finding the line of a key in TOML that a person wrote."""

import json
import re
from collections.abc import Mapping
from typing import Any

_KEY = re.compile(r"""^\s*(?P<key>[A-Za-z0-9_.\-"' ]+?)\s*=""")
_TABLE = re.compile(r"^\s*\[\[?\s*(?P<table>[^\[\]]+?)\s*\]")


def dumps(table: Mapping[str, Any], remarks: Mapping[str, str] | None = None) -> str:
    """Nested plain values as TOML. A remark on a dotted key becomes the comment behind it."""
    lines = _section(table, "", remarks or {})
    return "\n".join(lines).strip() + "\n"


def _section(table: Mapping[str, Any], prefix: str, remarks: Mapping[str, str]) -> list[str]:
    lines = []
    for key, value in table.items():
        if value is None or isinstance(value, Mapping) or _is_tables(value):
            continue
        text = f"{key} = {_value(value)}"
        remark = remarks.get(prefix + key)
        lines.append(f"{text:<32}  # {remark}" if remark else text)
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{prefix}{key}]", *_section(value, f"{prefix}{key}.", remarks)]
        elif _is_tables(value):
            for entry in value:
                lines += ["", f"[[{prefix}{key}]]", *_section(entry, f"{prefix}{key}.", remarks)]
    return lines


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "[" + ", ".join(_value(entry) for entry in value) + "]"


def lines_of(text: str) -> dict[str, int]:
    """The line of every dotted key. Good enough to point at; the parser is tomllib."""
    found: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if table := _TABLE.match(line):
            prefix = _plain(table["table"]) + "."
            found.setdefault(prefix[:-1], number)
        elif key := _KEY.match(line):
            found.setdefault(prefix + _plain(key["key"]), number)
    return found


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))
