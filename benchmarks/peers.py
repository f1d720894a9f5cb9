"""One peer on one GPU: the step of torchtitan's, nanoGPT's or transformers' own model, measured like ours.

Run as `python benchmarks/peers.py NAME SHAPE MICROBATCH SEQUENCE`; prints one line of JSON. torchtitan 0.2.2, torchao
and their small requirements must be importable (`pip install --no-deps --target DIR torchtitan==0.2.2 torchao torchdata
tyro typeguard docstring-parser shtab fsspec einops`, and a clone of nanoGPT as DIR/nanogpt; then PYTHONPATH=DIR). The
semantics are those of our own runs: fp32 weights, bf16 arithmetic, clipping by the global norm, fused AdamW, every step
updated.
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
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

WARM_UP, STEPS, RUNS = 6, 12, 3
MIXTURE = {"dim": 2048, "layers": 8, "heads": 16, "kv_heads": 16, "vocab": 32000}
SHAPES: dict[str, dict[str, int]] = {
    "gpt2-124m": {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn": 3072, "vocab": 50304},
    "llama3-1b": {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "llama3-8b-16": {"dim": 4096, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
    "moe-8": MIXTURE | {"experts": 8, "top_k": 2, "ffn": 4096},
    "moe-64": MIXTURE | {"experts": 64, "top_k": 8, "ffn": 1024},
}


def measured(model: nn.Module, loss_of: Callable[[], Tensor], autocast: bool = True) -> dict[str, Any]:
    """The median step in seconds, of the fastest of three runs, and the peak of allocated memory."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
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
    runs = [_median(step) for _ in range(RUNS)]
    return {
        "step_seconds": min(runs),
        "runs": runs,
        "first_step_seconds": first,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
    }


def _median(step: Callable[[], None]) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1000 for a, b in pairwise(marks))


def nanogpt(shape: dict[str, int], microbatch: int, sequence: int) -> dict[str, Any]:
    """nanoGPT's own GPT-2, with its biases, compiled as a whole; attention by cuDNN, faster than its default."""
    from nanogpt.model import GPT, GPTConfig  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import SDPBackend, sdpa_kernel

    arguments = GPTConfig(
        block_size=sequence, vocab_size=shape["vocab"], n_layer=shape["layers"], n_head=shape["heads"],
        n_embd=shape["dim"], dropout=0.0, bias=True,
    )  # fmt: skip
    model = GPT(arguments).to("cuda")
    model.compile()
    tokens, targets = torch.randint(0, shape["vocab"], (2, microbatch, sequence), device="cuda")
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return measured(model, lambda: model(tokens, targets)[1])


def transformers(shape: dict[str, int], microbatch: int, sequence: int) -> dict[str, Any]:
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


def _stand_in() -> None:
    """Let torchtitan import what its data loader and its metrics use, which are not used here."""
    for name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):
        stand_in = ModuleType(name)
        stand_in.__getattr__ = _anything  # pyright: ignore[reportAttributeAccessIssue]
        sys.modules[name] = stand_in


def torchtitan(shape: dict[str, int], microbatch: int, sequence: int, fp8: str = "") -> dict[str, Any]:
    """torchtitan's Llama with its own per-block compile; `fp8`: torchao's tensor-wise FP8 for all but the output.

    By "default" its gradients are e5m2 and their matmuls accumulate exactly; "fast", its fastest setting, has e4m3 and
    fast accumulation in all three matmuls, as ours.
    """
    _stand_in()
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
    if fp8:
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            CastConfig,
            Float8GemmConfig,
            Float8LinearConfig,
            convert_to_float8_training,
        )

        def inside(module: nn.Module, name: str) -> bool:
            return name != "output" and isinstance(module, nn.Linear)

        fast = Float8GemmConfig(use_fast_accum=True)
        e4m3 = CastConfig(target_dtype=torch.float8_e4m3fn)
        as_ours = Float8LinearConfig(
            gemm_config_grad_input=fast, gemm_config_grad_weight=fast, cast_config_grad_output=e4m3
        )
        setting = as_ours if fp8 == "fast" else Float8LinearConfig()
        convert_to_float8_training(model, config=setting, module_filter_fn=inside)
    apply_compile(model, Compile(enable=True))

    @torch.compile
    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    tokens, targets = torch.randint(0, shape["vocab"], (2, microbatch, sequence), device="cuda")
    return measured(model, lambda: cross_entropy(model(tokens), targets))


def mixture(shape: dict[str, int], sequence: int, sharded: bool, device: str = "cuda") -> nn.Module:
    """torchtitan's Qwen3 MoE without its norms of queries and keys, compiled as its own `parallelize_qwen3` does.

    `sharded`: under its `apply_fsdp` over one rank, which keeps the hidden states in bf16. On one GPU torchtitan itself
    takes autocast, where they are fp32 between the matmuls.
    """
    _stand_in()
    from torchtitan.config.job_config import Compile  # pyright: ignore[reportMissingImports]
    from torchtitan.models.llama4.infra.parallelize import (  # pyright: ignore[reportMissingImports]
        apply_compile,
        apply_fsdp,
    )
    from torchtitan.models.moe import MoEArgs  # pyright: ignore[reportMissingImports]
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs  # pyright: ignore[reportMissingImports]
    from torchtitan.models.qwen3.model.model import Qwen3Model  # pyright: ignore[reportMissingImports]

    routed = MoEArgs(
        num_experts=shape["experts"], num_shared_experts=0, top_k=shape["top_k"], score_func="softmax", route_norm=True,
        score_before_experts=False, load_balance_coeff=None,
    )  # fmt: skip
    arguments = Qwen3ModelArgs(
        dim=shape["dim"], n_layers=shape["layers"], n_heads=shape["heads"], n_kv_heads=shape["kv_heads"],
        vocab_size=shape["vocab"], head_dim=128, qk_norm=False, max_seq_len=sequence, moe_enabled=True,
        moe_inter_dim=shape["ffn"], moe_args=routed,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3Model(arguments)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(torch.device(device))
    apply_compile(model, Compile(enable=True), ep_enabled=False)
    if sharded:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1
        )
        mesh = init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))
        apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False, reshard_after_forward_policy="never")
    return model


def torchtitan_moe(shape: dict[str, int], microbatch: int, sequence: int, sharded: bool) -> dict[str, Any]:
    """torchtitan's MoE with grouped matmuls; no balance loss, no shared expert, every layer a mixture."""
    model = mixture(shape, sequence, sharded)

    @torch.compile
    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    tokens, targets = torch.randint(0, shape["vocab"], (2, microbatch, sequence), device="cuda")
    return measured(model, lambda: cross_entropy(model(tokens), targets), autocast=not sharded)


def main() -> None:
    """Measure one peer and print what was found."""
    name, shape, microbatch, sequence = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_float32_matmul_precision("high")
    if name in ("transformers", "nanogpt"):
        found = {"transformers": transformers, "nanogpt": nanogpt}[name](SHAPES[shape], microbatch, sequence)
    elif name.startswith("torchtitan-moe"):
        found = torchtitan_moe(SHAPES[shape], microbatch, sequence, sharded=name.endswith("-fsdp"))
    else:
        fp8 = {"torchtitan": "", "torchtitan-fp8": "default", "torchtitan-fp8-fast": "fast"}[name]
        found = torchtitan(SHAPES[shape], microbatch, sequence, fp8)
    print(json.dumps({"peer": name, "shape": shape, "microbatch": microbatch, "sequence": sequence, **found}))


if __name__ == "__main__":
    main()
