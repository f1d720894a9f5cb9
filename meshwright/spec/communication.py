"""Communication between data ranks that is no exact sum in every step: rare, rounded, or in one bit an element.

Both towers read it. **Rare**: local SGD (`average`), SlowMo and DiLoCo differ in the outer update alone. After
`optim.sync_warmup` steps of plain training every fragment of the model is synced once in `plan.sync_every` steps.

**Rounded**: gradients and weights in eight or four bits, in 16, or factored (PowerSGD). Blocks that share a scale run
along the rows of the whole weight, up to 128 elements each: no cut between rows divides one, nor one between columns by
up to eight ranks of tp. Vectors are never quantized.

**One bit**: replicas exchange momenta. A whole weight of n elements is cut into as many chunks as there are replicas,
each a multiple of eight elements long, and of each chunk there is one scale. Where a rank has a part of the weight
alone, it exchanges that part with those of the other replicas that have the same one, of which each is the server of
some of its rows: it receives their bits from every worker, averages them, and sends bits of the mean to all. What cuts
the weight inside a replica decides who sends what to whom, and no number.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal, Protocol

import msgspec

from meshwright.spec.plan import Plan

ANCHOR, MOMENTUM = "anchor", "outer_momentum"  # in checkpoints: the weights as they were last synced, and the buffer
BLOCK, MOST_TP = 128, 8  # elements that share a scale, at most, in rows that so many ranks of tp may cut
SCALE_BYTES = 4  # fp32, of a block
BITS = {"int8": 8, "int4": 4, "fp8": 8}  # the last of lossy gradients and gathers alone
TOLD = 4  # numbers that parameter servers add up for an update: the square norm, the loss, the votes, the tokens
TALLY = 8  # numbers that replicas tell each other when they meet; see optim/outer.py
# In checkpoints: what rounding took on the way to the shards, of a node's sum on its way to other nodes, on the way to
# the replicas, and of the replicas' sum; and the factors that PowerSGD begins its next step with.
SHARD_ERROR, NODE_ERROR, REPLICA_ERROR, SUM_ERROR = "shard_error", "node_error", "replica_error", "sum_error"
FACTOR = "powersgd_factor"
FEEDBACK = (SHARD_ERROR, NODE_ERROR, REPLICA_ERROR, SUM_ERROR, FACTOR)
CAST_BYTES = {"bf16": 2, "fp16": 2}
Shape = tuple[int, ...]
Region = tuple[tuple[int, int], ...]  # first and one past the last index of each dim
WORKER_ERROR, SERVER_ERROR = "worker_error", "server_error"  # in checkpoints: what each compression has left out
OWN_ERRORS = frozenset((WORKER_ERROR, SERVER_ERROR))  # which no two replicas have alike
WARM_UP_SHARE = 5  # of the run's steps, one in so many: 1-bit Adam's authors use 15 to 20 %
# Between replicas a step sends gradients in full, momenta in one bit, or nothing.
Exchange = Literal["exact", "compressed", "local"]


class SyncCalendar(msgspec.Struct, frozen=True, kw_only=True):
    """At which steps replicas meet, counted from 1."""

    every: int  # steps between two syncs of a fragment; 1: there is no outer loop
    fragments: int
    warmup: int
    steps: int

    def is_plain(self, step: int) -> bool:
        """Whether gradients are summed over all replicas in this step."""
        return self.every == 1 or step <= self.warmup

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments that are synced at the end of a step: staggered, and all of them after the last."""
        if self.is_plain(step):
            return ()
        if step == self.steps:
            return tuple(range(self.fragments))
        since = (step - self.warmup) % self.every
        return tuple(number for number in range(self.fragments) if number * self.every // self.fragments == since)

    def meets(self, step: int) -> bool:
        """Whether all replicas hear of each other in this step."""
        return self.is_plain(step) or bool(self.due(step))

    def has_come(self, step: int, every: int) -> bool:
        """Whether what is due every so many steps is done now: where replicas meet, or at their next meeting."""
        if every == 0 or not self.meets(step):
            return False
        return any(each % every == 0 for each in self._since_last(step))

    def _since_last(self, step: int) -> Iterator[int]:
        yield step
        while step > 1 and not self.meets(step := step - 1):
            yield step


def calendar(plan: Plan, warmup: int, steps: int) -> SyncCalendar:
    """When the replicas of a plan meet."""
    return SyncCalendar(
        every=plan.sync_every if plan.parts > 1 else 1, fragments=plan.outer_fragments, warmup=warmup, steps=steps
    )


def fragment_of(layer: int, fragments: int) -> int:
    """The fragment of a layer, strided as in streaming DiLoCo; what is outside the blocks (-1) is in the first."""
    return max(layer, 0) % fragments


def outer_states(plan: Plan) -> tuple[str, ...]:
    """What a rank keeps of each of its weights for the outer update, by its names in checkpoints."""
    if not plan.has_outer_loop:
        return ()
    if plan.outer == "average":
        return (ANCHOR,) if plan.outer_quant != "none" else ()  # an exact mean needs no memory of the last one
    return ANCHOR, MOMENTUM


def served_rows(rows: int, servers: int, server: int) -> tuple[int, int]:
    """The rows of a weight, first and one past the last, of which one of so many parameter servers has the copy."""
    each = -(-rows // servers)
    return min(server * each, rows), min((server + 1) * each, rows)


def of_part(kind: str, part: int) -> str:
    """The name under which a replica saves what it alone has: the first one's has no number."""
    return f"{kind}@{part}" if part else kind


def kind_of(name: str) -> str:
    """The kind of a saved tensor, of whichever replica."""
    return name.partition("/")[0].partition("@")[0]


def part_of(name: str) -> int:
    """The replica that saved a tensor."""
    return int(name.partition("/")[0].partition("@")[2] or 0)


def block_length(length: int) -> int:
    """Elements of a row that share a scale: a power of two that no plan of up to MOST_TP ranks of tp cuts."""
    size = BLOCK
    while size > 1 and length % (MOST_TP * size):
        size //= 2
    return size if length % MOST_TP == 0 else length


class Factors(msgspec.Struct, frozen=True):
    """The two factors of a gradient: of each matrix of a stack, as many rows as its short side and as its long one."""

    stack: int
    short: int
    long: int
    rank: int
    transposed: bool  # the matrix has more rows than columns

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


def message_bytes(form: str, tensors: Iterable[tuple[int, int]], element_bytes: int) -> int:
    """Bytes of one rank's message: tensors by their elements and their block, of so many bytes an element."""
    plain = blocks = codes = 0
    for elements, block in tensors:
        if form in CAST_BYTES:
            plain += elements * CAST_BYTES[form]
        elif block:
            blocks += elements // block
            codes += elements
        else:
            plain += elements * element_bytes
    return plain + blocks * SCALE_BYTES + math.ceil(codes * BITS.get(form, 0) / 8)


def mathematics(plan: Plan) -> dict[str, object]:
    """What of a plan decides the weights because communication is lossy: whose gradients are rounded, and how often."""
    found: dict[str, object] = {}
    if plan.gather != "default":
        found["gather"] = plan.gather
    if not plan.reduces_lossily:
        return found
    found |= {name: getattr(plan, name) for name in ("grad_reduce", "powersgd", "error_feedback", "replicate")}
    if plan.powersgd:  # of a replica's gradient, whatever ranks have summed it
        return found
    found["shard"] = plan.shard
    if plan.zero >= 2 and plan.pp == 1:  # every microbatch's gradient is rounded
        found["microbatch"] = plan.microbatch
    if plan.uses("grad_reduce_node"):  # what its ranks have summed is rounded once more
        found["grad_reduce_node"] = plan.grad_reduce_node
    return found


def described(plan: Plan) -> list[str]:
    """A line for the log about what is rounded on its way between ranks; none where nothing is."""
    fed_back = "with" if plan.error_feedback else "without"
    said = []
    if plan.grad_reduce != "default":
        again = " and once more between nodes" if plan.uses("grad_reduce_node") else ""
        said.append(f"gradients rounded to {plan.grad_reduce} on their way to a sum{again}, {fed_back} error feedback")
    if plan.powersgd:
        said.append(f"gradients of matrices summed as factors of rank {plan.powersgd}, {fed_back} error feedback")
    if plan.gather != "default":
        said.append(f"weights rounded to {plan.gather} where they are all-gathered")
    return [f"lossy communication: {' and '.join(said)}"] if said else []


class HasPhases(Protocol):
    """The keys of [optim] that decide what a step exchanges."""

    @property
    def name(self) -> str: ...
    @property
    def freeze_step(self) -> int: ...
    @property
    def var_update_scaler(self) -> int: ...
    @property
    def local_step_scaler(self) -> int: ...
    @property
    def local_step_clipper(self) -> int: ...
    @property
    def sync_warmup(self) -> int: ...


class LocalStepCalendar(SyncCalendar, frozen=True, kw_only=True):
    """Of 0/1 Adam: replicas meet in every step until the variance is frozen, and then more and more rarely."""

    freeze: int
    scaler: int
    clipper: int

    def meets(self, step: int) -> bool:
        """Whether replicas have the same weights after a step, counted from 1."""
        if step <= self.freeze or step >= self.steps:
            return True
        return step % local_interval(step - self.freeze, self.scaler, self.clipper) == 0


def local_interval(since: int, scaler: int, clipper: int) -> int:
    """Steps between two syncs in a step that is the so-manieth since the variance was frozen."""
    return int(min(clipper, 2 ** min((since - 1) // scaler, 62)))


def calendar_of(plan: Plan, optim: HasPhases, steps: int) -> SyncCalendar:
    """When the replicas of a run have the same weights."""
    if optim.name == "zero_one_adam":
        return _local_steps(optim, steps)
    return calendar(plan, optim.sync_warmup, steps)


def _local_steps(optim: HasPhases, steps: int) -> LocalStepCalendar:
    scaler, clipper = optim.local_step_scaler, optim.local_step_clipper
    return LocalStepCalendar(
        every=1, fragments=1, warmup=0, steps=steps, freeze=optim.freeze_step, scaler=scaler, clipper=clipper
    )


def exchange_of(optim: HasPhases, step: int, steps: int) -> Exchange:
    """What a step of an optimizer that compresses exchanges; steps count from 1."""
    if optim.name != "zero_one_adam":
        return "exact" if step <= optim.freeze_step else "compressed"
    if step in variance_steps(optim.freeze_step, optim.var_update_scaler):
        return "exact"
    return "compressed" if _local_steps(optim, steps).meets(step) else "local"


@lru_cache(maxsize=64)
def variance_steps(freeze: int, scaler: int) -> frozenset[int]:
    """The steps in which 0/1 Adam updates its variance: so many, then as many at half the rate, and so on."""
    found, interval, counted = list[int](), 1, 0
    step = 1
    while step <= freeze:
        if step % interval == 0:
            found.append(step)
            counted += 1
            if counted == scaler:
                counted, interval = 0, 2 * interval
        step += 1
    return frozenset(found)


def variance_updates(freeze: int, scaler: int, step: int) -> int:
    """How many of them have been made after a step."""
    return sum(each <= step for each in variance_steps(freeze, scaler))


def warm_up_steps(steps: int) -> int:
    """The usual `optim.freeze_step` of a run."""
    return max(steps // WARM_UP_SHARE, 1)


def chunk_length(elements: int, replicas: int) -> int:
    """Elements of each chunk of a whole weight, the last ones filled up."""
    return 8 * math.ceil(elements / (8 * replicas))


class Serving(msgspec.Struct, frozen=True):
    """How replicas share out a rank's part of a weight as servers."""

    dim: int  # along which
    elements: int  # of each server's rows; the last may have fewer, or none
    pieces: tuple[tuple[tuple[int, int], ...], ...]  # of each server's rows: what chunks they are of, and how much
    counts: tuple[int, ...]  # elements of each chunk of the whole weight

    @property
    def length(self) -> int:
        """Elements of a message, filled up to whole bytes."""
        return 8 * math.ceil(self.elements / 8)

    @property
    def sums(self) -> int:
        """Sums of magnitudes in a message: of every chunk that a server has something of, as many for each."""
        return max(1, *map(len, self.pieces))


def served_region(region: Region, replicas: int, server: int) -> Region:
    """The rows of a part of a weight of which one of the replicas is the server."""
    shape = tuple(end - begin for begin, end in region)
    dim = part_dim(shape, replicas)
    rows, (begin, end) = part_shape(shape, replicas)[dim], region[dim]
    mine = (min(begin + server * rows, end), min(begin + (server + 1) * rows, end))
    return (*region[:dim], mine, *region[dim + 1 :])


@lru_cache(maxsize=4096)
def serving(shape: Shape, region: Region, replicas: int) -> Serving:
    """The servers of a part of a weight of some shape."""
    whole, part = math.prod(shape), tuple(end - begin for begin, end in region)
    length = chunk_length(whole, replicas)
    served = (served_region(region, replicas, server) for server in range(replicas))
    return Serving(
        dim=part_dim(part, replicas),
        elements=math.prod(part_shape(part, replicas)),
        pieces=tuple(tuple(_pieces(shape, each, length)) for each in served),
        counts=tuple(min(max(whole - chunk * length, 0), length) for chunk in range(replicas)),
    )


def _pieces(shape: Shape, region: Region, length: int) -> Iterator[tuple[int, int]]:
    """The chunks of a weight that a region has something of, in its own order, which is theirs too."""
    if any(begin == end for begin, end in region):
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(begin * stride for (begin, _), stride in zip(region, strides, strict=True))
    last = sum((end - 1) * stride for (_, end), stride in zip(region, strides, strict=True))
    before = 0
    for chunk in range(first // length, last // length + 1):
        below = _below(shape, region, (chunk + 1) * length)
        if below > before:
            yield chunk, below - before
        before = below


def _below(shape: Shape, region: Region, limit: int) -> int:
    """Elements of a region that come before a place in the whole tensor, row by row."""
    if not shape:
        return int(limit > 0)
    (begin, end), inner = region[0], region[1:]
    row, rest = divmod(limit, math.prod(shape[1:]))
    rows = min(max(row - begin, 0), end - begin)
    cut = _below(shape[1:], inner, rest) if begin <= row < end else 0
    return rows * math.prod(last - first for first, last in inner) + cut


def packed_bytes(served: Iterable[Serving], width: int) -> int:
    """What a worker sends to one server, or a server to everybody, of some weights: sums of some width, and bits."""
    return sum(each.sums * width + each.length // 8 for each in served)
