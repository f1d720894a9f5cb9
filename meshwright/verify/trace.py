"""The dry run: one rank of any world takes a real step on tensors without memory, beside what was planned for it."""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd import Function
from torch.distributed.tensor import DTensor, _redistribute, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.config.run import Run
from meshwright.cost.job import Job
from meshwright.cost.layout import LABELS, state_layout, total
from meshwright.cost.memory import Ledger, ledger, worst
from meshwright.cost.resident import host_states, states
from meshwright.cost.traffic import Axis, Collective, Kind, of_every_step, traffic
from meshwright.data.loader import Batch, StepBatch
from meshwright.kernels import quantized
from meshwright.kernels.experts import by_segment
from meshwright.models import lora
from meshwright.models.decoder import Decoder
from meshwright.models.moe import Experts, MoELayer, RunExperts
from meshwright.optim import clip, master_weights
from meshwright.optim.clip import LossScale
from meshwright.optim.onebit import CompressingReplicas
from meshwright.optim.outer import NoOuterLoop
from meshwright.optim.quantized import send_scales
from meshwright.optim.resident import MATRIX_UPDATES, WHOLE_RULES, ResidentOptimizer
from meshwright.parallel import context, expert, grad_reduce, mesh, precision
from meshwright.parallel.apply import apply
from meshwright.parallel.context import HALF, AttentionBlock, Forward, Gradients
from meshwright.parallel.expert import ExpertRoute, route_of, slotted
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import DECODER
from meshwright.spec.plan import Plan
from meshwright.train.build import begin_draws
from meshwright.train.step import ForwardBackward, choose
from meshwright.verify.collectives import Calls, implied, observing, ranks_of

# The ledger knows a few moments of a step, the trace every operator in between: single buffers of one block, which
# weigh little in a model of some size.
PEAK_TOLERANCE = 0.10
NOTES = {  # of a field that is used
    "compile": "traced without the compiler, which cannot work on fake tensors: compiled blocks save less",
    "activation_quant": "traced with saved activations as they are: quantized ones are not followed",
    "activation_offload": "traced with saved activations on the device: copies on the host are not followed",
    "optimizer_offload": "traced with all states on the device, and compared with the ledger of that",
    "staleness": "the worker's device was traced: pushes, and what servers do on the hosts, are not followed",
    "sync_every": "a step without a sync was traced, and compared with what such a step sends",
    "pp": "one rank of the pipeline was traced: its neighbours' messages arrive at once",
    "cpu_offload": "a CPU's memory is the host's: the peak is that of the device with what lives in host memory",
}
RATE = 1e-3  # of learning: any, the weights have no values
Collectives = Callable[[dict[str, int]], Sequence[Collective]]  # of the rank in some place


@dataclass(frozen=True, slots=True)
class DryRunStep:
    """What a rank did and held in one step."""

    calls: Calls
    said: Calls  # the arithmetic's, with the ranks of this rank's axes
    axes: dict[tuple[int, ...], str]  # ranks by the axis on which this one meets them
    place: dict[str, int]  # this rank's, on each axis
    states: dict[str, int]  # bytes: weights, gradients, optimizer states
    live_bytes: int  # at the peak
    phase: str  # in which it was


class Live(TorchDispatchMode):
    """Counts every storage that an operator returns, from its first sight to the death of its last tensor.

    Views share a storage and are counted once. Storages that are resized in place, as `fully_shard` does with gathered
    weights, are no operator's result: `following` reports them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self.peak_phase = ""
        self.phase = ""  # what the step is doing, as whoever drives it says
        self.asking = 0  # calls by which DTensor asks for the shape of a whole result: such tensors are on no GPU
        self._sizes: Any = WeakIdKeyDictionary()  # bytes counted of each storage, in a box that its end can read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it become operators on this rank's parts first
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.see(tensor.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as large as it is now."""
        box = self._sizes.get(storage)
        if box is None:
            if self.asking:
                return
            box = self._sizes[storage] = [0]
            weakref.finalize(storage, self._gone, box)
        self._changed(storage.nbytes() - box[0])
        box[0] = storage.nbytes()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The same, of one that was seen before; others are no tensor of the step."""
        if storage in self._sizes:
            self.see(storage)

    def _gone(self, box: list[int]) -> None:
        self._changed(-box[0])
        box[0] = 0

    def _changed(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.peak:
            self.peak, self.peak_phase = self.bytes, self.phase


@contextmanager
def following() -> Iterator[Live]:
    """While it lasts, what comes into being is counted until it is gone."""
    live, resize, shape = Live(), torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        live.resized(storage)
        return result

    def shape_of_whole(*args: Any) -> Any:
        live.asking += 1
        try:
            return shape(*args)
        finally:
            live.asking -= 1

    with (
        # No operator of torch's tells that memory is given back this way.
        patch.object(torch.UntypedStorage, "resize_", resize_),
        patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", shape_of_whole),
        live,
    ):
        yield live


def stored(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind tensors, which several may share."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storages[held.untyped_storage()._cdata] = held.untyped_storage().nbytes()
    return sum(storages.values())


@contextmanager
def standing_in(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts, routers share their rows out evenly, and norms and a ring's attention are fused, as on a GPU."""
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    with ExitStack() as stack:
        for layer in layers:
            run = partial(_run_evenly, layer.run, layer.arch.experts)
            stack.enter_context(patch.object(layer, "run", run))
            if isinstance(layer.experts, lora.AdaptedExperts):  # whose plain products ask for the sizes of segments
                stack.enter_context(patch.object(layer.experts, "multiply", _by_even_segments))
                stack.enter_context(patch.object(layer.experts, "low_rank", _low_rank_by_even_segments))
        stack.enter_context(patch.object(expert, "announced", _announced_evenly))
        stack.enter_context(patch.object(expert, "slotted", _slotted_really))
        stack.enter_context(patch.object(context, "_kernel", partial(_kernel, context._kernel)))
        stack.enter_context(patch.object(F, "rms_norm", _rms_norm))
        # parallel/recompute.py compares addresses, which are all the same here.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


class Voting(TorchDispatchMode):
    """Before its first step torch's pipeline asks whether every stage's input is described: they are, and 1 says so."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        return func(*args, **(kwargs or {}))


def even(rows: int, parts: int) -> list[int]:
    """Rows shared out, the first parts having one more where they do not divide."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _run_evenly(run: RunExperts, total: int, experts: Experts, x: Tensor, counts: Tensor, *more: Any) -> Tensor:
    """The same experts, each with its even part of the rows instead of what the router chose."""
    return run(experts, x, _real(even(len(x), total)), *more)


def _by_even_segments(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    return by_segment(x, stack, _real(list(accumulate(even(len(x), len(stack))))))


def _low_rank_by_even_segments(x: Tensor, down: Tensor, up: Tensor, ends: Tensor) -> Tensor:
    return _by_even_segments(_by_even_segments(x, down, ends), up, ends)


def _announced_evenly(counts: Tensor, rows: int, group: dist.ProcessGroup) -> ExpertRoute:
    """What `announced` says when every rank sends what this one sends."""
    ranks = group.size()
    mine = counts.tolist()
    each = len(mine) // ranks  # experts of a rank
    leaving = torch.empty(ranks, each, dtype=torch.int64)
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    sent = [mine[rank * each : (rank + 1) * each] for rank in range(ranks)]
    held = mine[dist.get_rank(group) * each :][:each]  # from every rank as many as from this one
    route = route_of(sent, [held] * ranks, coming, rows)
    return replace(route, counts=_real([ranks * rows for rows in held]))


def _slotted_really(counts: Tensor, slots: int, rows: int, group: dist.ProcessGroup) -> ExpertRoute:
    """What `slotted` says, with the rows of an expert as a value."""
    route = slotted(torch.empty(len(counts), dtype=torch.int64), slots, rows, group)
    return replace(route, counts=_real([sum(route.received) // len(route.counts)] * len(route.counts)))


def _real(numbers: list[int]) -> Tensor:
    """A tensor that has values even here."""
    with unset_fake_temporarily():
        return torch.tensor(numbers, dtype=torch.int64)


def _rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float | None = None) -> Tensor:
    return _FusedNorm.apply(x, list(normalized_shape), weight, eps)


class _FusedNorm(Function):
    """Root-mean-square norm by the operators that a GPU has as kernels; on a CPU torch computes them piecemeal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor, eps: float | None) -> Tensor:
        y, scale = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, scale, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        to_x, to_weight = torch.ops.aten._fused_rms_norm_backward(grads[0], x, ctx.shape, scale, weight, [True, True])
        return to_x, None, to_weight, None


def _kernel(
    otherwise: Callable[[AttentionBlock], tuple[Forward, Gradients]], block: AttentionBlock
) -> tuple[Forward, Gradients]:
    """What flash kernels make of a block, where a GPU has them: results and no scores."""
    if block.q.dtype not in HALF or block.same is not None or block.q.shape[3] % 8:
        return otherwise(block)

    def attend(block: AttentionBlock) -> tuple[Tensor, Tensor]:
        return torch.empty_like(block.q), block.q.new_empty(block.q.shape[:3], dtype=torch.float32)

    def gradients(block: AttentionBlock, out: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(block.q), torch.empty_like(block.k), torch.empty_like(block.v)

    return attend, gradients


@contextmanager
def fake_world(plan: Plan, rank: int, apart: bool = False) -> Iterator[Mesh]:
    """The mesh of one rank; its collectives return at once, and no other rank exists."""
    assert not dist.is_initialized(), "a real world would be taken for the fake one"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world)
    try:
        with (
            patch.object(dist, "all_to_all_single", partial(_all_to_all, dist.all_to_all_single)),
            patch.object(Mesh, "over_shard_and_tp", _grouped_really(Mesh.over_shard_and_tp)),
        ):
            yield mesh.make(plan, torch.device("cpu"), apart)
    finally:
        dist.destroy_process_group()
        # What DTensor remembers of meshes: an equal one of the next world has other groups under the same names.
        debug._clear_sharding_prop_cache()
        getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # which torch 2.11 may not have


def _grouped_really(grouped: Callable[..., dist.ProcessGroup]) -> Callable[..., dist.ProcessGroup]:
    """Groups that are made when they are first asked for, in the middle of a step: ranks have values even here."""

    def group(*asked: Any) -> dist.ProcessGroup:
        with unset_fake_temporarily():
            return grouped(*asked)

    return group


def _all_to_all(
    exchange: Callable[..., Any],
    output: Tensor,
    given: Tensor,
    received: list[int] | None = None,
    sent: list[int] | None = None,
    **kwargs: Any,
) -> Any:
    """An all-to-all of the fake group, which returns what it is given: of nothing it can make nothing else."""
    if given.numel() == 0 and sent is not None:
        output, received = output.new_empty(0), [0] * len(sent)
    return exchange(output, given, received, sent, **kwargs)


def traceable(plan: Plan) -> Plan:
    """The plan as it can be traced: by plain kernels, not compiled (torch's compiler ends the process here), with all
    that it keeps on the device and as it is.
    """
    here = {"activation_quant": "none", "activation_offload": False, "optimizer_offload": "none"}
    return msgspec.structs.replace(plan, kernels="plain", compile=False, **here)


def trace_step(run: Run, rank: int, collectives: Collectives) -> DryRunStep:
    """The second step of a rank: what is made at first use is there, and what a step leaves behind too."""
    run = msgspec.structs.replace(run, plan=traceable(run.plan))
    with fake_world(run.plan, rank, run.compresses) as mesh, ExitStack() as stack:
        with torch.device("meta"):
            model = Decoder(run.arch).to(master_weights.weight_dtype(run.optim, run.plan))
        lora.freeze(model, run.arch, precision.compute_dtype(run.plan))
        chunks = apply(model, run.plan, mesh, DECODER)
        forward_backward = choose(run, chunks, mesh)
        stack.callback(quantized.forget_tables)
        # Tensors take no memory; the mesh and the model on meta, which hold none either, are let in.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live = stack.enter_context(following())
        stack.enter_context(standing_in(chunks))
        step = _Step(run, mesh, chunks, live, forward_backward)
        with Voting():
            step.run_once()
        live.peak = live.bytes
        with observing() as calls:
            step.run_once()
        planned = of_every_step(collectives(mesh.place))
        # Where two axes have the same ranks, the one that was planned names them; the world is the last resort.
        named: list[Axis] = [each.axis for each in planned if each.axis != "world"]
        axes: tuple[Axis, ...] = ("world", "pp", "cp", "tp", "shard", "replicate", *named)
        return DryRunStep(
            calls=Counter(calls),
            said=implied(planned, run.plan, mesh),
            axes={ranks_of(axis, run.plan, mesh): axis for axis in axes},
            place=mesh.place,
            states=step.states(),
            live_bytes=live.peak,
            phase=live.peak_phase,
        )


class _Step:
    """The trainer's own step, with a batch that has no content."""

    def __init__(
        self, run: Run, mesh: Mesh, chunks: list[nn.Module], live: Live, forward_backward: ForwardBackward
    ) -> None:
        self.run, self.mesh, self.chunks, self.live = run, mesh, chunks, live
        for chunk in chunks:
            chunk.to_empty(device=mesh.device)
            chunk.train()
            begin_draws(chunk, run, mesh.device)
        precision.attach(chunks, run.plan)
        master_weights.attach(chunks, run)
        self.frozen = [weight for chunk in chunks for weight in chunk.parameters() if not weight.requires_grad]
        names, self.weights = zip(*(pair for chunk in chunks for pair in lora.trained(chunk)), strict=True)
        self.optimizer = ResidentOptimizer(run.optim, self.weights, run.plan, names, mesh)
        # By blocks that suit a cache: of large weights too many to follow.
        if run.optim.master_weights != "fp32" or self.optimizer.quantized:
            sends, whole = partial(send_scales, self.optimizer), (*WHOLE_RULES, *MATRIX_UPDATES)
            self.optimizer.updates |= {name: sends for name in self.optimizer.updates if name not in whole}
        self.outer = CompressingReplicas(run, chunks, self.optimizer, mesh) if run.compresses else NoOuterLoop(run)
        self.scale = LossScale(run.plan, mesh.device)
        self.reductions = grad_reduce.begun(chunks, run, mesh)
        self.forward_backward = forward_backward
        self.measure = clip.choose(run.plan)

    def run_once(self) -> None:
        """As train/loop.py has it."""
        self.optimizer.zero_grad()
        self.live.phase = "forward and backward"
        loss_sum = self.forward_backward(_batch(self.run), self.scale.value)
        self.live.phase = "the optimizer's step"
        self.outer.sum_gradients(self.run.steps)
        loss, square, _ = self.measure(self.chunks, loss_sum, self.mesh, False)
        stats = clip.grad_stats(loss, square, self.scale.value, self.run.optim.grad_clip)
        self.optimizer.step(RATE, stats)
        expert.update_load_bias(self.chunks, self.run.arch, self.mesh, stats.finite)
        self.scale.update(stats.finite)

    def states(self) -> dict[str, int]:
        """Bytes of what stays from step to step, and of the gradients, which are there until the next begins."""
        return {
            "weights": stored([*self.optimizer.masters, *self.frozen]),
            "gradients": stored(weight.grad for weight in self.weights),
            "moments": stored(chain.from_iterable(self.optimizer.states().values())),
            "error_feedback": stored(chain.from_iterable(reduction.kept() for reduction in self.reductions)),
        }


def _batch(run: Run) -> StepBatch:
    """Microbatches of the right shapes."""
    shape, microbatches = (run.plan.microbatch, run.sequence), []
    for _ in range(run.plan.grad_accum):
        tokens, targets, positions, index, documents = (torch.zeros(shape, dtype=torch.int64) for _ in range(5))
        mask = documents if run.data.masks else None
        microbatches.append(Batch(tokens, targets, positions, mask, index))
    return StepBatch(tuple(microbatches), run.tokens, 0.0)


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of one kind and size among the same ranks."""

    kind: Kind
    axis: str
    bytes: int  # of one call
    planned: int  # calls in a step
    traced: int

    @property
    def agrees(self) -> bool:
        return self.planned == self.traced


class ByteRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something a rank holds."""

    name: Literal["weights", "gradients", "moments", "error_feedback", "peak"]
    planned: int
    traced: int
    tolerance: float  # of the planned; 0: to the byte

    @property
    def agrees(self) -> bool:
        return abs(self.traced - self.planned) <= self.tolerance * self.planned


class TraceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's step, planned and traced."""

    plan: str
    rank: int
    world: int
    calls: tuple[CallRow, ...]
    held: tuple[ByteRow, ...]
    moment: str  # of the peak, by the ledger
    phase: str  # of the peak, as it was traced
    notes: tuple[str, ...]  # what was traced otherwise than it will run
    refused: str = ""  # why nothing could be traced

    @property
    def agrees(self) -> bool:
        return not self.refused and all(row.agrees for row in (*self.calls, *self.held))


def trace(run: Run, job: Job, rank: int | None = None) -> TraceReport:
    """One step of a rank, the most loaded unless one is named. A step that cannot be traced is reported as such."""
    plan = traceable(run.plan)
    plain = msgspec.structs.replace(job, plan=plan)
    if rank is None:
        rank = worst(plain).rank * (plan.world // plan.pp)  # pp is the outermost axis
    about = {"plan": str(run.plan), "rank": rank, "world": plan.world, "notes": tuple(notes(run))}
    try:
        seen = trace_step(
            run, rank, lambda place: traffic(run.arch, plan, run.sequence, place=place, optimizer=job.optimizer)
        )
    except (RuntimeError, NotImplementedError) as error:  # torch's words for an operator that needs values
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return TraceReport(**about, calls=(), held=(), moment="", phase="", refused=reason)
    said = ledger(plain, seen.place)
    held = tuple(_held(plain, plan, seen, said))
    return TraceReport(**about, calls=tuple(_calls(seen)), held=held, moment=said.moment, phase=seen.phase)


def _calls(seen: DryRunStep) -> Iterator[CallRow]:
    """Every call that was planned or made."""
    for call in sorted(seen.calls.keys() | seen.said.keys()):
        yield CallRow(
            kind=call.kind,
            axis=seen.axes.get(call.ranks, f"{len(call.ranks)} ranks"),
            bytes=call.bytes,
            planned=seen.said[call],
            traced=seen.calls[call],
        )


def _held(job: Job, plan: Plan, seen: DryRunStep, said: Ledger) -> Iterator[ByteRow]:
    near, offloaded = (of(job.arch, plan, seen.place, state_layout(job)) for of in (states, host_states))
    planned = {line.name: line.bytes for line in (*near, *offloaded)}
    for name in ("weights", "gradients", "moments", "error_feedback"):
        if name in planned:
            yield ByteRow(name=name, planned=planned[name], traced=seen.states[name], tolerance=0.0)
    peak = said.allocated + total(offloaded)
    yield ByteRow(name="peak", planned=peak, traced=seen.live_bytes, tolerance=PEAK_TOLERANCE)


def notes(run: Run) -> Iterator[str]:
    """What a trace leaves out or does otherwise, for this run."""
    plan = run.plan
    yield "traced on a CPU's operators: workspaces, the allocator's cache and the device's context are not seen"
    if plan.kernels != "plain":
        yield "traced with plain kernels, and compared with the ledger of plain kernels: Triton's need a GPU"
    yield from (text for name, text in NOTES.items() if plan.uses(name))
    if run.optim.master_weights != "fp32":
        yield "the update of weights in bf16 is not traced: its collectives and states are"
    if run.arch.experts:
        yield "routers have no values to choose by: every expert gets an equal share of the rows, as the plan assumes"
    if plan.cp > 1 and plan.cp_kind == "ring" and (plan.precision in ("fp32", "fp64") or run.data.masks):
        yield "on a CPU this ring's attention is made of plain operators, whose scores a GPU's kernel does not hold"
    if plan.precision == "fp16":
        yield "no gradient overflows here: the loss scale stays as it is"


def lines(found: TraceReport) -> Iterator[str]:
    """A trace as people read it."""
    yield f"dry run of rank {found.rank} of {found.world}, one whole step on tensors without memory: {found.plan}"
    if found.refused:
        yield f"could not be traced: {found.refused}"
    else:
        yield from _tables(found)
    yield "what to know:"
    yield from (f"  {note}" for note in found.notes)
    if not found.refused:
        yield "the trainer does what was planned" if found.agrees else "the trainer does not do what was planned"


def _tables(found: TraceReport) -> Iterator[str]:
    if found.calls:
        yield f"{'collective':<16}{'axis':<18}{'bytes a call':>16}{'planned':>10}{'traced':>10}{'difference':>12}"
    else:
        yield "collectives: none, planned or traced"
    for row in found.calls:
        difference = "–" if row.agrees else f"{row.traced - row.planned:+,}"
        yield f"{row.kind:<16}{row.axis:<18}{row.bytes:>16,}{row.planned:>10,}{row.traced:>10,}{difference:>12}"
    yield f"{'bytes held':<16}{'planned':>22}{'traced':>22}{'difference':>12}"
    for row in found.held:
        difference = f"{row.traced / row.planned - 1:+.2%}" if row.planned else "new"
        difference = "–" if row.traced == row.planned else difference
        allowed = "" if not row.tolerance else f"  ({row.tolerance:.0%} allowed)"
        wrong = "" if row.agrees else "  !"
        yield f"{LABELS.get(row.name, row.name):<16}{row.planned:>22,}{row.traced:>22,}{difference:>12}{allowed}{wrong}"
    yield f"the peak was planned at {found.moment}, and traced in {found.phase}"
