"""One peer on one GPU: the step of torchtitan's or transformers' own model, measured like ours.

Run as `python benchmarks/peers.py NAME SHAPE MICROBATCH SEQUENCE`; prints one line of JSON. torchtitan 0.2.2, torchao
and their small requirements must be importable (`pip install --no-deps --target DIR torchtitan==0.2.2 torchao torchdata
tyro typeguard docstring-parser shtab`, then PYTHONPATH=DIR). The semantics are those of our own runs: fp32 weights,
bf16 arithmetic, clipping by the global norm, fused AdamW, every step updated.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WARM_UP, STEPS = 6, 12
SHAPES: dict[str, dict[str, int]] = {
    "gpt2-124m": {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn": 3072, "vocab": 50304},
    "llama3-1b": {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "llama3-8b-16": {"dim": 4096, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
}


def measured(model: nn.Module, loss_of: Callable[[], Tensor]) -> dict[str, float]:
    """The median step in seconds, and the peak of allocated memory."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    for _ in range(WARM_UP - 1):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]
    return {
        "step_seconds": statistics.median(seconds),
        "first_step_seconds": first,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
    }


def transformers(shape: dict[str, int], microbatch: int, sequence: int) -> dict[str, float]:
    """transformers' GPT-2 or Llama, compiled as a whole, attention by sdpa."""
    import transformers as hf

    common = {"use_cache": False, "attn_implementation": "sdpa", "vocab_size": shape["vocab"]}
    with torch.device("cuda"):
        if shape["vocab"] == 50304:
            model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common))
        else:
            sizes = {
                "hidden_size": shape["dim"],
                "num_hidden_layers": shape["layers"],
                "intermediate_size": shape["ffn"],
            }
            heads = {"num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"]}
            model = hf.LlamaForCausalLM(
                hf.LlamaConfig(max_position_embeddings=sequence, tie_word_embeddings=False, **sizes, **heads, **common)
            )
    model.train().compile()
    tokens = torch.randint(0, shape["vocab"], (microbatch, sequence), device="cuda")
    return measured(model, lambda: model(input_ids=tokens, labels=tokens).loss)


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def torchtitan(shape: dict[str, int], microbatch: int, sequence: int, eight: str = "") -> dict[str, float]:
    """torchtitan's Llama with its own per-block compile.

    `eight`: torchao's tensor-wise FP8 for all but the output, as it is by default (exact sums of gradients' matmuls,
    gradients in e5m2) or, fast, with fast sums in all three matmuls and gradients in e4m3.
    """
    for name in ("datasets", "datasets.distributed"):  # it imports them for its data loader, which is not used here
        stand_in = ModuleType(name)
        stand_in.__getattr__ = _anything  # pyright: ignore[reportAttributeAccessIssue]
        sys.modules[name] = stand_in
    from torchtitan.config.job_config import Compile  # pyright: ignore[reportMissingImports]
    from torchtitan.models.llama3.infra.parallelize import apply_compile  # pyright: ignore[reportMissingImports]
    from torchtitan.models.llama3.model.args import TransformerModelArgs  # pyright: ignore[reportMissingImports]
    from torchtitan.models.llama3.model.model import Transformer  # pyright: ignore[reportMissingImports]

    wide = shape["dim"] == 4096
    arguments = TransformerModelArgs(
        dim=shape["dim"],
        n_layers=shape["layers"],
        n_heads=shape["heads"],
        n_kv_heads=shape["kv_heads"],
        vocab_size=shape["vocab"],
        rope_theta=500_000,
        max_seq_len=sequence,
        ffn_dim_multiplier=1.3 if wide else 1.5,
        multiple_of=1024 if wide else 256,
    )
    with torch.device("meta"):
        model = Transformer(arguments)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights()
    if eight:
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            CastConfig,
            Float8GemmConfig,
            Float8LinearConfig,
            convert_to_float8_training,
        )

        fast = Float8GemmConfig(use_fast_accum=True)
        quick = {
            "gemm_config_grad_input": fast,
            "gemm_config_grad_weight": fast,
            "cast_config_grad_output": CastConfig(target_dtype=torch.float8_e4m3fn),
        }

        def inside(module: nn.Module, name: str) -> bool:
            return name != "output" and isinstance(module, nn.Linear)

        convert_to_float8_training(
            model, config=Float8LinearConfig(**(quick if eight == "fast" else {})), module_filter_fn=inside
        )
    apply_compile(model, Compile(enable=True))

    @torch.compile
    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    tokens, targets = torch.randint(0, shape["vocab"], (2, microbatch, sequence), device="cuda")
    return measured(model, lambda: cross_entropy(model(tokens), targets))


def main() -> None:
    """Measure one peer and print what was found."""
    name, shape, microbatch, sequence = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_float32_matmul_precision("high")
    if name == "transformers":
        found = transformers(SHAPES[shape], microbatch, sequence)
    else:
        eight = {"torchtitan-fp8": "default", "torchtitan-fp8-fast": "fast"}.get(name, "")
        found = torchtitan(SHAPES[shape], microbatch, sequence, eight)
    print(json.dumps({"peer": name, "shape": shape, "microbatch": microbatch, "sequence": sequence, **found}))


if __name__ == "__main__":
    main()
