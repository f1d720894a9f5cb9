"""Every kernel against its plain twin, the compiled twin, and a copy that moves as many bytes, on one GPU.

A kernel that only moves bytes can be no faster than a copy of them, so copy ÷ kernel is how close it is to the limit.
Times are medians of replayed graphs, so that no launch is counted; each graph walks over several sets of tensors, all
far larger than the cache. What fails is reported in its row and stops nothing.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch

from meshwright.kernels import adamw, attention, cross_entropy, dispatch, fp8, gated, norm, softmax
from meshwright.kernels import adamw as adamw_bf16

SETS = 2  # of tensors that a graph walks over, each beyond any cache
WARM_UP = 3
EPS = 1e-5
WAYS = ("fused", "plain", "compiled")
Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One function at one size; bytes are what must be moved at the least, None where there is no gradient."""

    name: str
    call: Call  # takes the tensors, then which kernels
    draw: Callable[[], list[Tensor]]  # floating-point ones that ask for gradients come first
    forward: int
    backward: int | None
    ways: tuple[str, ...] = WAYS


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers: zeros would run faster than real data."""
    return torch.randn(shape, dtype=dtype, device="cuda").requires_grad_()


def softmax_case(rows: int, cols: int) -> Case:
    moved = softmax.bytes_moved("fused", rows, cols, 2)
    backward = (3 if cols <= dispatch.ROW_LIMIT else 5) * rows * cols * 2  # long rows of both tensors are read twice
    return Case(f"softmax {rows} × {cols}", softmax.softmax, lambda: [normal(rows, cols)], moved, backward)


def norm_case(kind: str, rows: int, cols: int) -> Case:
    calls: dict[str, tuple[Call, int, int]] = {  # the function, matrices and vectors that it takes
        "rms norm": (lambda x, w, k: norm.rms_norm(x, w, EPS, k), 1, 1),
        "rms norm of a sum": (lambda x, r, w, k: norm.rms_norm_sum(x, r, w, EPS, k), 2, 1),
        "layer norm": (lambda x, w, b, k: norm.layer_norm(x, w, b, EPS, k), 1, 2),
    }
    call, matrices, vectors = calls[kind]
    size = rows * cols * 2
    return Case(
        f"{kind} {rows} × {cols}", call,
        lambda: [*(normal(rows, cols) for _ in range(matrices)), *(normal(cols) for _ in range(vectors))],
        2 * matrices * size, (2 + matrices) * size,
    )  # fmt: skip


def rope_case(batch: int, sequence: int, heads: tuple[int, int], head_dim: int) -> Case:
    angles = torch.randn(1, sequence, 1, head_dim // 2, device="cuda")
    table = angles.cos(), angles.sin()
    size = batch * sequence * sum(heads) * head_dim * 2
    return Case(
        f"rope {batch} × {sequence} × {heads[0]}+{heads[1]} × {head_dim}",
        lambda q, k, way: attention.apply_rope(q, k, table, way),
        lambda: [normal(batch, sequence, count, head_dim) for count in heads], 2 * size, 2 * size,
    )  # fmt: skip


def swiglu_case(rows: int, ffn: int) -> Case:
    size = rows * ffn * 2
    return Case(
        f"swiglu {rows} × {ffn}", lambda x, up, k: gated.gated(x, up, "silu", k),
        lambda: [normal(rows, ffn), normal(rows, ffn)], 3 * size, 5 * size,
    )  # fmt: skip


def gelu_case(activation: gated.Activation, rows: int, ffn: int) -> Case:
    size = rows * ffn * 2
    return Case(
        f"{activation} {rows} × {ffn}", lambda x, k: gated.activate(x, activation, k), lambda: [normal(rows, ffn)],
        2 * size, 3 * size,
    )  # fmt: skip


def quantize_case(rows: int, cols: int) -> Case:
    """Of an element two bytes are read, and one is written."""
    return Case(
        f"fp8 by row {rows} × {cols}", fp8.quantize, lambda: [normal(rows, cols).detach()], 3 * rows * cols, None
    )


def cast_case(rows: int, cols: int) -> Case:
    """FP8 in both layouts: two bytes are read, and one is written twice."""
    return Case(
        f"fp8 in both layouts {rows} × {cols}",
        lambda x, scale, way: fp8.cast_both(x, scale, fp8.E4M3) if way == "fused" else _cast_both(x, scale),
        lambda: [normal(rows, cols).detach(), torch.ones((), device="cuda")],
        4 * rows * cols, None,
    )  # fmt: skip


def _cast_both(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    values = fp8.cast(x, scale)
    return values, values.view(torch.uint8).t().contiguous()


def loss_case(rows: int, vocab: int) -> Case:
    """Losses of rows of logits, and over these their gradient up to a factor: one reading and one writing."""
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    part, weight = cross_entropy.whole(vocab), torch.ones((), device="cuda")
    return Case(
        f"cross-entropy and its gradient {rows} × {vocab}",
        lambda logits, way: cross_entropy.softmax_gradient(logits, targets, weight, part, way),
        lambda: [normal(rows, vocab).detach()], 2 * rows * vocab * 2, None,
    )  # fmt: skip


def update_case(kind: str, numbers: int, moved: int) -> Case:
    """AdamW of one tensor; `moved` bytes for each number. The twin is torch's own fused one, and what it lacks."""
    groups: dict[int, adamw.AdamWGroup] = {}
    zero, one = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    moves = adamw.AdamWStep(1e-4, 0.9, 0.95, 1e-8, one, one, one)
    stream = adamw_bf16.RoundingDraws(1, 3, 5)

    def group(weight: Tensor, first: Tensor, second: Tensor, beside: Tensor) -> adamw.AdamWGroup:
        if kind == "masters":
            return adamw.AdamWGroup([weight], [first], [second], [beside])
        if kind == "low bits":
            return adamw_bf16.BF16Group([weight], [first], [second], low=[beside.view(torch.int16)])
        if kind == "low bits, bf16 states":
            low = [beside.view(torch.int16)]
            return adamw_bf16.BF16Group([weight], [first], [second], low=low, state_draws=[stream])
        return adamw_bf16.BF16Group([weight], [first], [second], draws=[stream])

    def call(
        weight: Tensor, first: Tensor, second: Tensor, gradient: Tensor, beside: Tensor, way: dispatch.Kernels
    ) -> Any:
        if way == "fused":
            if weight.data_ptr() not in groups:
                groups[weight.data_ptr()] = group(weight, first, second, beside)
            groups[weight.data_ptr()].update([gradient], 0.1, moves)
        else:
            torch._fused_adamw_(
                [weight], [gradient.float()], [first], [second], [], [one], lr=1e-4, beta1=0.9, beta2=0.95,
                weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False, grad_scale=one, found_inf=zero,
            )  # fmt: skip
            beside.copy_(weight)

    def draw() -> list[Tensor]:
        weight = normal(numbers, dtype=torch.float32 if kind == "masters" else torch.bfloat16).detach()
        state_dtype = torch.bfloat16 if kind.endswith("bf16 states") else torch.float32
        wide = [normal(numbers, dtype=state_dtype).detach().abs() for _ in range(2)]
        return [weight, *wide, *(normal(numbers).detach() for _ in range(2))]

    ways = ("fused", "plain") if kind == "masters" else ("fused",)
    return Case(f"adamw, {kind} {numbers}", call, draw, moved * numbers, None, ways)


def cases() -> list[Case]:
    return [
        softmax_case(32768, 4096), softmax_case(8192, 16384), softmax_case(2048, 128256), softmax_case(131072, 1000),
        norm_case("layer norm", 131072, 768), norm_case("rms norm", 8192, 16384),
        *(norm_case(kind, rows, cols) for kind in ("rms norm", "rms norm of a sum")
          for rows, cols in ((65536, 2048), (32768, 4096))),
        rope_case(4, 8192, (32, 8), 128), rope_case(64, 1024, (12, 12), 64), swiglu_case(16384, 14336),
        gelu_case("gelu", 65536, 3072), gelu_case("gelu_tanh", 65536, 3072), quantize_case(32768, 4096),
        loss_case(8192, 128256), loss_case(16384, 50304),
        update_case("masters", 2**28, 28), update_case("low bits", 2**28, 26), update_case("draws", 2**28, 22),
        update_case("low bits, bf16 states", 2**28, 18), cast_case(8192, 4096), cast_case(8192, 14336),
    ]  # fmt: skip


def replayed(work: Callable[[], Any]) -> Callable[[], Any]:
    """The work as a graph on this stream; where it cannot be captured, as it is, its launches counted too."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            kept = work()
    except RuntimeError as error:
        print(f"  not captured: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return work

    def replay() -> Any:
        graph.replay()
        return kept  # the graph writes into these

    return replay


def seconds(work: Callable[[], Any], times: int) -> float:
    """The median of one round of the work, by the GPU's own clock."""
    for _ in range(WARM_UP):  # compilation and first allocations stay out of the graph
        work()
    torch.cuda.synchronize()
    again = replayed(work)
    taken = []
    for table in range(WARM_UP + times):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        again()
        ended.record()
        ended.synchronize()
        if table >= WARM_UP:
            taken.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(taken)


def copy_seconds(size: int, times: int) -> float:
    """A copy that reads and writes `size` bytes together."""
    pairs = [[torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(SETS)]
    for source, _ in pairs:
        source.random_()
    return seconds(lambda: [target.copy_(source) for source, target in pairs], times) / SETS


def way_of(case: Case, way: str) -> Call:
    """The case's function, by kernel, by plain arithmetic, or by plain arithmetic compiled."""
    kernels = "fused" if way == "fused" else "plain"

    def call(*tensors: Tensor) -> Any:
        return case.call(*tensors, kernels)

    return torch.compile(call, dynamic=False) if way == "compiled" else call


def forward_work(call: Call, sets: list[list[Tensor]]) -> Callable[[], Any]:
    def work() -> list[Any]:
        with torch.no_grad():
            return [call(*tensors) for tensors in sets]

    return work


def backward_work(call: Call, sets: list[list[Tensor]]) -> Callable[[], Any]:
    """The gradients alone: the forward runs once, before."""
    graphs = []
    for tensors in sets:
        results = call(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        graphs.append((results, tensors, [torch.randn_like(result) for result in results]))

    def work() -> list[Any]:
        return [torch.autograd.grad(*graph, retain_graph=True) for graph in graphs]

    return work


def measure(case: Case, direction: str, ways: tuple[str, ...], times: int) -> dict[str, Any]:
    """One row of the table: every way that works, and the error of each that does not."""
    size = case.forward if direction == "forward" else case.backward
    assert size is not None
    make = forward_work if direction == "forward" else backward_work
    taken: dict[str, float] = {}
    errors: dict[str, str] = {}
    for way in (way for way in ways if way in case.ways):
        torch.compiler.reset()
        try:
            taken[way] = seconds(make(way_of(case, way), [case.draw() for _ in range(SETS)]), times) / SETS
        except Exception as error:  # the table is worth having without this cell
            errors[way] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        torch.cuda.empty_cache()
    copy = copy_seconds(size, times)
    torch.cuda.empty_cache()
    return {
        "name": case.name, "direction": direction, "bytes": size, "seconds": taken, "copy_seconds": copy,
        "errors": errors,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """One row for people: microseconds, and the share of a copy's bandwidth."""
    taken = row["seconds"]
    cells = [
        f"{taken[way] * 1e6:9.1f}" if way in taken else f"{'failed' if way in row['errors'] else '–':>9}"
        for way in WAYS
    ]
    faults = "".join(f"  {way}: {text}" for way, text in row["errors"].items())
    return f"{row['name']:46} {row['direction']:8} {' '.join(cells)} {row['copy_seconds'] * 1e6:9.1f}{faults}"


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest copy of them all, in bytes a second, and each kernel's rate as a share of it."""
    best = max(row["bytes"] / row["copy_seconds"] for row in rows)
    shares = [
        {**row, "of_copy": row["bytes"] / row["seconds"]["fused"] / best if "fused" in row["seconds"] else None}
        for row in rows
    ]
    return {"copy_bandwidth": best, "rows": shares}


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print. All on one stream: gradients run on the stream of their forward, and it must be captured."""
    rows = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for case in cases():
            if case.name.startswith(options.only):
                for direction in ("forward", "backward") if case.backward else ("forward",):
                    rows.append(measure(case, direction, tuple(options.ways.split(",")), options.times))
                    print(line(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", default="", help="measure the cases whose names begin so")
    parser.add_argument("--ways", default=",".join(WAYS), help="which of them, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("results/kernels.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels are measured on a GPU, and there is none here")
    functorch.donated_buffer = False  # a compiled backward is run many times over one forward
    print(f"{'microseconds':46} {'':8} {' '.join(f'{way:>9}' for way in WAYS)} {'copy':>9}", flush=True)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "triton": dispatch.triton.__version__ if dispatch.triton else None,
        "times": options.times,
        **judged(rows_of(options)),
    }
    for row in result["rows"]:
        print(f"{row['name']:46} {row['direction']:8} {row['of_copy'] or 0:5.2f} of the fastest copy")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=2) + "\n")
    part.rename(options.out)


if __name__ == "__main__":
    main()
