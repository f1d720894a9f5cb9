"""What a cloud's Terraform provider says of a file, by the typed bindings that were made of the provider's own schema.

`terraform validate` asks the provider itself, which only its registry has; the bindings are packages of npm's.
"""

import re
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ALWAYS = {"count", "depends_on", "for_each", "lifecycle", "provider"}  # which Terraform has for every resource
INTERFACE = re.compile(r"^export interface (\w+)[^{]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
KEY = re.compile(r"\{@link [^ ]*#(\w+) [^}]*\}(?:(?!\*/).)*\*/\s*readonly \w+(\??): ([^;\n]+)", re.DOTALL)
GETTER = re.compile(r"^    get (\w+)\(\)", re.MULTILINE)
REFERENCE = re.compile(r"\b((?:aws|google)_\w+)\.(\w+)(?:\[[^]]*\])?\.(\w+)")
VARIABLE = re.compile(r"\bvar\.(\w+)")
KINDS = {bool: "boolean", int: "number", str: "string"}
Keys = dict[str, tuple[bool, str]]  # of a resource or a block: whether it may be left out, and its type


@cache
def declarations(package: Path) -> dict[str, str]:
    """Those of each resource, by its folder."""
    found = {}
    with tarfile.open(package) as archive:
        for member in archive:
            place = member.name.split("/")
            if place[1:2] == ["lib"] and place[3:] == ["index.d.ts"] and (file := archive.extractfile(member)):
                found[place[2]] = file.read().decode()
    return found


def problems(parsed: dict[str, Any], package: Path) -> Iterator[str]:
    """Resources, keys, types and references that the provider does not have, and keys that it wants."""
    texts = {kind: declarations(package).get(_folder(kind), "") for kind in parsed["resource"]}
    for kind, named in parsed["resource"].items():
        blocks = {name: _described(body) for name, body in INTERFACE.findall(texts[kind])}
        if not (config := next((name for name in blocks if name.endswith("Config")), "")):
            yield f"{kind}: the provider has no such resource"
            continue
        for name, bodies in named.items():
            for body in bodies:
                said = {key: value for key, value in body.items() if key not in ALWAYS}
                yield from _wrong(said, config, blocks, f"{kind}.{name}")
    for text in _strings(parsed):
        for kind, name, key in REFERENCE.findall(text):
            if name not in parsed["resource"].get(kind, {}):
                yield f"{text}: there is no {kind}.{name}"
            elif _camel(key) not in GETTER.findall(texts[kind]):
                yield f"{text}: {kind} has no {key}"
        yield from (f"{text}: no variable {name}" for name in VARIABLE.findall(text) if name not in parsed["variable"])


def _described(body: str) -> Keys:
    return {name: (bool(optional), kind) for name, optional, kind in KEY.findall(body)}


def _wrong(said: dict[str, Any], block: str, blocks: dict[str, Keys], place: str) -> Iterator[str]:
    known = blocks[block]
    yield from (
        f"{place}: {key} is missing" for key, (optional, _) in known.items() if not optional and key not in said
    )
    for key, value in said.items():
        if key not in known:
            yield f"{place}: {block} has no {key}"
            continue
        wanted = known[key][1].removesuffix(" | cdktf.IResolvable")
        inner = wanted.removesuffix("[]")
        if inner in blocks:
            if not isinstance(value, list) or (len(value) > 1 and inner == wanted):
                yield f"{place}: {key} is a block, or several"
                continue
            for each in value:
                yield from _wrong(each, inner, blocks, f"{place}.{key}")
        elif not _is(value, wanted):
            yield f"{place}: {key} = {value!r} is no {wanted}"


def _is(value: Any, wanted: str) -> bool:
    if isinstance(value, str) and value.startswith("${"):
        return True  # known when it is applied
    if wanted.endswith("[]"):
        return isinstance(value, list) and all(_is(each, wanted.removesuffix("[]")) for each in value)
    return isinstance(value, dict) if wanted.startswith("{") else KINDS.get(type(value)) == wanted


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(each)


def _folder(kind: str) -> str:
    return kind.partition("_")[2].replace("_", "-")


def _camel(key: str) -> str:
    first, *rest = key.split("_")
    return first + "".join(map(str.capitalize, rest))
