"""Whole matrices come together from every cut, one rank makes each, and every rank gets its pieces back."""

import zlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from trials import CPU, corpus_file, made, make_corpus, make_run
from worlds import world

from meshwright.optim.muon import Orthogonalizer, held_matrices, holders_of, orthogonalize
from meshwright.parallel.mesh import region_of
from meshwright.spec import matrices
from meshwright.spec.optimizers import is_hidden

ODD = ("arch.ffn=190", "arch.layers=3")  # cut into four, pieces differ
MOE = ("arch.preset=tiny-moe", "arch.layers=2")
TWO = [
    ("plan.replicate=2",),
    ("plan.shard=2", "plan.zero=1", *ODD),
    ("plan.shard=2", "plan.zero=3", "plan.deterministic=true"),
    ("plan.tp=2",),
    ("plan.cp=2",),
    ("plan.cp=2", "plan.zero=3"),
    ("plan.pp=2", "plan.grad_accum=4", "arch.layers=4"),
    ("plan.shard=2", "plan.zero=3", *MOE),
    ("plan.shard=2", "plan.zero=3", "plan.ep=2", *MOE),
    ("plan.tp=2", *MOE),
]
FOUR = [
    ("plan.shard=4", "plan.zero=3", *ODD),
    ("plan.replicate=2", "plan.shard=2", "plan.zero=3"),
    ("plan.shard=2", "plan.zero=3", "plan.tp=2", "arch.ffn=192"),
    ("plan.replicate=2", "plan.tp=2"),
    ("plan.replicate=2", "plan.shard=2", "plan.zero=3", "plan.deterministic=true"),
    ("plan.shard=4", "plan.zero=3", "plan.ep=2", *MOE),
    ("plan.shard=2", "plan.zero=3", "plan.tp=2", "plan.ep=2", *MOE),
    ("plan.replicate=4", "plan.ep=2", *MOE),
    ("plan.shard=4", "plan.zero=3", *MOE, "arch.experts=6"),  # cut inside the experts
    ("plan.pp=2", "plan.shard=2", "plan.zero=3", "plan.grad_accum=4", "arch.layers=4"),
]


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


def whole(name: str, weight: Tensor) -> Tensor:
    """The same on every rank, whatever part of the weight it has."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(weight.shape, dtype=torch.float64, generator=generator)


def exchange(folder, words: tuple[str, ...]) -> None:
    run, mesh, state = made(make_run(folder, *words), folder, CPU)
    state.loader.close()
    named = {name: weight for chunk in state.chunks for name, weight in chunk.named_parameters()}
    hidden = {name: weight for name, weight in named.items() if is_hidden(name, weight.ndim)}
    teams: dict[tuple[bool, int], list[str]] = {}
    for name, weight in hidden.items():
        held = held_matrices(weight)
        teams.setdefault((held.expert, held.cut.ranks), []).append(name)
    computed = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal computed
        computed += len(x)
        return orthogonalize(x)

    for names in teams.values():
        held = [held_matrices(hidden[name]) for name in names]
        holders = holders_of(held[0], mesh)
        regions = [region_of(hidden[name]) for name in names]
        parts = [
            each.view(whole(name, hidden[name])[region], holders.member)
            for each, name, region in zip(held, names, regions, strict=True)
        ]
        found: dict[tuple[int, int], Tensor] = {}
        orthogonalizer = Orthogonalizer(held, holders, torch.float64, CPU, alone=run.plan.deterministic)
        orthogonalizer.compute = counted
        orthogonalizer.run(
            lambda matrix, room, parts=parts: room.copy_(parts[matrix[0]][matrix[1]]),
            lambda matrix, piece, found=found: found.__setitem__(matrix, piece.clone()),
        )
        for index, (name, each) in enumerate(zip(names, held, strict=True)):
            weight = hidden[name]
            full = whole(name, weight)
            matrices_of = full.view(-1, *full.shape[-2:])
            expected = each.view(orthogonalize(matrices_of.clone()).view(full.shape)[region_of(weight)], holders.member)
            for number in range(each.count):
                # Whole on one rank, so the same sums but for how many matrices are beside one.
                assert torch.allclose(found.pop((index, number)), expected[number], rtol=0, atol=1e-12), name
        assert not found
    total = torch.tensor([computed, sum(w.shape[:-2].numel() for w in hidden.values()) if first_of_stage(mesh) else 0])
    dist.all_reduce(total)
    assert total[0] == total[1]  # nobody makes what another one makes
    assert computed <= -(-total[0].item() // (run.plan.world // run.plan.pp)) * 2


def first_of_stage(mesh) -> bool:
    return all(place == 0 for axis, place in mesh.place.items() if axis != "pp")


@pytest.mark.parametrize("most", [1 << 26, 1])
@world(2)
def test_two_ranks(folder, most):
    matrices.BATCH_ELEMENTS = most
    for words in TWO:
        exchange(folder, words)


@pytest.mark.parametrize("most", [1 << 26, 1])
@world(4)
def test_four_ranks(folder, most):
    matrices.BATCH_ELEMENTS = most
    for words in FOUR:
        exchange(folder, words)
