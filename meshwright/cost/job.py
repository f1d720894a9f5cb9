"""What is priced: a model under a plan, by some software, on some machines."""

from typing import Literal

import msgspec

from meshwright.hardware.cluster import Cluster
from meshwright.hardware.stacks import Stack
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan

MasterWeights = Literal["fp32", "split", "none"]  # as in config/run.py, optim.master_weights
StateDtype = Literal["fp32", "bf16", "int8", "int4", "fp8"]  # optim.state_dtype


class Job(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True):
    """Everything that decides bytes and seconds of a step."""

    arch: Arch
    plan: Plan
    sequence: int
    cluster: Cluster
    stack: Stack
    masked: bool = False  # documents are told apart
    span: float | None = None  # mean over tokens of the document that each is in; None: the whole sequence
    master_weights: MasterWeights = "fp32"
    state_dtype: StateDtype = "fp32"
    optimizer: str = "adamw"  # one of the descriptions of spec/optimizers.py
