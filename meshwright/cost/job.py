"""What is priced: a model under a plan, by some software, on some machines."""

from typing import Literal

import msgspec

from meshwright.hardware.cluster import Cluster
from meshwright.hardware.stacks import Stack
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan

Rounding = Literal["master", "stochastic", "compensated"]  # as in config/run.py, optim.rounding
States = Literal["fp32", "bf16"]  # optim.states


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides bytes and seconds of a step."""

    arch: Arch
    plan: Plan
    sequence: int
    cluster: Cluster
    stack: Stack
    masked: bool = False  # documents are told apart
    rounding: Rounding = "master"
    states: States = "fp32"
