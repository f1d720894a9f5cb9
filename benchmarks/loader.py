"""How fast the loader delivers, on one core and with tokens already in memory, and what the order of samples costs.

    python benchmarks/loader.py

Prints two tables and writes results/loader.json.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one core means one

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from meshwright.config.run import Data, Run
from meshwright.data.loader import Loader
from meshwright.data.order import locate
from meshwright.data.prepare import Corpus, prepare
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan

RESULTS = Path(__file__).parents[1] / "results" / "loader.json"
SHARDS, SHARD_TOKENS = 4, 25_000_000  # 200 MB of uint16
VOCAB, END = 50_304, 50_256
MICROBATCH, BATCH = 8, 64
STEPS, REPEATS = 60, 7
ORDERED = 65_536  # samples located in one go
COUNTS = (10**6, 10**9, 10**12, 2**40 + 1)  # the last is the worst case: half of the network's range is walked over


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second that one rank got."""

    case: str
    sequence: int
    tokens_per_second: float  # median
    slowest: float
    fastest: float


class Ordering(msgspec.Struct, frozen=True, kw_only=True):
    """What it costs to find one sample."""

    samples: int
    sources: int
    seconds_per_sample: float  # median


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    orderings = [ordering(count, sources) for sources in (1, 3) for count in COUNTS]
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder))
        deliveries = [delivery(Path(folder), case, sequence) for case in CASES for sequence in (1024, 2048, 4096)]
    show(deliveries, orderings)
    record = {"machine": machine(), "batch": BATCH, "delivery": deliveries, "order": orderings}
    RESULTS.parent.mkdir(exist_ok=True)
    part = RESULTS.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    part.rename(RESULTS)


CASES: dict[str, dict[str, object]] = {
    "stream": {},
    "stream, documents masked": {"mask_documents": True, "end_token": END},
    "documents, padded": {"pack": "documents", "end_token": END},
}


def write_shards(folder: Path) -> None:
    """Raw uint16 tokens, with documents of 700 tokens on average, as in web text."""
    generator = np.random.default_rng(1)
    for number in range(SHARDS):
        tokens = generator.integers(0, END, SHARD_TOKENS, dtype=np.uint16)
        tokens[generator.integers(0, SHARD_TOKENS, SHARD_TOKENS // 700)] = END
        tokens.tofile(folder / f"{number}.bin")


def delivery(folder: Path, case: str, sequence: int) -> Delivery:
    """Positions delivered per second, padding included, over several stretches of steps."""
    arch = Arch(vocab=VOCAB, layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, context=sequence)
    data = msgspec.convert({"source": f"{folder}/*.bin", "format": "nanogpt", **CASES[case]}, Data)
    plan = Plan(microbatch=MICROBATCH, grad_accum=BATCH // MICROBATCH)
    run = Run(arch=arch, data=data, sequence=sequence, batch=BATCH, plan=plan)
    rates = stretches(prepare(run, folder / "cache", lambda _: None), run)
    return Delivery(
        case=case,
        sequence=sequence,
        tokens_per_second=statistics.median(rates),
        slowest=min(rates),
        fastest=max(rates),
    )


def stretches(corpus: Corpus, run: Run) -> list[float]:
    """Tokens per second of each stretch; the steps before the first one bring the tokens into memory."""
    loader = Loader(corpus, run, data_rank=0, device=torch.device("cpu"))
    for tokens in corpus.sources:
        for shard in tokens.shards:
            shard.tokens.max()
    rates = []
    for repeat in range(REPEATS):
        first = (repeat + 1) * STEPS
        loader.take(first - 1)
        seconds = timed(lambda first=first: [loader.take(step) for step in range(first, first + STEPS)])
        rates.append(STEPS * run.tokens / seconds)
    loader.close()
    return rates


def ordering(count: int, sources: int) -> Ordering:
    """Seconds to locate one sample among so many."""
    weights = tuple(float(1 + source) for source in range(sources))
    indices = np.arange(count // 2, count // 2 + ORDERED)
    locate(indices, 1, (count,) * sources, weights)  # the first call also pays for fresh memory
    spent = [timed(lambda: locate(indices, 1, (count,) * sources, weights)) for _ in range(REPEATS)]
    return Ordering(samples=count, sources=sources, seconds_per_sample=statistics.median(spent) / ORDERED)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def machine() -> dict[str, str]:
    """What was measured on: the processor and the versions, no name of a host."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores used": "1",
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
    }


def show(deliveries: list[Delivery], orderings: list[Ordering]) -> None:
    write = sys.stdout.write
    write(f"{'case':<26}{'sequence':>9}{'million tokens/s':>18}{'slowest to fastest':>22}\n")
    for one in deliveries:
        spread = f"{one.slowest / 1e6:.1f} to {one.fastest / 1e6:.1f}"
        write(f"{one.case:<26}{one.sequence:>9}{one.tokens_per_second / 1e6:>18.1f}{spread:>22}\n")
    write(f"\n{'samples':>14}{'sources':>9}{'ns a sample':>13}\n")
    for one in orderings:
        write(f"{one.samples:>14}{one.sources:>9}{one.seconds_per_sample * 1e9:>13.0f}\n")


if __name__ == "__main__":
    main()
