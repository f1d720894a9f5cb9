"""What is priced: a model under a plan, by some software, on some machines."""

import msgspec

from meshwright.spec.arch import Arch
from meshwright.spec.cluster import Cluster
from meshwright.spec.plan import Plan
from meshwright.spec.stack import Stack


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides bytes and seconds of a step."""

    arch: Arch
    plan: Plan
    sequence: int
    cluster: Cluster
    stack: Stack
    masked: bool = False  # documents are told apart
