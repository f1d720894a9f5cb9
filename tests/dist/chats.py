"""Conversations, and real tokenizers made on the spot, for tests of chat data."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = ["What is two and two? It is four. Which colours are there? Red, green, blue. Be brief, please."] * 3
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# What special tokens of the field look like.
SPECIAL = re.compile(
    r"<[|｜][^|｜>\s'{}]*[|｜]>|</?s>|\[/?INST\]|<[a-z_]*(?:turn|utterance)[a-z_]*>|<\|[a-z_]+>|<[a-z_]+\|>"
)


def byte_level(marks: Iterable[str] = MARKS, begin: str = "") -> Tokenizer:
    """A byte-level BPE with these special tokens, one of which it may put before every text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)  # as many have it: offsets without their spaces
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    return _with_marks(made, marks, begin)


def sentence_piece(marks: Iterable[str] = MARKS, begin: str = "") -> Tokenizer:
    """A BPE as Llama 2 has it: spaces are letters, and one is put before a text; unknown bytes are tokens."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>", *bytes_], show_progress=False)
    )
    plain = json.loads(made.to_str()) | {"added_tokens": []}  # bytes are tokens like others
    return _with_marks(Tokenizer.from_str(json.dumps(plain)), marks, begin)


def _with_marks(made: Tokenizer, marks: Iterable[str], begin: str) -> Tokenizer:
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    if begin:
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
        )
    return made


def turns(*contents: str, system: str = "") -> list[dict[str, Any]]:
    """What user and assistant say in turn."""
    roles = ("user", "assistant") * len(contents)
    said = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return ([{"role": "system", "content": system}] if system else []) + said


def write_lines(file: Path, records: Iterable[Any]) -> Path:
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return file


def ragged(count: int) -> list[dict[str, Any]]:
    """Conversations of very different lengths."""
    said = [
        [f"What is {number} and {turn}? {'It ' * (turn % 3)}" for turn in range(2 + 2 * (number % 3))]
        for number in range(count)
    ]
    return [{"messages": turns(*each)} for each in said]
