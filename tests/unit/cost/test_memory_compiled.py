"""What compiled blocks keep, against what torch's own partitioner of forward and backward leaves."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from meshwright.config.presets import preset
from meshwright.cost.activations import block_saved, microbatch_shape
from meshwright.cost.job import Job
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stacks
from meshwright.models.layers import Block, Mlp, rope_table
from meshwright.parallel import precision
from meshwright.parallel.model_spec import ModelSpec
from meshwright.spec.plan import Plan

# Llama-3 8B's proportions: what is cheapest to save depends on them.
ARCH = msgspec.structs.replace(
    preset("llama3-8b"), layers=1, hidden=512, ffn=1792, heads=4, kv_heads=1, head_dim=128, vocab=256, context=1024
)
TOKENS = 1024
SCALES = 7 * 2 * 4 * 2  # bytes: of a block's seven matmuls two scales and their inverses


def left_by(plan: Plan) -> int:
    """Bytes that a compiled block's forward leaves for its backward, weights and rotary tables apart."""
    block = Block(ARCH, Mlp(ARCH, ARCH.ffn)).to(torch.bfloat16)
    mesh: Any = SimpleNamespace(device=torch.device("cpu"))
    spec = ModelSpec(blocks=lambda whole: dict(whole.named_children()))
    precision.wrap(nn.Sequential(block), plan, mesh, spec)
    x = torch.randn(1, TOKENS, ARCH.hidden, dtype=torch.bfloat16, requires_grad=True)
    rope = rope_table(ARCH, torch.arange(TOKENS)[None], torch.float32)
    lasting = {each.untyped_storage().data_ptr() for each in (*block.parameters(), *rope)}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.compiler.reset()
    # What the compiler does up to its own kernels, which need a GPU to be those of one.
    forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = forward(x, rope, None, None)
    y.backward(torch.ones_like(y))
    return sum(saved.values())


@pytest.mark.parametrize("how", [{"precision": "bf16"}, {"precision": "fp8"}, {"precision": "fp8", "fp8_grad": "e5m2"}])
def test_a_compiled_block_leaves_what_is_said(how):
    plan = Plan(microbatch=1, compile=True, **how)
    job = Job(arch=ARCH, plan=plan, sequence=TOKENS, cluster=cluster("1xh100"), stack=stacks()["meshwright"])
    expected = block_saved(microbatch_shape(job), moe=False)
    assert 0 <= left_by(plan) - expected <= SCALES
