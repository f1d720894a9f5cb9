"""Deterministic mode: the same bits for every number of replicas and shards."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trials import corpus_file, drive, make_corpus, make_run, mesh_of
from worlds import start, world

from meshwright.cost.traffic import traffic
from meshwright.parallel.deterministic import scattered, summed, tree_sum
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.verify.collectives import differences, implied, observing

# One global microbatch is one sequence, so every plan below has the same eight of them in a step.
WORDS = (
    "steps=20", "arch.layers=2", "plan.microbatch=1", "plan.precision=fp32", "data.pack=documents",
    "optim.grad_clip=0.1", "eval.batches=2",
)  # fmt: skip
ALONE = "replicate=1"
PLANS = {
    1: (ALONE,),
    2: ("replicate=2", "shard=2,zero=3"),
    4: ("replicate=4", "shard=4,zero=1", "shard=4,zero=3", "replicate=2,shard=2,zero=3"),
}


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


def digest(weights: dict[str, torch.Tensor]) -> str:
    """A short name for all bits of all weights, in the order of the parameter table."""
    whole = hashlib.sha256()
    for weight in weights.values():
        whole.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


@world(1)
def leave_bits(folder, plans, words, arch):
    """Run each plan on as many ranks as have been started, and leave all its bits in a file of the folder."""
    for plan in plans:
        run = make_run(folder, *WORDS, *words, *(f"plan.{word}" for word in plan.split(",")), arch=arch)
        trial = drive(run, make_corpus(run, folder), mesh_of(run.plan))
        bits = {
            "weights": digest(trial.weights),
            "losses": [value.hex() for value in trial.losses],
            "norms": [value.hex() for value in trial.norms],
            "held": trial.held.hex(),
            "clipped": all(norm > run.optim.grad_clip for norm in trial.norms),
        }
        if dist.get_rank() == 0:
            (folder / f"{plan}.bits").write_text(json.dumps(bits))


def bits(folder: Path, ranks: int, plans: tuple[str, ...], *words: str, arch: str = "tiny") -> dict[str, dict]:
    """What the plans for a number of ranks compute, to the last bit."""
    arguments = {"folder": folder, "plans": plans, "words": words, "arch": arch}
    start(ranks, Path(__file__), "leave_bits", arguments)
    return {plan: json.loads((folder / f"{plan}.bits").read_text()) for plan in plans}


def test_every_plan_leaves_the_same_bits_after_twenty_clipped_steps(folder):
    reference = bits(folder, 1, PLANS[1], "plan.deterministic=true")[ALONE]
    assert reference["clipped"]
    for ranks in (2, 4):
        for plan, found in bits(folder, ranks, PLANS[ranks], "plan.deterministic=true").items():
            assert found == reference, plan


def test_without_it_the_bits_differ(folder):
    alone = bits(folder, 1, PLANS[1], "steps=3")[ALONE]
    split = bits(folder, 4, ("replicate=4", "shard=4,zero=3"), "steps=3")
    assert all(found["weights"] != alone["weights"] for found in split.values())


@pytest.mark.parametrize(
    ("words", "arch"),
    [
        (("plan.precision=bf16",), "tiny"),
        (("plan.precision=fp16",), "tiny"),
        (("plan.precision=fp64",), "tiny"),
        # Rows and shards of odd lengths: the ends of tensors fall elsewhere on every number of ranks.
        (("arch.hidden=36", "arch.heads=2", "arch.kv_heads=1", "arch.head_dim=18", "arch.ffn=45"), "tiny"),
        (("arch.router=noisy_topk",), "tiny-moe"),
    ],
    ids=["bf16", "fp16", "fp64", "odd", "experts"],
)
def test_other_arithmetic_keeps_its_bits_too(folder, words, arch):
    words = ("steps=3", "plan.deterministic=true", *words)
    (alone,) = bits(folder, 1, (ALONE,), *words, arch=arch).values()
    for plan, found in bits(folder, 4, ("replicate=2,shard=2,zero=3", "shard=4,zero=2"), *words, arch=arch).items():
        assert found == alone, plan


@world(4)
def test_ranks_are_added_in_the_order_of_the_tree():
    torch.manual_seed(0)
    terms = torch.randn(4, 10)  # every rank knows all, and gives one
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    assert torch.equal(summed(terms[rank], group), tree_sum(terms))  # ten numbers among four ranks: unevenly
    assert torch.equal(scattered(terms[rank, :8].contiguous(), group), tree_sum(terms[:, :8])[2 * rank : 2 * rank + 2])
    orders = [terms[list(order)].cumsum(0)[-1] for order in itertools.permutations(range(4))]
    assert any(not torch.equal(one, tree_sum(terms)) for one in orders)  # so the order can be seen


@pytest.mark.parametrize("arch", ["tiny", "tiny-moe"])
@world(4)
def test_a_step_sends_what_the_arithmetic_says(folder, arch):
    for plan in ("replicate=4", "shard=4,zero=1", "shard=4,zero=3", "replicate=2,shard=2,zero=2"):
        words = ("plan.deterministic=true", *(f"plan.{word}" for word in plan.split(",")), "plan.precision=bf16")
        run = make_run(folder, *WORDS, *words, "steps=1", "data.eval_fraction=0.0", arch=arch)
        mesh = mesh_of(run.plan)
        state = build(run, make_corpus(run, folder), mesh)
        with observing() as seen:
            list(train(run, state, mesh))
        state.loader.close()
        assert seen
        assert differences(seen, implied(traffic(run.arch, run.plan, run.sequence), run.plan, mesh)) == [], plan
