"""What it costs to be told: CPU seconds of help and of mistakes, beyond `python -c pass`.

    python benchmarks/startup.py

The least of several runs, with bytecode cached as it is where the package is installed: whatever else the machine does
only adds to it. Results: results/startup.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 7
ALLOWED = 0.15  # seconds beyond the interpreter's own, of help and of a wrong key
COMMANDS = {
    "meshwright --help": ["-m", "meshwright", "--help"],
    "meshwright train stepz=3": ["-m", "meshwright", "train", "stepz=3"],
    "meshwright config show stepz=3": ["-m", "meshwright", "config", "show", "stepz=3"],
    "meshwright train --help": ["-m", "meshwright", "train", "--help"],
    "meshwright plan --help": ["-m", "meshwright", "plan", "--help"],
    "meshwright models": ["-m", "meshwright", "models"],
    "import meshwright": ["-c", "import meshwright"],
}
HELD = ("meshwright --help", "meshwright train stepz=3", "meshwright config show stepz=3")


def cpu_seconds(words: list[str], environment: dict[str, str]) -> float:
    """User and system time of one process, the least of RUNS."""
    found = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def measured(environment: dict[str, str]) -> dict[str, float]:
    """Each command beyond the interpreter alone, which is given too."""
    interpreter = cpu_seconds(["-c", "pass"], environment)
    beyond = {name: cpu_seconds(words, environment) - interpreter for name, words in COMMANDS.items()}
    return {"python -c pass": round(interpreter, 3), **{name: round(value, 3) for name, value in beyond.items()}}


def main() -> int:
    """Measure; exit 1 when one costs more than it may."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as cache:
        seconds = measured(plain | {"PYTHONPYCACHEPREFIX": cache})
    result = {"python": sys.version.split()[0], "runs": RUNS, "allowed": ALLOWED, "cpu_seconds_beyond": seconds}
    file = Path(__file__).parents[1] / "results" / "startup.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file.read_text(), end="")
    return 0 if all(seconds[name] <= ALLOWED for name in HELD) else 1


if __name__ == "__main__":
    raise SystemExit(main())
