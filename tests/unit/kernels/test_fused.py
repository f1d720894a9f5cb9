"""Where kernels go, and the one line that says which of them run or why none do."""

import pytest
import torch
from torch import nn

from meshwright.config import presets
from meshwright.kernels import dispatch
from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.decoder import Decoder
from meshwright.models.layers import weighted_loss
from meshwright.parallel import fused_kernels
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import DECODER
from meshwright.parallel.tensor import vocab_parallel_loss
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

pytestmark = pytest.mark.skipif(dispatch.INTERPRETED, reason="says what a CPU does without the interpreter")
CPU = torch.device("cpu")


def mesh() -> Mesh:
    place = dict.fromkeys(("pp", "replicate", "shard", "cp", "tp"), 0)
    nobody = None  # nothing here speaks to other ranks
    return Mesh(dense=nobody, expert=nobody, fine=nobody, device=CPU, rank=0, world=1, data_rank=0, place=place)


def wrapped(name: str = "tiny", **words) -> nn.Module:
    with torch.device("meta"):
        model = Decoder(presets.preset(name))
    return fused_kernels.wrap(model, Plan(microbatch=1, **words), mesh(), DECODER)


def test_one_rank_on_a_cpu_keeps_its_arithmetic():
    model = wrapped()
    assert model.loss is weighted_loss
    assert not fused_kernels.has_loss(model)


def test_a_cut_vocabulary_is_lost_in_chunks_on_a_cpu_too():
    model = wrapped(tp=2)
    assert model.loss.func is vocab_parallel_loss
    assert model.loss.keywords == {"kernels": "plain"}
    assert fused_kernels.has_loss(model)
    assert wrapped("tiny-gemma2", tp=2).loss.keywords == {"kernels": "plain", "softcap": 3.0}


@pytest.mark.parametrize("words", [{"tp": 2, "kernels": "plain"}, {"tp": 2, "pp": 2, "grad_accum": 2}], ids=str)
def test_all_logits_exist_where_plain_kernels_are_asked_for_and_in_a_pipeline(words):
    assert wrapped(**words).loss is weighted_loss


def test_kernels_that_cannot_run_are_refused_where_they_were_demanded():
    with pytest.raises(InputError, match="fused kernels need a GPU"):
        wrapped(kernels="fused")


def line(one_pass: bool = False, **words) -> str:
    return fused_kernels.chosen(Plan(microbatch=1, **words), CPU, [wrapped(tp=2)], one_pass)


def test_the_line_says_why_there_are_none():
    assert line() == "plain PyTorch (fused kernels need a GPU)"
    assert line(kernels="plain") == 'plain PyTorch (plan.kernels is "plain")'


@pytest.fixture
def able(monkeypatch):
    """A machine whose trial succeeds."""
    monkeypatch.setattr(fused_kernels, "settle", lambda *about: dispatch.KernelChoice("fused"))


@pytest.mark.usefixtures("able")
def test_the_line_says_which_there_are():
    assert line(one_pass=True) == "fused: the loss with its projection, one-pass updates"
    plan = Plan(microbatch=1)
    assert fused_kernels.chosen(plan, CPU, [nn.Linear(2, 2)], one_pass=True) == "fused: one-pass updates"
    assert (
        fused_kernels.chosen(plan, CPU, [nn.Linear(2, 2)], one_pass=False)
        == "fused, but this plan has no place for any"
    )


def test_what_is_not_predicted_has_one_number():
    from meshwright.data import pack
    from meshwright.kernels import cross_entropy

    assert IGNORE == cross_entropy.IGNORE == pack.IGNORE
