"""FP8 linear layers that ranks of tp share: the FP8 numbers of one process, by scales of whole tensors.

**Cut weights**: ranks agree on the largest magnitudes of what they have parts of, just before a matmul.

**Whole weights.** What joins multi-token prediction has a rank's own tokens, and ranks agree likewise. The way down of
latent attention, and heads of keys and values that are fewer than ranks, are computed alike by several ranks, each of
which has a part of the output's gradient, of what its own heads read. The sum of parts that are rounded is not the sum
rounded, so the parts are summed before; each of these ranks then makes all of both gradients, and gives its share.
"""

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Partial, Shard

from meshwright.kernels.fp8 import Fp8Linear, Sharing
from meshwright.models.decoder import AheadBlock
from meshwright.models.layers import Attention, LatentAttention
from meshwright.parallel.local_parts import (
    entering,
    read_head,
    read_partial,
    read_together,
    reading_locally,
    shared_out,
)
from meshwright.spec.problem import mistake

UP = ("q_up", "kv_up")  # of latent attention, which is computed by plain tensors


def share(linear: Fp8Linear, name: str, block: nn.Module, in_moe: bool) -> None:
    """Let a layer of a block, of a name in it, have the scales of whole tensors."""
    path, _, last = name.rpartition(".")
    weight, of = linear.weight, block.get_submodule(path)
    if isinstance(weight, DTensor) and not isinstance(weight.placements[0], Shard) and _compute_whole(linear, of):
        return
    linear.sharing = sharing_of(linear, name)
    if isinstance(of, LatentAttention) and last in UP:
        linear.forward = partial(_of_latents, linear)
    elif not in_moe:  # whose layer hands its shared experts a rank's own tensors, and sums up itself
        linear.forward = partial(_of_parts, linear)


def sharing_of(linear: nn.Linear, name: str) -> Sharing:
    """How the ranks of tp agree on the scales of a layer that they cut."""
    weight = linear.weight
    if not isinstance(weight, DTensor) or not isinstance(weight.placements[0], Shard):
        what = f"plan.precision = fp8 needs every linear layer of a block cut by plan.tp, and {name} is not"
        raise mistake(what, "cut it in the split table, or use plan.tp = 1 or plan.precision = bf16")
    group = weight.device_mesh.get_group()
    return Sharing("out" if weight.placements[0].dim == 0 else "in", partial(_largest, group))


def _largest(group: dist.ProcessGroup, amax: Tensor) -> Tensor:
    # Functional, so that the compiler sees it, and recomputation by operation saves it.
    return functional.wait_tensor(functional.all_reduce(amax, "max", group))


def _compute_whole(linear: Fp8Linear, of: nn.Module) -> bool:
    """Whether a weight that every rank holds whole is of a kind that is known; then it is multiplied so."""
    assert isinstance(linear.weight, DTensor)
    group = linear.weight.device_mesh.get_group()
    if isinstance(of, AheadBlock):
        linear.sharing, linear.forward = Sharing("tokens", partial(_largest, group)), partial(_of_tokens, linear)
    elif isinstance(of, LatentAttention):
        linear.forward = partial(_of_all_ranks, linear, group)
    elif isinstance(of, Attention):
        linear.sharing = Sharing("out", partial(_largest, group))
        linear.forward = partial(_of_a_head, linear, group, linear.out_features // of.head_dim)
    return isinstance(of, AheadBlock | Attention)


def _of_parts(linear: Fp8Linear, input: Tensor) -> Tensor:
    """A layer's output by a rank's own tensors: its features, or its part of the sum, which torch's style completes."""
    assert isinstance(input, DTensor)
    weight = linear.weight
    assert isinstance(weight, DTensor)
    assert linear.sharing is not None
    columns = linear.sharing.cut == "out"
    near = input.to_local(grad_placements=[Partial()] if columns else None)
    y = linear.product(near, weight.to_local())
    bias: Tensor | None = linear.bias
    if isinstance(bias, DTensor):
        held = bias.to_local()
        # Of a sum the first rank adds it, the others nothing; the gradient, of whole outputs, is that of each.
        y = y + (held if columns or input.device_mesh.get_local_rank() == 0 else held - held.detach())
    placement = Shard(input.dim() - 1) if columns else Partial()
    return DTensor.from_local(y, input.device_mesh, [placement], run_check=False)


def _of_latents(linear: Fp8Linear, input: Tensor) -> Tensor:
    """A rank's features of latents, which each rank has whole."""
    with reading_locally(linear, read_partial):
        return Fp8Linear.forward(linear, entering(input))


def _of_tokens(linear: Fp8Linear, input: Tensor) -> Tensor:
    """All features of a rank's tokens."""
    assert isinstance(input, DTensor)
    with reading_locally(linear, read_partial):  # its gradient is that of these tokens
        return Fp8Linear.forward(linear, input.to_local())


def _of_all_ranks(linear: Fp8Linear, group: dist.ProcessGroup, input: Tensor) -> Tensor:
    """All features of all tokens, as every rank computes them."""

    def read(weight: DTensor) -> Tensor:
        return shared_out(read_partial(weight), group.size())

    with reading_locally(linear, read):
        return read_together(Fp8Linear.forward(linear, shared_out(entering(input), group.size())), group)


def _of_a_head(linear: Fp8Linear, group: dist.ProcessGroup, heads: int, input: Tensor) -> Tensor:
    """The features of one head, as the ranks compute them that read it."""
    assert isinstance(linear.weight, DTensor)
    copies, mine = group.size() // heads, read_head(heads, linear.weight.device_mesh)

    def read(weight: DTensor) -> Tensor:
        return shared_out(mine(weight), copies)

    with reading_locally(linear, read):
        return read_together(Fp8Linear.forward(linear, shared_out(entering(input), copies)), group, heads)
