"""Norms after the sub-layers (GPT-1) under every axis: each plan trains as one process does."""

import pytest
from test_data_parallel import compare, folder  # noqa: F401
from trials import GPT
from worlds import world

POST = (*GPT, "arch.norm_position=post")


@pytest.mark.parametrize(
    "plan",
    [
        ("plan.shard=2", "plan.zero=3", "plan.recompute=selective"),
        ("plan.tp=2",),
        ("plan.cp=2",),
        ("plan.pp=2", "plan.grad_accum=4"),
    ],
    ids=["shard", "tp", "cp", "pp"],
)
@world(2)
def test_two_ranks_train_as_one_process_does(folder, plan):  # noqa: F811
    compare(folder, POST, plan)


@world(2)
def test_an_output_of_its_own_is_split_too(folder):  # noqa: F811
    compare(folder, (*POST, "arch.tied=false"), ("plan.tp=2",))
