"""A user's strings in other programs' languages, where no letter of them may mean anything: YAML, HCL, labels."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
NOT_IN_LABELS = re.compile(r"[^a-z0-9]+")
BLOCK = re.compile(r"(?:[!-~][ -~]*\n|\n)*[!-~][ -~]*\n")  # lines of ASCII, the first of them with a letter in front
LONGEST_LABEL = 30  # a Service's name has 63 letters, and a pod's is a job's with more behind it
ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # of YAML, as keys


def quoted(text: str) -> str:
    """A string between double quotes, with the escapes that JSON, YAML and HCL have in common."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(letter: str) -> str:
    if letter in ESCAPES:
        return ESCAPES[letter]
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def hcl(text: str) -> str:
    """A string of Terraform's language, in which `${` and `%{` would begin a template."""
    return quoted(text).replace("${", "$${").replace("%{", "%%{")


def pod_word(text: str) -> str:
    """A word of a container's command, in which Kubernetes would replace `$(NAME)`."""
    return text.replace("$(", "$$(")


def label(name: str, digest: str) -> str:
    """A name that schedulers, pods and clouds all take: letters, digits and hyphens, and told apart by the digest."""
    slug = NOT_IN_LABELS.sub("-", name.lower()).strip("-")[: LONGEST_LABEL - len(digest) - 1].strip("-")
    return f"{slug if slug[:1].isalpha() else f'run-{slug}'.strip('-')}-{digest}"


def yaml(value: Any) -> str:
    """A document. Every string is between quotes, or a block of plain lines; nothing is guessed from its letters."""
    return "\n".join(_lines(value)) + "\n"


def yaml_documents(values: Sequence[Any]) -> str:
    """Several documents in one file."""
    return "---\n".join(map(yaml, values))


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, each in value.items() for line in _entry(f"{_key(key)}:", each)]
    if isinstance(value, list | tuple) and value:
        return [line for each in value for line in _item(each)]
    return [_scalar(value)]


def _entry(head: str, value: Any) -> list[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        return [head, *map(_deeper, _lines(value))]
    if isinstance(value, str) and "\n" in value and BLOCK.fullmatch(value):
        return [f"{head} |", *map(_deeper, value.split("\n")[:-1])]
    return [f"{head} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    first, *rest = _lines(value) if isinstance(value, Mapping | list | tuple) else [_scalar(value)]
    return [f"- {first}", *map(_deeper, rest)]


def _deeper(line: str) -> str:
    return f"  {line}" if line else ""


def _key(key: str) -> str:
    return key if PLAIN_KEY.fullmatch(key) and key.lower() not in WORDS else quoted(key)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    return "{}" if isinstance(value, Mapping) else "[]"
