"""`meshwright bench`: a run's step measured beside its promise, several plans side by side, a device's own limits."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from meshwright.spec.check import InputError, Problem
from meshwright.verbs import surroundings, words


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    verb = words.verb(verbs, "bench", bench, "measure a step beside what was promised, or a device")
    verb.add_argument("words", nargs="*", metavar="RUN.toml | MODEL | key=value", help=words.OVERRIDES)
    verb.add_argument(
        "--plan", action="append", default=[], help='a plan to measure; may be repeated: "shard=2,zero=3"'
    )
    verb.add_argument("--sweep", action="store_true", help="one rank, DDP, ZeRO-1, ZeRO-2 and FSDP side by side")
    verb.add_argument("--ranks", type=words.count, default=2, help="ranks of --sweep's plans (default 2)")
    verb.add_argument("--steps", type=words.count, default=10, help="steps that count, after the warm-up (default 10)")
    verb.add_argument(
        "--waterfall", action="store_true", help="take steps apart: where the time goes, from peak to achieved"
    )
    verb.add_argument(
        "--probe", action="store_true", help="measure products, attention, memory and links of this device"
    )
    verb.add_argument("--quick", action="store_true", help="with --probe: few and small shapes")
    verb.add_argument("--out", type=Path, help="where the answer goes as JSON (of --probe: profile.json)")
    verb.add_argument("--folder", type=Path, default=Path("runs/bench"), help="for tokens and traces")


def bench(options: argparse.Namespace) -> int:
    """Measure; exit 1 when a plan could not be."""
    words.require_training()
    if options.probe:
        return _probe(options)
    from meshwright.bench import sweep

    target, overrides = words.target(options.words)
    plans = [(plan, plan) for plan in options.plan]
    if options.sweep:
        plans += [(name, plan.format(n=options.ranks)) for name, plan in sweep.FAMOUS.items()]
    steps = options.steps + (TRACED if options.waterfall else 0)
    planned = sweep.runs(target, overrides, plans or [("", "")], steps, options.folder)
    say = words.say_to(options.json)
    say(HEAD)
    traced = TRACED if options.waterfall else 0
    rows = sweep.sweep(planned, surroundings.cache(), options.folder, lambda row: say(_line(row)), traced)
    answers = [{"name": row.name, **(row.measured or {}), "error": row.error} for row in rows]
    answer = answers[0] if len(answers) == 1 else answers
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
    if options.json:
        print(msgspec.json.encode(answer).decode())
    return 1 if any(row.error for row in rows) else 0


def _probe(options: argparse.Namespace) -> int:
    import torch

    from meshwright.bench.probe import probe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    say = words.say_to(options.json)
    profile = probe(device, say, quick=options.quick or device.type == "cpu")
    text = msgspec.json.format(msgspec.json.encode(profile)) + b"\n"
    target = options.out or Path("profile.json")
    if target.is_dir():
        raise InputError([Problem(f"{target} is a folder", "name a file with --out")])
    target.write_bytes(text)
    if options.json:
        print(text.decode())
    best = max(profile.products, key=lambda each: each.m * each.n * each.k / each.seconds)
    rate = 2 * best.m * best.n * best.k / best.seconds / 1e12
    say(f"{profile.device}: products up to {rate:.1f} TFLOP/s ({best.m} × {best.n} × {best.k}, {best.dtype}),")
    say(f"copies {profile.copy_bandwidth / 1e9:.0f} GB/s, a launch {profile.launch_seconds * 1e6:.1f} µs; in {target}")
    return 0


TRACED = 3  # steps that are taken apart
COLUMNS = ("step s", "promised", "tokens/s", "MFU", "peak GiB", "promised", "first s")
WIDTHS = (10, 10, 12, 7, 10, 10, 9)
HEAD = f"{'plan':<26}" + "".join(f"{name:>{width}}" for name, width in zip(COLUMNS, WIDTHS, strict=True))


def _line(row: object) -> str:
    from meshwright.bench.sweep import Row

    assert isinstance(row, Row)
    found = row.measured
    if found is None:
        return f"{row.name:<26}could not be measured: {row.error}"
    promised = f"{found['predicted_seconds']:>10.4f}" if found["predicted_seconds"] else f"{'–':>10}"
    bytes_promised = f"{found['predicted_bytes'] / 2**30:>10.2f}" if found["predicted_bytes"] else f"{'–':>10}"
    mfu = f"{found['mfu']:>7.1%}" if found["mfu"] else f"{'–':>7}"
    falls = "".join(
        f"\n    {share['name']:<24}{share['seconds']:>10.4f} s{share['share']:>8.1%}" for share in _falls(found)
    )
    return (
        f"{row.name or 'as given':<26}{found['step_seconds']:>10.4f}{promised}{found['tokens_per_second']:>12,.0f}{mfu}"
        f"{found['peak_allocated_bytes'] / 2**30:>10.2f}{bytes_promised}{found['first_step_seconds']:>9.1f}{falls}"
    )


def _falls(found: dict[str, Any]) -> list[dict[str, Any]]:
    return found["waterfall"]["shares"] if found.get("waterfall") else []
