"""Which tokens of a conversation are trained, proved on every sample rather than guessed.

What generation begins from is the template's text of the messages before an answer: everything up to there is prompt,
everything behind it up to the stop token is the model's to write. A template with generation marks says the same
itself, and is held against it. Where a text goes on otherwise than its prompt, where no stop token closes an answer or
where marks leave it out, the sample is refused.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
from tokenizers import Encoding, Tokenizer

from meshwright.data.chat import ChatTemplate, Span, TemplateError
from meshwright.data.conversation import REPAIR, Conversation, quoted
from meshwright.data.tokenize import WORD, Words, words_of
from meshwright.spec.problem import InputError, mistake

TrainOn = Literal["assistant", "completion", "all", "last"]
APART = "\ufdd2"  # set into a special token that somebody wrote as text, so that it stays text
OTHER = "\ufdd3"  # stands for an answer, to see what a template writes behind one
HELD = 8  # samples of each order of roles whose generation marks are held against prompts
WRITTEN = frozenset(("content", "instruction", "input", "thinking", "reasoning_content"))  # of a message
COMPARED = 32  # samples that are tokenised by words and as a whole, and must be the same
TAIL = 256  # characters between a special token and an answer that are tokenised by themselves for every sample
OTHERWISE = "use another template (data.template), or one with {% generation %} marks"


@dataclass(frozen=True, slots=True)
class MaskedSample:
    """A conversation as tokens, and which of them are trained."""

    tokens: np.ndarray
    mask: np.ndarray  # uint8, 1: the token is a target
    place: str


@dataclass(frozen=True, slots=True)
class _Text:
    """A conversation as text: what is trained of it, and where it is cut before it is tokenised."""

    of: Conversation
    text: str
    spans: list[Span]
    cuts: frozenset[int]


@dataclass
class Masker:
    """A template, a tokenizer and what is to be trained: conversations to masked tokens."""

    template: ChatTemplate
    tokenizer: Tokenizer
    train_on: TrainOn
    ends: frozenset[int] = frozenset()  # tokens that end a text, flagged as special or not
    stops: Counter[int] = field(default_factory=Counter)  # tokens that closed a trained answer
    notes: dict[str, str] = field(default_factory=dict)  # what should be known, by its kind
    _held: Counter[Any] = field(default_factory=Counter)
    _tails: dict[str, list[int]] = field(default_factory=dict)
    _long_tails: int = 0

    def __post_init__(self) -> None:
        # Without what it does behind tokenising, its offsets are those of the text, spaces included.
        description = msgspec.json.decode(self.tokenizer.to_str()) | {"post_processor": None}
        self.tokenizer = Tokenizer.from_str(msgspec.json.encode(description).decode())
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        for number in self.ends:
            if (text := self.tokenizer.id_to_token(number)) is not None:
                self.special.setdefault(text, number)
        self.special_ids = frozenset(self.special.values())
        self.added = {token.content: np.array(number, WORD).tobytes() for number, token in added.items()}
        self.added_pattern = _any_of(self.added)
        self.pattern = _any_of(self.special)
        self.words, self._compared = words_of(self.tokenizer, description), 0
        self.in_parts = not self._takes(str) and self._takes(_parts)

    def _takes(self, content: Callable[[str], Any]) -> bool:
        """Whether the template writes contents of some form."""
        turns = [{"role": role, "content": content(f"the {role}")} for role in ("user", "assistant")]
        try:
            return "the assistant" in self.template.text(turns)
        except TemplateError:
            return False

    @property
    def marks(self) -> str:
        return f"the generation marks of {self.template.name}"

    def samples(self, conversations: Iterable[Conversation]) -> Iterator[MaskedSample]:
        """Every conversation as tokens with its mask, in order."""
        return (self._encoded(self._text(each)) for each in conversations)

    def _text(self, chat: Conversation) -> _Text:
        """The text of a conversation, and what of it is trained."""
        chat = self._shaped(chat)
        try:
            found = _without_marks(self._marked(chat) if self.template.is_marked else self._prefixed(chat))
            self._complete(chat, found)
        except TemplateError as error:
            what = f"{chat.place}: the chat template of {self.template.name} refuses the sample: {error}"
            raise mistake(what, f"{REPAIR}, or {OTHERWISE}") from None
        return found

    def _complete(self, chat: Conversation, found: _Text) -> None:
        """Every trained answer must be in what is trained of the text: its lines, its calls, and its reasoning."""
        texts, chosen = [found.text[start:end] for start, end in found.spans], self._chosen(chat)
        if self.train_on == "all" or len(texts) != len(chosen):  # marks that part an answer
            texts = ["".join(texts)] * len(chosen)
        for number, trained in zip(chosen, texts, strict=True):
            message = found.of.messages[number]
            lost = _lost(_said(message["content"]).replace(APART, ""), trained) or _lost_call(message, trained)
            lost = lost or self._lost_reasoning(chat, message, number, trained)
            if lost:
                what = f"{chat.place}: the chat template of {self.template.name} leaves out {quoted(lost)}"
                last = "; where only earlier answers lose something, data.train_on = last will do"
                is_last = number == chat.answers[-1]
                raise mistake(f"{what} of turn {number + 1}", f"{REPAIR}, or {OTHERWISE}{'' if is_last else last}")

    def _lost_reasoning(self, chat: Conversation, message: Mapping[str, Any], number: int, trained: str) -> str:
        """What is missing of the reasoning of an answer that is past; a template that writes none at all is told of."""
        reasoning = message.get("reasoning_content")
        lost = _lost(reasoning.replace(APART, ""), trained) if isinstance(reasoning, str) else ""
        if not lost:
            return ""
        if lost in self.template.text(chat.messages[: number + 1], chat.tools):
            return lost
        self.notes.setdefault(
            "reasoning",
            f"the template of {self.template.name} writes no reasoning: that of answers as in {chat.place} "
            f"({quoted(lost)}) is not trained",
        )
        return ""

    def _shaped(self, chat: Conversation) -> Conversation:
        """The same as the template takes it, with special tokens that somebody wrote broken apart: text is no mark."""
        spelled = any(self.pattern.search(text) for message in chat.messages for text in _texts(message).values())
        if not spelled and not self.in_parts:
            return chat
        if spelled:
            self._spelled(chat)
        messages = []
        for message in chat.messages:
            apart = {name: self.pattern.sub(_apart, text) for name, text in _texts(message).items()}
            content = {"content": _parts(apart["content"])} if self.in_parts else {}
            messages.append(message | apart | content)
        return Conversation(chat.place, messages, chat.tools, chat.prompt)

    def _spelled(self, chat: Conversation) -> None:
        """Tell of a special token in what somebody says."""
        texts = (text for message in chat.messages for text in _texts(message).values())
        first = next(found for text in texts if (found := self.pattern.search(text)))
        self.notes.setdefault(
            "spelled",
            f"{chat.place} spells out {first[0]}, a special token: in what somebody says it stays text",
        )

    def _chosen(self, chat: Conversation) -> list[int]:
        """The answers that are trained."""
        answers = [number for number in chat.answers if chat.weight(number)]
        match self.train_on:
            case "last":
                return [number for number in answers if number == chat.answers[-1]]
            case "completion":
                return [number for number in answers if number >= chat.prompt]
            case _:
                return answers

    def _prompt(self, chat: Conversation, answer: int) -> str:
        return self.template.text(chat.messages[:answer], chat.tools, prompt=True)

    def _prefixed(self, chat: Conversation) -> _Text:
        """By prefixes: an answer is what the whole text has behind the text of all before it."""
        whole, chosen = self.template.text(chat.messages, chat.tools), self._chosen(chat)
        if self.train_on == "all":
            left_out = [number for number in chat.answers if not chat.weight(number)]
            spans = _others(len(whole), [self._answer(chat, whole, number) for number in left_out])
            for number in chosen[-1:]:
                self._answer(chat, whole, number)  # whose stop token is then trained
            return _Text(chat, whole, spans, frozenset())
        return _Text(chat, whole, [self._answer(chat, whole, number) for number in chosen], frozenset())

    def _answer(self, chat: Conversation, whole: str, number: int) -> Span:
        """Where one answer lies in the whole text, its stop token included."""
        prompt = self._prompt(chat, number)
        if not whole.startswith(prompt):
            at = common(whole, prompt)
            raise mistake(
                f"{chat.place}: by the chat template of {self.template.name} generation begins from "
                f"{quoted(prompt[max(at - 40, 0) :])}, and the text of the sample has "
                f"{quoted(whole[max(at - 40, 0) : at + 60])} there: prompt and answer cannot be told apart",
                f"{OTHERWISE}; where only earlier answers differ, data.train_on = last will do",
            )
        start = len(prompt)
        if number == len(chat.messages) - 1:
            return start, self._closed(chat, whole, start, len(whole))
        through = self.template.text(chat.messages[: number + 1], chat.tools)
        if whole.startswith(through):
            return start, self._closed(chat, whole, start, len(through))
        calls = bool(chat.messages[number].get("tool_calls")) and through.startswith(prompt)
        after = self._past_call(chat, whole, start, number, through) if calls else None
        after = after or self._past(chat, whole, start, number)
        if after is None:
            raise self._unstopped(chat, whole[start:])
        if self._opens(chat, number, after[0]):
            raise self._unstopped(chat, whole[start : after.start()])
        self._stopped(after[0])
        if through.startswith(prompt) and not through.startswith(whole[start : after.end()], start):
            self.notes.setdefault(
                "past",
                f"generation writes answers as that of turn {number + 1} of {chat.place} from "
                f"{quoted(through[start : start + 60])} on, and earlier ones are trained from "
                f"{quoted(whole[start : start + 60])} on (the template of {self.template.name} writes them so); "
                "data.train_on = last trains none of these",
            )
        return start, after.end()

    def _opens(self, chat: Conversation, number: int, found: str) -> bool:
        """Whether a token opens the model's own turns, and is no end of a text: behind an answer it opens the next."""
        before, prompt = self.template.text(chat.messages[:number], chat.tools), self._prompt(chat, number)
        return found in prompt[common(before, prompt) :] and self.special[found] not in self.ends

    def _past(self, chat: Conversation, whole: str, start: int, number: int) -> re.Match[str] | None:
        """What closes an answer that the template writes otherwise once it is past.

        What is the same behind another answer is not its.
        """
        other = self._with_other(chat, number)
        behind = common(whole[start:][::-1], other[::-1])
        after = self.pattern.search(whole, len(whole) - behind)
        if OTHER not in other or after is None or whole[len(whole) - behind : after.start()].strip():
            return None
        return after

    def _past_call(self, chat: Conversation, whole: str, start: int, number: int, through: str) -> re.Match[str] | None:
        """Of one that calls a tool: the first token before the next turn's words that closes it as a last one."""
        stop = self._closing(through, start, len(through))
        closing = self.pattern.finditer(whole, start, common(whole, self._with_other(chat, number + 1)))
        return next((found for found in closing if stop is not None and found[0] == stop[0]), None)

    def _with_other(self, chat: Conversation, number: int) -> str:
        """The text of a conversation in which one turn says something else."""
        others = [*chat.messages]
        others[number] = others[number] | {"content": _parts(OTHER) if self.in_parts else OTHER}
        return self.template.text(others, chat.tools)

    def _closed(self, chat: Conversation, whole: str, start: int, end: int) -> int:
        """The end of an answer's stop token."""
        stop = self._closing(whole, start, end)
        if stop is None:
            raise self._unstopped(chat, whole[start:end])
        self._stopped(stop[0])
        return stop.end()

    def _closing(self, whole: str, start: int, end: int) -> re.Match[str] | None:
        """Of the special tokens that nothing but white space follows, the first that ends a text, else the last."""
        closing, at = list[re.Match[str]](), start
        for found in self.pattern.finditer(whole, start, end):
            closing = [*closing, found] if not whole[at : found.start()].strip() else [found]
            at = found.end()
        if not closing or whole[at:end].strip():
            return None
        return next((found for found in closing if self.special[found[0]] in self.ends), closing[-1])

    def _stopped(self, stop: str) -> None:
        self.stops[self.special[stop]] += 1

    def _unstopped(self, chat: Conversation, answer: str) -> InputError:
        tail = answer if len(answer) < 80 else f"…{answer[-80:]}"
        return mistake(
            f"{chat.place}: by the chat template of {self.template.name} an answer ends as {quoted(tail)}, without a "
            f"special token of the tokenizer behind it: nothing would teach the model to stop",
            f"{OTHERWISE} whose answers end with one",
        )

    def _marked(self, chat: Conversation) -> _Text:
        """By generation marks, which are held against prompts."""
        whole, marked = self.template.marked(chat.messages, chat.tools)
        chosen = self._chosen(chat)
        plain = self.train_on != "all" and chosen == chat.answers
        shape = tuple((message["role"], "tool_calls" in message) for message in chat.messages)
        self._held[shape] += 1
        if plain and self._held[shape] > HELD and not self.notes.keys() & {"prompt", "marks"}:
            spans = marked
        else:
            begins = [self._begin(chat, whole, number) for number in chat.answers]
            by_answer = self._attributed(chat, whole, marked, begins)
            if self.train_on == "all":
                left_out = [span for number, each in by_answer.items() if number not in chosen for span in each]
                return _Text(chat, whole, _others(len(whole), left_out), frozenset())
            spans = [span for number in chosen for span in by_answer[number]]
        return _Text(chat, whole, self._all_closed(chat, whole, spans), frozenset())

    def _begin(self, chat: Conversation, whole: str, answer: int) -> int:
        """Where the text of a conversation parts from the prompt of an answer: what is before is given, not written."""
        prompt = self._prompt(chat, answer)
        if whole.startswith(prompt):
            return len(prompt)
        at = common(whole, prompt)
        self.notes.setdefault(
            "prompt",
            f"generation begins from {quoted(prompt[-60:])}, and answers as {chat.place} go on otherwise: "
            f"{quoted(whole[at : at + 40])} (the template of {self.template.name} writes them so)",
        )
        # The first letters of an answer may be those that the prompt has there: only marks are sure to be its.
        return max((found.end() for found in self.pattern.finditer(whole, 0, at)), default=0)

    def _attributed(
        self, chat: Conversation, whole: str, marked: Sequence[Span], begins: Sequence[int]
    ) -> dict[int, list[Span]]:
        """The marked spans of each answer. Marks around what the prompt gives are cut back to the answer."""
        found: dict[int, list[Span]] = {number: [] for number in chat.answers}
        for start, end in marked:
            place = bisect_left(begins, end) - 1  # the last answer that begins before
            if place < 0 or (place > 0 and start <= begins[place - 1]):
                what = f"{quoted(whole[start:end])}, which is no answer"
                raise mistake(f"{chat.place}: {self.marks} are around {what}", f"correct the marks, or {OTHERWISE}")
            if start < begins[place]:
                given = quoted(whole[start : begins[place]])
                self.notes.setdefault(
                    "marks",
                    f"{self.marks} are around {given} too, which the prompt gives: it is not trained",
                )
            found[chat.answers[place]].append((max(start, begins[place]), end))
        for number in (number for number, spans in found.items() if not spans):
            what = f"turn {number + 1}, {quoted(_said(chat.messages[number]['content']))}"
            raise mistake(f"{chat.place}: {self.marks} leave out {what}", f"correct the marks, or {OTHERWISE}")
        return found

    def _all_closed(self, chat: Conversation, whole: str, spans: list[Span]) -> list[Span]:
        """The spans without white space behind their stop tokens; the last of neighbours must have one."""
        closed = []
        for number, (start, end) in enumerate(spans):
            goes_on = number + 1 < len(spans) and not whole[end : spans[number + 1][0]].strip()
            if goes_on:
                closed.append((start, end))
                continue
            after = self.pattern.match(whole, end)
            if after is not None and not self._ends_special(whole, start, end):
                what = f"{chat.place}: {self.marks} end before {after[0]!r}: the stop token would never be trained"
                raise mistake(what, f"put the end of the marks behind it, or {OTHERWISE}")
            closed.append((start, self._closed(chat, whole, start, end)))
        return closed

    def _ends_special(self, whole: str, start: int, end: int) -> bool:
        return any(not whole[found.end() : end].strip() for found in self.pattern.finditer(whole, start, end))

    def _encoded(self, each: _Text) -> MaskedSample:
        """A text as tokens; by words the first samples must have the tokens of the whole text."""
        quick = self._by_words(each, self.words) if self.words is not None and not each.cuts else None
        if quick is None or self._compared < COMPARED:
            return self._agreed(quick, self._whole(each))
        return quick

    def _agreed(self, quick: MaskedSample | None, whole: MaskedSample) -> MaskedSample:
        """The sample as the tokenizer makes it of the whole text. Words that would make another are not used again."""
        self._compared += quick is not None
        if quick is not None and not (
            np.array_equal(quick.tokens, whole.tokens) and np.array_equal(quick.mask, whole.mask)
        ):
            self.words = None
        return whole

    def _by_words(self, each: _Text, words: Words) -> MaskedSample | None:
        """A text tokenised word by word between its marks, and apart from where an answer begins."""
        text, parts, count, at = each.text, list[bytes](), 0, 0
        found, starts = {0: 0}, iter(sorted({start for start, _ in each.spans}))
        start = next(starts, None)
        for mark in (*self.added_pattern.finditer(text), None):
            stop = len(text) if mark is None else mark.start()
            while start is not None and start < stop:
                if at < start:
                    parts.append(words.encode(text[at:start]))
                    count += len(parts[-1]) // WORD.itemsize
                    at = start
                found[start] = count
                start = next(starts, None)
            if at < stop:
                parts.append(words.encode(text[at:stop]))
                count += len(parts[-1]) // WORD.itemsize
            found[stop] = count
            if mark is not None:
                parts.append(self.added[mark[0]])
                count, at = count + 1, mark.end()
                found[at] = count
        bounds = [(found[start], found[end]) for start, end in each.spans if end in found and start in found]
        tokens = np.frombuffer(b"".join(parts), WORD).astype(np.int64)
        return self._sample(each, tokens, bounds) if len(bounds) == len(each.spans) else None

    def _whole(self, each: _Text) -> MaskedSample:
        encoding = self.tokenizer.encode(each.text, add_special_tokens=False)
        pieces = [(0, encoding)] if not each.cuts else self._pieces(each, each.cuts)
        bounds = self._bounds(each, pieces)
        if bounds is None:  # the prompt would be tokenised otherwise: then they are apart
            pieces = self._pieces(each, each.cuts | {start for start, _ in each.spans})
            bounds = self._bounds(each, pieces)
        if bounds is None:
            what = f"{each.of.place}: a token lies across an end of {quoted(_spanned(each))}"
            raise mistake(what, f"{REPAIR}, or {OTHERWISE}")
        tokens = np.concatenate([np.array(encoding.ids, np.int64) for _, encoding in pieces])
        return self._sample(each, tokens, bounds)

    def _sample(self, each: _Text, tokens: np.ndarray, bounds: list[Span]) -> MaskedSample:
        mask = np.zeros(len(tokens), np.uint8)
        for start, end in bounds:
            mask[start:end] = 1
        if bounds and self.train_on != "all" and tokens[bounds[-1][1] - 1] not in self.special_ids:
            raise self._unstopped(each.of, _spanned(each))
        return MaskedSample(tokens, mask, each.of.place)

    def _pieces(self, each: _Text, cuts: frozenset[int]) -> list[tuple[int, Encoding]]:
        """A text tokenised in pieces, which must say the same together."""
        at = [0, *sorted(cut for cut in cuts if 0 < cut < len(each.text)), len(each.text)]
        texts = [each.text[start:end] for start, end in pairwise(at)]
        found = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        tokens = [token for encoding in found for token in encoding.ids]
        whole = self.tokenizer.encode(each.text, add_special_tokens=False).ids
        if self.tokenizer.decode(tokens, skip_special_tokens=False) != self.tokenizer.decode(
            whole, skip_special_tokens=False
        ):
            what = f"{each.of.place}: the tokenizer cannot begin {quoted(_spanned(each))} with a token of its own"
            raise mistake(what, f"{REPAIR}, or {OTHERWISE}")
        return list(zip(at, found, strict=False))

    def _bounds(self, each: _Text, pieces: list[tuple[int, Encoding]]) -> list[Span] | None:
        """The tokens of every span; None where one lies across a span's end, or the prompt has others by itself."""
        found = []
        for start, end in each.spans:
            first, last = _token_at(pieces, start), _token_at(pieces, end)
            if first is None or last is None or not self._is_prompt(each, pieces, start, first):
                return None
            found.append((first, last))
        return found

    def _is_prompt(self, each: _Text, pieces: list[tuple[int, Encoding]], start: int, first: int) -> bool:
        """Whether what precedes an answer has the tokens that it has as a prompt, without the answer behind it."""
        if len(pieces) > 1 or start == 0:
            return True  # by itself already, or nothing is before it
        encoding = pieces[0][1]
        ids, at = encoding.ids, first - 1
        while at > 0 and ids[at] not in self.special_ids:
            at -= 1
        began = encoding.token_to_chars(at)
        tail = each.text[began[0] if began and at else 0 : start]
        if len(tail) > TAIL:
            self._long_tails += 1
            if self._long_tails > 100:
                return True
        known = self._tails.get(tail)
        if known is None:
            known = self.tokenizer.encode(tail, add_special_tokens=False).ids
            if len(tail) <= TAIL and len(self._tails) < 10_000:
                self._tails[tail] = known
        return known == ids[at:first]


def truncated(sample: MaskedSample, limit: int, side: str, begin: int | None) -> MaskedSample:
    """At most so many tokens, cut between two of them. On the left a token that begins all texts stays."""
    length = len(sample.tokens)
    if length <= limit:
        return sample
    kept = np.arange(limit) if side == "right" else np.arange(length - limit, length)
    if side == "left" and sample.tokens[0] == begin:
        kept[0] = 0
    return MaskedSample(sample.tokens[kept], sample.mask[kept], sample.place)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of some texts at a place."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def common(one: str, other: str) -> int:
    """How many characters two texts begin alike with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _parts(text: str) -> list[dict[str, str]]:
    """A content as templates of models that see and hear take it."""
    return [{"type": "text", "text": text}]


def _texts(message: Mapping[str, Any]) -> dict[str, str]:
    """What somebody wrote in a message."""
    return {name: text for name, text in message.items() if name in WRITTEN and isinstance(text, str)}


def _said(content: Any) -> str:
    return content if isinstance(content, str) else content[0]["text"]


def _lost(said: str, trained: str) -> str:
    """The last line of what somebody says that is not in what is trained."""
    if said.strip() in trained:
        return ""
    lines = (line.strip() for line in reversed(said.split("\n")))
    return next((line for line in lines if line not in trained), "")


def _lost_call(message: Mapping[str, Any], trained: str) -> str:
    """The name of a function that an answer calls and that is not in what is trained."""
    calls = message.get("tool_calls")
    calls = [call.get("function", call) for call in calls] if isinstance(calls, list) else []
    names = (str(call.get("name", "")) for call in calls if isinstance(call, dict))
    return next((name for name in names if name not in trained), "")


def _apart(found: re.Match[str]) -> str:
    return found[0][:1] + APART + found[0][1:]


def _token_at(pieces: list[tuple[int, Encoding]], at: int) -> int | None:
    """The first token of a place in a text; None where a token lies across it."""
    before = 0
    for number, (start, encoding) in enumerate(pieces):
        end = pieces[number + 1][0] if number + 1 < len(pieces) else None
        if at == start:
            return before
        if end is None or at < end:
            return _token_within(encoding, at - start, before)
        before += len(encoding)
    return before


def _token_within(encoding: Encoding, at: int, before: int) -> int | None:
    last = encoding.token_to_chars(len(encoding) - 1) if len(encoding) else None
    while last is not None and at < last[1]:
        token = encoding.char_to_token(at)
        if token is not None:
            chars = encoding.token_to_chars(token)
            return before + token if chars is not None and chars[0] >= at else None
        at += 1  # a character that the tokenizer leaves out
    return before + len(encoding)


def _others(length: int, left_out: list[Span]) -> list[Span]:
    """What is not left out of a text."""
    found, at = [], 0
    for start, end in sorted(left_out):
        found.append((at, start))
        at = end
    return [span for span in [*found, (at, length)] if span[0] < span[1]]


def _spanned(each: _Text) -> str:
    return each.text[each.spans[0][0] : each.spans[0][1]] if each.spans else each.text


def _without_marks(each: _Text) -> _Text:
    """The text without the characters that break special tokens apart, which become cuts."""
    if APART not in each.text:
        return each
    places = [found.start() for found in re.finditer(APART, each.text)]

    def moved(at: int) -> int:
        return at - sum(place < at for place in places)

    spans = [(moved(start), moved(end)) for start, end in each.spans]
    cuts = frozenset(moved(place) for place in places)
    return _Text(each.of, each.text.replace(APART, ""), spans, cuts)
