"""What a model folder says of its text: the tokens that end it, and the chat template that makes a prompt of messages.

A template is a program of whoever made the folder, so it runs in jinja2's sandbox, without files or Python's insides.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from tokenizers import Tokenizer

from meshwright.config.huggingface import CONFIG, CONFIG_BYTES, read_config
from meshwright.data.tokenize import ENDS
from meshwright.spec.problem import mistake

GENERATION, DESCRIPTION, TEMPLATE = "generation_config.json", "tokenizer_config.json", "chat_template.jinja"
NO_TEMPLATE = "generate without --chat, or put the model's chat_template.jinja beside its weights"


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


def end_tokens(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: as the folder states them, else the first of the usual ones that there is."""
    for name in (GENERATION, CONFIG):
        stated = read_config(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        tokens = [token for token in (stated if isinstance(stated, list) else [stated]) if isinstance(token, int)]
        if tokens:
            return frozenset(tokens)
    known = (tokenizer.token_to_id(name) for name in ENDS)
    return frozenset([token for token in known if token is not None][:1])


def template_of(folder: Path) -> str:
    """The chat template of a folder: its own file, or a value of its tokenizer_config.json."""
    if (file := folder / TEMPLATE).is_file():
        if file.stat().st_size > CONFIG_BYTES:
            raise mistake(f"{file} has more than {CONFIG_BYTES} bytes", NO_TEMPLATE)
        return file.read_text(errors="replace")
    found = _description(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [each for each in found if isinstance(each, dict)]
        found = next((each.get("template") for each in named if each.get("name") == "default"), None)
    if not isinstance(found, str):
        raise mistake(f"{folder} has no chat template", NO_TEMPLATE)
    return found


def prompt_of(folder: Path, messages: Sequence[Message]) -> str:
    """Messages as the model was trained to read them, up to where its answer begins."""
    template = template_of(folder)
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise mistake("a chat template needs jinja2, which is not installed", "run: pip install jinja2") from None
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    sandbox.filters["tojson"] = lambda value, **kwargs: msgspec.json.encode(value).decode()  # jinja2's own is for HTML
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return sandbox.from_string(template).render(
            messages=msgspec.to_builtins(list(messages)), add_generation_prompt=True, **_special(folder)
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError, LookupError) as error:
        raise mistake(f"the chat template of {folder} cannot be used: {error}", NO_TEMPLATE) from None


def _refuse(text: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(text)


def _special(folder: Path) -> dict[str, str]:
    """The special tokens that templates name, such as bos_token; old files describe one by an object."""
    found: dict[str, Any] = {name: value for name, value in _description(folder).items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _description(folder: Path) -> dict[str, Any]:
    return read_config(folder / DESCRIPTION) if (folder / DESCRIPTION).is_file() else {}
