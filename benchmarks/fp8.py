"""FP8 on one GPU: its matmuls by accumulation and format, and a compiled block of Llama-3 8B by how operands are cast.

`python benchmarks/fp8.py [--out FILE]` measures, at 8,192 tokens: each matmul of a block's linear layers, forward and
backward, accumulating fast and exactly, gradients in either format; and a block's forward and backward with what it
leaves for the backward, in the ways of casting that were considered. The first way is the trainer's.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from meshwright.config.presets import preset
from meshwright.kernels import fp8
from meshwright.models.layers import Block, Mlp, rope_table
from meshwright.parallel import precision
from meshwright.parallel.fused_kernels import fastest_attention
from meshwright.parallel.model_spec import ModelSpec
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan

TOKENS = 8192
WARM_UP, ROUNDS = 5, 20
Both = Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
Turned = Callable[[Tensor, Tensor, Tensor], Tensor]


def seconds(work: Callable[[], Any]) -> float:
    """The median of one round, by the GPU's own clock, warm."""
    for _ in range(WARM_UP):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) / 1e3 for one, other in pairwise(marks))


@torch.library.custom_op("benchmarks::transpose_fp8", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """The transpose of FP8 numbers, by the kernel that casts: they have a scale of one."""
    turned = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    fp8._launch(x, torch.ones((), device=x.device), None, turned)
    return turned


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


def cast_then_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The compiler's cast, and the transpose of what it wrote."""
    values = fp8.cast(x, scale, dtype)
    return values, transposed(values)


def from_the_forward(x: Tensor, scale: Tensor, after: Tensor) -> Tensor:
    """The same of a weight; as nothing holds it back, the compiler makes it in the forward and saves it."""
    return transposed(fp8.cast(x, scale))


WAYS: dict[str, tuple[Both, Turned]] = {
    "both layouts in one kernel, weights cast again": (fp8.cast_both, fp8.cast_transposed),
    "cast, then transposed; weights cast again": (cast_then_transpose, fp8.cast_transposed),
    "both layouts in one kernel, weights saved": (fp8.cast_both, from_the_forward),
    "cast, then transposed; weights saved": (cast_then_transpose, from_the_forward),
}


def matmuls(arch: Arch) -> list[dict[str, Any]]:
    """Every linear layer's three matmuls."""
    widths = {
        "q": (arch.q_width, arch.hidden),
        "k": (arch.kv_width, arch.hidden),
        "out": (arch.hidden, arch.q_width),
        "gate": (arch.ffn, arch.hidden),
        "down": (arch.hidden, arch.ffn),
    }
    rows = []
    for name, (n, k) in widths.items():
        for kind, (a, b, depth) in {
            "output": (TOKENS, n, k),
            "input gradient": (TOKENS, k, n),
            "weight gradient": (n, k, TOKENS),
        }.items():
            for format in fp8.FORMATS if kind != "output" else ("e4m3",):
                left, right = (torch.randn(rows_, depth, device="cuda", dtype=torch.bfloat16) for rows_ in (a, b))
                first = fp8.quantize_linear(left, "tensorwise", fp8.FORMATS[format])
                second = fp8.quantize_linear(right, "tensorwise")
                row: dict[str, Any] = {"layer": name, "matmul": kind, "format": format}
                for fast in (True, False):
                    taken = seconds(lambda x=first, y=second, fast=fast: fp8._matmul(x, y, torch.bfloat16, fast))
                    row["fast" if fast else "exact"] = 2 * a * b * depth / taken
                rows.append(row)
                rates = (f"{how} {row[how] / 1e12:7.0f}" for how in ("fast", "exact"))
                print(f"{name:5} {kind:16} {format}  {'  '.join(rates)} TFLOP/s", flush=True)
    return rows


def block_of(arch: Arch) -> Block:
    """A block as the trainer makes it for FP8."""
    with torch.device("cuda"):
        block = Block(arch, Mlp(arch, arch.ffn)).to(torch.bfloat16)
    mesh: Any = None  # FP8 asks nothing of it
    spec = ModelSpec(blocks=lambda whole: dict(whole.named_children()))
    precision.wrap(nn.Sequential(block), Plan(microbatch=1, precision="fp8"), mesh, spec)
    block.attn.attend = fastest_attention
    return block


def measure(way: str, arch: Arch) -> dict[str, Any]:
    """A block's forward and backward, and the bytes between them."""
    fp8.cast_both, fp8.cast_transposed = WAYS[way]  # pyright: ignore[reportAttributeAccessIssue]
    torch.compiler.reset()
    block = block_of(arch)
    x = torch.randn(1, TOKENS, arch.hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    rope = rope_table(arch, torch.arange(TOKENS, device="cuda")[None], torch.float32)
    forward, slope = torch.compile(block.forward), torch.randn_like(x)
    held = 0

    def step() -> None:
        nonlocal held
        for weight in block.parameters():
            weight.grad = None
        x.grad = None
        before = torch.cuda.memory_allocated()
        y = forward(x, rope, None, None)
        held = torch.cuda.memory_allocated() - before
        y.backward(slope)

    taken = seconds(step)
    row = {"way": way, "seconds": taken, "held_bytes": held}
    print(f"{way:50} {taken * 1e3:8.3f} ms  {held / 2**20:8.0f} MiB left for the backward", flush=True)
    return row


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/fp8.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("FP8 matmuls are measured on a GPU, and there is none here")
    arch = msgspec.structs.replace(preset("llama3-8b"), layers=1)
    blocks = [measure(way, arch) for way in WAYS]
    record = {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "tokens": TOKENS}
    options.out.write_text(json.dumps({**record, "blocks": blocks, "matmuls": matmuls(arch)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
