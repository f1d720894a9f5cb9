import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.search.best_first import search
from meshwright.search.sizes import largest_microbatch, largest_model, largest_sequence
from meshwright.spec.params import count
from meshwright.spec.problem import InputError
from meshwright.spec.tuning import Adapter, Tuning
from search.questions import question

ASKED = question("llama3-8b", "8xh100", sequence=4096, batch=32)


def test_the_largest_model_fits_and_the_next_does_not():
    found = largest_model(question("tiny", "1xh100", sequence=512, batch=4))
    assert found is not None
    assert isinstance(found.next_value, str)
    assert count(preset(str(found.value))) <= count(preset(found.next_value))
    assert found.found.fit.fits


def test_the_largest_microbatch_is_to_the_sequence():
    found = largest_microbatch(ASKED)
    assert found is not None
    assert found.found.plan.microbatch == found.value
    assert found.found.plan.tp == found.found.plan.pp == found.found.plan.cp == 1


def test_a_longer_sequence_than_the_largest_does_not_fit():
    asked = question("llama3.2-1b", "1xh100", sequence=1024, batch=1)
    found = largest_sequence(asked)
    assert found is not None
    assert search(msgspec.structs.replace(asked, sequence=int(found.value))).found
    assert not search(msgspec.structs.replace(asked, sequence=int(found.next_value or 0))).found


def test_learned_positions_end_where_their_table_ends():
    found = largest_sequence(question("gpt2", "8xh100", sequence=1024, batch=8))
    assert found is not None
    assert (found.value, found.next_value) == (1024, None)
    assert "positions" in found.end


def test_the_next_microbatch_does_not_fit():
    asked = question("llama3-8b", "8xh100", sequence=4096, batch=32, recompute="none", activation_offload=False)
    found = largest_microbatch(asked)
    assert found is not None
    assert found.next_value == int(found.value) + 1


def test_microbatches_are_as_many_as_are_fixed():
    found = largest_microbatch(question("gpt2-xl", "8xh100", sequence=1024, batch=8, pp=2, grad_accum=4))
    assert found is not None
    assert (found.found.plan.pp, found.found.plan.grad_accum) == (2, 4)


def test_a_short_table_of_positions_is_used_whole():
    asked = question("gpt2", "8xh100", batch=8)
    short = msgspec.structs.replace(asked, arch=msgspec.structs.replace(asked.arch, context=512))
    found = largest_sequence(short)
    assert found is not None
    assert (found.value, found.next_value) == (512, None)
    assert "positions" in found.end


@pytest.mark.parametrize("fixed", [{"tp": 3}, {"tp": 0}, {"pp": 2, "schedule": "dualpipev", "grad_accum": 1}])
def test_what_no_microbatch_is_legal_for_is_refused(fixed):
    with pytest.raises(InputError):
        largest_microbatch(question("llama3-8b", "8xh100", **fixed))


def test_a_model_that_what_is_fixed_does_not_suit_is_not_called_too_large():
    found = largest_model(question("tiny", "8xh100", sequence=512, batch=8, tp=8))
    assert found is not None
    assert preset(str(found.value)).kv_heads % 8 == 0
    assert found.next_value is None or preset(str(found.next_value)).kv_heads % 8 == 0


def test_the_largest_model_with_an_adapter_is_larger_than_without(monkeypatch):
    monkeypatch.setattr("meshwright.search.sizes.presets.preset_names", lambda: ("llama3-8b", "gpt2-xl", "gpt2"))
    on_card = {"optimizer_offload": "none", "cpu_offload": False}
    plain = question("gpt2", "1xrtx4090", 1024, 1).with_fixed(on_card)
    tuned = msgspec.structs.replace(plain.arch, tuning=Tuning(adapter=Adapter(kind="lora")))
    alone, adapted = largest_model(plain), largest_model(msgspec.structs.replace(plain, arch=tuned))
    assert alone is not None
    assert adapted is not None
    assert (alone.value, adapted.value) == ("gpt2", "llama3-8b")


TINY = ("tiny", "tiny-moe", "tiny-deepseek-v2")  # of which the dense one is the smallest


@pytest.mark.parametrize(
    ("tuning", "largest"),
    [
        (Tuning(adapter=Adapter(kind="lora"), compared=True), "tiny-moe"),
        (Tuning(adapter=Adapter(kind="lora", dropout=0.1)), "tiny"),
        (Tuning(adapter=Adapter(kind="lora", targets=("attn.k", "mlp.gate"))), "tiny"),
    ],
)
def test_the_largest_model_is_one_that_can_be_tuned_as_asked(monkeypatch, tuning, largest):
    monkeypatch.setattr("meshwright.search.sizes.presets.preset_names", lambda: TINY)
    asked = question("tiny", "1xh100", sequence=512, batch=4)
    found = largest_model(msgspec.structs.replace(asked, arch=msgspec.structs.replace(asked.arch, tuning=tuning)))
    assert found is not None
    assert (found.value, found.next_value) == (largest, None)
