import numpy as np
import pytest
from tokenizers import Tokenizer, models

from meshwright.data import tokenize
from meshwright.data.tokenize import END, TokenizerInfo, encode, end_token, entries, pieces, train
from meshwright.spec.problem import InputError

TEXT = "".join(
    f"@named\ndef function_{number}(argument):\n    return argument + {number}\n\n\n" for number in range(200)
)


def lexicon(tmp_path, texts: list[str], vocab: int = 320) -> TokenizerInfo:
    tokenizer = train(texts, vocab)
    return TokenizerInfo(tmp_path / "tokenizer.json", tokenizer, end_token(tokenizer, None))


def silent(_: str) -> None: ...


def encoded(lexicon: TokenizerInfo, documents: list[str]) -> list[list[int]]:
    return [array.tolist() for array in encode(lexicon, documents, 0, silent)]


@pytest.mark.parametrize("vocab", [257, 300, 512])
def test_a_trained_vocabulary_is_never_larger_than_asked(vocab):
    assert entries(train([TEXT], vocab)) == vocab


def test_training_is_repeatable():
    assert train([TEXT], 320).to_str() == train(iter([TEXT]), 320).to_str()


@pytest.mark.parametrize("text", [TEXT, "Grüße, 世界 🌍\r\n\t\x00 end", " leading and trailing "])
def test_any_text_survives_a_round_trip(tmp_path, text):
    made = lexicon(tmp_path, [TEXT])
    (tokens,) = encoded(made, [text])
    assert tokens[-1] == made.end_token
    assert made.tokenizer.decode(tokens[:-1]) == text


def test_text_cannot_forge_the_end_of_a_document(tmp_path):
    made = lexicon(tmp_path, [TEXT])
    (tokens,) = encoded(made, [f"one{END}two"])
    assert tokens.count(made.end_token) == 1
    assert made.tokenizer.decode(tokens[:-1]) == f"one{END}two"


def test_a_long_document_is_encoded_in_pieces_with_the_same_tokens(tmp_path, monkeypatch):
    made = lexicon(tmp_path, [TEXT])
    whole = encoded(made, [TEXT, "short"])
    monkeypatch.setattr(tokenize, "PIECE", 500)
    monkeypatch.setattr(tokenize, "BATCH", 1200)
    assert len(list(pieces(TEXT))) > 10
    assert encoded(made, [TEXT, "short"]) == whole


def test_pieces_put_together_are_the_document(monkeypatch):
    monkeypatch.setattr(tokenize, "PIECE", 50)
    for text in (TEXT[:900], "x" * 120, "\n" * 120, "", "y" * 50):
        parts = list(pieces(text))
        assert "".join(part for part, _ in parts) == text
        assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
        assert max(len(part) for part, _ in parts) <= 50


def test_progress_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "SAY_SECONDS", -1.0)
    said: list[str] = []
    list(encode(lexicon(tmp_path, [TEXT]), [TEXT], 2_000_000, said.append))
    assert said == ["tokenising 0 of 2 MB"]


def word_tokenizer(*words: str) -> Tokenizer:
    return Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))


@pytest.mark.parametrize(("words", "token"), [(("a", "</s>"), 1), (("<eos>", "</s>"), 1), (("[SEP]", "b"), 0)])
def test_the_end_token_is_the_first_usual_one(words, token):
    assert end_token(word_tokenizer(*words), None) == token


def test_a_stated_end_token_wins():
    assert end_token(word_tokenizer("a", "</s>"), 0) == 0


def test_a_tokenizer_without_an_end_token_asks_for_one():
    with pytest.raises(InputError, match=r"set data\.end_token"):
        end_token(word_tokenizer("a", "b"), None)


def test_holes_in_a_vocabulary_count():
    assert entries(Tokenizer(models.WordLevel({"a": 0, "b": 900}, unk_token="a"))) == 901


def test_a_tokenizer_is_found_as_a_file_or_in_a_folder(tmp_path):
    train([TEXT], 300).save(str(tmp_path / "tokenizer.json"))
    assert tokenize.path(str(tmp_path)) == tokenize.path(str(tmp_path / "tokenizer.json"))
    assert entries(tokenize.load(tokenize.path(str(tmp_path)))) == 300


def test_a_tokenizer_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(InputError, match="there is no tokenizer at"):
        tokenize.path(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"is not a tokenizer\.json"):
        tokenize.load(tokenize.path(str(tmp_path)))


def test_wide_vocabularies_get_wide_tokens(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    (tokens,) = encode(TokenizerInfo(tmp_path, tokenizer, 0), ["b"], 0, silent)
    assert tokens.dtype == np.dtype("<u4")
    assert tokens.tolist() == [70_000, 0]
