"""The three answers: what is found by itself, what parts keep, what a plan asks for in vain."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from meshwright.config.presets import preset
from meshwright.models.decoder import Decoder
from meshwright.parallel.model_spec import (
    DECODER,
    Absent,
    ModelSpec,
    Stage,
    longest_list,
    resolved,
    sequential_stage,
    stage_of,
    unanswered,
    unmatched,
    with_weights,
)
from meshwright.spec.params import params
from meshwright.spec.plan import Plan

TINY = preset("tiny")


class Model(nn.Module):
    """Two lists, of which the longer holds the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(3, 4)
        self.short = nn.ModuleList([nn.Identity()])
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(5))})
        self.end = nn.Linear(4, 2)

    def forward(self, x):
        x = self.begin(x)
        for layer in self.body["layers"]:
            x = layer(x)
        return self.end(x)


def test_blocks_are_the_longest_list_under_their_names():
    model = Model()
    blocks = longest_list(model)
    assert list(blocks) == [f"body.layers.{layer}" for layer in range(5)]
    assert all(model.get_submodule(name) is block for name, block in blocks.items())


def test_a_model_without_a_list_has_no_blocks():
    assert longest_list(nn.Sequential(nn.Linear(2, 2))) == {}


def test_a_list_may_be_the_model():
    assert list(longest_list(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))) == ["0", "1"]


@given(cut=st.integers(1, 4))
@settings(max_examples=4, deadline=None, derandomize=True)
def test_parts_in_a_row_are_the_model_and_share_no_weight(cut):
    model, x = Model(), torch.randn(2, 3)
    stages = [Stage(range(cut), True, False), Stage(range(cut, 5), False, True)]
    parts = [sequential_stage(copy.deepcopy(model), stage, before=("begin",), after=("end",)) for stage in stages]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert torch.equal(parts[1](parts[0](x)), model(x))
    assert len(list(with_weights(longest_list(parts[0])))) == cut


def test_what_is_absent_passes_its_first_argument():
    x = torch.ones(2)
    assert Absent()(x, 3, mask=None) is x


def test_a_star_stands_for_one_word():
    into, out_of = ColwiseParallel(), RowwiseParallel()
    table = resolved({"body.layers.*": into, "body.*": into, "end": out_of, "nothing": into}, Model())
    assert table == {**{f"body.layers.{layer}": into for layer in range(5)}, "body.layers": into, "end": out_of}


def test_a_line_of_the_table_that_fits_nothing_is_found():
    table = {"body.layers.*": ColwiseParallel(), "body.layer.*": ColwiseParallel(), "layers.*": ColwiseParallel()}
    assert unmatched(table, Model()) == ["body.layer.*", "layers.*"]


def test_a_stage_knows_its_blocks_and_its_ends():
    plan = Plan(pp=3, stages=(3, 2, 1), microbatch=1, grad_accum=3)
    assert [stage_of(plan, stage) for stage in range(3)] == [
        Stage(range(0, 3), True, False),
        Stage(range(3, 5), False, False),
        Stage(range(5, 6), False, True),
    ]


@pytest.mark.parametrize(("axis", "answer"), [("tp", "tp_plan"), ("pp", "stage_fn")])
def test_a_plan_names_the_answer_it_misses(axis, answer):
    plan = Plan(microbatch=1, **{axis: 2})
    (problem,) = unanswered(ModelSpec(), plan)
    assert f"plan.{axis} = 2 needs" in problem.text
    assert f"`{answer}`" in problem.text
    assert not list(unanswered(DECODER, plan))


def test_copies_and_shards_ask_nothing():
    assert not list(unanswered(ModelSpec(), Plan(replicate=2, shard=2, zero=3, microbatch=1)))


def test_our_decoder_answers_like_anyone():
    with torch.device("meta"):
        model = Decoder(TINY)
    assert list(DECODER.blocks(model)) == [f"blocks.{layer}" for layer in range(TINY.layers)]
    assert DECODER.tp_plan is not None
    assert DECODER.stage_fn is not None
    assert resolved(DECODER.tp_plan(model), model).keys() == DECODER.tp_plan(model).keys()  # every name is there
    plan = Plan(pp=2, stages=(2, TINY.layers - 2), microbatch=1, grad_accum=2)
    parts = [DECODER.stage_fn(copy.deepcopy(model), stage_of(plan, stage)) for stage in range(2)]
    held = sorted(name for part in parts for name, _ in part.named_parameters())
    assert held == sorted(param.name for param in params(TINY))
