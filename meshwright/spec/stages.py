"""Cutting a model's layers into pipeline stages of like cost."""

from functools import cache
from itertools import accumulate

from meshwright.spec.arch import Arch
from meshwright.spec.params import params


@cache
def balanced_stages(arch: Arch, stages: int) -> tuple[int, ...]:
    """Layers of each stage such that the costliest stage costs least, and the others are as even as they can be.

    Cost is the weights a token is multiplied with, which is what a stage's time is made of: the output projection
    counts to the last stage, and the embedding, which is looked up, to none.
    """
    if not 1 <= stages <= arch.layers:
        return (0,) * stages  # refused by the rules, with the reason
    costs = [_layer_cost(arch, layer) for layer in range(arch.layers)]
    costs[-1] += arch.vocab * arch.hidden
    return _even(costs, stages, _least_bound(costs, stages))


def _layer_cost(arch: Arch, layer: int) -> int:
    total = 0
    for param in params(arch):
        if param.layer == layer:
            total += param.numel * arch.top_k // arch.experts if param.expert and arch.top_k else param.numel
    return total


def _least_bound(costs: list[int], stages: int) -> int:
    """The smallest cost that no stage needs to exceed, by bisection."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(costs, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(costs: list[int], bound: int) -> int:
    needed, spent = 1, 0
    for cost in costs:
        if spent + cost > bound:
            needed, spent = needed + 1, 0
        spent += cost
    return needed


def _even(costs: list[int], stages: int, bound: int) -> tuple[int, ...]:
    """Within a bound, the cut whose stage costs have the least sum of squares; among equals, longer stages first."""
    ends = [0, *accumulate(costs)]
    layers = len(costs)
    # best[i]: the least sum of squares of the stages from layer i to the end, and the first of those stages' lengths.
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for remaining in range(1, stages + 1):
        following, best = best, {}
        for start in range(layers - remaining, -1, -1):
            for end in range(layers - remaining + 1, start, -1):
                cost = ends[end] - ends[start]
                if cost > bound or end not in following:
                    continue
                squares, lengths = following[end]
                total = squares + cost * cost
                if start not in best or total < best[start][0]:
                    best[start] = (total, (end - start, *lengths))
    return best[0][1]
