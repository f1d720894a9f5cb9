"""Signs with a scale and error feedback; the calendar of 1-bit optimizers; what is refused."""

import math
from itertools import product

import pytest
import torch

from meshwright.config import load
from meshwright.config.run import Optim, digest
from meshwright.cost.traffic import traffic
from meshwright.optim.interface import WeightShard
from meshwright.optim.onebit import SignExchange
from meshwright.spec.communication import (
    chunk_length,
    exchange_of,
    packed_bytes,
    served_region,
    serving,
    variance_steps,
)
from meshwright.spec.problem import InputError

TINY = ("arch.preset=tiny", "batch=8", "steps=20")


def once(
    values: list[torch.Tensor], worker: list[torch.Tensor], server: list[torch.Tensor], finite: bool = True
) -> list[torch.Tensor]:
    shapes = [tuple(value.shape) for value in values]
    shards = [
        WeightShard(
            "", shape, tuple((0, size) for size in shape), (), 0.0, {}, unasked, unasked, write=lambda new: None
        )
        for shape in shapes
    ]
    return SignExchange(None).mean(shards, values, worker, server, torch.tensor(finite))


def unasked() -> torch.Tensor:
    raise AssertionError("an exchange asks for nothing")


def test_what_a_compression_leaves_out_is_shorter_than_what_it_was_given():
    torch.manual_seed(1)
    sparse = torch.zeros(40, 25).index_put_((torch.tensor([3]),), torch.randn(25))  # as of an embedding
    for value in (torch.randn(7, 5), sparse, torch.full((9,), -2.0)):
        worker, server = torch.zeros_like(value), torch.zeros_like(value)
        (received,) = once([value], [worker], [server])
        assert worker.norm() < value.norm()
        assert received.abs().unique().numel() == 1
        assert torch.allclose(received + worker + server, value, atol=1e-6)  # nothing is lost


def test_errors_come_later():
    """Over many exchanges of the same tensor the mean of what is received is the tensor."""
    torch.manual_seed(2)
    value = torch.randn(33, dtype=torch.float64)
    worker, server = torch.zeros_like(value), torch.zeros_like(value)
    total = torch.zeros_like(value)
    for _ in range(400):
        total += once([value], [worker], [server])[0]
    assert (total / 400 - value).abs().max() < 0.05


def test_a_gradient_that_is_not_finite_leaves_errors_as_they_are():
    worker, server = torch.ones(8), torch.ones(8)
    once([torch.full((8,), torch.nan)], [worker], [server], finite=False)
    assert worker.eq(1).all()
    assert server.eq(1).all()


def test_a_message_is_one_bit_an_element_and_a_scale_a_weight():
    assert [chunk_length(size, 4) for size in (1, 32, 33, 1024)] == [8, 8, 16, 256]
    whole = [serving(shape, tuple((0, size) for size in shape), 4) for shape in ((32, 32), (33,))]
    # Of the vector servers have nine elements and chunks sixteen: the second is of two chunks.
    assert [each.pieces for each in whole] == [
        tuple(((number, 256),) for number in range(4)),
        (((0, 9),), ((0, 7), (1, 2)), ((1, 9),), ((1, 5), (2, 1))),
    ]
    assert packed_bytes(whole, 4) == (1 + 2) * 4 + (256 + 16) // 8
    run = load.load(None, [*TINY, "optim.name=onebit_adam", "plan.replicate=4"]).run
    exact, signs = (
        sum(each.total_bytes for each in traffic(run.arch, run.plan, 64, optimizer="onebit_adam", warm_up=warm_up))
        for warm_up in (True, False)
    )
    assert 2 / 33 < signs / exact < 2 / 31  # both ways


def parts(size: int) -> list[tuple[int, int]]:
    """A dim whole, and cut in two."""
    return [(0, size), (0, (size + 1) // 2), ((size + 1) // 2, size)]


@pytest.mark.parametrize("shape", [(9,), (4, 6), (5, 3), (3, 4, 5)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_every_element_of_a_part_has_one_server_and_the_chunk_that_it_has_in_the_whole(shape, replicas):
    length = chunk_length(math.prod(shape), replicas)
    chunks = torch.arange(math.prod(shape)).view(shape) // length
    for region in product(*map(parts, shape)):
        found, times = serving(shape, region, replicas), torch.zeros(shape)
        for server, pieces in enumerate(found.pieces):
            rows = tuple(slice(*side) for side in served_region(region, replicas, server))
            times[rows] += 1
            assert chunks[rows].flatten().tolist() == [chunk for chunk, size in pieces for _ in range(size)]
            assert chunks[rows].numel() <= found.elements
        inside = torch.zeros(shape)
        inside[tuple(slice(*side) for side in region)] = 1
        assert torch.equal(times, inside)
        assert found.counts == tuple((chunks == chunk).sum().item() for chunk in range(replicas))


def test_variance_updates_become_rarer_and_so_do_syncs():
    assert sorted(variance_steps(16, 2)) == [1, 2, 4, 6, 8, 12, 16]
    optim = Optim(name="zero_one_adam", freeze_step=6, var_update_scaler=2, local_step_scaler=4, local_step_clipper=4)
    found = "".join(exchange_of(optim, step, 30)[0] for step in range(1, 31))
    assert found[:6] == "eecece"
    assert found[6:10] == "cccc"
    assert found[10:14] == "lclc"
    assert found[14:] == "lclllclllclllclc"[:16]


def test_the_warm_up_is_a_fifth_of_the_run_unless_it_is_stated():
    run = load.load(None, [*TINY, "optim.name=onebit_lamb", "plan.replicate=2"]).run
    assert (run.optim.freeze_step, run.optim.beta2) == (4, 0.999)
    other = load.load(None, [*TINY, "optim.name=onebit_lamb", "plan.replicate=4"]).run
    assert digest(run) != digest(other)  # each replica's momentum is rounded
    cut = load.load(None, [*TINY, "optim.name=onebit_lamb", "plan.replicate=2", "plan.shard=2", "plan.zero=2"]).run
    assert digest(run) == digest(cut)  # of whatever ranks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan.replicate=1",), "plan.replicate = 1 has none; set plan.replicate to 2 or more"),
        (("plan.replicate=2", "optim.freeze_step=20"), "not shorter than the run, whose steps = 20; use 1 to 19"),
        (("plan.replicate=2", "steps=1", "optim.freeze_step=0"), "not shorter than the run, whose steps = 1"),
        (("plan.replicate=2", "plan.cp=2", "plan.zero=0"), "over the copies of the weights; set plan.zero = 1, 2 or 3"),
        (("plan.shard=2", "plan.zero=1"), "has none: plan.shard = 2 sums gradients before there is a momentum; set"),
        (("plan.shard=2", "plan.zero=1"), "such as adamw, whose gradients plan.grad_reduce rounds between shards"),
        (("plan.replicate=2", "plan.sync_every=2"), "by its own calendar"),
        (("plan.replicate=2", "plan.deterministic=true"), "plan.deterministic"),
        (("plan.replicate=2", "log.noise_scale=true"), "which optim.name = onebit_adam never has after its warm-up"),
        (("plan.replicate=2", "optim.local_step_clipper=4"), "is for 0/1 Adam"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(words, said):
    with pytest.raises(InputError) as caught:
        load.load(None, [*TINY, "optim.name=onebit_adam", *words])
    assert said in str(caught.value)
