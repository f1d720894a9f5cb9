"""From a plain model to what this rank runs: the transforms in their order."""

from torch import nn

from meshwright.parallel import shard
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan


def apply(model: nn.Module, plan: Plan, mesh: Mesh) -> list[nn.Module]:
    """Turn a plain model into the chunks this rank runs."""
    return [shard.wrap(model, plan, mesh)]  # last: it must see the final parameters
