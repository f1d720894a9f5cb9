"""Text tokenised word by word has the tokens of the tokenizer, whatever the text."""

import json

import numpy as np
import pytest
from chats import byte_level, sentence_piece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from meshwright.data.tokenize import WORD, Words, words_of

# As Llama 3 and Qwen cut, and as o200k does.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = st.text(st.sampled_from("aBzI's.?!_-/09 \t\n\r\f\vé’漢²😀𝐀ſ\x1c\u0378e\u0301"), max_size=80) | st.text(
    max_size=40
)


def words(tokenizer: Tokenizer) -> Words | None:
    return words_of(tokenizer, json.loads(tokenizer.to_str()))


def cut_by(expression: str) -> Tokenizer:
    made = byte_level()
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return made


TOKENIZERS = {"gpt2": byte_level(), "llama3": cut_by(LLAMA3), "o200k": cut_by(O200K)}
WORDS = {name: words(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, derandomize=True, max_examples=150)
@given(text=TEXT)
def test_words_have_the_tokens_of_the_whole_text(name, text):
    own = WORDS[name]
    assert own is not None
    found = np.frombuffer(own.encode(text), WORD).tolist()
    assert found == TOKENIZERS[name].encode(text, add_special_tokens=False).ids


def test_tokenizers_that_do_more_than_to_cut_have_no_words():
    spaced = byte_level()
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert words(spaced) is None
    assert words(sentence_piece()) is None
    assert words(cut_by(r"\p{Greek}+|\s+")) is None
