"""Train by iterating steps: `python train_steps.py`, or `torchrun --nproc-per-node 2 train_steps.py`."""

import meshwright

run = meshwright.load(None, "arch.preset=tiny", "steps=5", "sequence=64", "batch=4", "eval.every=0")
for result in meshwright.train(run):
    print(f"{type(result).__name__} {result.step}: loss {result.loss.item():.3f}")
