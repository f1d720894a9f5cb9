"""Records of chat data as conversations: whichever of the usual fields they have, checked before any is rendered."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from meshwright.data.chat import REASONING
from meshwright.spec.problem import mistake

Message = dict[str, Any]
# The fields that a kind of record is known by, in the order in which they are looked for.
KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "ShareGPT": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "Alpaca": ("instruction", "output"),
}
FIELDS = (
    *("messages", "conversations", "prompt", "completion", "chosen", "rejected"),
    *("instruction", "input", "output", "system", "tools"),
)
SPEAKERS = {  # who speaks, by ShareGPT's names
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "assistant": "assistant", "function_call": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
# What may come before a turn of a role; "" is the beginning.
BEFORE: dict[str, tuple[str, ...]] = {
    "system": ("",),
    "developer": ("", "system"),
    "user": ("", "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
REPAIR = "repair or remove the sample"
RESERVED = re.compile("[\ufdd0-\ufdd3]")  # marks of templates (chat.py) and of masks (mask.py)
SHOWN = 200  # characters of a sample that a message quotes


@dataclass(frozen=True, slots=True)
class Conversation:
    """One sample of chat data."""

    place: str  # file and record, for people
    messages: list[Message]
    tools: list[Any] | None
    prompt: int  # how many messages are the prompt; what follows is the completion

    @property
    def answers(self) -> list[int]:
        """The messages that the model writes."""
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    def weight(self, number: int) -> int:
        """Whether a message's turn is trained, as the data says."""
        return self.messages[number].get("weight", 1)


def quoted(text: str) -> str:
    """The beginning of a text as one line, for a message."""
    line = msgspec.json.encode(text[:SHOWN]).decode()
    return line if len(text) <= SHOWN else f'{line[:-1]}…"'


def conversation(place: str, record: Any, columns: Mapping[str, str]) -> Conversation:
    """A record as a conversation; InputError says what is wrong with it."""
    if not isinstance(record, dict):
        raise mistake(f"{place} is not a JSON object", 'write every sample as {"messages": […]}')
    found = {name: value for name, value in _named(place, record, columns).items() if value is not None}
    kind = next((kind for kind, fields in KINDS.items() if all(name in found for name in fields)), "")
    if not kind and "chosen" in found and "rejected" in found:
        what = f"{place} has a chosen and a rejected answer, which objective = dpo compares"
        field = "completion" if "prompt" in found else "messages"
        raise mistake(what, f'set objective = dpo, or data.columns = ["{field}=chosen"]', "objective")
    if not kind:
        fields = "; ".join(" and ".join(each) for each in KINDS.values())
        raise mistake(
            f"{place} has none of the fields that chat data is known by ({fields}), only {', '.join(record)}",
            'name its own as data.columns = ["messages=…"], or ["prompt=…", "completion=…"]',
            "data.columns",
        )
    messages, prompt = _READERS[kind](place, found)
    tools = _tools(place, found.get("tools"))
    system = found.get("system")
    if system and not any(message["role"] == "system" for message in messages):
        messages, prompt = [{"role": "system", "content": _text(place, "system", system)}, *messages], prompt + 1
    _check(place, messages)
    _require_characters(place, messages, tools)
    if prompt == 0:  # no prompt of its own: what follows the last question is the completion
        users = [number for number, message in enumerate(messages) if message["role"] == "user"]
        prompt = users[-1] + 1 if users else 0
    return Conversation(place, messages, tools, prompt)


def preference(place: str, record: Any, columns: Mapping[str, str]) -> tuple[Conversation, Conversation]:
    """A record of preference data as two conversations with one prompt: the chosen answer's and the rejected one's."""
    found = _named(place, record, columns) if isinstance(record, dict) else {}
    if found.get("chosen") is None or found.get("rejected") is None:
        what = f"{place} has no chosen and rejected answer, which objective = dpo compares, only {', '.join(found)}"
        remedy = 'name its own as data.columns = ["chosen=…", "rejected=…"], or set objective = sft'
        raise mistake(what, remedy, "data.columns")
    for name in ("chosen", "rejected"):
        if not isinstance(found[name], list):
            _text(place, name, found[name])
    answers = (found["chosen"], found["rejected"])
    asked = found.get("prompt")
    if all(isinstance(each, list) and each and _opens(each[0]) for each in answers):  # with their prompt
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False)))
        alike = min(alike, *(len(each) - 1 for each in answers))
        asked, answers = answers[0][:alike], tuple(each[alike:] for each in answers)
    if not asked:
        what = f"{place}: the chosen and the rejected answer have no prompt in common"
        raise mistake(what, f'{REPAIR}, or add a "prompt"')
    if answers[0] == answers[1]:
        raise mistake(f"{place}: the chosen and the rejected answer are the same", REPAIR)
    beside = {name: found[name] for name in ("system", "tools") if found.get(name) is not None}
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    turns = ([{"role": "assistant", "content": each}] if isinstance(each, str) else each for each in answers)
    chosen, rejected = (conversation(place, {**beside, "prompt": asked, "completion": each}, {}) for each in turns)
    return chosen, rejected


def _opens(turn: Any) -> bool:
    """Whether a turn is one that begins a conversation, not an answer."""
    return isinstance(turn, dict) and turn.get("role", turn.get("from")) not in ("assistant", "gpt")


def _named(place: str, record: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a record by our names, where the run names the columns."""
    if missing := [column for column in columns.values() if column not in record]:
        what = f"{place} has no field {missing[0]!r}, which data.columns names, only {', '.join(record)}"
        raise mistake(what, "name fields that every sample has", "data.columns")
    own = set(columns.values())
    return {name: value for name, value in record.items() if name not in own} | {
        name: record[column] for name, column in columns.items()
    }


def _messages(place: str, found: dict[str, Any]) -> tuple[list[Message], int]:
    return _turns(place, "messages", found["messages"]), 0


def _sharegpt(place: str, found: dict[str, Any]) -> tuple[list[Message], int]:
    return _turns(place, "conversations", found["conversations"]), 0


def _prompt(place: str, found: dict[str, Any]) -> tuple[list[Message], int]:
    asked, answer = found["prompt"], found["completion"]
    if isinstance(asked, list) or isinstance(answer, list):
        before = _turns(place, "prompt", asked)
        return before + _turns(place, "completion", answer), len(before)
    asked, answer = _text(place, "prompt", asked), _text(place, "completion", answer)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], 1


def _alpaca(place: str, found: dict[str, Any]) -> tuple[list[Message], int]:
    if found.get("history"):
        raise mistake(f"{place} has a history of earlier turns", 'write it as {"messages": […]}')
    asked, given = (_text(place, name, found.get(name, "")) for name in ("instruction", "input"))
    user = {
        "role": "user",
        "content": f"{asked}\n\n{given}" if given else asked,
        "instruction": asked,
        "input": given,
    }
    return [user, {"role": "assistant", "content": _text(place, "output", found["output"])}], 1


_READERS = {"messages": _messages, "ShareGPT": _sharegpt, "prompt and completion": _prompt, "Alpaca": _alpaca}


def _require_characters(place: str, *values: Any) -> None:
    """Refuse the marks that templates and masks are found by: in what somebody says they would move what is trained."""
    found = RESERVED.search(_json(values))
    if found is not None:
        what = f"{place} has U+{ord(found[0]):X}, one of Unicode's noncharacters, which are kept out of all text"
        raise mistake(what, REPAIR)


def _turns(place: str, name: str, value: Any) -> list[Message]:
    """A list of turns by our names: those of ShareGPT are translated, what nobody filled in is left out."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        what = f"{place}: the field {name!r} holds {quoted(_json(value))}, not a list of turns"
        raise mistake(what, 'write it as [{"role": "user", "content": "…"}, …], or name another field as data.columns')
    return [_turn(f"{place}, turn {number}", turn) for number, turn in enumerate(value, start=1)]


def _turn(place: str, turn: dict[str, Any]) -> Message:
    given = {name: item for name, item in turn.items() if item is not None}
    speaker, content = given.pop("from", None), given.pop("value", None)
    role = given.get("role", SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else None)
    if not isinstance(role, str):
        raise mistake(f"{place} has no role, only {', '.join(turn)}", 'every turn has a "role" and a "content"')
    content = given.get("content", content)
    message = {**given, "role": role, "content": _content(place, content)}
    if isinstance(calls := given.get("tool_calls"), list):
        message["tool_calls"] = [_call(place, call) for call in calls]
    reasoning = next((given[name] for name in REASONING if name in given), None)
    if reasoning is not None:  # templates read one name or the other
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _call(place: str, call: Any) -> Any:
    """A tool call with its arguments as an object, which many files hold as JSON in a text."""
    if not isinstance(call, dict):
        raise mistake(f"{place}: a tool call holds {quoted(_json(call))}, not an object", REPAIR)
    if isinstance(call.get("function"), dict):
        return call | {"function": _call(place, call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        found = msgspec.json.decode(arguments) if arguments.strip() else {}
    except msgspec.MsgspecError:
        found = None
    if not isinstance(found, dict):
        what = f"{place}: the arguments of the call of {call.get('name')!r} are not a JSON object"
        raise mistake(f"{what}: {quoted(arguments)}", REPAIR)
    return call | {"arguments": found}


def _content(place: str, content: Any) -> str:
    """What a turn says: text, or parts that are text."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise mistake(f"{place} has parts that are not text", f"{REPAIR}; images and sounds are not trained here")
        content = "".join(texts)
    return _text(place, "content", "" if content is None else content)


def _text(place: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise mistake(f"{place}: the field {name!r} holds {type(value).__name__}, not text", REPAIR)
    return value


def _tools(place: str, value: Any) -> list[Any] | None:
    """The tools of a sample; many files hold them as JSON in a string."""
    if isinstance(value, str) and value.strip():
        try:
            value = msgspec.json.decode(value)
        except msgspec.MsgspecError:
            raise mistake(f"{place}: the field 'tools' is not JSON", REPAIR) from None
    if not value:
        return None
    if not isinstance(value, list):
        raise mistake(f"{place}: the field 'tools' is not a list", REPAIR)
    return value


def _check(place: str, messages: list[Message]) -> None:
    """Roles in their order, answers that say something, weights of 0 or 1."""
    before = ""
    for number, message in enumerate(messages, start=1):
        role, where = message["role"], f"{place}, turn {number}"
        if role not in BEFORE:
            known = ", ".join(BEFORE)
            raise mistake(f"{where} has the role {role!r}, which is none of {known}", REPAIR)
        if before not in BEFORE[role]:
            after = f"after {before!r}" if before else "at the beginning"
            raise mistake(f"{where}: the role {role!r} is out of order {after}", REPAIR)
        weight = message.get("weight", 1)
        if weight not in (0, 1) or isinstance(weight, str):
            raise mistake(f"{where} has the weight {weight!r}", "use 0 or 1: a turn is trained or it is not")
        if role != "assistant" and message.get("weight"):
            what = f"{where}: the role {role!r} has a weight, and only answers are trained"
            raise mistake(what, "give weights to turns of the assistant alone")
        speaks = message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
        if role == "assistant" and weight and not speaks:
            what = f"{where} is an empty answer after {quoted(messages[number - 2]['content'])}"
            raise mistake(what, f'{REPAIR}, or give the turn "weight": 0')
        before = role


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def columns_of(names: tuple[str, ...]) -> dict[str, str]:
    """What data.columns says: our name of a field, and the file's."""
    found = {name: column for name, _, column in (each.partition("=") for each in names)}
    if wrong := [name for name, column in found.items() if name not in FIELDS or not column]:
        what = f"data.columns has {wrong[0]!r}, which names no field of chat data"
        raise mistake(what, f'write "FIELD=COLUMN", where FIELD is one of {", ".join(FIELDS)}', "data.columns")
    return found
