import pytest

from meshwright.spec import check, load
from meshwright.spec.check import InputError

WRONG = [
    (["arch.heads=7", "arch.kv_heads=7"], "does not divide into arch.heads"),
    (["arch.kv_heads=4"], "cannot share arch.kv_heads = 4 evenly"),
    (["arch.head_dim=31"], "rotary positions turn pairs"),
    (["arch.positions=learned", "sequence=512"], "longer than the 256 learned positions"),
    (["arch.experts=4", "arch.top_k=2"], "arch.expert_ffn is missing"),
    (["arch.experts=4", "arch.expert_ffn=8", "arch.top_k=5"], "cannot be chosen among"),
    (["arch.experts=4", "arch.expert_ffn=8", "arch.router=switch", "arch.top_k=1"], "needs arch.capacity"),
    (["arch.experts=4", "arch.expert_ffn=8", "arch.router=gshard", "arch.top_k=1", "arch.capacity=2.0"], "chooses 2"),
    (["plan.shard=2"], "shards nothing"),
    (["steps=0"], "is not a count"),
    (["seed=-1"], "is negative"),
    (["optim.beta2=1.0"], "out of range"),
    (["data.held_out=0.9"], "out of range"),
    (["data.pack=documents", "data.mask_documents=true"], "has no meaning"),
    (['data.mix=[{source="a", weight=0.0}]'], "is not positive"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_wrong_pair_is_told_with_a_remedy(words, sentence):
    with pytest.raises(InputError) as caught:
        load.load(None, words, default_ranks=2)
    told = [problem for problem in caught.value.problems if sentence in problem.text]
    assert told, str(caught.value)
    assert all(problem.remedy for problem in told)


def test_expert_choice_is_allowed_with_its_warning():
    words = ["arch.experts=4", "arch.expert_ffn=8", "arch.router=expert_choice", "arch.capacity=2.0"]
    (warning,) = check.warnings(load.load(None, words).run)
    assert "depends on later tokens" in warning
    assert check.warnings(load.load(None).run) == []
