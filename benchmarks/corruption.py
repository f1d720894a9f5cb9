"""Silent data corruption: faulty ranks one after another, and what the checks of their matmuls find.

Each rank is a short training in this process: clean steps first, then steps in which a share of its matmuls has one bit
of its output flipped, any bit of any element. The check of `train/matmul_check.py` looks on until it would end the run;
the steps go on to see whether the loss would have changed. Weights and optimizer states are put back between ranks.
What is measured besides: single flips, clean steps, and what the check costs.
"""

import argparse
import json
import math
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.cost.flops import step_flops
from meshwright.data.prepare import prepare
from meshwright.parallel import mesh as meshes
from meshwright.parallel import precision
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.failure import FailureError
from meshwright.train import matmul_check
from meshwright.train.build import build
from meshwright.train.faults import Spikes
from meshwright.train.inject import FaultyMatmuls
from meshwright.train.loop import StepResult, train
from meshwright.train.matmul_check import COLUMNS, SUSPECTED, MatmulCheck, Matmuls
from meshwright.train.state import State

RESULT = Path(__file__).parents[1] / "results" / "corruption.json"
SMALL = [
    *("arch.preset=tiny", "arch.layers=2", "sequence=32", "batch=4", "optim.warmup=0", "optim.lr=1e-3"),
    *("eval.every=0", "eval.batches=1", "data.eval_fraction=0", "checkpoint.every=0"),
]
# For the cost: large enough that a step is arithmetic.
LARGE = [*SMALL, "arch.layers=8", "arch.hidden=256", "arch.ffn=768", "arch.heads=8", "sequence=256", "batch=4"]
CLEAN, WINDOW = 20, 50  # steps before a device begins to err, and in which it is to be named
SHARES = (0.3, 0.1, 0.03, 0.01)  # of a rank's matmuls; an equal number of ranks each
RARER = (0.003, 0.001)
CHANGED = 0.001  # a loss that is further from the clean run's by this share has changed
TRIALS, CLEAN_STEPS, PAIRS = 1500, 2000, 60


class Bench:
    """One model that is trained again and again from the same state."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.run: Run = load.load(None, [*words, "faults.check_matmuls_every=1", f"steps={CLEAN_STEPS + 1000}"]).run
        self.mesh: Mesh = meshes.kept(self.run.plan, torch.device("cpu"), self.run.compresses)
        self.state: State = build(self.run, prepare(self.run, folder / "cache", lambda text: None), self.mesh)
        self.held = [precision.master(weight) for chunk in self.state.chunks for weight in chunk.parameters()]
        self.held += [state for states in self.state.optimizer.states().values() for state in states]
        self.held.append(self.state.optimizer.count)
        self.begin = self.copy()

    def copy(self) -> list[Tensor]:
        return [meshes.local(tensor).clone() for tensor in self.held]

    def put_back(self, copy: list[Tensor], step: int) -> None:
        """The state after a step, as it was."""
        with torch.no_grad():
            for tensor, value in zip(self.held, copy, strict=True):
                meshes.local(tensor).copy_(value)
        precision.refresh(self.state.chunks)
        self.state.step = step

    def steps(self) -> Generator[StepResult]:
        return (result for result in train(self.run, self.state, self.mesh) if isinstance(result, StepResult))

    def check(self) -> MatmulCheck:
        return MatmulCheck(self.run, self.state, self.mesh, 0)

    def close(self) -> None:
        self.state.loader.close()


@contextmanager
def faulty(device: FaultyMatmuls) -> Iterator[None]:
    """Matmuls by a device that errs, the check's repetitions too."""
    original = matmul_check.multiply
    matmul_check.multiply = partial(device.multiply, original)
    try:
        with Matmuls(device.take):
            yield
    finally:
        matmul_check.multiply = original


def one_rank(
    bench: Bench, share: float, seed: int, clean: list[float], at: tuple[list[Tensor], Spikes]
) -> dict[str, Any]:
    """A rank that errs from step CLEAN + 1 on: when its loss changed, when it was named, when the run would end."""
    bench.put_back(at[0], CLEAN)
    spikes = Spikes(bench.run.faults.spike)
    spikes.losses.extend(at[1].losses)
    spikes.norms.extend(at[1].norms)
    check, device = bench.check(), FaultyMatmuls(share, random.Random(seed))
    found = {"share": share, "precision": bench.run.plan.precision, "changed": None, "named": None, "ended": None}
    with faulty(device):
        for result in islice(bench.steps(), WINDOW):
            after, loss, norm = result.step - CLEAN, result.loss.item(), result.norm.item()
            off = abs(loss - clean[result.step - 1]) / clean[result.step - 1]
            if found["changed"] is None and not off <= CHANGED:
                found["changed"] = after
            if found["ended"] is not None:
                continue
            check.passed(result.step)
            try:
                if check.read(result.step):
                    found["named"] = found["named"] or after
            except FailureError:
                found["named"], found["ended"] = found["named"] or after, after
                check.disarm()
                continue
            spikes.add(loss, norm)
            if spikes.is_odd:
                check.suspect(result.step, SUSPECTED)
    check.disarm()
    return found | {"flips": device.flips}


def ranks(bench: Bench, shares: tuple[float, ...], each: int, seed: int) -> list[dict[str, Any]]:
    """Faulty ranks beside one clean curve."""
    bench.put_back(bench.begin, 0)
    spikes, clean = Spikes(bench.run.faults.spike), list[float]()
    middle = list[Tensor]()
    for result in islice(bench.steps(), CLEAN + WINDOW):
        clean.append(result.loss.item())
        if result.step <= CLEAN:
            spikes.add(result.loss.item(), result.norm.item())
        if result.step == CLEAN:
            middle = bench.copy()
    same = one_rank(bench, 0.0, seed, clean, (middle, spikes))
    assert same["changed"] is same["named"] is None, "without a fault the curve comes out again"
    return [
        one_rank(bench, share, seed + number, clean, (middle, spikes)) for share in shares for number in range(each)
    ]


class OneFlip(FaultyMatmuls):
    """One flip of the exponent's highest bit, in one matmul of a step."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(0.0, chance, bit=1)
        self.seen, self.target = 0, -1

    def take(self, operator: Any, args: Any, kwargs: Any, c: Tensor) -> None:
        if self.seen == self.target:
            self.flip(c)
        self.seen += 1


def single_flips(bench: Bench, trials: int) -> dict[str, Any]:
    """How often one flip in one matmul of a step is found, beside the share of matmuls that are checked."""
    chance, found, checked, matmuls = random.Random(1), 0, 0, 0
    device = OneFlip(chance)
    bench.put_back(bench.begin, 0)
    check = bench.check()
    original = matmul_check.multiply
    with Matmuls(device.take):
        for number, result in enumerate(islice(bench.steps(), trials + 1)):
            check.passed(result.step)
            scores = [each.scores for each in check.pending]
            check.pending.clear()
            if number:
                found += any(score.max().item() > 1 for score in scores)
                checked += sum(len(score) for score in scores)
            matmuls, device.seen = device.seen, 0
            device.target = chance.randrange(matmuls)
            bench.put_back(bench.begin, result.step)
    check.disarm()
    assert matmul_check.multiply is original
    return {"trials": trials, "found": found, "matmuls_per_step": matmuls, "checked_share": checked / trials / matmuls}


def clean_steps(bench: Bench, steps: int) -> dict[str, Any]:
    """Steps without a fault: alarms, the largest score, and steps in which suspicion had all layers checked."""
    bench.put_back(bench.begin, 0)
    check, spikes, alarms, worst, products, thorough = bench.check(), Spikes(bench.run.faults.spike), 0, 0.0, 0, 0
    for result in islice(bench.steps(), steps):
        thorough += result.step <= check.thorough_until
        check.passed(result.step)
        for each in check.pending:
            products += len(each.products)
            worst = max(worst, each.scores[:, 0].max().item())
            alarms += int((each.scores[:, 0] > 1).sum())
        check.pending.clear()
        spikes.add(result.loss.item(), result.norm.item())
        if spikes.is_odd:
            check.suspect(result.step, SUSPECTED)
    check.disarm()
    return {
        "precision": bench.run.plan.precision,
        "steps": steps,
        "products": products,
        "alarms": alarms,
        "largest_score": worst,
        "thorough_steps": thorough,
    }


def cost(bench: Bench, pairs: int) -> dict[str, Any]:
    """CPU seconds of steps with and without a check, in turn; and the share of arithmetic."""
    check = bench.check()
    with_check, without = list[float](), list[float]()
    check.disarm()
    steps = bench.steps()
    for number in range(2 * pairs + 4):
        if number % 2:
            check.arm(bench.state.step + 1)
        began = time.process_time()
        next(steps)
        check.passed(bench.state.step)
        taken = time.process_time() - began
        check.disarm()  # who arms is this loop
        if number >= 4:
            (with_check if number % 2 else without).append(taken)
    steps.close()
    medians = statistics.median(with_check), statistics.median(without)
    spread = statistics.quantiles(without, n=4)
    return {
        "pairs": pairs,
        "cpu_seconds_with": medians[0],
        "cpu_seconds_without": medians[1],
        "cost": medians[0] / medians[1] - 1,
        "cost_of_pairs": statistics.median(a / b - 1 for a, b in zip(with_check, without, strict=True)),
        "spread_without": (spread[2] - spread[0]) / spread[1],
        "arithmetic": arithmetic(bench.run),
    }


def arithmetic(run: Run) -> float:
    """The check's share of a step's FLOPs, in the mean over a round: the three products of one layer."""
    arch, tokens = run.arch, run.batch * run.sequence
    shapes = [(arch.hidden, arch.q_width), *[(arch.hidden, arch.kv_width)] * 2, (arch.q_width, arch.hidden)]
    shapes += [(arch.hidden, arch.ffn)] * 2 + [(arch.ffn, arch.hidden)]
    layers = [*shapes * arch.layers, (arch.hidden, arch.vocab)]
    total = sum(sum(check_flops(*sizes) for sizes in three(tokens, *shape)) for shape in layers)
    return total / len(layers) / step_flops(arch, run.sequence, run.batch, run.sequence)


def three(rows: int, inner: int, columns: int) -> list[tuple[int, int, int]]:
    """The products of a linear layer: output, gradient of its input, gradient of its weight."""
    return [(rows, inner, columns), (rows, columns, inner), (columns, rows, inner)]


def check_flops(rows: int, inner: int, columns: int) -> float:
    """Of A·(B·r), the sums and norms of all three matrices."""
    return 2 * rows * inner * columns / COLUMNS + 4 * (rows * inner + inner * columns + rows * columns)


def table(record: dict[str, Any]) -> str:
    """The record as a page shows it."""
    lines = [
        "| share of matmuls with a flip | ranks | loss changed | of these named within 50 steps "
        "| before it changed | median steps until named |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    rows = [*record["ranks_fp32"], *record["ranks_bf16"]]
    for shares in [*((share,) for share in SHARES), SHARES, *((share,) for share in RARER)]:
        those = [row for row in rows if row["share"] in shares]
        changed = [row for row in those if row["changed"] is not None]
        named = [row["named"] for row in changed if row["named"] is not None]
        early = sum(row["named"] is not None and row["named"] < row["changed"] for row in changed)
        label = "all of these" if len(shares) > 1 else f"{shares[0]:.1%}"
        median = f"{statistics.median(named):.0f}" if named else "–"
        share = f"{len(named)} ({len(named) / len(changed):.0%})" if changed else "–"
        lines.append(f"| {label} | {len(those)} | {len(changed)} | {share} | {early} | {median} |")
    single, price = record["single"], record["cost"]
    share = f"{single['found'] / single['trials']:.1%} of {single['trials']:,} found"
    expected = f"{single['checked_share']:.1%} expected: the share of matmuls that is checked"
    lines += ["", "| besides | |", "|---|---|"]
    lines.append(f"| one passing flip of an exponent's highest bit | {share} ({expected}) |")
    for clean in (record["clean_fp32"], record["clean_bf16"]):
        lines.append(
            f"| clean steps in {clean['precision']} | {clean['alarms']} false alarms in {clean['steps']:,} steps and "
            f"{clean['products']:,} matmuls; the largest residual was {clean['largest_score']:.2f} of its tolerance |"
        )
    lines.append(
        f"| cost | {price['cost']:+.1%} of a step's CPU time (medians of {price['pairs']} pairs of steps in turn; half "
        f"of the plain steps lie within {price['spread_without']:.0%}); {price['arithmetic']:.2%} of its FLOPs |"
    )
    return "\n".join(lines)


def ranks_in(kind: str, folder: Path, quick: float) -> list[dict[str, Any]]:
    """The faulty ranks of one precision."""
    each = math.ceil(25 * quick)  # of each share: with two precisions 200 in all
    bench = Bench([*SMALL, f"plan.precision={kind}"], folder)
    rows = ranks(bench, SHARES, each, 1000) + ranks(bench, RARER, max(each // 2, 1), 2000)
    bench.close()
    return rows


def with_bench(measure: Callable[[Bench, int], dict[str, Any]], words: list[str], count: int, folder: Path) -> Any:
    """What a function of a model that was just made comes to."""
    bench = Bench(words, folder)
    found = measure(bench, count)
    bench.close()
    return found


def parts(quick: float) -> dict[str, Callable[[Path], Any]]:
    """What is measured, each by itself."""
    found: dict[str, Callable[[Path], Any]] = {}
    for kind in ("fp32", "bf16"):
        words = [*SMALL, f"plan.precision={kind}"]
        found[f"ranks_{kind}"] = partial(ranks_in, kind, quick=quick)
        found[f"clean_{kind}"] = partial(with_bench, clean_steps, words, int(CLEAN_STEPS * quick))
    found["single"] = partial(with_bench, single_flips, [*SMALL, "plan.precision=fp32"], int(TRIALS * quick))
    found["cost"] = partial(with_bench, cost, [*LARGE, "plan.precision=fp32"], max(int(PAIRS * quick), 5))
    return found


def measured(part: Callable[[Path], Any]) -> Any:
    """One part, in a world of one rank."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        found = part(folder)
        dist.destroy_process_group()
    return found


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=parts(1.0), help="measure one part only, and put it into the record")
    parser.add_argument("--quick", type=float, default=1.0, help="the share of all trials that is made; not recorded")
    parser.add_argument("--table", action="store_true", help="print an earlier record as a table")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        wanted = parts(options.quick)
        names = [options.part] if options.part else list(wanted)
        found = {name: measured(wanted[name]) for name in names}
        if options.quick < 1:
            print(json.dumps(found, indent=1))
            return
        about = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "clean_steps_before": CLEAN,
            "window": WINDOW,
            "changed_share": CHANGED,
            "run": SMALL,
            "cost_run": LARGE,
        }
        before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        RESULT.write_text(json.dumps(before | about | found, indent=1) + "\n")
    record = json.loads(RESULT.read_text())
    print(table(record) if record.keys() >= parts(1.0).keys() else f"recorded so far: {', '.join(record)}")


if __name__ == "__main__":
    main()
