"""Chat templates, and what a model folder says of its text: its template, its special tokens, those that end a text.

A template is a program in Jinja that makes one text of messages, run in jinja2's sandbox as Hugging Face runs it. It is
a program of whoever made a model folder, so it has neither files nor Python's insides. Its generation marks,
`{% generation %}` around what the model is to write, become two characters that no text has, and are found again in
what it rendered.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from tokenizers import Tokenizer

from meshwright.config.huggingface import CONFIG, CONFIG_BYTES, read_config
from meshwright.config.run import Run
from meshwright.config.weights import TEXT
from meshwright.data import tokenize
from meshwright.data.tokenize import ENDS
from meshwright.spec.problem import InputError, mistake

if TYPE_CHECKING:
    from jinja2 import Environment, Template


Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]  # characters of a text: from, to
BEGIN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters, which Unicode keeps out of all text that is exchanged
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's reasoning: the name in use, and earlier ones
MOST_STEPS, MOST_SECONDS = 100_000, 20.0  # of one text: rounds of loops and calls of macros, and the time between two
MOST_LONG, MOST_POWER = 10_000_000, 1024  # characters of a text or of what a template makes of two, and operands of **
DAY = datetime(2024, 7, 26)  # of templates that write the date: a run's text must not depend on when it is made

# Named templates: the marks that must be single tokens of the tokenizer, and the program.
NO_TOOLS = "{% if message.tool_calls %}{{ raise_exception('this template has no tool calls') }}{% endif %}"
TURNS = "{{ bos_token }}{% for message in messages %}" + NO_TOOLS
ENDED = (  # what a turn says and its close, in marks where the model writes it
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + 'CLOSE' }}{% endgeneration %}"
    "{% else %}{{ message.content + 'CLOSE' }}{% endif %}"
)
CHATML = (
    TURNS
    + r"{{ '<|im_start|>' + message.role + '\n' }}"
    + ENDED.replace("CLOSE", "<|im_end|>")
    + r"{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    TURNS
    + r"{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    + ENDED.replace("CLOSE", "<|eot_id|>")
    + "{% endfor %}{% if add_generation_prompt %}"
    + r"{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{% set ns = namespace(system='') %}"
    + TURNS
    + "{% if message.role == 'system' %}"
    + r"{% set ns.system = message.content + '\n\n' %}{% elif message.role == 'assistant' %}"
    + r"{{ '<start_of_turn>model\n' }}{% generation %}{{ message.content + '<end_of_turn>' }}{% endgeneration %}"
    + r"{{ '\n' }}{% else %}{{ '<start_of_turn>' + message.role + '\n' + ns.system + message.content }}"
    + r"{{ '<end_of_turn>\n' }}{% set ns.system = '' %}{% endif %}{% endfor %}"
    + r"{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ONE_ANSWER = (
    "{% if messages | length > 2 or messages[0].role != 'user' %}"
    "{{ raise_exception('this template has one prompt and one answer') }}{% endif %}{{ bos_token }}"
)
ANSWER = (
    "{% for message in messages[1:] %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}{% endfor %}"
)
TASK = "Below is an instruction that describes a task"
REQUEST = "Write a response that appropriately completes the request."
ALPACA = (
    ONE_ANSWER
    + "{% set ask = messages[0] %}{% if ask.input %}"
    + f"{{{{ '{TASK}, paired with an input that provides further context. {REQUEST}' }}}}"
    + r"{{ '\n\n### Instruction:\n' + ask.instruction + '\n\n### Input:\n' + ask.input }}{% else %}"
    + f"{{{{ '{TASK}. {REQUEST}' }}}}"
    + r"{{ '\n\n### Instruction:\n' + (ask.instruction or ask.content) }}{% endif %}{{ '\n\n### Response:' }}"
    + ANSWER
)
PLAIN = ONE_ANSWER + "{{ messages[0].content }}" + ANSWER
NAMED: dict[str, tuple[tuple[str, ...], str]] = {
    "chatml": (("<|im_start|>", "<|im_end|>"), CHATML),
    "llama3": (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), LLAMA3),
    "gemma": (("<start_of_turn>", "<end_of_turn>"), GEMMA),
    "alpaca": ((), ALPACA),
    "plain": ((), PLAIN),
}


class TemplateError(ValueError):
    """A template could not make a text of some messages."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens that it may name."""

    name: str  # as people know it: a file, or a named one
    source: str
    special: Mapping[str, str]  # bos_token and the like
    clock: Callable[[], datetime] = field(default=lambda: DAY)

    @cached_property
    def is_marked(self) -> bool:
        """Whether it says itself what the model writes."""
        return MARKED.search(self.source) is not None

    def text(self, messages: Messages, tools: Any = None, *, prompt: bool = False) -> str:
        """Messages as one text; `prompt`: up to where the model's answer begins."""
        text = self._rendered(messages, tools, prompt)
        return text.replace(BEGIN, "").replace(CLOSE, "") if self.is_marked else text

    def marked(self, messages: Messages, tools: Any = None) -> tuple[str, list[Span]]:
        """The text with what lies between its generation marks, empty ones apart."""
        before, *rest = self._rendered(messages, tools, False).split(BEGIN)
        text, spans, length = [before], list[Span](), len(before)
        for part in rest:
            inside, _, after = part.partition(CLOSE)
            if inside:
                spans.append((length, length + len(inside)))
            after = after.replace(CLOSE, "")  # of marks within marks
            text += (inside, after)
            length += len(inside) + len(after)
        return "".join(text), spans

    def _rendered(self, messages: Messages, tools: Any, prompt: bool) -> str:
        if any(message.get("tool_calls") for message in messages) and self.takes_calls_as_text:
            messages = [message | {"tool_calls": calls_as_text(message)} for message in map(dict, messages)]
        return self._render(messages, tools, prompt)

    @cached_property
    def takes_calls_as_text(self) -> bool:
        """Whether it wants the arguments of a tool call as JSON in a text, and not as the object that they are."""
        taken = []
        for arguments in ({"place": 1}, '{"place": 1}'):
            call = {"type": "function", "id": "call00001", "function": {"name": "ask", "arguments": arguments}}
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                taken.append("'place'" not in self._render(turns, None, False))  # which is Python's, and not JSON
            except TemplateError:
                taken.append(False)
        return taken == [False, True]

    def _render(self, messages: Messages, tools: Any, prompt: bool) -> str:
        program = _compiled(self.source, self.clock)
        from jinja2 import TemplateError as JinjaError

        failures = (JinjaError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
        failures += (LookupError, MemoryError)
        program.environment.globals["_step"].begin()
        try:
            return program.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.special
            )
        except failures as error:
            raise TemplateError(str(error) or type(error).__name__) from None


def calls_as_text(message: Mapping[str, Any]) -> Any:
    """The tool calls of a message with their arguments as JSON."""
    calls = message.get("tool_calls")
    return [_with_arguments(call, _json) for call in calls] if isinstance(calls, list) else calls


def _with_arguments(call: Any, written: Callable[[Any], Any]) -> Any:
    """A call with its arguments in another form, if it has an object of them."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"], written)}
    return call | {"arguments": written(call["arguments"])} if isinstance(call.get("arguments"), dict) else call


def require_program(template: ChatTemplate, remedy: str) -> None:
    """Refuse a template that is not a program of Jinja, before any sample is rendered."""
    _require_jinja()
    from jinja2 import TemplateError as JinjaError

    try:
        _compiled(template.source, template.clock)
    except (JinjaError, RecursionError) as error:
        raise mistake(f"the chat template of {template.name} cannot be used: {error}", remedy) from None


def _require_jinja() -> None:
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise mistake("a chat template needs jinja2, which is not installed", "run: pip install jinja2") from None


@lru_cache(maxsize=8)
def _compiled(source: str, clock: Callable[[], datetime]) -> "Template":
    return _sandbox(clock).from_string(source)


def _sandbox(clock: Callable[[], datetime]) -> "Environment":
    """What Hugging Face gives a template: loop controls, generation marks, and a few functions."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class GenerationMarks(Extension):
        tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, close = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, CLOSE))
            return nodes.Scope([begin, *body, close]).set_lineno(line)

    class Counting(NodeTransformer):
        """Puts a step before the body of every loop and macro, and a bounded join in the place of ~."""

        def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  (as jinja2 names it)
            node.body.insert(0, nodes.ExprStmt(_called("_step", [], node.lineno)).set_lineno(node.lineno))
            return self.generic_visit(node)

        visit_Macro = visit_CallBlock = visit_For  # noqa: N815

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            return _called("_joined", node.nodes, node.lineno)

    def _called(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        return nodes.Call(nodes.Name(name, "load", lineno=line), arguments, [], None, None, lineno=line)

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        """One whose loops and macros are counted, and whose products are bounded: a template may be anybody's."""

        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            return Counting().visit(super()._parse(source, name, filename))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            is_text = operator == "+" and isinstance(left, str) and isinstance(right, str)  # nearly all they do
            if is_text and len(left) + len(right) <= MOST_LONG:
                return left + right
            _require_short(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def getattr(self, obj: Any, attribute: str) -> Any:
            """The same as jinja2's, without an exception for every field of a message."""
            if type(obj) is dict and attribute in obj and not hasattr(obj, attribute):
                return obj[attribute]
            return super().getattr(obj, attribute)

    sandbox = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationMarks, "jinja2.ext.loopcontrols"],
        autoescape=False,
    )
    sandbox.filters["tojson"] = _json  # jinja2's own is for HTML
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["_step"], sandbox.globals["_joined"] = _Steps(), _joined
    sandbox.globals["strftime_now"] = lambda form: clock().strftime(form)
    return sandbox


class _Steps:
    """Counts what a template does for one text, and ends it when that is more than any conversation needs."""

    def begin(self) -> None:
        """A text begins."""
        self.left, self.until = MOST_STEPS, time.monotonic() + MOST_SECONDS

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0 or time.monotonic() > self.until:
            _refuse(f"it takes more than {MOST_STEPS:,} rounds of loops, or {MOST_SECONDS:.0f} seconds, for one text")


def _joined(*parts: Any) -> str:
    """What ~ makes of its operands."""
    texts = [str(part) for part in parts]
    _require_short("~", *texts)
    return "".join(texts)


def _require_short(operator: str, *operands: Any) -> None:
    """Refuse a product, a power or a sum that would fill the memory or take for ever."""
    size = sum(len(each) for each in operands if isinstance(each, (str, list, tuple)))
    factor = max((abs(each) for each in operands if isinstance(each, int)), default=1)
    if operator == "**":
        is_long = factor > MOST_POWER
    elif operator == "*":
        is_long = size * factor > MOST_LONG or factor > 1 << 4096
    else:
        is_long = size > MOST_LONG or (operator == "%" and isinstance(operands[0], str) and _pads(operands[0]))
    if is_long:
        _refuse(f"it makes more than {MOST_LONG:,} characters or digits by {operator}")


def _pads(form: str) -> bool:
    """Whether a form asks for thousands of characters of padding, or for as many as an operand says."""
    return re.search(r"%[^a-zA-Z%]*(\d{5}|\*)", form) is not None


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(text: str) -> NoReturn:
    from jinja2 import TemplateError as JinjaError

    raise JinjaError(text)


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


def document_end(run: Run, tokenizer: Tokenizer) -> int:
    """The token that closes a document: as stated, the first of the usual ones, or the EOS of the model's folder."""
    try:
        return tokenize.end_token(tokenizer, run.data.end_token)
    except InputError:
        folder = text_folder(run)
        named = tokenizer.token_to_id(special_tokens(folder).get("eos_token", ""))
        ends = [named] if named is not None else sorted(end_tokens(folder, tokenizer))
        if known := [end for end in ends if tokenizer.id_to_token(end) is not None]:
            return known[0]
        raise


def template_of(folder: Path, remedy: str = NO_TEMPLATE) -> str:
    """The chat template of a folder: its own file, or a value of its tokenizer_config.json."""
    if (file := folder / TEMPLATE).is_file() and (text := _read(file, remedy)).strip():
        return text
    found = _description(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [each for each in found if isinstance(each, dict)]
        found = next((each.get("template") for each in named if each.get("name") == "default"), None)
    if not isinstance(found, str) or not found.strip():
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
            special["eos_token"] = tokenizer.id_to_token(document_end(run, tokenizer)) or ""
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
