"""A collective as a value: the word in which traffic is predicted and observed alike."""

from collections.abc import Iterable
from typing import Literal

import msgspec

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"]

# Between which ranks. `shard` and `replicate` are as the weights see them, with cp folded in; the two of the experts
# are what ep leaves of those. `tied` are the two pipeline ranks that hold a tied embedding.
Axis = Literal["replicate", "shard", "expert_replicate", "expert_shard", "tp", "cp", "ep", "pp", "tied", "world"]


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind and size that one rank makes in one step, among the ranks of one axis.

    `bytes` are those of one call, counted on the side where the tensor is whole: the output of an all-gather, the
    input of a reduce-scatter, the tensor of an all-reduce or a broadcast, all that a rank gives to an all-to-all (its
    own part included), the message of a send. A receive is its sender's send, and not listed.
    """

    kind: Kind
    axis: Axis
    count: int
    bytes: int
    overlappable: bool = False  # the trainer starts it early enough for arithmetic to hide it

    @property
    def total_bytes(self) -> int:
        """Of all calls."""
        return self.count * self.bytes


def merged(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """One entry for calls that differ in nothing, in the order in which they first come."""
    counts: dict[Collective, int] = {}
    for each in collectives:
        alike = msgspec.structs.replace(each, count=1)
        counts[alike] = counts.get(alike, 0) + each.count
    return tuple(msgspec.structs.replace(alike, count=count) for alike, count in counts.items() if count > 0)
