"""What the standard set of plans does not hold: documents and routers over shared sequences."""

import pytest
from test_data_parallel import compare, folder  # noqa: F401
from worlds import world

MASKED = ("data.mask_documents=true",)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@world(2)
def test_two_ranks_that_share_sequences_are_one_device(folder, kind):  # noqa: F811
    compare(folder, MASKED, ("plan.cp=2", f"plan.cp_kind={kind}"))


@pytest.mark.parametrize(
    "words",
    [(), ("arch.router=gshard", "arch.capacity=1.0"), ("arch.router=noisy_topk",)],
    ids=["topk", "gshard", "noisy"],
)
@world(2)
def test_routers_see_whole_sequences(folder, words):  # noqa: F811
    compare(folder, ("data.pack=documents", *words), ("plan.cp=2",), arch="tiny-moe")


@pytest.mark.parametrize(
    "plan",
    [
        ("plan.cp=2", "plan.shard=2", "plan.zero=3", "plan.grad_accum=2"),
        ("plan.cp=2", "plan.tp=2"),
        ("plan.cp=4", "plan.zero=3"),
    ],
    ids=["shard", "tp", "cp4"],
)
@world(4)
def test_shared_sequences_compose(folder, plan):  # noqa: F811
    compare(folder, MASKED, plan)
