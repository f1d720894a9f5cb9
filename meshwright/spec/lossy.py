"""Lossy communication as both towers know it: how gradients and weights are rounded, cut into parts, and factored.

Blocks that share a scale run along the rows of the whole weight, up to 128 elements each, as those of `outer_quant` do:
no cut between rows divides one, nor one between columns by up to eight ranks of tp. Vectors are never put into codes.
"""

import math
from collections.abc import Iterable

import msgspec

from meshwright.spec.outer import BITS, SCALE_BYTES, block_length
from meshwright.spec.plan import Plan

# In checkpoints: what rounding took on the way to the shards, to the replicas, and of the replicas' sum; and the
# factors that PowerSGD begins its next step with.
SHARD_ERROR, REPLICA_ERROR, SUM_ERROR, FACTOR = "shard_error", "replica_error", "sum_error", "powersgd_factor"
FEEDBACK = (SHARD_ERROR, REPLICA_ERROR, SUM_ERROR, FACTOR)
CAST_BYTES = {"bf16": 2, "fp16": 2}
Shape = tuple[int, ...]


class Factors(msgspec.Struct, frozen=True):
    """The two factors of a gradient: of each matrix of a stack, as many rows as its short side and as its long one."""

    stack: int
    short: int
    long: int
    rank: int
    turned: bool  # the matrix has more rows than columns

    @property
    def first(self) -> int:
        """Elements of the factor that is orthogonalized: the short side's, which costs least."""
        return self.stack * self.short * self.rank

    @property
    def second(self) -> int:
        """Elements of the other, which is kept for the next step."""
        return self.stack * self.long * self.rank


def factors(shape: Shape, rank: int) -> Factors | None:
    """How PowerSGD of some rank factors a gradient; None: a vector goes as it is."""
    if len(shape) < 2:
        return None
    *stack, rows, columns = shape
    short, long = sorted((rows, columns))
    return Factors(math.prod(stack), short, long, min(rank, short), rows > columns)


def block_of(shape: Shape) -> int:
    """Elements of a whole weight's rows that share a scale; 0: none do."""
    return block_length(shape[-1]) if len(shape) > 1 else 0


def part_dim(shape: Shape, parts: int) -> int:
    """The dim along which ranks share out a sum: the first but the last that comes out even, else dim 0, filled up."""
    return next((dim for dim in range(max(len(shape) - 1, 1)) if shape[dim] % parts == 0), 0)


def part_shape(shape: Shape, parts: int) -> Shape:
    """One of those parts."""
    dim = part_dim(shape, parts)
    return (*shape[:dim], math.ceil(shape[dim] / parts), *shape[dim + 1 :])


def message_bytes(form: str, tensors: Iterable[tuple[int, int]], wide: int) -> int:
    """Bytes of one rank's message: tensors by their elements and their block, of so many bytes an element."""
    plain = blocks = codes = 0
    for elements, block in tensors:
        if form in CAST_BYTES:
            plain += elements * CAST_BYTES[form]
        elif block:
            blocks += elements // block
            codes += elements
        else:
            plain += elements * wide
    return plain + blocks * SCALE_BYTES + math.ceil(codes * BITS.get(form, 0) / 8)


def mathematics(plan: Plan) -> dict[str, object]:
    """What of a plan decides the weights because communication is lossy: whose gradients are rounded, and how often."""
    found: dict[str, object] = {}
    if plan.gather != "default":
        found["gather"] = plan.gather
    if not plan.reduces_lossily:
        return found
    found |= {name: getattr(plan, name) for name in ("grad_reduce", "powersgd", "error_feedback", "replicate", "shard")}
    if plan.zero >= 2 and plan.pp == 1:  # every microbatch's gradient is rounded
        found["microbatch"] = plan.microbatch
    return found


def described(plan: Plan) -> list[str]:
    """A line for the log about what is rounded on its way between ranks; none where nothing is."""
    fed_back = "with" if plan.error_feedback else "without"
    said = []
    if plan.grad_reduce != "default":
        said.append(f"gradients rounded to {plan.grad_reduce} on their way to a sum, {fed_back} error feedback")
    if plan.powersgd:
        said.append(f"gradients of matrices summed as factors of rank {plan.powersgd}, {fed_back} error feedback")
    if plan.gather != "default":
        said.append(f"weights rounded to {plan.gather} where they are all-gathered")
    return [f"lossy communication: {' and '.join(said)}"] if said else []
