"""Dropout under every axis: each plan drops what one process drops, recomputed blocks included."""

import pytest
from test_data_parallel import compare, folder  # noqa: F401
from worlds import world

DROPPED = ("arch.layers=4", "arch.dropout=0.2", "data.pack=documents")


@pytest.mark.parametrize(
    "plan",
    [
        ("plan.replicate=2", "plan.grad_accum=2"),
        ("plan.shard=2", "plan.zero=3", "plan.recompute=full"),
        ("plan.tp=2", "plan.recompute=selective"),
        ("plan.cp=2",),
        ("plan.pp=2", "plan.grad_accum=4", "plan.schedule=zb1p"),
    ],
    ids=["replicate", "shard", "tp", "cp", "pp"],
)
@world(2)
def test_two_ranks_drop_what_one_process_drops(folder, plan):  # noqa: F811
    compare(folder, DROPPED, plan)


@world(4)
def test_tp_and_cp_drop_it_together_with_learned_positions(folder):  # noqa: F811
    gpt = ("arch.norm=layer", "arch.positions=learned", "arch.mlp=gelu", "arch.tied=true")
    compare(folder, (*DROPPED, *gpt), ("plan.tp=2", "plan.cp=2"))
