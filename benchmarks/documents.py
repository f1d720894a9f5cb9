"""Attention within documents on one GPU, four ways: `python benchmarks/documents.py [--out FILE]`.

The whole sample without documents is there for scale: it computes more, by the fastest kernel there is. Samples are
cut at random into documents of a mean length.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.bench.measure import seconds_of
from meshwright.kernels import attention
from meshwright.models.layers import causal_attention
from meshwright.parallel.fused_kernels import fastest_attention

RESULT = Path(__file__).parents[1] / "results" / "documents.json"


class Shape(NamedTuple):
    """A shape of queries, and how many heads keys and values have."""

    samples: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int


SHAPES = (
    Shape(1, 32, 8, 8192, 128),
    Shape(2, 32, 8, 8192, 64),
    Shape(16, 12, 12, 1024, 64),
    Shape(1, 32, 8, 32768, 128),
)
MEANS = (512, 4096)


def numbers(shape: Shape, mean: int) -> Tensor:
    """Which document each position is of, (b, s)."""
    ends = torch.rand(shape.samples, shape.length, device="cuda") < 1 / mean
    return ends.cumsum(dim=1)


def varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Torch's flash attention of samples of many lengths; the host must know their number and the longest."""
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    found = torch.ops.aten._flash_attention_forward(*rows, ends, ends, longest, longest, 0.0, True, False)[0]
    return found.unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def ends_of(told: Tensor) -> Tensor:
    """Where documents end, counted through all samples, with a 0 before."""
    apart = told + torch.arange(len(told), device=told.device)[:, None] * told.shape[1]
    lengths = apart.flatten().unique_consecutive(return_counts=True)[1]
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(torch.int32)


def measured(attend: Callable[..., Tensor], tensors: list[Tensor], wanted: Tensor, reference: Tensor) -> dict[str, Any]:
    """Seconds of a forward and a backward, the memory they need, and how far the result is from the dense mask's."""
    q = tensors[0]
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()

    def step() -> Tensor:
        found = attend(*tensors)
        found.backward(wanted)
        return found

    found = step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    gradient = q.grad.clone() if q.grad is not None else torch.zeros_like(q)
    return {
        "seconds": seconds_of(step, q.device),
        "first_seconds": first,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "deviation": ((found - reference).norm() / reference.norm()).item(),
        "gradient_norm": gradient.norm().item(),
    }


def compared(shape: Shape, mean: int) -> dict[str, Any]:
    """All ways at one shape."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(
            shape.samples, heads, shape.length, shape.head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    told = numbers(shape, mean)
    ends = ends_of(told)
    ways: dict[str, Callable[..., Tensor]] = {
        "without documents": lambda q, k, v: fastest_attention(q, k, v, None),
        "dense mask": partial(causal_attention, documents=told),
        "flash, many lengths": partial(varlen, ends=ends, longest=int(ends.diff().max())),
        "blocks": partial(attention.document_attention, mask=attention.build_mask(told)),
    }
    wanted = torch.randn_like(q)
    reference = causal_attention(q, k, v, told).detach()
    row: dict[str, Any] = {"shape": shape._asdict(), "mean": mean, "documents": len(ends) - 1}
    for name, attend in ways.items():
        for x in (q, k, v):
            x.grad = None
        try:
            row[name] = measured(attend, [q, k, v], wanted, reference)
        except (RuntimeError, torch.OutOfMemoryError) as why:
            row[name] = {"error": str(why).splitlines()[0]}
    return row


def main() -> None:
    """Every shape, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        for mean in MEANS:
            rows.append(compared(shape, mean))
            print(json.dumps(rows[-1]), flush=True)
            options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
