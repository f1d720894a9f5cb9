"""Attention in a sliding window beside dense attention on one GPU: `python benchmarks/windows.py [--out FILE]`.

Forward and backward at the shapes of families that have windows, by FlexAttention over the blocks that a window
touches, beside the fastest kernel of causal attention over all earlier positions. Softcaps and sinks come on top.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from documents import measured

from meshwright.kernels.attention import Scoring, build_mask, document_attention, scored_attention, visible
from meshwright.parallel.fused_kernels import fastest_attention

RESULT = Path(__file__).parents[1] / "results" / "windows.json"


class Shape(NamedTuple):
    """Queries of a family, heads of its keys and values, and its window."""

    name: str
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    window: int
    softcap: float = 0.0
    sinks: bool = False


SHAPES = (
    Shape("32 heads of 128", 32, 8, 8192, 128, 1024),
    Shape("Gemma 3 4B", 8, 4, 8192, 256, 1024),
    Shape("Gemma 2 9B, softcap", 16, 8, 8192, 256, 4096, softcap=50.0),
    Shape("Mistral v0.1 at 16k", 32, 8, 16384, 128, 4096),
    Shape("gpt-oss, sinks", 64, 8, 8192, 64, 128, sinks=True),
)


def compared(shape: Shape) -> dict[str, Any]:
    """Both ways at one shape; how far the window's result is from all scores' is of one head's first two windows."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, shape.length, shape.head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    sinks = torch.randn(shape.heads, device="cuda") if shape.sinks else None
    how = Scoring(window=shape.window, softcap=shape.softcap, sinks=sinks)
    one = torch.zeros(1, shape.length, dtype=torch.int64, device="cuda")
    wanted = torch.randn_like(q)
    dense = fastest_attention(q, k, v, None).detach()
    blocks = partial(document_attention, mask=build_mask(one, shape.window), how=how)
    few, keys, values = (x.detach()[:, :1, : 2 * shape.window + 128].double() for x in (q, k, v))
    length = few.shape[2]
    alone = how._replace(sinks=None if sinks is None else sinks[:1])
    seen = visible(one[:, :length], length, shape.window, q.device)
    exact = scored_attention(few, keys, values, seen, alone)
    with torch.no_grad():
        near = blocks(q, k, v)[:, :1, :length].double()
    row: dict[str, Any] = {"shape": shape._asdict(), "deviation": ((near - exact).norm() / exact.norm()).item()}
    ways = {"dense": lambda q, k, v: fastest_attention(q, k, v, None), "window": blocks}
    for name, attend in ways.items():
        for x in (q, k, v):
            x.grad = None
        found = measured(attend, [q, k, v], wanted, dense)
        row[name] = {key: found[key] for key in ("seconds", "first_seconds", "peak_bytes")}
    return row | {"ratio": row["window"]["seconds"] / row["dense"]["seconds"]}


def table(record: dict[str, Any]) -> str:
    """The record as the page of measurements shows it."""
    lines = ["| shape | heads | window of tokens | window | dense | ÷ |", "|---|--:|--:|--:|--:|--:|"]
    for row in record["rows"]:
        shape, seconds = row["shape"], [f"{1e3 * row[way]['seconds']:.2f} ms" for way in ("window", "dense")]
        heads = f"{shape['heads']} of {shape['head_dim']}"
        cells = [shape["name"], heads, f"{shape['window']:,} of {shape['length']:,}", *seconds, f"{row['ratio']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Every shape, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        rows.append(row := compared(shape))
        both = f"{row['window']['seconds'] * 1e3:.2f} ms, dense {row['dense']['seconds'] * 1e3:.2f} ms"
        print(f"{shape.name:<24} {both}, ratio {row['ratio']:.3f}, deviation {row['deviation']:.1e}", flush=True)
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
