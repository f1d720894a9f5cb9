"""Whole matrices take the memory that the planner says, on every rank of a plan; collectives that return at once."""

import pytest
import torch
from live import Live
from torch import Tensor

from meshwright.config.presets import preset
from meshwright.cost.matrices import matrix_teams, shared_out
from meshwright.cost.rank_view import RankView
from meshwright.models.decoder import Decoder
from meshwright.optim.muon import Orthogonalizer, held_matrices, holders_of
from meshwright.parallel.apply import apply
from meshwright.parallel.mesh import local
from meshwright.parallel.model_spec import DECODER
from meshwright.spec import matrices
from meshwright.spec.optimizers import is_hidden
from meshwright.spec.plan import Plan
from meshwright.verify.trace import fake_world

PLANS = [
    ("tiny", {}),
    ("tiny", {"replicate": 3}),
    ("tiny", {"shard": 4, "zero": 3}),
    ("tiny", {"shard": 3, "zero": 1}),  # pieces differ
    ("tiny", {"tp": 2}),
    ("tiny", {"replicate": 2, "shard": 2, "zero": 3, "tp": 2}),
    ("tiny", {"replicate": 2, "shard": 2, "zero": 3, "deterministic": True}),
    ("tiny-moe", {"shard": 4, "zero": 3}),
    ("tiny-moe", {"shard": 4, "zero": 3, "ep": 2, "tp": 2}),
    ("tiny-moe", {"replicate": 4, "ep": 2}),
]


@pytest.mark.parametrize("most", [1 << 26, 20000, 1])
@pytest.mark.parametrize(("arch", "fields"), PLANS, ids=str)
def test_bytes_alive_are_those_of_the_planner(arch, fields, most, monkeypatch):
    monkeypatch.setattr(matrices, "BATCH_ELEMENTS", most)
    shared_out.cache_clear()
    plan, shape = Plan(microbatch=1, precision="fp64", **fields), preset(arch)
    for rank in sorted({0, plan.world - 1}):
        with fake_world(plan, rank) as mesh:
            with torch.device("meta"):
                model = Decoder(shape).double()
            chunks = apply(model, plan, mesh, DECODER)
            view = RankView(arch=shape, plan=plan, sequence=1, place=mesh.place)
            found: dict[tuple[bool, int, int], list[Tensor]] = {}
            for name, weight in chunks[0].named_parameters():
                if is_hidden(name, weight.ndim):
                    found.setdefault(held_matrices(weight).team, []).append(weight)
            for weights in found.values():
                held = [held_matrices(weight) for weight in weights]
                each = Orthogonalizer(
                    held, holders_of(held[0], mesh), torch.float64, torch.device("cpu"), plan.deterministic
                )
                (said,) = [team for team in matrix_teams(view) if team.batches == each.batches]
                with Live([]) as live:
                    each.run(lambda matrix, room: None, lambda matrix, piece: None)
                assert live.peak == 8 * said.peak_elements(plan.deterministic)
                assert sum(len(one) for one in each.matrices.values()) == sum(one.count for one in held)
                pieces = [tuple(local(weight.detach()).shape[-2:]) for weight in weights]
                assert pieces == [one.cut.piece(each.holders.member) for one in held]
