"""Each router against a slow one that takes tokens one by one."""

import math
from collections import Counter

import msgspec
import pytest
import torch
from torch import Tensor

from meshwright.models.moe import ROUTERS
from meshwright.spec.arch import Arch

Kept = dict[tuple[int, int], float]  # (token, expert) -> gate


def ranked(probabilities: list[float]) -> list[int]:
    return sorted(range(len(probabilities)), key=lambda expert: -probabilities[expert])


def slow_topk(p: list[list[float]], arch: Arch, limit: int, draw: list[float]) -> Kept:
    used: Counter[int] = Counter()
    kept = {}
    for token, row in enumerate(p):
        chosen = ranked(row)[: arch.top_k]
        for expert in chosen:
            if used[expert] < limit:
                used[expert] += 1
                kept[token, expert] = row[expert] / sum(row[other] for other in chosen)
    return kept


def slow_switch(p: list[list[float]], arch: Arch, limit: int, draw: list[float]) -> Kept:
    used: Counter[int] = Counter()
    kept = {}
    for token, row in enumerate(p):
        expert = ranked(row)[0]
        if used[expert] < limit:
            used[expert] += 1
            kept[token, expert] = row[expert]
    return kept


def slow_gshard(p: list[list[float]], arch: Arch, limit: int, draw: list[float]) -> Kept:
    used: Counter[int] = Counter()
    kept = {}
    for choice in (0, 1):
        for token, row in enumerate(p):
            first, second = ranked(row)[:2]
            expert = (first, second)[choice]
            gate = row[expert] / (row[first] + row[second])
            wanted = choice == 0 or 2 * gate > draw[token]
            if wanted and used[expert] < limit:
                used[expert] += 1
                kept[token, expert] = gate
    return kept


def slow_expert_choice(p: list[list[float]], arch: Arch, limit: int, draw: list[float]) -> Kept:
    kept = {}
    for expert in range(arch.experts):
        for token in sorted(range(len(p)), key=lambda token: -p[token][expert])[:limit]:
            kept[token, expert] = p[token][expert]
    return kept


SLOW = {
    "topk": slow_topk,
    "noisy_topk": slow_topk,
    "switch": slow_switch,
    "gshard": slow_gshard,
    "expert_choice": slow_expert_choice,
}


def logits_and_draw(arch: Arch, sequences: int = 3, positions: int = 11) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(sequences, positions, arch.experts, generator=random, dtype=torch.float64) * 2
    logits[..., 0] += 1  # a favourite, so that its slots run out
    return logits, torch.rand(sequences, positions, generator=random, dtype=torch.float64)


def test_each_router_does_as_its_slow_twin(mixture):
    logits, draw = logits_and_draw(mixture)
    routing = ROUTERS[mixture.router](logits, mixture, draw)
    for sequence, probabilities in enumerate(logits.softmax(-1).tolist()):
        expected = SLOW[mixture.router](probabilities, mixture, mixture.expert_slots(11), draw[sequence].tolist())
        kept = routing.kept[sequence].nonzero().tolist()
        found = {
            (token, int(routing.experts[sequence, token, choice])): float(routing.gates[sequence, token, choice])
            for token, choice in kept
        }
        assert found == pytest.approx(expected, rel=1e-13)
    assert routing.gates[~routing.kept].abs().sum() == 0
    assert routing.kept.sum() <= routing.rows


def test_capacity_drops_what_finds_no_slot(mixture):
    logits, draw = logits_and_draw(mixture)
    routing = ROUTERS[mixture.router](logits, mixture, draw)
    for sequence in range(3):
        taken = routing.experts[sequence][routing.kept[sequence]].bincount(minlength=4)
        if mixture.router == "expert_choice":
            assert taken.tolist() == [mixture.expert_slots(11)] * 4
        assert taken.max() <= mixture.expert_slots(11)
    dropped = (~routing.kept).sum()
    assert (dropped > 0) == (mixture.capacity > 0)


def test_slots_are_a_fair_share_times_capacity(topk):
    assert topk.expert_slots(10) == 10  # no capacity: nothing is dropped
    for capacity, expected in [(1.0, 5), (1.25, 7), (0.5, 3), (9.0, 10)]:
        arch = msgspec.structs.replace(topk, capacity=capacity)
        assert arch.expert_slots(10) == expected == min(10, math.ceil(capacity * 2 * 10 / 4))


def test_without_a_draw_the_second_expert_is_always_asked(topk):
    gshard = msgspec.structs.replace(topk, router="gshard", capacity=4.0)  # room for all
    logits, draw = logits_and_draw(gshard)
    assert ROUTERS["gshard"](logits, gshard, None).kept.all()
    assert not ROUTERS["gshard"](logits, gshard, torch.ones_like(draw)).kept[..., 1].any()  # gates are at most one half


def test_balance_and_z_equal_their_formulas(mixture):
    logits, draw = logits_and_draw(mixture)
    routing = ROUTERS[mixture.router](logits, mixture, draw)
    for sequence, rows in enumerate(logits.softmax(-1).tolist()):
        if mixture.router == "expert_choice":
            asked = Counter(range(4))
        else:
            asked = Counter(expert for row in rows for expert in ranked(row)[: mixture.top_k])
        balance = 4 * sum(
            asked[expert] / asked.total() * sum(row[expert] for row in rows) / len(rows) for expert in range(4)
        )
        z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits[sequence].tolist()) / len(rows)
        assert routing.balance[sequence].item() == pytest.approx(balance, rel=1e-13)
        assert routing.z[sequence].item() == pytest.approx(z, rel=1e-13)
    assert routing.load.sum().item() == pytest.approx(1.0, rel=1e-14)


def test_even_experts_have_balance_one(topk):
    first = torch.eye(4, dtype=torch.float64)
    logits = (50 * first + first.roll(1, dims=1)).repeat(1, 3, 1)  # every expert is as often first and as often second
    assert ROUTERS["topk"](logits, topk, None).balance.item() == pytest.approx(1.0, rel=1e-12)


def test_the_lower_expert_wins_a_tie(topk):
    routing = ROUTERS["topk"](torch.zeros(1, 5, 4), topk, None)
    assert routing.experts.tolist() == [[[0, 1]] * 5]


def test_sequences_do_not_see_each_other(mixture):
    logits, draw = logits_and_draw(mixture)
    together = ROUTERS[mixture.router](logits, mixture, draw)
    for row in range(3):
        alone = ROUTERS[mixture.router](logits[[row]], mixture, draw[[row]])
        assert torch.equal(alone.kept[0], together.kept[row])
        assert torch.equal(alone.gates[0], together.gates[row])
        assert (alone.balance[0] - together.balance[row]).abs() < 1e-14
