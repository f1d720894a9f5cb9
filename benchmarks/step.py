"""What the trainer adds to a step: Meshwright's loop, records included, beside a bare torch loop over the same model.

One rank, fp32, a GPT-2 shape of about 20 M parameters. The two loops take turns in one process, so that both see the
same machine; the ratio is of medians.
"""

import argparse
import io
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.data.loader import Batch, Loader
from meshwright.data.prepare import Corpus, prepare
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill_model
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.place import Place, cores
from meshwright.spec.params import count
from meshwright.train.build import build
from meshwright.train.log import PlainLines, Recorder
from meshwright.train.loop import train
from meshwright.train.world import world

WORDS = (
    "arch.preset=gpt2", "arch.vocab=8192", "arch.layers=8", "arch.hidden=384", "arch.heads=6", "arch.ffn=1536",
    "sequence=256", "batch=8", "eval.every=0", "data.eval_fraction=0.0", "optim.lr=1e-3",
)  # fmt: skip


def ours(run: Run, corpus: Corpus, mesh: Mesh, folder: Path) -> Iterator[None]:
    """The product's loop, with its records and lines."""
    state = build(run, corpus, mesh)
    recorder = Recorder(run, mesh, folder, PlainLines(io.StringIO(), every=1))
    for result in train(run, state, mesh):
        recorder.add(result)
        yield
    recorder.close()
    state.loader.close()


def bare(run: Run, batches: list[Batch]) -> Iterator[None]:
    """What a person would write for one process: nothing recorded, nothing checked, data already there."""
    model = Decoder(run.arch)
    fill_model(model, run.arch, run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.optim.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        logits = model(batch.tokens, batch.positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optim.grad_clip)
        optimizer.step()
        yield


def measure(steps: int, warm_up: int) -> dict[str, object]:
    """Both loops in turns, one step each."""
    run = load.load(None, [*WORDS, f"steps={steps + warm_up}"], ranks=1).run
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = prepare(run, folder / "cache", lambda text: None)
        here = Place(
            rank=0, world=1, local_rank=0, local_world=1, address="", port=0, launcher="", threads=cores(),
            store=str(folder / "store"),
        )  # fmt: skip
        with world(run, here) as mesh:
            loader = Loader(corpus, run, 0, mesh.device)
            batches = [loader.take(step).microbatches[0] for step in range(run.steps)]
            loader.close()
            loops = {"meshwright": ours(run, corpus, mesh, folder), "bare": bare(run, batches)}
            seconds: dict[str, list[float]] = {name: [] for name in loops}
            for step in range(run.steps):
                order = list(loops) if step % 2 else list(reversed(loops))
                for name in order:
                    began = time.perf_counter()
                    next(loops[name])
                    seconds[name].append(time.perf_counter() - began)
            for loop in loops.values():
                list(loop)
    medians = {name: statistics.median(values[warm_up:]) for name, values in seconds.items()}
    paired = [one / other for one, other in zip(seconds["meshwright"], seconds["bare"], strict=True)][warm_up:]
    return {
        "parameters": count(run.arch),
        "tokens_per_step": run.tokens,
        "steps": steps,
        "threads": cores(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "median_seconds": medians,
        "ratio_of_medians": medians["meshwright"] / medians["bare"],
        "median_of_paired_ratios": statistics.median(paired),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("results/step.json"))
    options = parser.parse_args()
    result = measure(options.steps, warm_up=5)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
