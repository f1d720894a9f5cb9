"""Which test files cost most: the CPU seconds of each, with those of every process that its tests start.

    python benchmarks/suite.py tests/dist/test_verify.py tests/unit/kernels
    python benchmarks/suite.py                  # each file of tests/dist, each folder of tests/unit: half an hour

Each runs in a pytest of its own, whose start (torch, and the server that ranks are forked from) costs some 7 seconds.
Unlike the clock, CPU seconds hardly depend on what else the machine does.
"""

import argparse
import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

from meshwright.runtime.ranks import SET_CHILD_SUBREAPER

TESTS = Path(__file__).parents[1] / "tests"


def cpu_seconds(tests: str) -> tuple[float, int]:
    """User and system time, and pytest's exit code. Processes whose parent has gone become ours, and are waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", tests], capture_output=True, check=False)
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def main() -> None:
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    folders = sorted(path for path in (TESTS / "unit").iterdir() if any(path.glob("test_*.py")))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="FILE")
    every = [*map(str, sorted((TESTS / "dist").glob("test_*.py"))), *map(str, folders)]
    for tests in parser.parse_args().tests or every:
        seconds, code = cpu_seconds(tests)
        print(f"{seconds:7.1f} s  {tests}{f'  exit code {code}' if code else ''}", flush=True)


if __name__ == "__main__":
    main()
