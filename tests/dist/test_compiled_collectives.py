"""Collectives inside of compiled blocks: their values and gradients are those of eager ones."""

import pytest
import torch
import torch.distributed as dist
from worlds import world

from meshwright.parallel.mesh import all_to_all, gather, scatter, sum_once

COLLECTIVES = {  # of a tensor among a group, of which this is one rank
    "gather": lambda x, group, rank: gather(x, 1, group),
    "scatter": lambda x, group, rank: scatter(x, 1, group),
    "sum once": lambda x, group, rank: sum_once(x, group),
    "all to all": lambda x, group, rank: all_to_all(x, group),
    "all to all, uneven": lambda x, group, rank: all_to_all(x, group, *[[1, 3], [1, 3]] if rank == 0 else [[3, 1]] * 2),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@world(2)
def test_a_compiled_collective_and_its_gradient_are_those_of_an_eager_one(name):
    torch._dynamo.reset()
    group, rank = dist.group.WORLD, dist.get_rank()

    def layer(x, weight):
        return COLLECTIVES[name](x @ weight, group, rank).sin() * x.mean()

    generator = torch.Generator().manual_seed(rank)
    x, weight = (torch.randn(4, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2))
    found = []
    for made in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = made(x, weight)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, weight])])
    assert found[0][2].abs().max() > 0
    for mine, other in zip(*found, strict=True):
        assert (mine - other).abs().max() <= 1e-12
