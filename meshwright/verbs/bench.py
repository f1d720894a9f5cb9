"""`meshwright bench`: a run's step measured beside its promise, several plans side by side, a device's own limits."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.spec.check import InputError, Problem
from meshwright.spec.place import Place
from meshwright.spec.profile import Profile, read_profile
from meshwright.spec.run import Run
from meshwright.spec.writing import require_file, require_folder
from meshwright.verbs import surroundings, words

if TYPE_CHECKING:
    from meshwright.bench.sweep import Lab, Row

TRACED = 3  # steps that are taken apart
SWEPT = 2  # ranks of --sweep's plans
COLUMNS = ("step s", "promised", "tokens/s", "MFU", "peak GiB", "promised", "first s")
WIDTHS = (10, 10, 12, 7, 10, 10, 9)
HEAD = f"{'plan':<26}" + "".join(f"{name:>{width}}" for name, width in zip(COLUMNS, WIDTHS, strict=True))


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    verb = words.verb(verbs, "bench", bench, "measure a step beside what was promised, or a device")
    verb.add_argument("words", nargs="*", metavar="RUN.toml | MODEL | key=value", help=words.OVERRIDES)
    verb.add_argument(
        "--plan", action="append", default=[], help='a plan to measure; may be repeated: "shard=2,zero=3"'
    )
    verb.add_argument("--sweep", action="store_true", help="one rank, DDP, ZeRO-1, ZeRO-2 and FSDP side by side")
    verb.add_argument(
        "--ranks",
        type=words.count,
        help="of --sweep's plans (default 2), or of --probe (default: one a GPU, else 2)",
    )
    verb.add_argument("--steps", type=words.count, default=10, help="steps that count, after the warm-up (default 10)")
    verb.add_argument(
        "--waterfall", action="store_true", help="take steps apart: where the time goes, from peak to achieved"
    )
    verb.add_argument(
        "--probe", action="store_true", help="measure products, attention, memory, collectives and the disk"
    )
    verb.add_argument("--quick", action="store_true", help="with --probe: few and small shapes")
    verb.add_argument("--profile", type=Path, help="a profile that promises are made from, as --probe wrote it")
    verb.add_argument("--out", type=Path, help="where the answer goes as JSON (of --probe: profile.json)")
    verb.add_argument("--folder", type=Path, default=Path("runs/bench"), help="for tokens and traces")


def bench(options: argparse.Namespace) -> int:
    """Measure; exit 1 when a plan could not be."""
    words.require_training()
    if options.probe:
        from meshwright.verbs.bench_probe import probe

        return probe(options)
    require_folder(options.folder, "name another --folder")
    if options.out:
        require_file(options.out, "name another --out")  # before minutes are spent on what could not be kept
    here, planned = surroundings.here(), _planned(options)
    lab = _lab(options, here, planned)
    return _alone(planned, lab, options) if here is None else _rank(planned, here, lab, options)


def _planned(options: argparse.Namespace) -> list[tuple[str, Run]]:
    from meshwright.bench import sweep

    target, overrides = words.target(options.words)
    plans = [(plan, plan) for plan in options.plan]
    if options.sweep:
        plans += [(name, plan.format(n=options.ranks or SWEPT)) for name, plan in sweep.FAMOUS.items()]
    steps = options.steps + (TRACED if options.waterfall else 0)
    return sweep.runs(target, overrides, plans or [("", "")], steps, options.folder, words.say_to(options.json))


def _lab(options: argparse.Namespace, here: Place | None, planned: list[tuple[str, Run]]) -> "Lab":
    from meshwright.bench import promise, sweep

    most, say = max(run.plan.world for _, run in planned), words.say_to(options.json)

    def probed() -> Profile | None:
        """Ranks that somebody else launched hold the machine already: there a profile must be given."""
        try:
            return promise.kept(surroundings.cache(), most, say) if here is None else None
        except RuntimeError as error:
            say(f"nothing is promised: the probe failed: {str(error).strip().splitlines()[-1]}")
            return None

    given = read_profile(options.profile) if options.profile else None
    return sweep.Lab(
        cache=surroundings.cache(),
        folder=options.folder,
        machine=promise.Machine(given=given, probed=probed),
        traced=TRACED if options.waterfall else 0,
    )


def _alone(planned: list[tuple[str, Run]], lab: "Lab", options: argparse.Namespace) -> int:
    """Start the ranks of every plan, one plan after another."""
    from meshwright.bench import sweep

    say = words.say_to(options.json)
    say(HEAD)
    rows = sweep.sweep(planned, lab, lambda row: say(_line(row)))
    return _answer(rows, options, say)


def _rank(planned: list[tuple[str, Run]], here: Place, lab: "Lab", options: argparse.Namespace) -> int:
    """Be one rank of the only plan, in a job that somebody else has launched."""
    from meshwright.bench import sweep

    (name, run), *more = planned
    if more or run.plan.world != here.world:
        text = f"{here.launcher} started {here.world} ranks, which can measure one plan of as many"
        raise InputError([Problem(text, "give one --plan of that world, and start the job once for each", "plan")])
    sweep.feed(planned, lab)
    row = sweep.rank_row(name, run, here, lab)
    if row is None:
        return 0
    say = words.say_to(options.json)
    say(f"{HEAD}\n{_line(row)}")
    return _answer([row], options, say)


def _answer(rows: "list[Row]", options: argparse.Namespace, say: Callable[[str], None]) -> int:
    for line in _notes([row.measured for row in rows if row.measured]):
        say(line)
    answers = [{"name": row.name, **(row.measured or {}), "error": row.error} for row in rows]
    answer = answers[0] if len(answers) == 1 else answers
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
    if options.json:
        print(msgspec.json.encode(answer).decode())
    return 1 if any(row.error for row in rows) else 0


def _notes(found: list[dict[str, Any]]) -> list[str]:
    """What the columns are made of, where that is not the same everywhere."""
    if not found:
        return []
    lines = []
    if source := found[0]["promised_from"]:
        lines.append(f"promised from {source}")
    if of := found[0]["mfu_of"]:
        lines.append(f"MFU: of {of}")
    if found[0]["device"] == "cpu":
        lines.append("peak GiB: by which a rank's process grew since before it had a model; promised are tensors")
    return lines


def _line(row: "Row") -> str:
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
