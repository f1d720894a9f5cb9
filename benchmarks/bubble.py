"""How idle each pipeline schedule leaves its ranks: measured through torch's runtime, beside the simulator.

A stage's work is a sleep: a third in the forward, a third for the gradient of its input, a third for those of its
weights. Sleeping processes need no cores, so four ranks wait for each other as four machines would, and what is
measured is the schedule and the runtime. A rank has the same work under every schedule. `--table` prints the record as
the table of docs/axes/pipeline.md.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from meshwright.cost.simulate import Timeline, even_cost, play
from meshwright.parallel import mesh as meshes
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline import Pipeline, my_stages
from meshwright.spec.plan import Plan
from meshwright.spec.schedule import Schedule, actions, default_chunks, stage_ranks

SCHEDULES: tuple[Schedule, ...] = ("naive", "gpipe", "1f1b", "looped", "interleaved", "zb1p", "zbv", "dualpipev")
RANKS = 4
MICROBATCHES = (8, 16)
THIRD = 0.06  # seconds that a rank's stages together take for a third of one microbatch's work
OVERSLEEP = 0.25  # a busy machine wakes sleepers late; work done twice would be a third more at least
WIDTH = 4  # numbers that stages hand on: too few to take time
RESULT = Path("results/bubble.json")

Spans = list[tuple[float, float]]  # when a rank was at work, by the machine's clock


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule with one number of microbatches; shares of the step's time that are idle, 0 to 1."""

    schedule: Schedule
    chunks: int
    microbatches: int
    simulated: float
    measured: float
    measured_of_ranks: list[float]
    seconds: float  # of the median step, from the first action of any rank to the last
    simulated_seconds: float


class _Timed(Function):
    """The identity, whose forward and backward take their time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float, spans: Spans) -> Tensor:
        ctx.seconds, ctx.spans = backward_seconds, spans
        rest(forward_seconds, spans)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rest(ctx.seconds, ctx.spans)
        return grads[0], None, None, None


def rest(seconds: float, spans: Spans) -> None:
    """Work, as far as anybody waiting can tell."""
    if seconds == 0:
        return
    start = time.monotonic()
    time.sleep(seconds)
    spans.append((start, time.monotonic()))


class Stage(nn.Module):
    """One stage of equal stages."""

    def __init__(self, seconds: float, spans: Spans) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds, self.spans = seconds, spans

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():  # tokens, at the first stage
            x = x.float()[..., None].expand(*x.shape, WIDTH)
        # Two nodes of the graph, so that a split backward reaches one at a time. The first stage has no gradient of its
        # input to compute; it works as long as the others all the same.
        weight_seconds = self.seconds if x.requires_grad else 2 * self.seconds
        weight = cast(Tensor, _Timed.apply(self.weight, 0.0, weight_seconds, self.spans))
        return weight * cast(Tensor, _Timed.apply(x, self.seconds, self.seconds, self.spans))


def stream(tokens: Tensor, stage: int) -> Tensor:
    """What a stage is sent."""
    return tokens if stage == 0 else torch.empty(*tokens.shape, WIDTH, requires_grad=True)


def plan_of(schedule: Schedule, microbatches: int) -> Plan:
    chunks = default_chunks(schedule)
    return Plan(
        pp=RANKS, schedule=schedule, chunks=chunks, stages=(1,) * RANKS * chunks, microbatch=1, grad_accum=microbatches
    )


def simulated(plan: Plan) -> Timeline:
    """The same step on paper, every third of a stage a second."""
    orders = actions(plan.schedule, plan.pp, plan.chunks, plan.grad_accum)
    return play(orders, stage_ranks(plan.schedule, plan.pp, plan.chunks), even_cost(len(plan.stages), plan.chunks))


def measured(plan: Plan, mesh: Mesh, steps: int) -> list[tuple[float, list[float]]]:
    """Every step after the first: its seconds, and the share of them that each rank idles."""
    spans: Spans = []
    chunks = [Stage(THIRD / plan.chunks, spans) for _ in my_stages(plan, mesh)]
    pipeline = Pipeline(chunks, plan, mesh, lambda outputs, targets: outputs.sum(), stream)
    tokens, found = torch.ones(plan.grad_accum, 2, dtype=torch.long), []
    for _ in range(steps + 1):
        spans.clear()
        dist.barrier()
        pipeline.step(tokens, {}, tokens, torch.ones(()))
        found.append(idle(spans, plan.grad_accum))
    return found[1:]  # the first also builds the runtime


def idle(spans: Spans, microbatches: int) -> tuple[float, list[float]]:
    """A step's seconds over all ranks, and each rank's idle share; the machine's clock is the same for all."""
    mine = torch.tensor([spans[0][0], spans[-1][1], sum(end - start for start, end in spans)], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(every, mine)
    starts, ends, busy = torch.stack(every).T.tolist()
    seconds = max(ends) - min(starts)
    planned = 3 * THIRD * microbatches
    assert all(abs(each / planned - 1) < OVERSLEEP for each in busy), f"ranks worked {busy} s, not {planned} s"
    return seconds, [1 - each / seconds for each in busy]


def row(plan: Plan, steps: list[tuple[float, list[float]]]) -> Row:
    """The median step beside the simulated one."""
    seconds, idles = sorted(steps)[len(steps) // 2]
    timeline = simulated(plan)
    return Row(
        schedule=plan.schedule,
        chunks=plan.chunks,
        microbatches=plan.grad_accum,
        simulated=timeline.bubble,
        measured=statistics.mean(idles),
        measured_of_ranks=idles,
        seconds=seconds,
        simulated_seconds=timeline.seconds * THIRD / plan.chunks,
    )


def rank(number: int, steps: int, folder: Path) -> None:
    """One of the processes; the first writes what all found."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    mesh = meshes.make(plan_of("1f1b", RANKS), torch.device("cpu"))
    rows = []
    for microbatches in MICROBATCHES:
        for schedule in SCHEDULES:
            plan = plan_of(schedule, microbatches)
            rows.append(row(plan, measured(plan, mesh, steps)))
            if number == 0:
                print(
                    f"{schedule:<12} m={microbatches:<3} {rows[-1].simulated:.3f} {rows[-1].measured:.3f}", flush=True
                )
    if number == 0:
        (folder / "rows.json").write_bytes(msgspec.json.encode(rows))
    dist.destroy_process_group()


def measure(steps: int) -> dict[str, object]:
    """Start the ranks and take the record home."""
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [context.Process(target=partial(rank, number, steps, folder)) for number in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        rows = json.loads((folder / "rows.json").read_bytes())
    return {
        "ranks": RANKS,
        "seconds_of_a_third": THIRD,
        "steps": steps,
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "rows": rows,
    }


def table(record: dict[str, Any]) -> str:
    """The record as a page shows it."""
    rows = msgspec.convert(record["rows"], list[Row])
    head = " | ".join(f"m = {m}: simulated | measured" for m in MICROBATCHES)
    lines = [f"| schedule | stages a rank | {head} |", "|---|" + "--:|" * (1 + 2 * len(MICROBATCHES))]
    for schedule in SCHEDULES:
        mine = {row.microbatches: row for row in rows if row.schedule == schedule}
        cells = [f"{mine[m].simulated:.1%} | {mine[m].measured:.1%}" for m in MICROBATCHES]
        lines.append(f"| {schedule} | {mine[MICROBATCHES[0]].chunks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="print an earlier record as a table")
    options = parser.parse_args()
    if not options.table:
        options.out.write_text(json.dumps(measure(options.steps), indent=2) + "\n")
    print(table(json.loads(options.out.read_text())))


if __name__ == "__main__":
    main()
