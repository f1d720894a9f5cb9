"""How many microbatches each stage of a pipeline rank holds, at every action of its order."""

from collections import Counter
from functools import lru_cache

import msgspec

from meshwright.spec.schedule import Schedule, actions
from meshwright.spec.schedule_orders import Kind

STEADY: tuple[Schedule, ...] = ("1f1b", "interleaved", "zb1p", "zbv", "dualpipev")  # rounds in their middle are alike
ROUNDS = 4  # microbatches ÷ pp after which a further round shows a rank nothing new


class Scene(msgspec.Struct, frozen=True):
    """A rank in the middle of an action: what its forwards have left and its backwards not yet taken."""

    kind: Kind
    stage: int
    kept: tuple[tuple[int, int], ...]  # of each stage, microbatches whose activations are held
    between: tuple[tuple[int, int], ...]  # of each stage, those of them between the halves of their backward
    summing: frozenset[int]  # stages whose gradients exist


def settled(schedule: Schedule, pp: int, microbatches: int) -> int:
    """The least number of microbatches in which a rank goes through every state of so many.

    Without a pipeline the second is like all that follow. Orders in rounds of pp microbatches differ in their last one
    when it is short, so only whole rounds are left out.
    """
    if pp == 1:
        return min(microbatches, 2)
    if schedule not in STEADY or microbatches % pp:
        return microbatches
    return min(microbatches, ROUNDS * pp)


@lru_cache(maxsize=4096)
def scenes(schedule: Schedule, pp: int, chunks: int, microbatches: int, rank: int) -> tuple[Scene, ...]:
    """Every different state of a rank during a step."""
    if pp == 1:
        return _alone(microbatches)
    held, halves = Counter[int](), Counter[int]()
    summing = frozenset[int]()
    found: dict[Scene, None] = {}
    for action in actions(schedule, pp, chunks, microbatches)[rank]:
        stage, kind = action.stage, action.kind
        held[stage] += kind == "F"
        if kind in ("B", "W"):
            summing |= {stage}
        found[Scene(kind, stage, tuple(sorted(held.items())), tuple(sorted(halves.items())), summing)] = None
        held[stage] -= kind in ("B", "W")
        halves[stage] += (kind == "I") - (kind == "W")
    return _largest(found)


def _alone(microbatches: int) -> tuple[Scene, ...]:
    """One microbatch after another on a rank that holds the whole model."""
    before = frozenset({0}) if microbatches > 1 else frozenset[int]()
    one = ((0, 1),)
    return Scene("F", 0, one, (), before), Scene("B", 0, one, (), frozenset({0}))


def _largest(found: dict[Scene, None]) -> tuple[Scene, ...]:
    """Of scenes that differ only in how many microbatches are held, those that no other exceeds in every stage."""
    alike: dict[tuple[Kind, int, frozenset[int]], list[Scene]] = {}
    for scene in found:
        rivals = alike.setdefault((scene.kind, scene.stage, scene.summing), [])
        if not any(_covers(rival, scene) for rival in rivals):
            rivals[:] = [rival for rival in rivals if not _covers(scene, rival)]
            rivals.append(scene)
    return tuple(scene for rivals in alike.values() for scene in rivals)


def _covers(one: Scene, other: Scene) -> bool:
    """Whether one scene holds at least what the other does."""
    return _at_least(one.kept, other.kept) and _at_least(one.between, other.between)


def _at_least(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    counts = dict(one)
    return all(counts.get(stage, 0) >= count for stage, count in other)
