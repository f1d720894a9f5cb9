"""The choices that make a plan, level by level."""

from typing import NamedTuple

from meshwright.spec.schedule import Schedule


class Layout(NamedTuple):
    """The axes of a plan."""

    pp: int
    replicate: int
    shard: int
    zero: int
    cp: int
    cp_kind: str
    ep: int
    tp: int

    @property
    def data(self) -> int:
        return self.replicate * self.shard

    @property
    def shards(self) -> int:
        return self.shard * self.cp if self.zero else 1


class Round(NamedTuple):
    """How a data rank goes through its share of the batch."""

    microbatch: int
    accumulate: int


class Policy(NamedTuple):
    """What becomes of that which blocks keep for the backward, and where states live."""

    recompute: str = "none"
    activations: str = "device"
    compress: str = "none"
    offload: str = "none"
    offload_update: str = "host"

    @property
    def plainer(self) -> "Policy":
        """The same with what is kept as it is, on the device: never slower."""
        return self._replace(activations="device", compress="none")

    @property
    def is_helped(self) -> bool:
        """Whether something is sent or coded to hold less."""
        return self != self.plainer


class Order(NamedTuple):
    """How a pipeline goes through its microbatches."""

    schedule: Schedule
    chunks: int
