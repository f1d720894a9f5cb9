import os

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from meshwright.spec.problem import InputError
from meshwright.train import rank
from meshwright.train.rank import Fact, differences

OLD = Fact(source="a", tokens=10, digest="x")


def test_data_that_changed_is_named_with_both_sizes():
    (problem,) = differences([OLD, OLD], [OLD, Fact(source="a", tokens=4, digest="x")])
    assert "10 tokens then, 4 now" in problem.text
    assert differences([OLD], [OLD]) == []
    assert len(differences([OLD], [Fact(source="a", tokens=10, digest="y")])) == 1


def test_the_first_attempt_remembers_and_the_next_one_holds_to_it(tmp_path, monkeypatch):
    class Named:
        source = "a"

    class Data:
        sources = (Named,)

    class Init:
        folder = ""

    class Adapter:
        kind = "none"

    class Run:
        data = Data
        init = Init
        adapter = Adapter

    class Corpus:
        sources = (None,)
        tokenizer = tmp_path / "made.json"
        chats = ()

    Corpus.tokenizer.write_text(one := Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str())
    monkeypatch.setattr(rank, "fact", lambda source, tokens: OLD)
    rank.check(Run, Corpus, tmp_path, writes=False)
    assert not (tmp_path / rank.DATA).exists()
    assert rank.check(Run, Corpus, tmp_path, writes=True) == []
    assert rank.check(Run, Corpus, tmp_path, writes=True) == []
    assert (tmp_path / "tokenizer.json").read_text() == one
    monkeypatch.setattr(rank, "fact", lambda source, tokens: Fact(source="a", tokens=9, digest="x"))
    with pytest.raises(InputError):
        rank.check(Run, Corpus, tmp_path, writes=True)
    (tmp_path / rank.DATA).rename(tmp_path / "data.1.json")  # as --extend does
    told = ["extended: a has changed since the run began (10 tokens then, 9 now)"]
    assert rank.check(Run, Corpus, tmp_path, writes=True) == told
    assert rank.check(Run, Corpus, tmp_path, writes=True) == []
    (tmp_path / rank.DATA).rename(tmp_path / "data.2.json")
    os.utime(tmp_path / "data.1.json", (2**33, 2**33))  # written before the clock was set back
    assert rank.check(Run, Corpus, tmp_path, writes=True) == []
    Corpus.tokenizer.write_text("another")
    with pytest.raises(InputError, match=r"set data\.tokenizer="):
        rank.check(Run, Corpus, tmp_path, writes=True)
    (tmp_path / "tokenizer.json").write_text(one[:20])  # of a disk that was full, say
    with pytest.raises(InputError, match=r"it is damaged; restore it from a copy"):
        rank.check(Run, Corpus, tmp_path, writes=True)
    for damaged in (b"", b"[{", b"{}", b'[{"source": "\xff"}]'):
        (tmp_path / rank.DATA).write_bytes(damaged)
        with pytest.raises(InputError, match=r"data\.json, which says what data the run began with, is damaged"):
            rank.check(Run, Corpus, tmp_path, writes=True)
