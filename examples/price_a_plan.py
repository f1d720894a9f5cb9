"""Price one plan: seconds of a step, model FLOPs utilization, and memory by what takes it."""

import meshwright

MODEL = ["arch.preset=llama3-8b", "sequence=8192", "batch=64"]
PLAN = ["plan.shard=64", "plan.zero=3", "plan.precision=bf16"]

run = meshwright.load(None, *MODEL, *PLAN, ranks=64)
found = meshwright.price(run, "64xh100")
print(f"{run.plan}: {found.price.seconds:.2f} s/step, MFU {found.price.mfu:.0%}, fits: {found.fit.fits}")
for entry in found.ledger.lines:
    print(f"{entry.name:<32}{entry.bytes / 2**30:8.2f} GiB")
