"""What the standard set of plans does not hold: biases, learned positions, tied embeddings and experts under tp."""

import pytest
from test_data_parallel import compare, folder  # noqa: F401
from trials import GPT
from worlds import world


@pytest.mark.parametrize(
    "shape", [(), GPT, ("arch.tied=true", "data.mask_documents=true")], ids=["llama", "gpt", "tied"]
)
@world(2)
def test_two_ranks_that_share_matrices_are_one_device(folder, shape):  # noqa: F811
    compare(folder, shape, ("plan.tp=2", "plan.grad_accum=2"))


@world(2)
def test_experts_cut_inside_are_one_device(folder):  # noqa: F811
    compare(folder, ("data.pack=documents",), ("plan.tp=2",), arch="tiny-moe")
