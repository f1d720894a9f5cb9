"""Whole matrices come together from every cut, one rank makes each, and every rank gets its pieces back."""

import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from trials import CPU, corpus_file, made, make_corpus, make_run
from worlds import world

from meshwright.cost.matrices import MatrixTeam, matrix_teams, shared_out
from meshwright.cost.rank_view import RankView
from meshwright.optim.muon import HeldMatrices, Orthogonalizer, held_matrices, holders_of, orthogonalize
from meshwright.parallel.mesh import Mesh, region_of
from meshwright.spec import matrices
from meshwright.spec.optimizers import is_hidden
from meshwright.verify.collectives import observing, ranks_of

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
    ("plan.replicate=2", "plan.ep=2", *MOE),
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
    ("plan.replicate=2", "plan.cp=2", "plan.zero=1", *MOE),
    ("plan.shard=4", "plan.zero=3", *MOE, "arch.experts=6"),  # cut inside the experts
    ("plan.pp=2", "plan.shard=2", "plan.zero=3", "plan.grad_accum=4", "arch.layers=4"),
]


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


class Team:
    """Some weights of a real model, held by the same ranks, each with the same numbers on all of them."""

    def __init__(self, weights: dict[str, Tensor], held: list[HeldMatrices], mesh: Mesh, alone: bool) -> None:
        self.held, self.holders, self.made = held, holders_of(held[0], mesh), 0
        self.whole = [self.draw(name, weight) for name, weight in weights.items()]
        self.regions = [region_of(weight) for weight in weights.values()]
        self.parts = [self.pieces(index, whole) for index, whole in enumerate(self.whole)]
        self.returned: dict[tuple[int, int], Tensor] = {}
        self.orthogonalizer = Orthogonalizer(held, self.holders, torch.float64, CPU, alone)
        self.room = [torch.empty_like(part) for part in self.parts]

    @staticmethod
    def draw(name: str, weight: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(weight.shape, dtype=torch.float64, generator=generator)

    def pieces(self, index: int, whole: Tensor) -> Tensor:
        """What this rank has of some weight."""
        each = self.held[index]
        return whole[self.regions[index]].reshape(each.count, *each.cut.piece(self.holders.member))

    def run(self) -> None:
        """Exchange and make them all, and count those that this rank makes."""
        compute = self.orthogonalizer.compute

        def counted(x: Tensor) -> Tensor:
            self.made += len(x)
            return compute(x)

        self.orthogonalizer.compute = counted
        self.orthogonalizer.run(self.fill, self.apply)

    def fill(self, matrix: tuple[int, int], room: Tensor | None) -> None:
        if room is not None:
            room.copy_(self.parts[matrix[0]][matrix[1]])

    def apply(self, matrix: tuple[int, int], piece: Tensor) -> None:
        self.returned[matrix] = self.room[matrix[0]][matrix[1]].copy_(piece)

    def check(self) -> None:
        """Every piece came back once, and is that of the whole matrix."""
        expected = {}
        for index, whole in enumerate(self.whole):
            made = orthogonalize(whole.view(-1, *whole.shape[-2:]).clone()).view(whole.shape)
            expected |= {(index, number): piece for number, piece in enumerate(self.pieces(index, made))}
        assert self.returned.keys() == expected.keys()
        # Made from the same whole numbers, beside other matrices: float64 products in another order, amplified by 500.
        assert all(torch.allclose(self.returned[one], expected[one], rtol=0, atol=1e-12) for one in expected)


def teams_of(weights: Mapping[str, Tensor], mesh: Mesh, alone: bool) -> list[Team]:
    found: dict[tuple[bool, int, int], dict[str, Tensor]] = {}
    for name, weight in weights.items():
        held = held_matrices(weight)
        found.setdefault(held.team, {})[name] = weight
    return [Team(each, [held_matrices(one) for one in each.values()], mesh, alone) for each in found.values()]


def exchange(folder: Path, words: tuple[str, ...]) -> None:
    run, mesh, state = made(make_run(folder, *words), folder, CPU)
    state.loader.close()
    named = {name: weight for chunk in state.chunks for name, weight in chunk.named_parameters()}
    hidden = {name: weight for name, weight in named.items() if is_hidden(name, weight.ndim)}
    teams = teams_of(hidden, mesh, run.plan.deterministic)
    view = RankView(arch=run.arch, plan=run.plan, sequence=1, place=mesh.place)
    planned = {(each.members, each.batches): each for each in matrix_teams(view)}
    assert len(teams) == len(planned)
    for team in teams:
        (said,) = [each for each in planned.values() if each.batches == team.orthogonalizer.batches]
        assert (said.member, said.replica) == (team.holders.member, team.holders.replica)
        watched(team, said, run.plan, mesh)
    # Nobody makes what somebody else makes, and all share the work.
    counts = [
        sum(team.made for team in teams),
        sum(weight.shape[:-2].numel() for weight in hidden.values())
        if all(place == 0 for axis, place in mesh.place.items() if axis != "pp")
        else 0,
    ]
    total = torch.tensor(counts)
    dist.all_reduce(total)
    assert total[0] == total[1]
    assert 0 < counts[0] < total[0]


def watched(team: Team, said: MatrixTeam, plan, mesh: Mesh) -> None:
    """One exchange: what it sends is what the planner says."""
    with observing() as calls:
        team.run()
    team.check()
    flops = sum(batch.cut.flops * batch.of_replica(said.replica)[said.member] for batch in team.orthogonalizer.batches)
    assert said.flops == flops
    expected = Counter((kind, ranks_of(axis, plan, mesh), elements * 8) for kind, axis, elements in said.exchanged())
    assert calls == expected


@pytest.mark.parametrize("most", [1 << 26, 20000, 1])
@world(2)
def test_two_ranks(folder, most):
    matrices.BATCH_ELEMENTS = most
    shared_out.cache_clear()
    for words in TWO:
        exchange(folder, words)


@pytest.mark.parametrize("most", [1 << 26, 20000, 1])
@world(4)
def test_four_ranks(folder, most):
    matrices.BATCH_ELEMENTS = most
    shared_out.cache_clear()
    for words in FOUR:
        exchange(folder, words)
