"""Optimizers as data, read by both towers: what each keeps of a parameter, which it takes, what an update moves.

Their arithmetic is in optim/, one file each, under the same names.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

# How a state tensor is shaped beside its parameter. Row and column means (Adafactor) or a whole matrix of statistics
# (Shampoo) become further words here and further cases of `StateTensor.elements`.
StateShape = Literal["elementwise"]
# In how many bits it is kept: as the master weight, so fp32, float64 in proofs, or bf16 by optim.state_dtype.
StateDtypeRule = Literal["master"]
Takes = Literal["all", "matrices", "rest"]  # which parameters an optimizer updates


class StateTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that an optimizer keeps of every parameter."""

    name: str  # in checkpoints, as NAME/PARAMETER
    label: str
    shape: StateShape = "elementwise"
    dtype: StateDtypeRule = "master"

    def elements(self, shape: tuple[int, ...]) -> int:
        """Elements beside a parameter of a shape."""
        return math.prod(shape)


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimizer says of itself, whatever form its states take."""

    name: str  # optim.name
    label: str
    held: str  # its states, in a ledger's words
    states: tuple[StateTensor, ...]
    takes: Takes = "all"
    collectives: tuple[str, ...] = ()  # that its update issues: one by elements needs none
    keys: tuple[str, ...]  # of [optim], those that only it reads
    flops: int  # of one parameter's update, by operations that round once each
    # Bytes of one parameter that unfused operators move, temporaries included. Between them the states are the least.
    has_kernel: bool = False  # of ours, in kernels/, that reads and writes everything once
    rounded_bytes: float  # without an fp32 master weight: widened, updated, rounded by optim/master_weights.py
    bf16_state_bytes: float  # with bf16 states, by the host in optim/offload.py; most of it stays in its caches

    @property
    def state_names(self) -> tuple[str, ...]:
        """The kinds of its state tensors, in the order of its arithmetic."""
        return tuple(state.name for state in self.states)

    def state_bytes(self, width: int) -> int:
        """Bytes of its states for one parameter, at so many bytes an element."""
        return width * len(self.states)  # all are elementwise

    def moved_bytes(self, width: int) -> int:
        """Bytes of its states that one update of a parameter reads and writes."""
        return 2 * self.state_bytes(width)


ADAMW = OptimizerSpec(
    name="adamw",
    label="AdamW",
    held="AdamW's two",
    states=(StateTensor(name="first", label="first moment"), StateTensor(name="second", label="second moment")),
    keys=("beta1", "beta2", "eps"),
    flops=16,
    has_kernel=True,
    rounded_bytes=230,
    bf16_state_bytes=80,  # some twenty passes of four bytes
)

SGD = OptimizerSpec(
    name="sgd",
    label="SGD with momentum",
    held="SGD's momentum",
    states=(StateTensor(name="momentum", label="momentum"),),
    keys=("momentum", "nesterov"),
    flops=7,  # two more with nesterov
    rounded_bytes=134,  # AdamW's, less 96 of its nine further operators and of its second state
    bf16_state_bytes=56,  # some fourteen passes: AdamW's, less those that widen, move and round a second state
)

OPTIMIZERS: Mapping[str, OptimizerSpec] = {each.name: each for each in (ADAMW, SGD)}


def saved_by(kinds: Iterable[str]) -> OptimizerSpec | None:
    """The optimizer whose states are among the kinds of tensors that a checkpoint has."""
    held = set(kinds)
    return next((each for each in OPTIMIZERS.values() if held.issuperset(each.state_names)), None)


def is_hidden(name: str, dims: int) -> bool:
    """Whether a parameter is a matrix inside a block: no embedding, output projection, vector or router."""
    return dims >= 2 and name.startswith("blocks.") and not name.endswith((".router.weight", ".noise.weight"))
