"""From a plain model to what this rank runs: the transforms in their order."""

from torch import nn

from meshwright.models.decoder import Decoder
from meshwright.parallel import context, expert, pipeline, shard, tensor
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan


def apply(model: Decoder, plan: Plan, mesh: Mesh) -> list[nn.Module]:
    """Turn a plain model into the chunks this rank runs."""
    chunks = pipeline.cut(model, plan, mesh)  # first: everything after works on fewer layers
    for transform in (tensor.split, expert.split, context.split):  # what a rank holds
        chunks = [transform(chunk, plan, mesh) for chunk in chunks]
    return [shard.wrap(chunk, plan, mesh) for chunk in chunks]  # last: it must see the final parameters
