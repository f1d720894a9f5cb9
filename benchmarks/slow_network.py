"""Replicas with a slow network between them: loss against wall-clock by how little they say to each other.

Two network namespaces stand for two machines, joined by a link that `tc` slows to 100 Mbit/s, 1 and 10 Gbit/s. One job
is trained over it by plain replicas, with lossy gradients, PowerSGD, 1-bit Adam, local SGD and DiLoCo, one rank in each
namespace; and by ZeRO-3 and ZeRO++, two ranks in each, so that hpZ has neighbours. All read the same text in the same
order. Then a few steps of each are counted three times: by the planner's list of collectives, by the calls that the
ranks issued, and by the interfaces of the two namespaces. Needs Linux, root, `ip` and `tc`; a quarter of an hour on
two cores. Where the machine has other work: `chrt -r 1 python benchmarks/slow_network.py`, and the record says so. With
`--seconds N` nothing new is begun after that; the same command goes on with what is missing.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ethernet import ADDRESSES, INTERFACES, PORT, Nodes, lacking, two_nodes

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.cost.calibrate import bus_share
from meshwright.cost.traffic import Collective, traffic
from meshwright.report.loss_curves import LossCurve, LossPanel, picture
from meshwright.runtime.files import replace_file
from meshwright.spec.params import count

ROOT = Path(__file__).parents[1]
RECORD, PICTURE, PAGE = (
    ROOT / "results/slow_network.json",
    ROOT / "docs/slow-network.svg",
    ROOT / "docs/communication.md",
)
SCHEDULERS = {os.SCHED_OTHER: "normal", os.SCHED_RR: "real-time, round robin", os.SCHED_FIFO: "real-time, first in"}
SECONDS = 900.0  # until a hang is certain
COUNTED = 20  # steps whose bytes are counted: a sync of those that sync rarely is among them
STEPS, SHARDED_STEPS = 120, 24  # of a run; ZeRO sends every weight twice and every gradient once
TWICE = 2  # Gloo's reduce-scatter is an all-reduce of which a rank keeps its part
JOB = (
    "arch.preset=starter", "arch.layers=2", "arch.hidden=256", "arch.heads=4", "arch.kv_heads=2", "arch.ffn=2048",
    "data.source=stdlib", "sequence=16", "batch=4", "optim.lr=1e-3", "optim.warmup=10", "eval.batches=16",
    "eval.sample_tokens=0", "checkpoint.every=0", "log.every=1000", "faults.compare_every=0",
)  # fmt: skip


class Method(NamedTuple):
    """One way to train the job over two machines."""

    name: str
    words: tuple[str, ...]
    local: int = 1  # ranks on each machine
    steps: int = STEPS
    is_sharded: bool = False


SYNC = 20  # steps between two syncs
REPLICAS = "plan.replicate=2"
SHARDS = ("plan.shard=4", "plan.zero=3")
ZEROPP = ("plan.gather=int8", "plan.grad_reduce=int4", "plan.secondary_shard=2")
RARELY = (REPLICAS, f"plan.sync_every={SYNC}")
DILOCO = (*RARELY, "plan.outer=diloco")
GENTLE = ("optim.outer_lr=0.9", "optim.outer_momentum=0.1")  # what so short a run bears; the paper's are 0.7 and 0.9
METHODS = (
    Method("plain replicas", (REPLICAS,)),
    Method("bf16", (REPLICAS, "plan.grad_reduce=bf16")),
    Method("int8", (REPLICAS, "plan.grad_reduce=int8")),
    Method("int4", (REPLICAS, "plan.grad_reduce=int4")),
    Method("PowerSGD, rank 4", (REPLICAS, "plan.powersgd=4")),
    Method("1-bit Adam", (REPLICAS, "optim.name=onebit_adam")),
    Method("local SGD, int4", (*RARELY, "plan.outer=average", "plan.outer_quant=int4")),
    Method("DiLoCo, int8", (*DILOCO, *GENTLE, "plan.outer_quant=int8")),
    Method("DiLoCo, int4", (*DILOCO, *GENTLE, "plan.outer_quant=int4")),
    Method("DiLoCo, int4, 0.7 and 0.9", (*DILOCO, "plan.outer_quant=int4")),
    Method("ZeRO-3", SHARDS, 2, SHARDED_STEPS, True),
    Method("ZeRO++: qwZ, qgZ", (*SHARDS, "plan.gather=int8", "plan.grad_reduce=int4"), 2, SHARDED_STEPS, True),
    Method("ZeRO++: qwZ, hpZ, qgZ", (*SHARDS, *ZEROPP), 2, SHARDED_STEPS, True),
    Method("ZeRO++, qgZ in two levels", (*SHARDS, *ZEROPP, "plan.grad_reduce_node=2"), 2, SHARDED_STEPS, True),
)
ALONE = Method("alone", ("plan.replicate=1", "batch=2"), 1, 24)  # a replica's part of the batch, and nobody to tell


# The ranks.


def be_rank(folder: Path, words: list[str], counted: bool) -> None:
    """One rank, as the environment names it: a whole run, or some steps whose bytes are counted."""
    import torch.distributed as dist

    from meshwright.cli import env
    from meshwright.data.prepare import prepare
    from meshwright.train.build import build
    from meshwright.train.world import world

    run, place = load.load(None, words, ranks=None, default_ranks=1).run, env.here()
    assert place is not None, "the script itself starts its ranks"
    with world(run, place) as mesh:
        state = build(run, prepare(run, env.cache(), lambda text: None), mesh)
        dist.barrier()
        found = _counted(run, state, mesh) if counted else _trained(run, state, mesh)
        state.loader.close()
        dist.barrier()  # whoever leaves early would close what others still read
    (folder / f"rank{place.rank}.json").write_text(json.dumps(found))


def _trained(run: Run, state: Any, mesh: Any) -> dict[str, Any]:
    """Seconds at which steps ended, validation left out, and the validation losses."""
    from meshwright.train.loop import StepResult, train

    began, ends, losses = time.perf_counter(), [0.0], []
    for result in train(run, state, mesh):
        now = time.perf_counter() - began
        if isinstance(result, StepResult):
            result.loss.item()
            ends.append(now)
        else:
            losses.append((result.step, ends[-1], result.loss.item()))
            began += now - ends[-1]
    return {"ends": ends[1:], "losses": losses}


def _counted(run: Run, state: Any, mesh: Any) -> dict[str, Any]:
    """What was said, what was called and what the interface saw, of the steps after the first."""
    import torch.distributed as dist

    from meshwright.train.loop import train
    from meshwright.verify.collectives import differences, implied, observing

    steps = train(run, state, mesh)
    next(steps)
    dist.barrier()
    before = seen_by_interface()
    with observing() as seen:
        for _ in range(COUNTED):
            next(steps)
    dist.barrier()
    after = seen_by_interface()
    said = implied(predicted(run, mesh.place), run.plan, mesh)
    calls = [(call.kind, list(call.ranks), call.bytes, number) for call, number in sorted(seen.items())]
    surprises = differences(seen, said)
    return {"sent": after[0] - before[0], "received": after[1] - before[1], "calls": calls, "surprises": surprises}


def seen_by_interface() -> tuple[int, int]:
    """Bytes that have left this namespace and come into it, by the kernel's own counters."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    sent, received = (Path(f"/sys/class/net/{name}/statistics/{way}_bytes").read_text() for way in ("tx", "rx"))
    return int(sent), int(received)


# The arithmetic.


def predicted(run: Run, place: Any) -> tuple[Collective, ...]:
    """The planner's list, of as many steps as are counted."""
    import msgspec

    calls = traffic(run.arch, run.plan, run.sequence, place=place, optimizer=run.optim.name)
    return tuple(msgspec.structs.replace(each, count=each.count * COUNTED // each.every) for each in calls)


def crossing(calls: Iterable[tuple[str, list[int], int, int]], local: int) -> float:
    """Bytes that calls of one rank, and its neighbours' alike, take out of their machine.

    Rings pass a machine's border once; in an all-to-all each of its ranks sends to all beyond. Both are Gloo's ways.
    A call among some of a machine's ranks has its like among the others.
    """
    total = 0.0
    for kind, ranks, size, number in calls:
        inside = sum(rank < local for rank in ranks)
        if inside in (0, len(ranks)):
            continue
        if kind == "all_to_all":
            out = inside * size * (len(ranks) - inside) / len(ranks)
        else:
            out = bus_share(kind, len(ranks)) * size * (TWICE if kind == "reduce_scatter" else 1)
        total += number * out * (local // inside)
    return total


# The machines.


def on_both(nodes: Nodes, method: Method, folder: Path, *, counted: bool = False) -> list[dict[str, Any]]:
    """Train on both machines; what each rank found, or said before it failed."""
    words = [*JOB, *method.words, *(run_words(method) if not counted else counted_words(method))]
    world = 1 if method is ALONE else 2 * method.local
    ranks: list[subprocess.Popen[str]] = []
    for old in folder.glob("rank*.json"):
        old.unlink()
    try:
        for number in range(2 * method.local):
            node, local = divmod(number, method.local)
            rank = 0 if method is ALONE else number
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": method.local}
            at = ADDRESSES[node if method is ALONE else 0]
            meeting = {"MASTER_ADDR": at, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": INTERFACES[node]}
            told = {key: str(value) for key, value in (place | meeting | {"OMP_NUM_THREADS": 1}).items()}
            command = ["ip", "netns", "exec", nodes[node], sys.executable, __file__, "--rank", str(folder)]
            command += ["--counted"] * counted
            around = {**os.environ, **told}
            ranks.append(subprocess.Popen([*command, *words], env=around, stderr=subprocess.PIPE, text=True))
        ends = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if failed := [end for end, rank in zip(ends, ranks, strict=True) if rank.returncode]:
        raise RuntimeError(f"{method.name}: {failed[0].strip()[-2000:]}")
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def run_words(method: Method) -> list[str]:
    """A whole run, with some validation losses on its way."""
    every = method.steps if method.is_sharded else method.steps // 3
    return [f"steps={method.steps}", f"eval.every={every}"]


def counted_words(method: Method) -> list[str]:
    """A few steps: one before those that count, and some after, so that the run's last one is not among them."""
    freeze = ["optim.freeze_step=1"] if "optim.name=onebit_adam" in method.words else []
    return [f"steps={COUNTED + 4}", "data.eval_fraction=0.0", "eval.every=0", "optim.warmup=1", *freeze]


def bytes_of(nodes: Nodes, method: Method, folder: Path) -> dict[str, Any]:
    """A method's bytes a step: as planned and as issued, which must be the same calls, and as the interfaces saw."""
    found = on_both(nodes, method, folder, counted=True)
    if surprises := [text for each in found for text in each["surprises"]]:
        raise RuntimeError(f"{method.name} issues other calls than the planner lists: {surprises[:3]}")
    first = found[0]
    said = crossing(((kind, ranks, size, number) for kind, ranks, size, number in first["calls"]), method.local)
    seen = [found[0]["sent"], found[method.local]["sent"]]
    return {
        "name": method.name,
        "predicted": said / COUNTED,
        "issued": said / COUNTED,
        "calls": sum(call[3] for call in first["calls"]) / COUNTED,
        "counted": [each / COUNTED for each in seen],
        "overhead": max(seen) / said - 1,
    }


def over(mbit: float, folder: Path, methods: Iterable[Method], rate: dict[str, Any], until: float) -> dict[str, Any]:
    """Every method at one rate, but for those that it has already, as long as there is time."""
    before = rate.get("load_before", os.getloadavg()[0])
    rows = list(rate.get("rows", ()))
    with two_nodes(mbit / 1000) as nodes:
        alone = rate.get("alone_seconds") or statistics.median(
            later - earlier for earlier, later in pairwise(on_both(nodes, ALONE, folder)[0]["ends"])
        )
        print(f"{mbit:g} Mbit/s; a replica's step without the others: {alone:.3f} s", flush=True)
        for method in lacking_in(rows, methods):
            if time.monotonic() > until:
                break
            found = on_both(nodes, method, folder)[0]
            ends = found["ends"]
            seconds = (ends[-1] - ends[0]) / (len(ends) - 1)  # the first makes what is made once
            rows.append(
                {
                    "name": method.name, "words": list(method.words), "ranks": 2 * method.local, "steps": len(ends),
                    "step_seconds": seconds, "network_share": 1 - alone / seconds if method.local == 1 else None,
                    "losses": found["losses"],
                }
            )  # fmt: skip
            row = rows[-1]
            print(f"  {method.name:<26}{60 / seconds:>9.1f} steps/min  loss {row['losses'][-1][2]:.4f}", flush=True)
    order = [method.name for method in METHODS]
    rows.sort(key=lambda row: order.index(row["name"]))
    return {"mbit": mbit, "load_before": before, "load_after": os.getloadavg()[0], "alone_seconds": alone, "rows": rows}


def lacking_in(rows: list[dict[str, Any]], methods: Iterable[Method]) -> list[Method]:
    """Methods that have no row yet."""
    found = {row["name"] for row in rows}
    return [method for method in methods if method.name not in found]


def measure(mbits: list[float], methods: tuple[Method, ...], begun: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The record, or what there is of it when the time is over."""
    began = time.monotonic()
    until = began + seconds
    run = load.load(None, [*JOB, REPLICAS]).run
    counts, rates = list(begun.get("bytes", ())), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with two_nodes(10.0) as nodes:
            for method in lacking_in(counts, methods):
                if time.monotonic() > until:
                    break
                counts.append(each := bytes_of(nodes, method, folder))
                print(f"  {each['name']:<26}{each['predicted']:>12,.0f} B a step, {each['overhead']:+.2%} on the wire")
        for mbit in mbits:
            rate = next((each for each in begun.get("rates", ()) if each["mbit"] == mbit), {})
            late = time.monotonic() > until or not lacking_in(rate.get("rows", []), methods)
            rates.append(rate if late else over(mbit, folder, methods, rate, until))
    return {
        "machine": platform.machine(), "cores": os.cpu_count(), "torch": version("torch"),
        "scheduler": SCHEDULERS.get(os.sched_getscheduler(0), "other"), "job": list(JOB), "parameters": count(run.arch),
        "tokens": run.tokens, "seconds": begun.get("seconds", 0.0) + time.monotonic() - began,
        "bytes": counts, "rates": [rate for rate in rates if rate],
    }  # fmt: skip


# What the page shows.


def base(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a row is compared with: plain replicas, or plain ZeRO-3."""
    name = "ZeRO-3" if row["ranks"] > 2 else "plain replicas"
    return next(each for each in rows if each["name"] == name)


def rate_name(mbit: float) -> str:
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def table(record: dict[str, Any]) -> str:
    """Steps a minute at every rate, and the loss."""
    rates = record["rates"]
    head = "".join(f" {rate_name(rate['mbit'])} |" for rate in rates)
    lines = [
        f"| | steps | validation loss | |{head}\n|---|--:|--:|--:|{'--:|' * len(rates)}",
    ]
    for place, row in enumerate(rates[0]["rows"]):
        plain = base(row, rates[0]["rows"])
        loss, beside = row["losses"][-1][2], row["losses"][-1][2] / plain["losses"][-1][2] - 1
        cells = [row["name"], str(row["steps"]), f"{loss:.3f}", "" if row is plain else f"{beside:+.1%}"]
        for rate in rates:
            here = rate["rows"][place]
            faster = base(here, rate["rows"])["step_seconds"] / here["step_seconds"]
            cells.append(
                f"{60 / here['step_seconds']:,.0f}" + ("" if here["name"] == plain["name"] else f" ({faster:.1f} ×)")
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bytes_table(record: dict[str, Any]) -> str:
    """Bytes that leave a machine in a step, three times."""
    lines = ["| | calls a step | planned = issued, kB | interfaces, kB | more |\n|---|--:|--:|--:|--:|"]
    for each in record["bytes"]:
        seen = " and ".join(f"{number / 1000:,.1f}" for number in each["counted"])
        said = f"{each['calls']:g} | {each['predicted'] / 1000:,.1f}"
        lines.append(f"| {each['name']} | {said} | {seen} | {each['overhead']:.2%} |")
    return "\n".join(lines)


def drawn(record: dict[str, Any]) -> str:
    """Loss against wall-clock, a panel for each rate."""
    panels = [
        LossPanel(
            title=rate_name(rate["mbit"]),
            unit="seconds of training",
            logarithmic=True,
            curves=tuple(
                LossCurve(name=row["name"], points=tuple((end, loss) for _, end, loss in row["losses"]))
                for row in rate["rows"]
                if row["ranks"] == 2
            ),
        )
        for rate in record["rates"]
    ]
    return picture("Validation loss against wall-clock, two machines", panels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 1000.0, 10_000.0])
    parser.add_argument("--only", nargs="+", help="names of methods; what these are compared with is added")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after that")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # be a rank, and leave what was found here
    parser.add_argument("--counted", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.rank, options.words, options.counted)
        return 0
    if why := lacking():
        print(f"slow_network.py: {why}", file=sys.stderr)
        return 2
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    wanted = set(options.only or [method.name for method in METHODS])
    wanted |= {"ZeRO-3" if each.is_sharded else "plain replicas" for each in METHODS if each.name in wanted}
    methods = tuple(each for each in METHODS if each.name in wanted)
    part = options.record.with_suffix(".part.json")
    begun = json.loads(part.read_text()) if part.is_file() else {}
    begun = begun if begun.get("job") == list(JOB) else {}
    try:
        record = measure(options.mbit, methods, begun, options.seconds)
    except KeyboardInterrupt:
        print("slow_network.py: stopped; the namespaces are gone", file=sys.stderr)
        return 130
    rows = [record["bytes"], *(each["rows"] for each in record["rates"])]
    rows += [[]] * (1 + len(options.mbit) - len(rows))
    if missing := sum(len(lacking_in(each, methods)) for each in rows):
        replace_file(part, (json.dumps(record, indent=1) + "\n").encode())
        print(f"slow_network.py: {missing} measurements are missing: run the same command again", file=sys.stderr)
        return 3
    part.unlink(missing_ok=True)
    replace_file(options.record, (json.dumps(record, indent=1) + "\n").encode())
    replace_file(options.picture, drawn(record).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
