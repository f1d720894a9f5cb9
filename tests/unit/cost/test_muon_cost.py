"""What the planner says of Muon: its products are shared out, and priced; its matrices are in the ledger."""

import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.layout import state_layout
from meshwright.cost.matrices import matrix_teams
from meshwright.cost.memory import ledger
from meshwright.cost.rank_view import RankView
from meshwright.cost.resident import matrix_bytes
from meshwright.cost.traffic import traffic
from meshwright.cost.weight_time import orthogonalize_seconds, update_shares
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import efficiency_of, stack_of
from meshwright.search.question import Question
from meshwright.spec.optimizers import MUON, is_hidden
from meshwright.spec.params import count, params
from meshwright.spec.plan import Plan

ARCH = preset("llama3-8b")
HIDDEN = [param for param in params(ARCH) if is_hidden(param.name, len(param.shape))]


def flops() -> int:
    """Of all matrices, as docs/optimizers.md counts them."""
    sides = [sorted(param.shape) for param in HIDDEN]
    return sum(5 * (4 * short * short * long + 2 * short**3) for short, long in sides)


def view(**fields: int) -> RankView:
    return RankView(arch=ARCH, plan=Plan(microbatch=1, precision="bf16", **fields), sequence=1)


@pytest.mark.parametrize(
    "fields", [{}, {"shard": 8, "zero": 3}, {"replicate": 8}, {"replicate": 2, "shard": 2, "zero": 1, "tp": 2}]
)
def test_products_are_shared_out_over_all_ranks(fields):
    plan = view(**fields).plan
    (team,) = matrix_teams(view(**fields))
    assert team.flops * plan.world == flops() == 665_891_729_571_840
    # Large products reach the catalogue's share of the peak, less the ends of their waves.
    machine = cluster("8xh100")
    ideal = team.flops / (machine.gpu.bf16 * efficiency_of(machine.gpu).product)
    assert 1 < orthogonalize_seconds(team, plan, machine) / ideal < 1.2


def test_every_piece_travels_there_and_back_once():
    sizes = sum(param.numel for param in HIDDEN)
    sent = traffic(ARCH, view(shard=8, zero=3).plan, 1, optimizer="muon")
    moved = [each for each in sent if each.kind == "all_to_all"]
    assert sum(each.total_bytes for each in moved) == 2 * 2 * sizes // 8
    assert not [each for each in traffic(ARCH, view(shard=8, zero=3).plan, 1) if each.kind == "all_to_all"]


def test_states_are_halved_but_for_embeddings_and_head():
    hidden, everything = sum(param.numel for param in HIDDEN), count(ARCH)
    assert MUON.total_bytes(params(ARCH), 4) == 4 * hidden + 8 * (everything - hidden)
    assert update_shares(ARCH, "muon") == (hidden / everything, (everything - hidden) / everything)


def test_gathered_matrices_are_in_the_ledger_at_the_update():
    plan = Plan(microbatch=1, precision="bf16", shard=8, zero=3)
    question = Question(
        arch=ARCH, sequence=8192, batch=64, precision="bf16", cluster=cluster("8xh100"), stack=stack_of("meshwright")
    )
    job = msgspec.structs.replace(question, optimizer="muon").job(plan)
    # Four square matrices in work, of which products double: twice them, and two polynomials. Four more arrive, as they
    # leave in pieces elsewhere, and one of 14336 × 4096 returns.
    square, long = 4 * 4096**2, 14336 * 4096
    assert matrix_bytes(state_layout(job), view(shard=8, zero=3)) == 2 * (4 * square + 2 * square + 2 * long)
    assert ledger(job).allocated < ledger(question.job(plan)).allocated
