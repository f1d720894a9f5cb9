"""Are gathers in flight while blocks compute? Two ranks on the CPU share the weights (zero 3), under torch's profiler.

On a GPU torch starts a gather on a stream of its own, and the arithmetic of the block before hides it. Gloo has no
streams: there a gather hides only if it is started ahead and not waited for, as our plans do. The same without that
is measured beside it. Hidden is the part of a gather's time, from its start to its end, in which a block's forward
runs; waiting for a gather is not part of that.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import apply
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import DECODER
from meshwright.runtime.place import Place
from meshwright.spec.params import count
from meshwright.train.build import initialise
from meshwright.train.world import world

WORDS = (
    "arch.preset=tiny", "arch.layers=8", "arch.hidden=256", "arch.heads=8", "arch.kv_heads=8", "arch.head_dim=32",
    "arch.ffn=768", "sequence=128", "batch=4", "plan.shard=2", "plan.zero=3",
)  # fmt: skip
WAYS = {"when needed": False, "one block ahead": True}
GATHER = "gloo:all_gather"


class Span(NamedTuple):
    """From when to when something ran, in microseconds."""

    start: float
    end: float


def hidden(gathers: Iterable[Span], computing: list[Span]) -> float:
    """The share of the gathers' time in which something was computed."""
    total = shared = 0.0
    for gather in gathers:
        total += gather.end - gather.start
        shared += sum(max(0.0, min(gather.end, one.end) - max(gather.start, one.start)) for one in computing)
    return shared / total


def build(run: Run, mesh: Mesh, ahead: bool) -> nn.Module:
    """The sharded model of a run, its blocks named in the trace."""
    with torch.device("meta"):
        model = Decoder(run.arch)
    (chunk,) = apply(model, run.plan, mesh, DECODER)
    chunk.to_empty(device=mesh.device)
    initialise(chunk, run, mesh.device)
    blocks = list(DECODER.blocks(chunk).values())
    for number, block in enumerate(blocks):
        block.forward = _named(f"block {number}", block.forward)
    for block in blocks:
        assert isinstance(block, FSDPModule)
        if not ahead:
            block._set_unshard_async_op(False)
            block.set_modules_to_forward_prefetch([])
    return chunk


def _named(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with record_function(name):
            return forward(*args)

    return run


def spans(trace: profile, name: str) -> list[Span]:
    """When things of a name ran."""
    ran = [event.time_range for event in trace.events() or () if event.name.startswith(name)]
    return sorted(Span(each.start, each.end) for each in ran)


def measured(model: nn.Module, run: Run, steps: int) -> dict[str, float]:
    """The median of the hidden share of some forwards, and the gathers seen in one."""
    tokens = torch.arange(2 * run.sequence).view(2, -1) % run.arch.vocab
    positions = torch.arange(run.sequence).expand(2, -1)
    shares, gathers = [], []
    for step in range(steps + 2):
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            model(tokens, positions).sum().backward()
        blocks, gathers = spans(trace, "block "), spans(trace, GATHER)
        gathers = [one for one in gathers if one.start < blocks[-1].end]  # later ones are the backward's
        if step >= 2:  # the first ones make what is made at first use
            shares.append(hidden(gathers, blocks))
    return {"hidden": round(statistics.median(shares), 3), "gathers": len(gathers)}


def rank(number: int, steps: int, folder: Path) -> None:
    """One rank; the first leaves the record."""
    torch.manual_seed(0)
    run = load.load(None, list(WORDS)).run
    here = Place(
        rank=number, world=2, local_rank=number, local_world=2, address="", port=0, launcher="", threads=1,
        store=str(folder / "store"),
    )  # fmt: skip
    with world(run, here) as mesh:
        found = {way: measured(build(run, mesh, ahead), run, steps) for way, ahead in WAYS.items()}
    if number == 0:
        (folder / "found.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--record", type=Path, default=Path("results/overlap.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        start = multiprocessing.get_context("spawn")
        ranks = [start.Process(target=rank, args=(number, options.steps, Path(name))) for number in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        found = json.loads((Path(name) / "found.json").read_text())
    run = load.load(None, list(WORDS)).run
    record = {
        "machine": platform.machine(), "torch": torch.__version__, "parameters": count(run.arch), "plan": str(run.plan),
        "steps": options.steps, "gathers": found,
    }  # fmt: skip
    options.record.write_text(json.dumps(record, indent=2) + "\n")
    for way, figures in found.items():
        print(f"gathered {way}: {figures['hidden']:.0%} of the time of {figures['gathers']} gathers hidden")


if __name__ == "__main__":
    main()
