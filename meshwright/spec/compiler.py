"""What compilation needs of a machine, asked before ranks start there."""

import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from meshwright.spec.plan import Plan
from meshwright.spec.problem import Problem

NAMES = ("g++", "clang++", "c++", "icpx")


def compiles_doubles() -> bool:
    """Whether torch compiles attention in float64: 2.11 mixes it with fp32 on a CPU, and fails."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (2, 12)


def missing(plan: Plan, find: Callable[[str], str | None] = shutil.which) -> Iterator[Problem]:
    """Torch turns blocks into C++ (on CPUs) or into Triton kernels whose start is C (on GPUs)."""
    if plan.compile and not any(map(find, NAMES)):
        yield Problem(
            "plan.compile needs a C++ compiler, and this machine has none",
            "install one (apt-get install g++), or leave plan.compile out",
            "plan.compile",
        )
