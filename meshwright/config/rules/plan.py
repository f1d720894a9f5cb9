"""Rules of a plan: its axes, its precision, what saves memory, how blocks run."""

import math
import shutil
from collections.abc import Callable, Iterator

from meshwright.config.run import FP8_KEYS, Run
from meshwright.spec import plan as recompute
from meshwright.spec.arch import Arch
from meshwright.spec.optimizers import OPTIMIZERS, in_state_dtype
from meshwright.spec.params import cut_widths, shares_heads
from meshwright.spec.plan import FP8_MULTIPLE, Plan
from meshwright.spec.problem import Problem
from meshwright.spec.quantized import FORMATS
from meshwright.spec.schedule import misfits

COMPILERS = ("g++", "clang++", "c++", "icpx")


def _batch(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if plan.batch == run.batch or min(plan.batch, run.batch) < 1:  # a count below 1 has a rule of its own
        return
    share, rest = divmod(run.batch, plan.data)
    wanted = f"batch = {(share + 1) * plan.data} with " if rest else ""
    share += bool(rest)
    micro = math.gcd(share, plan.microbatch)
    if micro < plan.microbatch and share % plan.grad_accum == 0:
        micro = share // plan.grad_accum
    other = f"{wanted}plan.microbatch = {micro} and plan.grad_accum = {share // micro}"
    yield Problem(
        f"batch = {run.batch} is not microbatch {plan.microbatch} × grad_accum {plan.grad_accum} × "
        f"{plan.data} data ranks = {plan.batch}",
        f"set batch = {plan.batch}" + (f", or {other}" if share * plan.data != plan.batch else ""),
        "batch",
    )


def _zero(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if plan.zero == 0 and plan.shard > 1:
        what = f"plan.shard = {plan.shard} with plan.zero = 0 shards nothing"
        yield Problem(what, f"set plan.zero = 1, 2 or 3, or use plan.replicate = {plan.shard}", "plan.zero")


def _tensor(run: Run) -> Iterator[Problem]:
    arch, tp = run.arch, run.plan.tp
    if tp <= 1:
        return
    widths = cut_widths(arch, tp)
    works = max(degree for degree in range(1, tp + 1) if all(width % degree == 0 for width in widths.values()))
    for name, width in widths.items():
        if width % tp:
            what = f"arch.{name} = {width} cannot be sharded over plan.tp = {tp} ranks"
            yield Problem(
                what, f"use plan.tp = {works}, and the other ranks for plan.shard or plan.replicate", "plan.tp"
            )


def _sequence(run: Run) -> Iterator[Problem]:
    cp, tp = run.plan.cp, run.plan.tp
    parts = (2 * cp if cp > 1 else 1) * tp  # each rank of cp holds an early and a late slice, to balance causal work
    if parts > 0 and run.sequence % parts:
        near = max(run.sequence // parts, 1) * parts
        what = (
            f"sequence = {run.sequence} cannot be split into {parts} equal slices for plan.cp = {cp} and plan.tp = {tp}"
        )
        yield Problem(what, f"use a multiple of {parts}, such as {near}, or smaller plan.cp and plan.tp", "sequence")


def _ulysses(run: Run) -> Iterator[Problem]:
    plan, arch = run.plan, run.arch
    ranks = plan.cp * plan.tp
    if plan.cp <= 1 or plan.cp_kind != "ulysses" or ranks < 1:
        return
    for name, heads in (("heads", arch.heads), ("kv_heads", arch.kv_heads)):
        if heads % ranks:
            what = f"plan.cp_kind = ulysses spreads arch.{name} = {heads} over cp × tp = {ranks} ranks"
            yield Problem(what, "use plan.cp_kind = ring, which needs no heads to spare", "plan.cp_kind")


def _pipeline(run: Run) -> Iterator[Problem]:
    plan, layers = run.plan, run.arch.blocks
    if plan.pp <= 1:
        if plan.stages or plan.chunks != 1:
            yield Problem(
                "plan.stages and plan.chunks are for pipelines", "leave them out, or set plan.pp", "plan.stages"
            )
        return
    stages = plan.pp * plan.chunks
    if stages > layers:
        named = f"arch.layers = {run.arch.layers}{' and that of arch.mtp_layers' if run.arch.mtp_layers else ''}"
        what = f"plan.pp = {plan.pp} × plan.chunks = {plan.chunks} are more stages than {named}"
        yield Problem(what, f"use plan.pp of at most {max(layers // max(plan.chunks, 1), 1)}", "plan.pp")
    elif len(plan.stages) != stages or sum(plan.stages) != layers or min(plan.stages, default=0) < 1:
        what = f"plan.stages = {list(plan.stages)} is not {stages} stages of {layers} layers in total"
        yield Problem(what, "leave plan.stages out to have the layers balanced", "plan.stages")
    yield from misfits(plan.schedule, plan.pp, plan.chunks, plan.grad_accum)


def _experts(run: Run) -> Iterator[Problem]:
    plan, experts = run.plan, run.arch.experts
    if plan.ep <= 1:
        return
    if experts == 0:
        what = f"plan.ep = {plan.ep} distributes experts, and this model has none"
        yield Problem(what, "leave plan.ep at 1, or state arch.experts", "plan.ep")
    elif experts % plan.ep:
        what = f"arch.experts = {experts} cannot be distributed evenly over plan.ep = {plan.ep} ranks"
        yield Problem(what, f"use a plan.ep that divides {experts}", "plan.ep")
    lenders, axes = (plan.shards, "shard · cp") if plan.zero else (plan.copies, "replicate · cp")
    if plan.parts > 1 and not plan.zero:
        axes = "cp"  # replicas that sync rarely have all experts each
    if lenders % plan.ep:
        what = f"plan.ep = {plan.ep} borrows its ranks from {axes} = {lenders}, which it does not divide"
        yield Problem(what, f"use a plan.ep that divides {lenders}, or another plan.{axes.split()[0]}", "plan.ep")


def _routes(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if run.arch.experts and plan.activation_quant != "none" and plan.recompute != "none":
        yield Problem(
            f"plan.recompute = {plan.recompute} would recompute the routing, and send some tokens to other experts: "
            f"plan.activation_quant = {plan.activation_quant} has rounded what the router reads",
            "leave one of them out, or use plan.activation_offload = true, which is exact",
            "plan.activation_quant",
        )


def _deterministic(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if not plan.deterministic:
        return
    for axis, sums in {"tp": "partial matmuls", "cp": "parts of a sequence", "ep": "tokens of an expert"}.items():
        if getattr(plan, axis) > 1:
            yield Problem(
                f"plan.deterministic fixes the order of sums over microbatches, and plan.{axis} = "
                f"{getattr(plan, axis)} adds up {sums} in an order of its own",
                f"set plan.{axis} = 1 and use plan.replicate and plan.shard, or leave plan.deterministic out",
                f"plan.{axis}",
            )
    if plan.pp > 1:
        yield Problem(
            f"plan.deterministic needs each microbatch's gradient apart, and plan.pp = {plan.pp} adds them up itself",
            "set plan.pp = 1 and use plan.replicate and plan.shard, or leave plan.deterministic out",
            "plan.pp",
        )
    for name in ("replicate", "shard", "grad_accum"):
        value = getattr(plan, name)
        if value > 0 and value & (value - 1):
            yield Problem(
                f"plan.deterministic adds in a binary tree, and plan.{name} = {value} is not a power of two",
                f"use plan.{name} = {1 << (value.bit_length() - 1)} or {1 << value.bit_length()}",
                f"plan.{name}",
            )


def _precision(run: Run) -> Iterator[Problem]:
    plan = run.plan
    for name in FP8_KEYS if plan.precision != "fp8" else ():
        if plan.uses(name):
            what = f"plan.{name} = {getattr(plan, name)} is for FP8 matmuls, and plan.precision = {plan.precision}"
            yield Problem(what, f"set plan.precision = fp8, or leave plan.{name} out", f"plan.{name}")
    if plan.precision == "fp8" and plan.tp > 1:
        yield from _scales_over_tp(run)
    if plan.precision == "fp8" and (tokens := plan.microbatch * run.sequence // plan.cp) % FP8_MULTIPLE:
        what = f"plan.precision = fp8 needs the {tokens} tokens of a microbatch to be a multiple of {FP8_MULTIPLE}"
        yield Problem(what, "use a sequence or a microbatch that makes it one, or plan.precision = bf16", "sequence")
    if plan.tf32 and plan.precision == "fp64":
        what = "plan.tf32 is for matmuls of fp32 numbers, and plan.precision = fp64 has none"
        yield Problem(what, "use plan.precision = fp32, or leave plan.tf32 out", "plan.tf32")
    if plan.precision == "fp8" and plan.deterministic:
        what = "plan.precision = fp8 computes scales of whole tensors, and plan.deterministic splits them differently"
        yield Problem(what, "use plan.precision = bf16, or leave plan.deterministic out", "plan.precision")


def _scales_over_tp(run: Run) -> Iterator[Problem]:
    """FP8 matmuls whose parts, and whose gradients, would not be those of the whole."""
    arch, plan = run.arch, run.plan
    stated, remedy = f"plan.precision = fp8 with plan.tp = {plan.tp}", "or plan.precision = bf16"
    held = {
        "latent attention": arch.is_latent,
        "multi-token prediction (arch.mtp_layers)": arch.mtp_layers > 0,
        f"arch.kv_heads = {arch.kv_heads} shared heads": shares_heads(arch, plan.tp),
    }
    whole = next((name for name, is_so in held.items() if is_so), "")
    if whole and arch.adapter.kind != "none":
        what = f"{stated} beside adapters is not offered for {whole}, with frozen matrices that every rank holds whole"
        yield Problem(what, f"use plan.tp = 1 and plan.shard, {remedy}", "plan.tp")
        return
    tokens = plan.microbatch * run.sequence // plan.cp // plan.tp
    if arch.mtp_layers and arch.hidden % FP8_MULTIPLE == 0 and tokens % FP8_MULTIPLE:
        what = f"{stated} leaves each rank {tokens} tokens of a microbatch for what joins arch.mtp_layers, which is no"
        longer = "a sequence or a microbatch that makes it one"
        yield Problem(f"{what} multiple of {FP8_MULTIPLE}", f"use {longer}, or a smaller plan.tp, {remedy}", "plan.tp")
    for name, width, part in _parts_in_fp8(arch, plan.tp):
        if width % FP8_MULTIPLE == 0 and arch.hidden % FP8_MULTIPLE == 0 and part % FP8_MULTIPLE:
            what = f"{stated} leaves each rank {part} of arch.{name} = {width}, which is no multiple of {FP8_MULTIPLE}"
            yield Problem(what, f"use a smaller plan.tp, {remedy}", "plan.tp")


def _parts_in_fp8(arch: Arch, tp: int) -> Iterator[tuple[str, int, int]]:
    """Widths that ranks of tp have parts of in matmuls of blocks, by the keys that they are from, and these parts."""
    widths = {"heads · head_dim": arch.q_width}
    if arch.is_latent:
        inner = arch.head_dim - arch.rope_dim + arch.v_head
        widths |= {"heads · v_dim": arch.out_width, "heads · (head_dim - rope_dim + v_dim)": arch.heads * inner}
    elif shares_heads(arch, tp):
        yield "kv_heads · head_dim", arch.kv_width, arch.head_dim
    else:
        widths["kv_heads · head_dim"] = arch.kv_width
    if not all(map(arch.is_moe, range(arch.layers))):
        widths["ffn"] = arch.ffn
    widths["shared_experts · expert_ffn"] = arch.shared_experts * arch.expert_ffn
    yield from ((name, width, width // tp) for name, width in widths.items() if width % tp == 0)


def _bf16_params(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if not plan.bf16_params:
        return
    remedy = "leave plan.bf16_params out"
    if plan.world > 1:
        what = f"plan.bf16_params is for single-rank plans, and this plan has {plan.world} ranks"
        yield Problem(what, f"{remedy}: sharded weights are cast when they are gathered", "plan.bf16_params")
    if plan.precision in ("fp32", "fp64"):
        what = f"plan.bf16_params is a bf16 copy, and plan.precision = {plan.precision} uses none"
        yield Problem(what, f"{remedy}, or set plan.precision = bf16", "plan.bf16_params")
    if plan.deterministic:
        yield Problem(
            "plan.deterministic accumulates gradients by itself, without plan.bf16_params", remedy, "plan.bf16_params"
        )


def _rounding(run: Run) -> Iterator[Problem]:
    plan, master_weights = run.plan, run.optim.master_weights
    if run.optim.stochastic_rounding != (master_weights == "none"):
        what = "optim.stochastic_rounding goes with optim.master_weights = none, and one of the two is set alone"
        yield Problem(what, "set both, or neither", "optim.stochastic_rounding")
    if master_weights == "fp32":
        return
    if plan.precision not in ("bf16", "fp8"):
        what = f"optim.master_weights = {master_weights} holds bf16 weights, not plan.precision = {plan.precision}"
        yield Problem(what, "set plan.precision = bf16, or leave optim.master_weights out", "optim.master_weights")
    if plan.deterministic:
        what = f"plan.deterministic accumulates fp32 gradients, and optim.master_weights = {master_weights} has none"
        yield Problem(what, "leave one of them out", "optim.master_weights")


def _offload(run: Run) -> Iterator[Problem]:
    plan, states = run.plan, run.optim.state_dtype
    if plan.optimizer_offload == "none":
        if states == "bf16" and run.optim.master_weights == "fp32":
            what = "optim.state_dtype = bf16 is for offloaded states or bf16 weights, and optim.master_weights = fp32"
            remedy = "leave optim.state_dtype out"
            if not plan.deterministic:  # which has fp32 master weights alone
                first = "" if plan.precision in ("bf16", "fp8") else "plan.precision = bf16 and "
                remedy = f"set {first}optim.master_weights = split, which keeps the same bits, or {remedy}"
            yield Problem(what, remedy, "optim.state_dtype")
        return
    remedy = "leave plan.optimizer_offload out"
    if plan.world > 1:
        what = f"plan.optimizer_offload is for a single rank, and this plan has {plan.world} ranks"
        yield Problem(
            what, f"{remedy}: plan.zero = 1 to 3 shards the states over plan.shard ranks", "plan.optimizer_offload"
        )
    if plan.deterministic:
        what = "plan.deterministic accumulates gradients and moves weights by itself, without plan.optimizer_offload"
        yield Problem(what, f"{remedy}, or plan.deterministic", "plan.optimizer_offload")
    if plan.precision in ("bf16", "fp16", "fp8") and plan.world == 1 and not plan.bf16_params:
        what = "plan.optimizer_offload needs bf16 parameters on the device: plan.bf16_params = false keeps none"
        yield Problem(what, "leave plan.bf16_params out", "plan.bf16_params")
    if states == "bf16" and plan.precision not in ("bf16", "fp8"):
        what = f"optim.state_dtype = bf16 is for bf16 weights, and plan.precision = {plan.precision} has none"
        yield Problem(what, "set plan.precision = bf16, or leave optim.state_dtype out", "optim.state_dtype")
    if run.optim.master_weights != "fp32":
        stated = f"optim.master_weights = {run.optim.master_weights}"
        what = f"plan.optimizer_offload has its own master weights, without {stated}"
        yield Problem(what, "leave optim.master_weights out, or plan.optimizer_offload", "optim.master_weights")
    if plan.optimizer_offload_host_bytes < 0:
        what = f"plan.optimizer_offload_host_bytes = {plan.optimizer_offload_host_bytes} is negative"
        yield Problem(what, "use 0 to have every state on the disk", "plan.optimizer_offload_host_bytes")


def _quantized(run: Run) -> Iterator[Problem]:
    """States in int8, int4 or fp8 are updated on the device, by rules of elements; no byte of two codes is cut."""
    plan, states = run.plan, run.optim.state_dtype
    if states not in FORMATS:
        return
    fits = [name for name in OPTIMIZERS if in_state_dtype(name, states) != name]
    if run.optim.name not in fits and not OPTIMIZERS[run.optim.name].whole:
        what = f"optim.state_dtype = {states} is for {', '.join(fits)}, and optim.name = {run.optim.name}"
        yield Problem(what, "leave optim.state_dtype out, or set optim.name to one of them", "optim.state_dtype")
    for key in ("optimizer_offload", "cpu_offload"):
        if plan.uses(key):
            what = f"plan.{key} updates states in host memory or brings them by pieces, in fp32 or bf16, not {states}"
            yield Problem(what, f"leave plan.{key} out: {states} states are small, or optim.state_dtype", f"plan.{key}")
    for key, part in _row_parts(run):
        if FORMATS[states].cuts_byte(part):
            what = (
                f"optim.state_dtype = {states} has two codes in a byte, and this plan cuts rows of {key} after {part}"
            )
            yield Problem(f"{what} columns", "set optim.state_dtype = int8, or another plan.tp", "optim.state_dtype")
            return


def _row_parts(run: Run) -> Iterator[tuple[str, int]]:
    """The lengths into which a plan cuts rows of matrices, each with the key that the rows' length is from."""
    arch, plan = run.arch, run.plan
    rows = {"arch.head_dim": arch.q_width, "arch.ffn": arch.ffn}
    rows |= {"arch.expert_ffn": arch.expert_ffn} if arch.experts else {}
    if plan.tp > 1:
        yield from ((key, size // plan.tp) for key, size in rows.items())
    if arch.experts and plan.zero:  # a stack is sharded along the first dim that comes out even
        experts, inside, shards = arch.experts // plan.ep, arch.expert_ffn // plan.tp, plan.shards // plan.ep
        stacks = {"arch.hidden": (experts, inside, arch.hidden), "arch.expert_ffn": (experts, arch.hidden, inside)}
        for key, dims in stacks.items():
            if shards > 1 and next((dim for dim, size in enumerate(dims) if size % shards == 0), 0) == 2:
                yield key, dims[2] // shards


def _cpu_offload(run: Run) -> Iterator[Problem]:
    plan, key = run.plan, "plan.cpu_offload"
    if not plan.cpu_offload:
        return
    remedy = "leave plan.cpu_offload out"
    if plan.zero != 3:
        what = f"plan.cpu_offload frees a block's weights after use, and plan.zero = {plan.zero} keeps them all"
        yield Problem(what, f"set plan.zero = 3, on one rank too, or {remedy}", "plan.zero")
    if plan.pp > 1:
        what = f"plan.cpu_offload fetches one block at a time, and plan.pp = {plan.pp} keeps whole stages all-gathered"
        yield Problem(what, f"set plan.pp = 1 and use plan.shard, or {remedy}", key)
    if plan.bf16_params:
        what = "plan.bf16_params keeps a bf16 copy of all weights on the device, and plan.cpu_offload keeps none there"
        yield Problem(what, "leave one of them out", "plan.bf16_params")
    if plan.optimizer_offload != "none":
        what = f"plan.cpu_offload includes plan.optimizer_offload = {plan.optimizer_offload}: all states are there"
        yield Problem(what, "leave one of them out: plan.optimizer_offload is for weights that fit on the device", key)
    if plan.deterministic:
        what = "plan.deterministic accumulates gradients on the device by itself, without plan.cpu_offload"
        yield Problem(what, "leave one of them out", key)


def how_blocks_run(plan: Plan) -> Iterator[Problem]:
    """Recomputation, saved activations and compilation, for any model."""
    if (wrong := recompute.problem(plan.recompute)) is not None:
        yield wrong
        return
    yield from _saved_activations(plan)
    if not plan.splits_backward:
        return
    near = f"use plan.schedule = {'1f1b' if plan.chunks == 1 else 'interleaved'}, whose backwards are whole"
    if plan.recompute != "none":
        # Right in float64 but for `selective`, which torch refuses; measured on the last of two stages: 11 forwards of
        # every block under full, 17 under every-2, where a whole backward takes 2.
        yield Problem(
            f"plan.recompute = {plan.recompute} recomputes a block for every backward through it, and plan.schedule "
            f"= {plan.schedule} goes back for the block's input and then for each of its weights",
            f"{near}, or leave plan.recompute out",
            "plan.recompute",
        )
    if plan.compile:
        what = f"plan.compile makes one backward of a block, and plan.schedule = {plan.schedule} needs its two halves"
        yield Problem(what, f"{near}, or leave plan.compile out", "plan.compile")


def _saved_activations(plan: Plan) -> Iterator[Problem]:
    said = {"activation_quant": plan.activation_quant} if plan.activation_quant != "none" else {}
    said |= {"activation_offload": "true"} if plan.activation_offload else {}
    together = recompute.by_operation(plan.recompute) or any(len(run) > 1 for run in recompute.runs(plan.recompute, 4))
    for name, value in said.items() if together else ():
        yield Problem(
            f"plan.{name} = {value} works on a block's saved activations, and plan.recompute = {plan.recompute} "
            "has none of a block's own",
            "use plan.recompute = none, first-K or full",
            f"plan.{name}",
        )
    if plan.activation_quant != "none" and plan.precision == "fp64":
        yield Problem(
            f"plan.activation_quant = {plan.activation_quant} is not exact, and plan.precision = fp64 is for proofs",
            "leave plan.activation_quant out; plan.activation_offload = true saves as much and is exact",
            "plan.activation_quant",
        )


def compiles_doubles() -> bool:
    """Whether torch compiles attention in float64: 2.11 mixes it with fp32 on a CPU, and fails."""
    from importlib.metadata import PackageNotFoundError, version  # which imports an e-mail parser

    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (2, 12)


def missing(plan: Plan, find: Callable[[str], str | None] = shutil.which) -> Iterator[Problem]:
    """Torch turns blocks into C++ (on CPUs) or into Triton kernels whose start is C (on GPUs)."""
    if plan.compile and not any(map(find, COMPILERS)):
        what = "plan.compile needs a C++ compiler, and this machine has none"
        yield Problem(what, "install one (apt-get install g++), or leave plan.compile out", "plan.compile")


SPLIT_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _batch,
    _precision,
    _bf16_params,
    _rounding,
    _offload,
    _quantized,
    _cpu_offload,
    _zero,
    _tensor,
    _sequence,
    _ulysses,
    _pipeline,
    _experts,
    _deterministic,
    _routes,
    lambda run: how_blocks_run(run.plan),
)
