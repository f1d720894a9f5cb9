"""What compilation needs of a machine, asked before ranks start there."""

import shutil
from collections.abc import Callable, Iterator

from meshwright.spec.plan import Plan
from meshwright.spec.problem import Problem

NAMES = ("g++", "clang++", "c++", "icpx")


def missing(plan: Plan, find: Callable[[str], str | None] = shutil.which) -> Iterator[Problem]:
    """Torch turns blocks into C++ (on CPUs) or into Triton kernels whose start is C (on GPUs)."""
    if plan.compile and not any(map(find, NAMES)):
        yield Problem(
            "plan.compile needs a C++ compiler, and this machine has none",
            "install one (apt-get install g++), or leave plan.compile out",
            "plan.compile",
        )
