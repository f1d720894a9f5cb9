"""Prove plans on a model that is not ours: a Llama of Hugging Face's transformers, cut without touching its code."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.parallel.model_spec import ModelSpec, sequential_stage
from meshwright.verify import parity

IGNORE = -100
CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
)


def make_model() -> nn.Module:
    """The model as its authors wrote it, returning its logits alone."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(CONFIG)
    model.register_forward_hook(only_logits)
    return model


def only_logits(module: nn.Module, arguments: Any, output: Any) -> Tensor:
    """A copy: a part without the head returns a slice, and torch warns of views that leave a sharded module."""
    return output.logits.clone()


def tp_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Heads and hidden units over ranks; the residual stream, norms and embeddings stay whole on each."""
    into, out_of = ColwiseParallel(), RowwiseParallel()
    return {
        **{f"model.layers.*.self_attn.{name}_proj": into for name in "qkv"},
        "model.layers.*.self_attn.o_proj": out_of,
        "model.layers.*.mlp.gate_proj": into,
        "model.layers.*.mlp.up_proj": into,
        "model.layers.*.mlp.down_proj": out_of,
    }


# Its blocks are found by themselves: the longest nn.ModuleList is model.layers.
LLAMA = ModelSpec(
    tp_plan=tp_plan,
    stage_fn=partial(sequential_stage, before=("model.embed_tokens",), after=("model.norm", "lm_head")),
)


def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of token losses, and the number of tokens that have one."""
    _, targets = batch
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, (targets != IGNORE).sum()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Eight sequences of very different lengths: averages of averages would show."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(CONFIG.vocab_size, (8, 17), generator=draw)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    for row in range(8):
        targets[row, 2 + 2 * row :] = IGNORE
    return inputs, targets


PLANS = ["shard=2,zero=3", "tp=2", "pp=2,schedule=1f1b"]


def main() -> None:
    verdicts = parity(make_model, [batch(step) for step in range(3)], loss, PLANS, LLAMA, print)
    if not all(verdict.passed for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
