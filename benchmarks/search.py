"""How long the search takes, and how much of the space it has to look at: results/search.json.

Each question is asked in a fresh process, so that no cache of an earlier one helps; the median of a few is kept.
`--table` prints an earlier record as the table of docs/plan.md.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config.presets import preset
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.search.best_first import search
from meshwright.search.question import Question

QUESTIONS = (  # model, machines, sequence, batch
    ("llama3-8b", "8xh100", 8192, 64),
    ("llama3-70b", "64xh100", 8192, 512),
    ("mixtral-8x7b", "64xh100", 4096, 512),
    ("llama3-405b", "16384xh100", 8192, 2048),
    ("deepseek-v3", "2048xh100", 4096, 15360),
)
RESULT = Path("results/search.json")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One question: what became of its plans, and seconds."""

    model: str
    cluster: str
    legal: int
    too_large: int
    slower: int
    priced: int
    seconds: float  # of the search alone, by the clock
    cpu_seconds: float
    command_seconds: float  # of the whole command


def asked(number: int) -> Row:
    """Search for one answer, in this process."""
    model, machines, sequence, batch = QUESTIONS[number]
    question = Question(
        arch=preset(model),
        sequence=sequence,
        batch=batch,
        precision="bf16",
        cluster=cluster(machines),
        stack=stack_of("meshwright"),
    )
    clock, cpu = time.perf_counter(), time.process_time()
    counts = search(question, kinds=True).counts  # as `plan` does
    return Row(
        model=model,
        cluster=machines,
        legal=counts.legal,
        too_large=counts.does_not_fit,
        slower=counts.slower,
        priced=counts.priced,
        seconds=time.perf_counter() - clock,
        cpu_seconds=time.process_time() - cpu,
        command_seconds=0.0,
    )


def measured(number: int, times: int) -> Row:
    """The median of several fresh processes."""
    rows, commands = [], []
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(number)], check=True, capture_output=True, text=True
        )
        rows.append(msgspec.json.decode(done.stdout, type=Row))
        commands.append(_command_seconds(number))
    middle = sorted(rows, key=lambda row: row.seconds)[len(rows) // 2]
    return msgspec.structs.replace(middle, command_seconds=statistics.median(commands))


def _command_seconds(number: int) -> float:
    model, machines, sequence, batch = QUESTIONS[number]
    words = ["plan", model, "--cluster", machines, "--sequence", str(sequence), "--batch", str(batch), "--json"]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "meshwright", *words], check=True, capture_output=True)
    return time.perf_counter() - start


def table(record: dict[str, Any]) -> str:
    """The record as a page shows it."""
    lines = [
        "| model | GPUs | legal plans | do not fit | pruned by lower bound | fully evaluated | CPU seconds |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in record["rows"]:
        counts = " | ".join(f"{row[name]:,}" for name in ("legal", "too_large", "slower", "priced"))
        lines.append(f"| {row['model']} | {row['cluster']} | {counts} | {row['cpu_seconds']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Ask every question and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=int, help="ask one question here and print its row")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print an earlier record as a table")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(RESULT.read_text())))
        return
    if options.one is not None:
        print(msgspec.json.encode(asked(options.one)).decode())
        return
    rows = [measured(number, options.times) for number in range(len(QUESTIONS))]
    record: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": msgspec.to_builtins(rows),
    }
    RESULT.write_text(json.dumps(record, indent=2) + "\n")
    for row in rows:
        print(
            f"{row.model:<14}{row.cluster:<12}{row.legal:>9,} legal{row.priced:>7,} priced"
            f"{row.seconds:>8.2f} s ({row.cpu_seconds:.2f} s of CPU), command {row.command_seconds:.2f} s"
        )


if __name__ == "__main__":
    main()
