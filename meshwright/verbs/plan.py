"""`meshwright plan`: what a plan implies."""

import argparse
from pathlib import Path

import msgspec

from meshwright.spec import load, zoo
from meshwright.verbs import words


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    verb = words.verb(verbs, "plan", plan, "what a plan implies: the collectives of one step")
    verb.add_argument("words", nargs="*", metavar="RUN.toml | MODEL | key=value", help=words.OVERRIDES)
    verb.add_argument("--traffic", action="store_true", required=True, help="list the collectives that one rank issues")


def plan(options: argparse.Namespace) -> int:
    """The collectives of one optimizer step, as the first rank issues them."""
    from meshwright.cost.traffic import bytes_by_axis, traffic

    target, overrides = words.target(options.words)
    given = [f"arch.preset={target}", *overrides] if target in zoo.preset_names() else overrides
    file = None if target is None or target in zoo.preset_names() else Path(target)
    run = load.load(file, given).run
    collectives = traffic(run.arch, run.plan, run.sequence, masked=run.data.mask_documents)
    if options.json:
        print(msgspec.json.encode(collectives).decode())
        return 0
    print(f"plan: {run.plan}")
    print(f"{'kind':<16}{'axis':<18}{'calls':>8}{'bytes a call':>18}")
    for each in collectives:
        print(f"{each.kind:<16}{each.axis:<18}{each.count:>8}{each.bytes:>18,}")
    print(
        "in all: " + (", ".join(f"{axis} {size:,}" for axis, size in bytes_by_axis(collectives).items()) or "nothing")
    )
    return 0
