"""Train from Python: the loop is a generator, and what happens with each step is up to whoever iterates."""

import tempfile
from pathlib import Path

from meshwright.config import load
from meshwright.data.prepare import prepare
from meshwright.runtime.place import Place
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.world import world


def main() -> None:
    words = ["arch.preset=tiny", "steps=5", "sequence=64", "batch=4", "eval.every=0"]
    run = load.load(None, words, ranks=1).run
    with tempfile.TemporaryDirectory() as folder:
        here = Place(
            rank=0, world=1, local_rank=0, local_world=1, address="", port=0, launcher="", store=f"{folder}/store"
        )
        corpus = prepare(run, Path(folder), print)
        with world(run, here) as mesh:
            state = build(run, corpus, mesh)
            for result in train(run, state, mesh):
                if isinstance(result, StepResult):
                    print(f"step {result.step}: loss {result.loss.item():.3f}")
            state.loader.close()


if __name__ == "__main__":
    main()
