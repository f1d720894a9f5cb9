"""`meshwright bench`: a run's step against its prediction, several plans side by side, a device's own limits."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.cli import env
from meshwright.cli import options as words
from meshwright.hardware.profile import Profile, read_profile
from meshwright.runtime.failure import Exit
from meshwright.runtime.files import require_file, require_folder
from meshwright.runtime.place import Place
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.problem import InputError, Problem
from meshwright.spec.units import GIB, plural

if TYPE_CHECKING:
    from meshwright.bench.optimizers import LearningPoint, OptimizerTable
    from meshwright.bench.sweep import Row, SweepSetup

TRACED = 3  # steps that are taken apart
SWEPT = 2  # ranks of --sweep's plans
CONVENTION = "attention in full as torchtitan and nanoGPT count it; causal and TFLOP/s of a rank: as computed"
UNITS = ((2**20, "MiB"), (2**10, "KiB"), (1, "B"))
SMALL = 0.1e-3  # seconds below which microseconds read better
COLUMNS = ("s/step", "predicted", "tokens/s", "MFU", "causal", "TFLOP/s", "peak GiB", "predicted", "first s")
WIDTHS = (10, 10, 12, 7, 8, 9, 10, 10, 9)
HEAD = f"{'plan':<26}" + "".join(f"{name:>{width}}" for name, width in zip(COLUMNS, WIDTHS, strict=True))


def add_bench(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    words.add_plans(verb, 'a plan to measure; may be repeated: "shard=2,zero=3"')
    verb.add_argument("--sweep", action="store_true", help="one rank, DDP, ZeRO-1, ZeRO-2 and FSDP side by side")
    verb.add_argument(
        "--ranks",
        type=words.count,
        help="of a plan (default: its own or 1), of --sweep's (default 2), of --probe (default: one per GPU, else 2)",
    )
    verb.add_argument("--steps", type=words.count, default=10, help="steps that count, after the warm-up (default 10)")
    verb.add_argument(
        "--warm-up", type=words.count, metavar="N", help="steps before those (default 5; 1 if they are long)"
    )
    verb.add_argument(
        "--waterfall", action="store_true", help="profile steps: where the time goes, from peak to achieved"
    )
    verb.add_argument(
        "--probe", action="store_true", help="measure matmuls, attention, memory, collectives and the disk"
    )
    verb.add_argument("--quick", action="store_true", help="with --probe: few and small shapes")
    verb.add_argument(
        "--optimizers",
        action="store_true",
        help="train the run with every optimizer, each by the best of some rates",
    )
    verb.add_argument(
        "--only",
        action="append",
        default=[],
        choices=sorted(OPTIMIZERS),
        metavar="NAME",
        help=f"with --optimizers: this; may be repeated ({', '.join(sorted(OPTIMIZERS))})",
    )
    verb.add_argument(
        "--rates", type=words.count, metavar="N", help="with --optimizers: learning rates that each tries (default 8)"
    )
    verb.add_argument(
        "--at-once",
        type=words.count,
        default=1,
        metavar="N",
        help="with --optimizers: how many train beside each other",
    )
    verb.add_argument("--picture", type=Path, help="with --optimizers: an SVG of loss against step and wall-clock")
    verb.add_argument("--profile", type=Path, help="predict from this machine profile, as --probe wrote it")
    verb.add_argument("--out", type=Path, help="where the answer goes as JSON (of --probe: profile.json)")
    verb.add_argument("--folder", type=Path, default=Path("runs/bench"), help="for tokens and traces")


def bench(options: argparse.Namespace) -> int:
    """Measure; exit 1 when a plan could not be, 3 when all that could not be did not fit."""
    words.require_training()
    if options.probe:
        return probe(options)
    if options.optimizers:
        return optimizers(options)
    from meshwright.bench import sweep
    from meshwright.cli import preflight

    say, here = words.say_to(options.json), env.here()
    target, overrides = words.target(options.words)
    plans = [(plan, plan) for plan in options.plan]
    if options.sweep:
        plans += [(name, plan.format(n=options.ranks or SWEPT)) for name, plan in sweep.FAMOUS.items()]
    steps = options.steps + (TRACED if options.waterfall else 0)
    ranks = None if options.sweep else options.ranks  # whose plans have them already
    warm_up = options.warm_up or sweep.WARM_UP
    planned = sweep.runs(
        target, overrides, plans or [("", "")], steps, options.folder, say, ranks=ranks, warm_up=warm_up
    )
    if here is None and options.ranks is None:
        found = [problem for _, run in planned for problem in preflight.device_problems(run, env.gpu_names())]
        if found:
            raise InputError(found[:1])
    setup = _setup(options, here, max(run.plan.world for _, run in planned))
    if options.out:
        require_file(options.out, "name another --out")  # before minutes are spent on what could not be kept
    require_folder(options.folder, "name another --folder")
    if here is None:
        say(HEAD)
        rows = sweep.sweep(planned, setup, lambda row: say(_line(row)))
    else:  # one rank of the only plan, in a job that somebody else has launched
        (name, run), *more = planned
        if more or run.plan.world != here.world:
            text = f"{here.launcher} started {plural(here.world, 'rank')}, which can measure one plan of as many"
            raise InputError([Problem(text, "give one --plan of that world, and start the job once for each", "plan")])
        sweep.feed(planned, setup)
        row = sweep.rank_row(name, run, here, setup)
        if row is None:
            return 0
        say(f"{HEAD}\n{_line(row)}")
        rows = [row]
    return _answer(rows, options, say)


def _setup(options: argparse.Namespace, here: Place | None, most: int) -> "SweepSetup":
    from meshwright.bench import sweep
    from meshwright.cost.calibrate import PredictionSource

    say = words.say_to(options.json)

    def probed() -> Profile | None:
        """Ranks that somebody else launched hold the machine already: there a profile must be given."""
        try:
            return sweep.cached_probe(env.cache(), most, say) if here is None else None
        except RuntimeError as error:
            say(f"no prediction: the probe failed: {str(error).strip().splitlines()[-1]}")
            return None

    given = read_profile(options.profile) if options.profile else None
    return sweep.SweepSetup(
        cache=env.cache(),
        folder=options.folder,
        machine=PredictionSource(given=given, probed=probed),
        traced=TRACED if options.waterfall else 0,
        warm_up=options.warm_up or sweep.WARM_UP,
    )


def _answer(rows: "list[Row]", options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """What the columns are made of, where that is not the same everywhere; then the rows, for programs."""
    if found := next((row.measured for row in rows if row.measured), None):
        if source := found["predicted_from"]:
            say(f"predicted from {source}")
        if of := found["mfu_of"]:
            say(f"MFU: of {of}, {CONVENTION}")
        if found["device"] == "cpu":
            grown = "how much a rank's process grew since before it had a model"
            say(f"peak GiB: {grown}; the prediction is of tensors alone")
    answers = [{"name": row.name, **(row.measured or {}), "error": row.error} for row in rows]
    answer = answers[0] if len(answers) == 1 else answers
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
    if options.json:
        print(msgspec.json.encode(answer).decode())
    codes = {row.exit_code for row in rows if row.error}
    return (codes.pop() if len(codes) == 1 else Exit.FAILED) if codes else Exit.DONE


def _line(row: "Row") -> str:
    found = row.measured
    if found is None:
        words = row.error if "\n" not in row.error else f"\n{row.error}"
        return f"{row.name or 'as given':<26}could not be measured: {words}"
    predicted = f"{found['predicted_seconds']:>10.4f}" if found["predicted_seconds"] else f"{'–':>10}"
    bytes_predicted = f"{found['predicted_bytes'] / GIB:>10.2f}" if found["predicted_bytes"] else f"{'–':>10}"
    mfu = f"{found['mfu']:>7.1%}{found['mfu_causal']:>8.1%}" if found["mfu"] else f"{'–':>7}{'–':>8}"
    mfu += f"{found['tflops']:>9.1f}"
    shares = found["waterfall"]["shares"] if found.get("waterfall") else []
    falls = "".join(f"\n    {each['name']:<24}{each['seconds']:>10.4f} s{each['share']:>8.1%}" for each in shares)
    time = f"{found['step_seconds']:>10.4f}{predicted}{found['tokens_per_second']:>12,.0f}{mfu}"
    memory = f"{found['peak_allocated_bytes'] / GIB:>10.2f}{bytes_predicted}"
    return f"{row.name or 'as given':<26}{time}{memory}{found['first_step_seconds']:>9.1f}{falls}"


def optimizers(options: argparse.Namespace) -> int:
    """Train with every optimizer; exit 1 when one could not."""
    from meshwright.bench.optimizers import RATES, OptimizerBench, table
    from meshwright.cli import preflight

    if (here := env.here()) is not None:
        text = f"{here.launcher} started this rank, and --optimizers starts ranks of its own"
        raise InputError([Problem(text, "start it once, by itself", "--optimizers")])
    for file in filter(None, (options.out, options.picture)):
        require_file(file, "name another file")  # before minutes are spent on what could not be kept
    require_folder(options.folder, "name another --folder")
    say = words.say_to(options.json)
    target, overrides = words.target(options.words)
    compared = OptimizerBench(target, overrides, options.folder / "optimizers", env.cache())
    if found := list(preflight.device_problems(compared.one, env.gpu_names())):
        raise InputError(found)
    names = options.only or list(OPTIMIZERS)
    size = f"{plural(compared.one.steps, 'step')} of {plural(compared.one.tokens, 'token')}"
    rates = options.rates or RATES
    say(f"{len(names)} optimizers, {rates} learning rates each, {size}")
    answer = compared.compare(names, _progress(say, len(names) * rates), rates=rates, at_once=options.at_once)
    say(table(answer))
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
    if options.picture:
        options.picture.write_text(optimizers_picture(answer))
    if options.json:
        print(msgspec.json.encode(answer).decode())
    return Exit.FAILED if any(row.error for row in answer.rows) else Exit.DONE


def _progress(say: Callable[[str], None], runs: int) -> Callable[[str], None]:
    """A line for each run that is done, and how many there are; the same on a terminal and in a log."""
    done = iter(range(1, runs + 1))
    return lambda text: say(f"[{next(done)}/{runs}] {text}")


def optimizers_picture(answer: "OptimizerTable") -> str:
    """Loss against step, and against seconds of training."""
    from meshwright.report.loss_curves import LossCurve, LossPanel, picture

    def curves(of: Callable[["LearningPoint"], float]) -> tuple[LossCurve, ...]:
        kept = [
            (row.name, [each for each in row.best.points if each.loss is not None]) for row in answer.rows if row.best
        ]
        return tuple(
            LossCurve(name=name, points=tuple((of(each), each.loss) for each in points if each.loss is not None))
            for name, points in kept
            if points
        )

    panels = (
        LossPanel(title="by step", unit="steps", curves=curves(lambda each: float(each.step))),
        LossPanel(title="by time", unit="seconds of training", curves=curves(lambda each: each.seconds)),
    )
    return picture(f"Validation loss of {answer.run} by optimizer", panels)


def probe(options: argparse.Namespace) -> int:
    """Measure this machine, write its profile and say what it does."""
    from meshwright.bench.sweep import PROBE, probe_here, probe_run

    target = options.out or Path("profile.json")
    if target.is_dir():
        raise InputError([Problem(f"{target} is a folder", "name a file with --out")])
    here = env.here()
    if here is None:
        profile = probe_here(options.ranks or env.default_ranks(), options.quick, target)
    else:
        PROBE(here, probe_run(here.world), options.quick, target)
        if here.rank != 0:
            return 0
        profile = read_profile(target)
    say = words.say_to(options.json)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(profile)).decode())
    best = max(profile.matmuls, key=lambda each: each.m * each.n * each.k / each.seconds)
    rate = 2 * best.m * best.n * best.k / best.seconds / 1e12
    threads = f", {plural(profile.threads, 'thread')} per rank" if profile.threads else ""
    say(f"{profile.device}{threads}: matmul up to {rate:.3g} TFLOP/s ({best.m} × {best.n} × {best.k}, {best.dtype}),")
    say(f"copies {profile.copy_bandwidth / 1e9:.0f} GB/s, a launch {profile.launch_seconds * 1e6:.1f} µs")
    if profile.host_bandwidth:
        to_host, back = profile.host_bandwidth / 1e9, profile.to_device_bandwidth / 1e9
        say(f"host link, pinned: {to_host:.1f} GB/s to the host, {back:.1f} GB/s to the device")
    written, read = profile.disk_write_bandwidth / 1e9, profile.disk_read_bandwidth / 1e9
    say(f"disk: {written:.2f} GB/s written, {read:.2f} GB/s read")
    for line in collective_lines(profile):
        say(line)
    say(f"written to {target}; predict with it: meshwright plan … --profile {target}")
    return 0


def collective_lines(profile: Profile) -> Iterator[str]:
    """Collectives as a table, and what was fitted to them."""
    from meshwright.cost.calibrate import algorithm_bandwidth, bus_bandwidth

    if not profile.collectives:
        return
    yield f"{'collective':<16}{'ranks':>6}{'size':>10}{'time':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}"
    for each in sorted(profile.collectives, key=lambda each: (each.kind, each.bytes)):
        unit, name = next((unit, name) for unit, name in UNITS if each.bytes >= unit)
        bandwidths = f"{algorithm_bandwidth(each) / 1e9:>12.3f}{bus_bandwidth(each) / 1e9:>12.3f}"
        size, seconds = f"{each.bytes / unit:.4g} {name}", _seconds(each.seconds)
        yield f"{each.kind:<16}{each.ranks:>6}{size:>10}{seconds:>12}{bandwidths}"
    yield f"{'fitted':<16}{'ranks':>6}{'latency':>22}{'GB/s':>12}{'error':>12}"
    for fit in profile.fits:
        bandwidth, error = f"{fit.bandwidth / 1e9:>12.3f}", f"{fit.error:>12.1%}"
        yield f"{fit.kind:<16}{fit.ranks:>6}{_seconds(fit.latency):>22}{bandwidth}{error}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < SMALL else f"{seconds * 1e3:.3f} ms"
