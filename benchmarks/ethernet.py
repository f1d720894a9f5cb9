"""Two nodes over Ethernet, on one machine: two network namespaces, joined by a link that is slowed to a given rate.

For each rate: what TCP alone reaches (one stream and four), every collective by size with a latency and a bandwidth
fitted to it, and a step under the famous plans with one rank in each namespace, so that gradients cross the link.
Beside each step stand two predictions made of one rank's step at half the batch, the planner's list of collectives and
the fits: with everything sent behind the arithmetic, and with nothing. Needs Linux, root, `ip` and `tc`.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.bench.sweep import FAMOUS
from meshwright.config import load
from meshwright.cost.calibrate import fitted_seconds
from meshwright.cost.traffic import traffic
from meshwright.hardware.profile import CollectiveFit, Profile, read_profile
from meshwright.runtime.files import replace_file
from meshwright.spec.params import count

MODEL = (
    "tiny", "arch.layers=6", "arch.hidden=384", "arch.heads=6", "arch.kv_heads=6", "arch.head_dim=64", "arch.ffn=1024",
    "arch.vocab=8192", "arch.context=256", "sequence=256",
)  # fmt: skip
BATCH = 4
ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("mwa", "mwb")
BURST = 256 * 1024  # bytes that may pass at once: four of the kernel's largest packets
QUEUED = "50ms"
PORT = 29_600
LONGEST = 900.0  # seconds that one measurement may take
PROBED = "profile.json"
MARK = "<!-- results/ethernet.json -->"


class Nodes(NamedTuple):
    """The names of the two namespaces."""

    first: str
    second: str


@contextmanager
def two_nodes(gbit: float) -> Iterator[Nodes]:
    """Two namespaces and the link between them, gone again however the work ends."""
    nodes = Nodes(f"meshwright{os.getpid()}a", f"meshwright{os.getpid()}b")
    try:
        for node in nodes:
            _ip("netns", "add", node)
        _ip("link", "add", INTERFACES[0], "netns", nodes[0], "type", "veth", "peer", INTERFACES[1], "netns", nodes[1])
        for node, interface, address in zip(nodes, INTERFACES, ADDRESSES, strict=True):
            _ip("-n", node, "address", "add", f"{address}/24", "dev", interface)
            _ip("-n", node, "link", "set", interface, "up")
            _ip("-n", node, "link", "set", "lo", "up")
            limit = ("rate", f"{gbit:g}gbit", "burst", str(BURST), "latency", QUEUED)
            _command("tc", "-n", node, "qdisc", "add", "dev", interface, "root", "tbf", *limit)
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node], capture_output=True, check=False)


def _ip(*words: str) -> None:
    _command("ip", *words)


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def on_both(nodes: Nodes, words: list[str], cache: Path) -> None:
    """Run meshwright with one rank on each node; what the first one said is in the files it was told to write."""
    ranks = []
    try:
        for rank, (node, interface) in enumerate(zip(nodes, INTERFACES, strict=True)):
            place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1}
            meeting = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": interface}
            told = {key: str(value) for key, value in (place | meeting).items()}
            environment = {**os.environ, **told, "XDG_CACHE_HOME": str(cache)}
            command = ["ip", "netns", "exec", node, sys.executable, "-m", "meshwright", *words]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        ends = [rank.communicate(timeout=LONGEST)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [end for end, rank in zip(ends, ranks, strict=True) if rank.returncode]
    if failed:
        raise RuntimeError(f"meshwright {' '.join(words)}: {failed[0].strip()[-2000:]}")


def alone(words: list[str], cache: Path) -> dict[str, Any]:
    """One rank, on no network."""
    command = [sys.executable, "-m", "meshwright", "bench", *words, "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def tcp(nodes: Nodes, streams: int) -> float:
    """Bits a second through plain sockets."""
    script = [sys.executable, str(Path(__file__).with_name("tcp.py"))]
    there = [ADDRESSES[1], str(PORT), str(streams)]
    receiver = subprocess.Popen(["ip", "netns", "exec", nodes.second, *script, "receive", *there])
    try:
        command = ["ip", "netns", "exec", nodes.first, *script, "send", *there]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return float(done.stdout)
    finally:
        receiver.kill()
        receiver.wait()


def sent_seconds(plan: str, fits: tuple[CollectiveFit, ...]) -> float:
    """What the planner's list of collectives takes on the link, by the fits."""
    words = [f"arch.preset={MODEL[0]}", *MODEL[1:], f"batch={BATCH}", *(f"plan.{word}" for word in plan.split(","))]
    run = load.load(None, words, ranks=None, default_ranks=1).run
    by_kind = {fit.kind: fit for fit in fits}
    calls = traffic(run.arch, run.plan, run.sequence)
    return sum(call.count * fitted_seconds(by_kind[call.kind], call.bytes) for call in calls)


def steps_over(nodes: Nodes, profile: Profile, half: float, folder: Path, steps: int) -> list[dict[str, Any]]:
    """Every famous plan of two ranks, measured and predicted."""
    rows = []
    for name, text in FAMOUS.items():
        plan = text.format(n=2)
        if name == "one rank":
            continue
        words = ["bench", *MODEL, f"batch={BATCH}", "--plan", plan, "--steps", str(steps), "--folder", str(folder)]
        on_both(nodes, [*words, "--profile", str(folder / PROBED), "--out", str(folder / "row.json")], folder)
        found = json.loads((folder / "row.json").read_text())
        sent = sent_seconds(plan, profile.fits)
        rows.append(
            {
                "name": name, "plan": plan, "step_seconds": found["step_seconds"], "low_seconds": found["low_seconds"],
                "high_seconds": found["high_seconds"], "sent_seconds": sent, "predicted_hidden": max(half, sent),
                "predicted_plain": half + sent, "planner_seconds": found["predicted_seconds"], "loss": found["loss"],
            }
        )  # fmt: skip
        print(_row(rows[-1]), flush=True)
    return rows


def _row(row: dict[str, Any]) -> str:
    times = [row[key] for key in ("step_seconds", "predicted_hidden", "predicted_plain", "planner_seconds")]
    return f"  {row['name']:<12}" + "".join(f"{seconds:>12.3f}" for seconds in times)


def one_rank(batch: int, folder: Path, steps: int) -> float:
    """Seconds of a step without a network."""
    words = [*MODEL, f"batch={batch}", "--plan", "replicate=1", "--steps", str(steps), "--folder", str(folder)]
    return alone(words, folder)["step_seconds"]


def over(gbit: float, folder: Path, steps: int) -> dict[str, Any]:
    """Everything at one rate. One rank is measured each time: what else runs on the machine changes."""
    load_before = round(os.getloadavg()[0], 1)
    whole, half = (one_rank(batch, folder, steps) for batch in (BATCH, BATCH // 2))
    with two_nodes(gbit) as nodes:
        streams = {str(number): tcp(nodes, number) / 1e9 for number in (1, 4)}
        print(f"{gbit:g} Gbit/s: TCP {streams['1']:.2f} Gbit/s by one stream, {streams['4']:.2f} by four", flush=True)
        print(f"  one rank: {whole:.3f} s, at half the batch {half:.3f} s", flush=True)
        on_both(nodes, ["bench", "--probe", "--out", str(folder / PROBED)], folder)
        profile = read_profile(folder / PROBED)
        for fit in profile.fits:
            print(f"  {fit.kind:<16}{fit.latency * 1e6:>9.0f} µs{fit.bandwidth * 8 / 1e9:>9.2f} Gbit/s", flush=True)
        print(f"  {'plan':<12}{'measured s':>12}{'all hidden':>12}{'none hidden':>12}{'planner':>12}")
        rows = steps_over(nodes, profile, half, folder, steps)
    fits = [{"kind": e.kind, "latency": e.latency, "bandwidth": e.bandwidth, "error": e.error} for e in profile.fits]
    times = [{"kind": each.kind, "bytes": each.bytes, "seconds": each.seconds} for each in profile.collectives]
    before = {"gbit": gbit, "load_before": load_before, "one_rank_seconds": whole, "half_batch_seconds": half}
    return {**before, "tcp_gbit": streams, "fits": fits, "collectives": times, "steps": rows}


def table(record: dict[str, Any]) -> str:
    """The steps of a record, as the page shows them."""
    head = "| link | plan | measured s | quickest to slowest | all hidden | none hidden | planner |\n"
    lines = [head + "|---|---|--:|--:|--:|--:|--:|"]
    for rate in record["rates"]:
        for row in rate["steps"]:
            between = f"{row['low_seconds']:.2f} to {row['high_seconds']:.2f}"
            guesses = [row[key] for key in ("predicted_hidden", "predicted_plain", "planner_seconds")]
            cells = [f"{rate['gbit']:g} Gbit/s", row["name"], f"{row['step_seconds']:.2f}", between]
            lines.append(f"| {' | '.join([*cells, *(f'{seconds:.2f}' for seconds in guesses)])} |")
    return "\n".join(lines)


def links(record: dict[str, Any]) -> str:
    """TCP and the fits of a record, as the page shows them."""
    kinds = [fit["kind"] for fit in record["rates"][0]["fits"]]
    lines = [f"| link | TCP, 1 stream | 4 streams | {' | '.join(kinds)} |", "|---|" + "--:|" * (len(kinds) + 2)]
    for rate in record["rates"]:
        streams = [f"{rate['tcp_gbit'][number]:.2f} Gbit/s" for number in ("1", "4")]
        fitted = [f"{fit['latency'] * 1e3:.2f} ms, {fit['bandwidth'] * 8 / 1e9:.2f}" for fit in rate["fits"]]
        lines.append("| " + " | ".join([f"{rate['gbit']:g} Gbit/s", *streams, *fitted]) + " |")
    return "\n".join(lines)


def shown(page: str, record: dict[str, Any]) -> str:
    """The page with the tables of a record between its two marks."""
    start, _, rest = page.partition(MARK)
    _, _, end = rest.partition(MARK)
    return f"{start}{MARK}\n\n{links(record)}\n\n{table(record)}\n\n{MARK}{end}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The record: one rank alone, then two at every rate."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rates = [over(gbit, folder, options.steps) for gbit in options.gbit]
    run = load.load(None, [f"arch.preset={MODEL[0]}", *MODEL[1:]]).run
    return {
        "machine": platform.machine(), "cores": os.cpu_count(), "torch": torch_version(), "parameters": count(run.arch),
        "batch": BATCH, "sequence": run.sequence, "steps": options.steps, "rates": rates,
    }  # fmt: skip


def torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def lacking() -> str:
    """Why this machine cannot be two."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root; run it as root"
    try:
        with two_nodes(1.0):
            return ""
    except RuntimeError as error:
        return f"{error}; allow network namespaces and tbf, or use another machine"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, nargs="+", default=[10.0, 1.0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--record", type=Path, default=Path("results/ethernet.json"))
    parser.add_argument("--page", type=Path, help="a page whose tables are to show the new record")
    options = parser.parse_args()
    if why := lacking():
        print(f"ethernet.py: {why}", file=sys.stderr)
        return 2
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    try:
        record = measure(options)
    except KeyboardInterrupt:
        print("ethernet.py: stopped; the namespaces are gone", file=sys.stderr)
        return 130
    replace_file(options.record, json.dumps(record, indent=1).encode() + b"\n")
    if options.page:
        replace_file(options.page, shown(options.page.read_text(), record).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
