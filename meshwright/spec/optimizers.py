"""Optimizers as data, read by both towers: what each keeps of a parameter, which it takes, what an update moves.

Their arithmetic is in optim/, one file each, under the same names. Shapes of states and of partial sums are functions
of a parameter's shape, and a rank's are the same functions of its part: what is cut along a dim that a state lacks is
held alike by those ranks.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import msgspec

from meshwright.spec.communication import FEEDBACK, SERVER_ERROR, WORKER_ERROR
from meshwright.spec.quantized import FORMATS, SCALES_ENDING, Columns, is_quantized, scales_name

PartOf = tuple[tuple[int, ...], Columns]  # of a part of a parameter: the whole shape, and the part's columns in that
# How a state tensor is shaped beside its parameter (…, r, c): like it, (…, r), (…, c), or one number. A whole matrix of
# statistics (Shampoo) becomes a further word here and a further case of `StateTensor.shape_beside` and `lacks`.
StateShape = Literal["elementwise", "rows", "columns", "number"]
# In how many bits it is kept: as the master weight, so fp32, float64 in proofs, or bf16 by optim.state_dtype.
StateDtypeRule = Literal["master"]
Dims = Literal["all", "vectors", "matrices"]  # of which parameters: stacks of matrices are matrices
Takes = Literal["all", "hidden"]  # which parameters an optimizer updates: all, or the matrices inside blocks


class HasShape(Protocol):
    """A parameter, by what decides its states."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def is_of(of: Dims, dims: int) -> bool:
    """Whether a parameter of so many dims is among those."""
    return of == "all" or (of == "matrices") == (dims >= 2)


def is_hidden(name: str, dims: int) -> bool:
    """Whether a parameter is a matrix inside a block: no embedding, output projection, vector or router.

    A stack of experts' biases or magnitudes has two dims, and is as little a matrix as one of them.
    """
    is_other = name.endswith((".router.weight", ".noise.weight", "_bias", "_magnitude"))
    return dims >= 2 and name.startswith("blocks.") and not is_other


class StateTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that an optimizer keeps of a parameter."""

    name: str  # in checkpoints, as NAME/PARAMETER
    label: str
    shape: StateShape = "elementwise"
    dtype: StateDtypeRule = "master"
    of: Dims = "all"

    def lacks(self, dims: int) -> tuple[int, ...]:
        """The dims of a parameter that it does not have."""
        whole = tuple(range(dims))
        return {"elementwise": (), "rows": (dims - 1,), "columns": (dims - 2,), "number": whole}[self.shape]

    def shape_beside(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape beside a parameter, or a part of one, of a shape."""
        lacks = self.lacks(len(shape))
        return tuple(size for dim, size in enumerate(shape) if dim not in lacks)

    def bytes_beside(self, shape: tuple[int, ...], width: int) -> int:
        """Its bytes there, at so many bytes an element of the master weight."""
        return math.prod(self.shape_beside(shape)) * width


class Statistic(msgspec.Struct, frozen=True, kw_only=True):
    """A sum, or a maximum, over a parameter (…, r, c) that an update needs whole: ranks that share it reduce theirs.

    rows: (…, r), over the last dim. columns: (…, c), over the one before. matrix: (…), over what is left of rows.
    tensor: one number, over everything.
    """

    shape: Literal["rows", "columns", "matrix", "tensor"]
    of: Dims = "all"
    op: Literal["sum", "max"] = "sum"

    def over(self, dims: int) -> tuple[int, ...]:
        """The dims that it is reduced over: ranks that cut one of them have a part each."""
        whole = tuple(range(dims))
        return {"rows": (dims - 1,), "columns": (dims - 2,), "matrix": (dims - 2,), "tensor": whole}[self.shape]

    def elements(self, shape: tuple[int, ...]) -> int:
        """Elements of a rank's part, from the shape of its part of the parameter."""
        left = {"rows": shape[:-1], "columns": (*shape[:-2], *shape[-1:]), "matrix": shape[:-2], "tensor": ()}
        return math.prod(left[self.shape])


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimizer says of itself, whatever form its states take."""

    name: str  # optim.name
    label: str
    held: str  # its states, in a ledger's words
    states: tuple[StateTensor, ...]
    takes: Takes = "all"
    rest: str = ""  # the optimizer that updates what it does not take
    # Its update is of whole tensors: what ranks reduce for it, one collective for each inner list, axis and operation.
    whole: bool = False
    reductions: tuple[tuple[Statistic, ...], ...] = ()
    orthogonalizes: bool = False  # matrices, whole, which ranks share out by spec/matrices.py
    # Replicas keep their gradients apart and exchange momenta in one bit an element, by spec/communication.py. Beside
    # its states a rank keeps what it leaves out as the server of its rows of every weight.
    compresses: bool = False
    compressed_reductions: tuple[tuple[Statistic, ...], ...] = ()  # of its compressed steps, in the place of the others
    is_exact: bool = True  # no reduction rounds: the same bits however tensors are cut
    keys: tuple[str, ...]  # of [optim], those that only it and its likes read
    defaults: tuple[tuple[str, float], ...] = ()  # of those that are not as in config/run.py
    flops: int  # of one parameter's update, by operations that round once each; of whole tensors all passes over one
    # Bytes of one parameter that unfused operators move, temporaries included. Between them the states are the least.
    has_kernel: bool = False  # of ours, in kernels/, that reads and writes everything once
    update_bytes: float = 0.0  # with an fp32 master weight, where no library has a fused kernel
    rounded_bytes: float  # without one: widened, updated, rounded by optim/master_weights.py
    bf16_state_bytes: float = 0.0  # with bf16 states, by the host in optim/offload.py; most of it stays in its caches
    temporaries: int = 0  # fp32 copies of a rank's part of the largest weight that an unfused update makes at a time
    quantized: str = ""  # in which format of spec/quantized.py states are kept, where a parameter's are quantized

    def of(self, name: str, dims: int) -> "OptimizerSpec":
        """The description that holds for a parameter."""
        return self if self.takes == "all" or is_hidden(name, dims) else OPTIMIZERS[self.rest]

    def reduced(self, warm_up: bool) -> tuple[tuple[Statistic, ...], ...]:
        """What the update of a step reduces, of one that compresses in its warm-up or after it."""
        return self.compressed_reductions if self.compresses and not warm_up else self.reductions

    @property
    def members(self) -> tuple["OptimizerSpec", ...]:
        """Itself, and who updates the rest."""
        return (self, OPTIMIZERS[self.rest]) if self.rest else (self,)

    def states_of(self, name: str, dims: int) -> tuple[StateTensor, ...]:
        """The state tensors of a parameter, in the order of its arithmetic."""
        return tuple(state for state in self.of(name, dims).states if is_of(state.of, dims))

    @property
    def all_states(self) -> tuple[StateTensor, ...]:
        """Every kind of state tensor, each name once."""
        return tuple({state.name: state for each in self.members for state in each.states}.values())

    @property
    def state_names(self) -> tuple[str, ...]:
        """The kinds of its state tensors, in the order of its arithmetic; of quantized ones each with its scales."""
        names = [state.name for state in self.all_states]
        if self.compresses:
            return (*names, SERVER_ERROR)
        return tuple(kind for name in names for kind in ((name, scales_name(name)) if self.quantized else (name,)))

    def label_of(self, kind: str) -> str:
        """A kind of state tensor as people read it."""
        labels = {state.name: state.label for state in self.all_states} | {SERVER_ERROR: "error of the server"}
        return labels[kind] if kind in labels else f"scale of the {labels[kind.removesuffix(SCALES_ENDING)]}"

    @property
    def is_elementwise(self) -> bool:
        """Whether every parameter has every state, each in its own shape: all have the same number of bytes."""
        alike = all((state.shape, state.of) == ("elementwise", "all") for state in self.states)
        return self.takes == "all" and alike and not (self.quantized or self.compresses)

    def state_bytes(self, width: int) -> int:
        """Bytes of its states for one parameter, at so many bytes an element; the least, where parameters differ."""
        if self.quantized:
            return len(self.states) * FORMATS[self.quantized].bits // 8
        kept = [[state for state in each.states if state.of == "all"] for each in self.members]
        return min(width * sum(state.shape == "elementwise" for state in states) for states in kept)

    def bytes_of(self, name: str, shape: tuple[int, ...], width: int, part: PartOf | None = None) -> int:
        """Bytes of a parameter's states, or of a part of it that has a shape."""
        states = self.states_of(name, len(shape))
        whole, columns = part or (shape, (0, shape[-1] if shape else 0))
        if self.quantized and is_quantized(whole):
            return len(states) * FORMATS[self.quantized].state_bytes(math.prod(shape[:-1]), columns, width)
        return sum(state.bytes_beside(shape, width) for state in states)

    def total_bytes(self, table: Iterable[HasShape], width: int) -> int:
        """Bytes of all parameters' states, unsharded."""
        return sum(self.bytes_of(param.name, param.shape, width) for param in table)

    def moved_bytes(self, width: int) -> float:
        """Bytes of its states that one update of a parameter reads and writes."""
        if self.quantized:
            format = FORMATS[self.quantized]
            return 2 * len(self.states) * (format.bits / 8 + width / format.block)
        return 2 * self.state_bytes(width)


FIRST, SECOND = (StateTensor(name=name, label=f"{name} moment") for name in ("first", "second"))

ADAMW = OptimizerSpec(
    name="adamw",
    label="AdamW",
    held="AdamW's two",
    states=(FIRST, SECOND),
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

ADAFACTOR = OptimizerSpec(
    name="adafactor",
    label="Adafactor",
    held="Adafactor's row and column means",
    states=(
        StateTensor(name="row", label="row means", shape="rows", of="matrices"),
        StateTensor(name="column", label="column means", shape="columns", of="matrices"),
        StateTensor(name="second", label="second moment", of="vectors"),
    ),
    whole=True,
    reductions=(
        (Statistic(shape="rows", of="matrices"), Statistic(shape="columns", of="matrices")),
        (Statistic(shape="matrix", of="matrices"),),
        (Statistic(shape="tensor"),),
    ),
    is_exact=False,
    keys=("beta1", "eps1", "eps2", "relative_step"),
    defaults=(("beta1", 0.0),),
    flops=19,
    update_bytes=152,
    rounded_bytes=282,
    temporaries=3,
)

MUON = OptimizerSpec(
    name="muon",
    label="Muon",
    held="Muon's momentum, and AdamW's two of what it leaves",
    states=(StateTensor(name="momentum", label="momentum"),),
    takes="hidden",
    rest="adamw",
    whole=True,
    orthogonalizes=True,
    keys=("momentum",),
    defaults=(("momentum", 0.95),),
    flops=8,  # beside those of orthogonalizing its matrix
    has_kernel=True,
    update_bytes=26,  # by kernels/muon.py: gradient, momentum and weight, the last two written too, and bf16 matrices
    rounded_bytes=134,  # as SGD's
)

SM3 = OptimizerSpec(
    name="sm3",
    label="SM3",
    held="SM3's momentum and accumulators of rows and columns",
    states=(
        StateTensor(name="row", label="row accumulators", shape="rows", of="matrices"),
        StateTensor(name="column", label="column accumulators", shape="columns", of="matrices"),
        StateTensor(name="second", label="accumulator", of="vectors"),
        StateTensor(name="momentum", label="momentum"),
    ),
    whole=True,
    reductions=(
        (
            Statistic(shape="rows", of="matrices", op="max"),
            Statistic(shape="columns", of="matrices", op="max"),
        ),
    ),
    keys=("momentum",),
    flops=24,
    update_bytes=210,
    rounded_bytes=334,
    temporaries=4,
)

LION = OptimizerSpec(
    name="lion",
    label="Lion",
    held="Lion's momentum",
    states=(StateTensor(name="first", label="momentum"),),
    keys=("beta1", "beta2"),
    defaults=(("beta2", 0.99),),
    flops=11,
    update_bytes=92,
    temporaries=2,
    rounded_bytes=166,  # SGD's, and four further operators
    bf16_state_bytes=72,  # the same of its passes
)

LAMB = OptimizerSpec(
    name="lamb",
    label="LAMB",
    held="LAMB's two",
    states=(FIRST, SECOND),
    whole=True,
    reductions=((Statistic(shape="tensor", of="matrices"), Statistic(shape="tensor", of="matrices")),),
    is_exact=False,
    keys=("beta1", "beta2", "eps"),
    defaults=(("beta2", 0.999), ("eps", 1e-6)),
    flops=35,
    update_bytes=324,
    rounded_bytes=538,
    temporaries=4,
)

WORKER = StateTensor(name=WORKER_ERROR, label="error of the worker")

ONEBIT_ADAM = OptimizerSpec(
    name="onebit_adam",
    label="1-bit Adam",
    held="1-bit Adam's two, and its errors",
    states=(FIRST, SECOND, WORKER),
    whole=True,
    compresses=True,
    is_exact=False,
    keys=("beta1", "beta2", "eps", "freeze_step"),
    defaults=(("beta2", 0.999),),
    flops=76,  # of a compressed step, most of them to make signs and back, twice
    update_bytes=554,
    rounded_bytes=554,  # there is always an fp32 master weight
    temporaries=5,  # beside the momenta of its group, its own and all workers'
)

ZERO_ONE_ADAM = OptimizerSpec(
    name="zero_one_adam",
    label="0/1 Adam",
    held="0/1 Adam's two, its local steps, the weights as last synced, and its errors",
    states=(
        FIRST,
        SECOND,
        StateTensor(name="local", label="momenta of local steps"),
        StateTensor(name="synced", label="weight as last synced"),
        WORKER,
    ),
    whole=True,
    compresses=True,
    is_exact=False,
    keys=("beta1", "beta2", "eps", "freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
    defaults=(("beta2", 0.999),),
    flops=91,
    update_bytes=704,
    rounded_bytes=704,
    temporaries=5,
)

ONEBIT_LAMB = OptimizerSpec(
    name="onebit_lamb",
    label="1-bit LAMB",
    held="1-bit LAMB's two, its fresh variance, ratios, and its errors",
    states=(
        FIRST,
        SECOND,
        StateTensor(name="fresh", label="second moment since the freeze", of="matrices"),
        StateTensor(name="ratio", label="mean trust ratio", shape="number", of="matrices"),
        StateTensor(name="factor", label="last factor of the ratio", shape="number", of="matrices"),
        WORKER,
    ),
    whole=True,
    compresses=True,
    reductions=LAMB.reductions,
    compressed_reductions=(
        (
            Statistic(shape="tensor", of="matrices"),
            Statistic(shape="tensor", of="matrices"),
            Statistic(shape="tensor", of="matrices", op="max"),
        ),
    ),
    is_exact=False,
    keys=("beta1", "beta2", "eps", "freeze_step"),
    defaults=(("beta2", 0.999), ("eps", 1e-6)),
    flops=100,
    update_bytes=760,
    rounded_bytes=760,
    temporaries=8,
)

OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    each.name: each for each in (ADAMW, SGD, ADAFACTOR, SM3, LION, LAMB, MUON, ONEBIT_ADAM, ZERO_ONE_ADAM, ONEBIT_LAMB)
}  # by optim.name


class HasOptions(Protocol):
    """The keys of [optim] that decide what an optimizer keeps and sends."""

    @property
    def name(self) -> str: ...
    @property
    def beta1(self) -> float: ...
    @property
    def relative_step(self) -> bool: ...
    @property
    def state_dtype(self) -> str: ...


def _with_first(spec: OptimizerSpec) -> OptimizerSpec:
    held, flops = f"{spec.held} and its first moment", spec.flops + 5
    more = {"update_bytes": spec.update_bytes + 52, "rounded_bytes": spec.rounded_bytes + 52}
    return msgspec.structs.replace(spec, held=held, states=(*spec.states, FIRST), flops=flops, **more)


def _with_relative_step(spec: OptimizerSpec) -> OptimizerSpec:
    first, *others = spec.reductions
    sizes = ((*first, Statistic(shape="tensor")), *others)  # of the weights
    more = {"update_bytes": spec.update_bytes + 12, "rounded_bytes": spec.rounded_bytes + 44}
    return msgspec.structs.replace(spec, reductions=sizes, flops=spec.flops + 2, **more)


FACTORED = (ADAFACTOR, _with_first(ADAFACTOR))
# Rules by elements whose states may be quantized: decoded, updated and encoded again by optim/quantized.py.
QUANTIZED = {
    f"{spec.name}+{name}": msgspec.structs.replace(spec, label=f"{spec.label} with {name} states", quantized=name)
    for spec in OPTIMIZERS.values()
    if spec.is_elementwise and not spec.whole
    for name in FORMATS
}
# All descriptions: those that `description_of` names, and the planner is told.
DESCRIPTIONS: Mapping[str, OptimizerSpec] = {
    **OPTIMIZERS,
    **QUANTIZED,
    "adafactor+first": FACTORED[1],
    "adafactor+relative": _with_relative_step(FACTORED[0]),
    "adafactor+first+relative": _with_relative_step(FACTORED[1]),
}


def description_of(optim: HasOptions) -> str:
    """The name of the description that holds for a run's optimizer: options may add a state, or something to reduce."""
    options = {"first": optim.beta1 > 0, "relative": optim.relative_step}
    longer = "+".join((optim.name, *(option for option, is_on in options.items() if is_on)))
    return in_state_dtype(longer if longer in DESCRIPTIONS else optim.name, optim.state_dtype)


def in_state_dtype(description: str, state_dtype: str) -> str:
    """The description of the same optimizer with states in another dtype, where that is another one."""
    quantized = f"{DESCRIPTIONS[description].name}+{state_dtype}"
    return quantized if quantized in DESCRIPTIONS else description


# Kinds of tensors that are no optimizer's states.
BESIDE = frozenset(("weight", "low", "anchor", "outer_momentum", *FEEDBACK))


def saved_by(kinds: Iterable[str]) -> OptimizerSpec | None:
    """The optimizer whose states are the kinds of tensors that a checkpoint has beside the weights.

    LAMB's are AdamW's, which it may take over.
    """
    held = set(kinds) - BESIDE
    return next((each for each in DESCRIPTIONS.values() if held == set(each.state_names)), None)
