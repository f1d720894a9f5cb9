import pytest

from meshwright.spec.check import InputError
from meshwright.train import same_data
from meshwright.train.same_data import Fact, differences

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

    class Run:
        data = Data

    class Corpus:
        sources = (None,)

    monkeypatch.setattr(same_data, "fact", lambda source, tokens: OLD)
    same_data.check(Run, Corpus, tmp_path, writes=False)
    assert not (tmp_path / same_data.FILE).exists()
    same_data.check(Run, Corpus, tmp_path, writes=True)
    same_data.check(Run, Corpus, tmp_path, writes=True)
    monkeypatch.setattr(same_data, "fact", lambda source, tokens: Fact(source="a", tokens=9, digest="x"))
    with pytest.raises(InputError):
        same_data.check(Run, Corpus, tmp_path, writes=True)
