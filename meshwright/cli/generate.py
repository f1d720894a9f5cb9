"""`meshwright generate`: text from the weights of a run, a checkpoint or a Hugging Face folder."""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.cli import options as words
from meshwright.runtime.files import printable
from meshwright.spec.problem import mistake

if TYPE_CHECKING:  # torch is imported when the words are known to be right
    import torch

    from meshwright.checkpoint.model_folder import ModelFolder
    from meshwright.models.decoder import Decoder

TOKENS = 128  # new ones, if nobody says and there is room
TEMPERATURE = 0.8  # that of a run's own sample


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What was written after one prompt."""

    prompt: str
    text: str
    tokens: tuple[int, ...]  # the end token included
    prompt_tokens: int
    finish: str  # "stop": with an end token; "length": after as many as were asked for


def add_generate(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument("model", metavar="MODEL", help="a run (RUN, RUN@STEP), a model folder, or a Hugging Face folder")
    verb.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="what to continue; may be repeated")
    verb.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line")
    verb.add_argument("--tokens", type=words.count, help=f"new tokens at most (default: {TOKENS}, or what fits)")
    verb.add_argument("--greedy", action="store_true", help="always the likeliest token")
    verb.add_argument("--temperature", type=float, help=f"of the draws (default: {TEMPERATURE}; 0: greedy)")
    verb.add_argument("--top-k", type=words.count, help="draw from the k likeliest tokens")
    verb.add_argument("--top-p", type=float, help="draw from the likeliest tokens that together have this probability")
    verb.add_argument("--seed", type=int, default=1, help="of the draws (default: 1); every prompt has them to itself")
    verb.add_argument("--chat", action="store_true", help="talk through the model's chat template, one line a turn")
    words.add_device(verb)


def generate(options: argparse.Namespace) -> int:
    """Continue prompts, or talk."""
    prompts = _prompts(options)
    _check(options)
    return words.with_weights(options, partial(_talk if options.chat else _continue, options, prompts))


def _prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of the words, then those of a file."""
    if "" in options.prompt:
        raise mistake("--prompt is empty", "give a text to continue")
    found = list(options.prompt)
    if options.prompts is not None:
        try:
            lines = options.prompts.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise mistake(f"{options.prompts} cannot be read: {why}", "give a text file, a prompt a line") from None
        if "" in lines:
            raise mistake(f"line {lines.index('') + 1} of {options.prompts} is empty", "remove it, or fill it in")
        found += lines
    if not found and not options.chat:
        raise mistake("there is no prompt", "add --prompt TEXT, or --prompts FILE, or --chat")
    return found


def _check(options: argparse.Namespace) -> None:
    given = [name for name in ("temperature", "top_k", "top_p") if getattr(options, name) is not None]
    if options.greedy and given:
        flag = f"--{given[0].replace('_', '-')}"
        raise mistake(f"{flag} cannot be combined with --greedy", "leave one of them out")
    if options.temperature is not None and not 0 <= options.temperature < math.inf:
        raise mistake(f"--temperature {options.temperature:g} is not a temperature", "use 0 (greedy) or more")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise mistake(f"--top-p {options.top_p:g} is not a probability", "use more than 0 and at most 1")
    if not 0 <= options.seed < 2**63:
        raise mistake(f"--seed {options.seed} is not a seed", f"use 0 to {2**63 - 1}")


class TextWriter:
    """A model with its tokenizer and the words of the verb: writes after prompts."""

    def __init__(self, options: argparse.Namespace, folder: "ModelFolder") -> None:
        from meshwright.data.chat import end_tokens
        from meshwright.models.generate import Sampling
        from meshwright.train.sample import load_tokenizer

        self.arch, self.asked = folder.arch, options.tokens
        self.tokenizer = load_tokenizer(folder)
        self.ends = end_tokens(folder.texts, self.tokenizer)
        temperature = TEMPERATURE if options.temperature is None else options.temperature
        self.sampling = Sampling(
            temperature=0.0 if options.greedy else temperature,
            top_k=options.top_k or 0,
            top_p=1.0 if options.top_p is None else options.top_p,
            seed=options.seed,
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a prompt; `special`: with those that its tokenizer puts around a text."""
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of the command line, or of a pipe, that are no characters
            raise mistake("a prompt is not UTF-8 text", "give it in UTF-8") from None
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def count(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many tokens to write after prompts; a model has only so many positions."""
        longest, positions = max(map(len, prompts)), self.arch.context
        if min(map(len, prompts)) == 0:
            raise mistake("a prompt has no tokens", "give a text to continue")
        if longest >= positions:
            what = f"the prompt has {longest} tokens, and the model has {positions} positions"
            raise mistake(what, f"use a prompt of at most {positions - 1} tokens")
        if longest + (self.asked or 0) > positions:
            what = f"a prompt of {longest} tokens and --tokens {self.asked} exceed the model's {positions} positions"
            raise mistake(what, f"use at most --tokens {positions - longest}")
        return self.asked or min(TOKENS, positions - longest)

    def text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """The text of tokens behind a prompt; some tokenizers drop a space that begins a text, so not by themselves."""
        before, whole = self.tokenizer.decode(list(prompt)), self.tokenizer.decode([*prompt, *tokens])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(list(tokens))

    def completions(
        self, decoder: "Decoder", texts: Sequence[str], prompts: Sequence[Sequence[int]], *, streams: bool
    ) -> list[Completion]:
        """What is written after prompts; of a single one it can be shown while it is written."""
        from meshwright.train.sample import written

        done: list[list[int]] = []
        shown = 0
        for done in written(decoder, prompts, self.count(prompts), self.sampling, self.ends):
            # A character may take several tokens, and is a replacement character until the last of them.
            if streams and not (text := self.text(prompts[0], done[0])).endswith("\ufffd"):
                print(printable(text[shown:]), end="", flush=True)
                shown = len(text)
        found = [
            Completion(
                prompt=text,
                text=self.text(prompt, tokens),
                tokens=tuple(tokens),
                prompt_tokens=len(prompt),
                finish="stop" if tokens[-1] in self.ends else "length",
            )
            for text, prompt, tokens in zip(texts, prompts, done, strict=True)
        ]
        if streams:
            print(printable(found[0].text[shown:]))
        return found


def _continue(options: argparse.Namespace, prompts: list[str], folder: "ModelFolder", device: "torch.device") -> None:
    """Continue every prompt: as it is written on a terminal, at the end in a pipe."""
    from meshwright.train.sample import load_decoder

    writer = TextWriter(options, folder)
    tokens = [writer.encode(prompt) for prompt in prompts]
    writer.count(tokens)  # before weights are loaded
    decoder = load_decoder(folder, device, options.dtype)
    on_screen = sys.stdout.isatty() and not options.json
    streams = on_screen and len(prompts) == 1
    if streams:
        print(printable(prompts[0]), end="", flush=True)
    began = time.perf_counter()
    found = writer.completions(decoder, prompts, tokens, streams=streams)
    seconds = time.perf_counter() - began
    if options.json:
        dtype = str(decoder.projection.dtype).removeprefix("torch.")
        record = {"model": options.model, "device": device.type, "dtype": dtype, "seconds": seconds}
        print(msgspec.json.encode({**record, "completions": found}).decode())
    elif not streams:
        escape = printable if on_screen else str
        for number, each in enumerate(found, 1):
            if len(found) > 1:
                print(f"=== {number} of {len(found)}")
            print(escape(each.prompt + each.text))


def _talk(options: argparse.Namespace, prompts: list[str], folder: "ModelFolder", device: "torch.device") -> None:
    """A conversation: what the user says comes from the words, else a line a turn from a terminal or a pipe."""
    from meshwright.data.chat import Message, prompt_of, template_of
    from meshwright.train.sample import load_decoder

    template_of(folder.texts)  # before weights are loaded
    writer, messages = TextWriter(options, folder), list[Message]()
    decoder = load_decoder(folder, device, options.dtype)
    streams = sys.stdout.isatty() and not options.json
    for turn in prompts or _turns():
        messages.append(Message("user", turn))
        tokens = writer.encode(prompt_of(folder.texts, messages), special=False)  # the template has written them
        (answer,) = writer.completions(decoder, [turn], [tokens], streams=streams)
        messages.append(Message("assistant", answer.text))
        if options.json:
            print(msgspec.json.encode(answer).decode(), flush=True)
        elif not streams:
            print(answer.text, flush=True)


def _turns() -> Iterator[str]:
    """What a person types, or the lines of a pipe, but for empty ones."""
    on_screen = sys.stdin.isatty()
    while True:
        try:
            line = input("> ") if on_screen else input()
        except EOFError:
            print(end="\n" if on_screen else "")  # behind the prompt that nobody has answered
            return
        if line.strip():
            yield line
