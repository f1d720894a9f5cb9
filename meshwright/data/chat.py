"""What a model folder says of its text: its special tokens, the tokens that end it, and its chat template."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from meshwright.config.huggingface import CONFIG, CONFIG_BYTES, read_config
from meshwright.config.run import Run
from meshwright.config.weights import TEXT
from meshwright.data import tokenize
from meshwright.data.template import NAMED, ChatTemplate, TemplateError, require_program
from meshwright.data.tokenize import ENDS
from meshwright.spec.problem import mistake

GENERATION, DESCRIPTION, TEMPLATE = "generation_config.json", "tokenizer_config.json", "chat_template.jinja"
NO_TEMPLATE = "generate without --chat, or put the model's chat_template.jinja beside its weights"
SET_TEMPLATE = f"set data.template to one of {', '.join(NAMED)}, or to a .jinja file"


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


def template_of(folder: Path, remedy: str = NO_TEMPLATE) -> str:
    """The chat template of a folder: its own file, or a value of its tokenizer_config.json."""
    if (file := folder / TEMPLATE).is_file():
        return _read(file, remedy)
    found = _description(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [each for each in found if isinstance(each, dict)]
        found = next((each.get("template") for each in named if each.get("name") == "default"), None)
    if not isinstance(found, str):
        raise mistake(f"{folder} has no chat template", remedy)
    return found


def prompt_of(folder: Path, messages: Sequence[Message]) -> str:
    """Messages as the model was trained to read them, up to where its answer begins."""
    template = ChatTemplate(str(folder), template_of(folder), special_tokens(folder), datetime.now)
    require_program(template, NO_TEMPLATE)
    try:
        return template.text(msgspec.to_builtins(list(messages)), prompt=True)
    except TemplateError as error:
        raise mistake(f"the chat template of {folder} cannot be used: {error}", NO_TEMPLATE) from None


def chat_template(run: Run, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that a run renders conversations with, its named marks held against the tokenizer."""
    named, folder = run.data.template, text_folder(run)
    special = special_tokens(folder)
    if named in NAMED:
        marks, source = NAMED[named]
        _require_marks(named, marks, run, tokenizer)
        special["bos_token"] = _beginning(tokenizer)
        if not special["bos_token"]:  # else whoever has one though texts do not begin with it would write it
            source = source.replace("{{ bos_token }}", "")
        if "eos_token" not in special:
            special["eos_token"] = tokenizer.id_to_token(tokenize.end_token(tokenizer, run.data.end_token)) or ""
        found = ChatTemplate(named, source, special)
    elif named:
        file = Path(named).expanduser()
        if not file.is_file():
            raise mistake(
                f"data.template = {named} is neither a named template nor a file", SET_TEMPLATE, "data.template"
            )
        found = ChatTemplate(named, _read(file, SET_TEMPLATE), special)
    else:
        found = ChatTemplate(str(folder), template_of(folder, SET_TEMPLATE), special)
    require_program(found, SET_TEMPLATE)
    return found


def text_folder(run: Run) -> Path:
    """Where the text files of a run's model are: beside its tokenizer, or where a run of ours keeps them."""
    beside = tokenize.path(run.data.tokenizer).parent
    return beside / TEXT if (beside / TEXT).is_dir() else beside


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that templates name, such as bos_token; old files describe one by an object."""
    found: dict[str, Any] = {name: value for name, value in _description(folder).items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _require_marks(named: str, marks: tuple[str, ...], run: Run, tokenizer: Tokenizer) -> None:
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    if lacking := [mark for mark in marks if mark not in special]:
        fits = [name for name, (needs, _) in NAMED.items() if set(needs) <= special]
        raise mistake(
            f"data.template = {named} writes {lacking[0]}, which is not a single special token of {run.data.tokenizer}",
            f"use another template ({', '.join(fits)}), or begin from a base that has it",
            "data.template",
        )


def _beginning(tokenizer: Tokenizer) -> str:
    """The token that the tokenizer puts before a text; "" where it puts none."""
    with_own, without = (tokenizer.encode("a", add_special_tokens=own).ids for own in (True, False))
    first = with_own[0] if with_own and with_own[: len(without)] != without else None
    return "" if first is None else tokenizer.id_to_token(first) or ""


def _read(file: Path, remedy: str) -> str:
    if file.stat().st_size > CONFIG_BYTES:
        raise mistake(f"{file} has more than {CONFIG_BYTES} bytes", remedy)
    return file.read_text(errors="replace")


def _description(folder: Path) -> dict[str, Any]:
    return read_config(folder / DESCRIPTION) if (folder / DESCRIPTION).is_file() else {}
