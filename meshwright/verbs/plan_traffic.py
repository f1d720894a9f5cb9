"""`meshwright plan --traffic`: the collectives of a step of the plan that is stated."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cost.traffic import bytes_by_axis, traffic
from meshwright.spec import load, zoo
from meshwright.spec.arch import Arch
from meshwright.spec.cluster import cluster
from meshwright.spec.run import Run
from meshwright.verbs import words
from meshwright.verbs.plan_question import described, flags


def collectives(options: argparse.Namespace) -> int:
    """The collectives of one optimizer step, as the first rank issues them."""
    target, overrides = words.target(options.words)
    ranks = cluster(options.cluster).gpus if options.cluster else 1  # of a plan that states no axis
    run = _run(target, [*overrides, *flags(options)], ranks)
    found = traffic(run.arch, run.plan, run.sequence)
    if options.json:
        print(msgspec.json.encode(found).decode())
        return 0
    print(f"plan: {run.plan}")
    print(f"{'kind':<16}{'axis':<18}{'calls':>8}{'bytes a call':>18}")
    for each in found:
        print(f"{each.kind:<16}{each.axis:<18}{each.count:>8}{each.bytes:>18,}")
    print("in all: " + (", ".join(f"{axis} {size:,}" for axis, size in bytes_by_axis(found).items()) or "nothing"))
    return 0


def _run(target: str | None, overrides: list[str], ranks: int) -> Run:
    """The run of a file; or the default run, with the architecture of a model, a folder or a config.json."""
    file = None
    if target in zoo.preset_names():
        overrides = [f"arch.preset={target}", *overrides]
    elif target is not None and (arch := described(Path(target))):
        overrides = [*_stated(arch), *overrides]
    elif target is not None:
        file = Path(target)
    return load.load(file, overrides, default_ranks=ranks).run


def _stated(arch: Arch) -> list[str]:
    """An architecture as the words that state it."""
    return [f"arch.{name}={_toml(value)}" for name, value in msgspec.to_builtins(arch).items()]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
