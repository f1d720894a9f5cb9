"""One mixture-of-experts layer on a GPU, forward and backward: ways to move rows and to multiply them, side by side.

`python benchmarks/experts.py [--shape moe-64 ...] [--only NAME] [--profile]`. Ways: gates after the experts, by the
compiler or by our kernels; gates inside them; FP8; and the grouped matmuls alone, the floor of all in bf16.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.experts import combine_rows, dispatch_rows, grouped_matmul, grouped_matmul_fp8
from meshwright.models.moe import MoELayer, grouped, mix_grouped
from meshwright.spec.arch import Arch
from meshwright.spec.units import GIB

TOKENS = (4, 4096)
WARM_UP, STEPS = 5, 20
SHAPES = {  # experts, chosen ones, width of one
    "moe-8": (8, 2, 4096),
    "moe-64": (64, 8, 1024),
    "moe-128": (128, 8, 768),
}


def layer_of(shape: str) -> MoELayer:
    """A layer of 2048 hidden states, with weights of the usual size."""
    experts, top_k, width = SHAPES[shape]
    arch = Arch(
        vocab=8, layers=1, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8, context=4096, mlp="swiglu",
        experts=experts, top_k=top_k, expert_ffn=width,
    )  # fmt: skip
    layer = MoELayer(arch, 0).to("cuda", torch.bfloat16)
    torch.manual_seed(0)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    layer.experts.compute = grouped
    return layer


def after(layer: MoELayer) -> None:
    """Gates after the experts, all by the compiler."""


def kernels(layer: MoELayer) -> None:
    """Gates after the experts, rows by our kernels."""
    layer.dispatch, layer.combine = partial(dispatch_rows, kernels="auto"), partial(combine_rows, kernels="auto")


def inside(layer: MoELayer) -> None:
    """Gates inside the experts."""
    layer.mix = mix_grouped


def fp8(layer: MoELayer, scaling: Any = "tensorwise") -> None:
    """The same, with two of three products in FP8."""
    layer.mix = mix_grouped
    layer.experts.multiply = partial(grouped_matmul_fp8, scaling=scaling)


WAYS: dict[str, Callable[[MoELayer], None]] = {
    "after": after,
    "kernels": kernels,
    "inside": inside,
    "fp8": fp8,
    "fp8-rowwise": partial(fp8, scaling="rowwise"),
}


def floor(shape: str) -> Callable[[], Tensor]:
    """The nine grouped matmuls of a layer with even loads, and nothing else but their sum of gradients."""
    layer = layer_of(shape)
    experts, top_k, width = SHAPES[shape]
    rows = TOKENS[0] * TOKENS[1] * top_k
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inner = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gate, up, down = layer.experts.gate, layer.experts.up, layer.experts.down
    assert gate is not None
    first, last = torch.randn_like(inner), torch.randn_like(x)

    def step() -> Tensor:
        a, b = grouped_matmul(x, gate, ends), grouped_matmul(x, up, ends)
        y = grouped_matmul(inner, down, ends)
        torch.autograd.backward([a, b, y], [first, first, last])
        x.grad = inner.grad = None
        layer.zero_grad(set_to_none=True)
        return y

    return step


def way(shape: str, name: str) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Forward and backward of a compiled layer; and its forward alone, whose result keeps what is saved."""
    torch._dynamo.reset()
    layer = layer_of(shape)
    WAYS[name](layer)
    run = torch.compile(layer)
    x = torch.randn(*TOKENS, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    slope = torch.randn_like(x)

    def step() -> Tensor:
        y = run(x)
        y.backward(slope)
        x.grad = None
        layer.zero_grad(set_to_none=True)
        return y

    return step, lambda: run(x)


def milliseconds(step: Callable[[], Any]) -> float:
    """The median of some runs."""
    for _ in range(WARM_UP):
        step()
    spans = []
    for _ in range(STEPS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans)


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """What a forward leaves behind for its backward."""
    before = torch.cuda.memory_allocated()
    y = forward()
    held = torch.cuda.memory_allocated() - before
    del y
    return held


def profile(step: Callable[[], Any]) -> str:
    """The kernels of a run, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=24, max_name_column_width=90)


def main() -> None:
    """Measure, print a table, write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["moe-64"])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--profile", action="store_true", help="print each way's kernels too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    for shape in options.shape:
        records.append({"shape": shape, "way": "matmuls alone", "milliseconds": milliseconds(floor(shape))})
        print(f"{shape:<10}{'matmuls alone':<16}{records[-1]['milliseconds']:>8.3f} ms", flush=True)
        for name in options.only:
            try:
                step, forward = way(shape, name)
                took, held = milliseconds(step), saved_bytes(forward)
            except Exception as error:  # one way that fails must not hide the others
                print(f"{shape:<10}{name:<16} failed: {str(error).strip().splitlines()[0][:160]}", flush=True)
                continue
            records.append({"shape": shape, "way": name, "milliseconds": took, "saved_bytes": held})
            print(f"{shape:<10}{name:<16}{took:>8.3f} ms  saves {held / GIB:.2f} GiB", flush=True)
            if options.profile:
                print(profile(step))
    if options.out is not None:
        options.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
