"""The mask over the chat templates of the field, those of the installed `trl` package, beside transformers."""

from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from chats import SPECIAL, byte_level, turns
from tokenizers import Tokenizer

from meshwright.data.chat import NAMED, ChatTemplate, TemplateError
from meshwright.data.conversation import conversation
from meshwright.data.mask import Masker
from meshwright.spec.problem import InputError

BEGIN, END = "<bos>", "<eos>"
NAMES = {"bos_token": BEGIN, "eos_token": END}
FOLDER = Path((find_spec("trl") or pytest.skip("trl is not installed", allow_module_level=True)).origin or "").parent
FAMILIES = {file.stem: file.read_text() for file in sorted((FOLDER / "chat_templates").glob("*.jinja"))}
ONE = turns("What is two and two?", "It is four.")
TWO = turns("What is two and two?", "It is four.", "Which colours are there?", "Red, green, blue.")
# Templates that write an answer otherwise than they begin one, or end it with nothing: refused without marks.
THOUGHTLESS = {"deepseek_r1_distill", "deepseekv3", "glm4moe", "nemotron_3_5_lightning"}
THOUGHTLESS |= {"nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"}
ONCE = {"qwen3_5_think", "qwen3_5_nothink", "qwen3_6"}  # and those that do so once an answer is past


@cache
def tokenizer(source: str) -> Tokenizer:
    return byte_level({*SPECIAL.findall(source), BEGIN, END})


def in_parts(messages: list[dict]) -> list[dict]:
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]


def rendered(source: str, messages: list[dict], **how: bool) -> tuple[str, list[tuple[int, int]]]:
    """What transformers makes of messages, and the spans of its own generation marks."""
    # More than a second, of every worker that collects it.
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), spans = render_jinja_template(
        [messages], chat_template=source, return_assistant_tokens_mask=bool(how.pop("marks", False)), **how, **NAMES
    )
    return text, spans[0] if spans else []


def trained(masker: Masker, messages: list[dict]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Tokens, mask, and the runs of trained ones."""
    (sample,) = masker.samples([conversation("chat.jsonl:1", {"messages": messages}, {})])
    mask = [0, *sample.mask.tolist(), 0]
    edges = [at - 1 for at in range(1, len(mask)) if mask[at] != mask[at - 1]]
    return sample.tokens.tolist(), sample.mask.tolist(), list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_a_prompt_up_to_the_stop_token_is_trained(name):
    source = FAMILIES[name]
    lexicon = tokenizer(source)
    template = ChatTemplate(name, source, NAMES, datetime.now)  # as transformers does
    masker = Masker(template, lexicon, "assistant", frozenset([lexicon.token_to_id(END)]))
    for messages in (ONE, TWO):
        if name in THOUGHTLESS or (name in ONCE and len(messages) > 2):
            with pytest.raises(InputError, match=r"chat.jsonl:1: by the chat template of"):
                trained(masker, messages)
            continue
        tokens, _, runs = trained(masker, messages)
        given = in_parts(messages) if masker.in_parts else messages
        whole, marks = rendered(source, given, marks=True)
        assert tokens == lexicon.encode(whole, add_special_tokens=False).ids, "transformers' text, token by token"
        assert len(runs) == len(messages) // 2, "one for each answer"
        for number, (start, end) in enumerate(runs):
            said = lexicon.decode(tokens[start:end], skip_special_tokens=False)
            assert messages[2 * number + 1]["content"] in said
            assert tokens[end - 1] in masker.special_ids, "the stop token"
            assert not any(message["content"] in said for message in messages[::2])
            prompt, _ = rendered(source, given[: 2 * number + 1], add_generation_prompt=True)
            if "prompt" not in masker.notes:  # else generation begins from more than the text has, which is told
                assert tokens[:start] == lexicon.encode(prompt, add_special_tokens=False).ids
            before, upto = (len(lexicon.decode(tokens[:at], skip_special_tokens=False)) for at in (start, end))
            inside = {at for low, high in marks for at in range(low, high)}
            assert not marks or inside.issuperset(range(before, upto)), "within its own marks"


def test_so_many_families_are_proved():
    accepted = [name for name in FAMILIES if name not in THOUGHTLESS | ONCE]
    assert len({name.removesuffix("_training") for name in accepted}) >= 25


@pytest.mark.parametrize("name", NAMED)
def test_a_named_template_is_read_by_transformers_as_by_us(name):
    marks, source = NAMED[name]
    lexicon = byte_level({*marks, BEGIN, END})
    masker = Masker(ChatTemplate(name, source, NAMES), lexicon, "assistant", frozenset([lexicon.token_to_id(END)]))
    messages = ONE if name in ("alpaca", "plain") else turns(*(each["content"] for each in TWO), system="Be brief.")
    text, spans = rendered(source, messages, marks=True)
    tokens, _, runs = trained(masker, messages)
    assert lexicon.decode(tokens, skip_special_tokens=False) == text
    assert [lexicon.decode(tokens[start:end], skip_special_tokens=False) for start, end in runs] == [
        text[start:end] for start, end in spans
    ]
    assert lexicon.decode([tokens[runs[-1][1] - 1]], skip_special_tokens=False) == (marks[-1] if marks else END)


ENDLESS = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive": "{% for x in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "doubled": "{% set n = namespace(s='a' * 99) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "tilde": "{% set n = namespace(s='a' * 99) %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "product": "{{ 'a' * 10 ** 12 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "padded": "{{ '%999999999d' % 1 }}",
}  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_would_never_end_is_refused(source):
    """By what it does, not by how long that takes here."""
    with pytest.raises(TemplateError, match=r"it takes more than|it makes more than"):
        ChatTemplate("the test", source, {}).text([{"role": "user", "content": "Why?"}])
