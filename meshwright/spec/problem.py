"""What is wrong with something a user gave, as a value."""

from pathlib import Path
from typing import Any

import msgspec

# What decoding raises of bytes that are not what they should be: msgspec passes on what is no UTF-8 inside a string.
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError)


class Problem(msgspec.Struct, frozen=True):
    """One mistake in the user's words, and what to do about it."""

    text: str
    remedy: str
    key: str = ""  # the dotted key to look at
    where: str = ""  # file and line, or the command line; filled in by whoever loaded the run

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.text}; {self.remedy}"


class InputError(ValueError):
    """What the user gave cannot be used. Ends a command with its exit code and the problems on the screen."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class ContradictionError(InputError):
    """A model is described that none can be, as opposed to one that is merely not supported."""


def mistake(text: str, remedy: str, key: str = "") -> InputError:
    """An InputError of a single problem."""
    return InputError([Problem(text, remedy, key)])


def install_command(extra: str) -> str:
    """The command that installs an extra of this package from where the package came: a clone, a wheel, an index."""
    from importlib.metadata import PackageNotFoundError, distribution  # which imports an e-mail parser

    try:
        text = distribution("meshwright").read_text("direct_url.json")
    except PackageNotFoundError:  # a clone that is on the path
        return install_words(extra, {"url": Path(__file__).parents[2].as_uri(), "dir_info": {"editable": True}})
    return install_words(extra, msgspec.json.decode(text) if text else {})


def install_words(extra: str, origin: dict[str, Any]) -> str:
    """The same, by what pip has recorded of where a package came from (PEP 610); nothing for an index."""
    from urllib.parse import unquote, urlparse

    url = origin.get("url", "")
    if "dir_info" in origin:
        flag = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {flag}'{unquote(urlparse(url).path)}[{extra}]'"
    if vcs := origin.get("vcs_info", {}).get("vcs"):
        url = f"{vcs}+{url}"
    return f"pip install 'meshwright[{extra}]{f' @ {url}' if url else ''}'"
