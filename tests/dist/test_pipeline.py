"""What the standard set of plans does not hold: tied embeddings, experts and documents in pipelines."""

import pytest
from test_data_parallel import compare, folder  # noqa: F401
from worlds import world


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@world(2)
def test_a_tied_embedding_on_two_stages_stays_one(folder, schedule):  # noqa: F811
    words = ("arch.layers=4", "arch.tied=true", "arch.positions=learned", "data.mask_documents=true")
    compare(folder, words, ("plan.pp=2", f"plan.schedule={schedule}", "plan.grad_accum=4"))


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@world(2)
def test_experts_in_the_middle_of_a_pipeline(folder, schedule):  # noqa: F811
    plan = ("plan.pp=2", f"plan.schedule={schedule}", "plan.grad_accum=4")
    compare(folder, ("arch.layers=4", "data.pack=documents"), plan, arch="tiny-moe")


@world(3)
def test_uneven_stages(folder):  # noqa: F811
    compare(folder, ("arch.layers=6",), ("plan.pp=3", "plan.stages=[3, 2, 1]", "plan.grad_accum=4"))


@pytest.mark.parametrize(("zero", "schedule"), [(1, "interleaved"), (2, "zb1p"), (3, "looped")])
@world(4)
def test_more_stages_on_a_rank_than_torch_holds_gathered(folder, zero, schedule):  # noqa: F811
    plan = ("plan.pp=2", "plan.shard=2", f"plan.zero={zero}", f"plan.schedule={schedule}", "plan.chunks=4")
    compare(folder, ("arch.layers=8", "data.pack=documents"), (*plan, "plan.grad_accum=4"))


@world(4)
def test_documents_in_a_pipeline_of_shared_sequences(folder):  # noqa: F811
    compare(folder, ("data.mask_documents=true",), ("plan.pp=2", "plan.cp=2", "plan.grad_accum=4"))
