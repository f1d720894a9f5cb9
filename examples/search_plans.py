"""Search plans for a model on a cluster: the best that fit, best first."""

import meshwright

for found in meshwright.search("llama3-8b", "64xh100", "plan.precision=bf16", sequence=8192, batch=512, top=3):
    print(f"{found.price.seconds:.2f} s, MFU {found.price.mfu:.0%}, {found.peak_bytes / 2**30:.1f} GiB: {found.plan}")
