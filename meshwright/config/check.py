"""Every rule between fields of a run. All problems are found at once, each with its remedy."""

import math
import shutil
from collections.abc import Callable, Iterator
from operator import attrgetter

from meshwright.config import communication, evaluation
from meshwright.config.arch_rules import (
    ARCH_CAPS,
    ARCH_COUNTS,
    ARCH_LIMIT,
    ARCH_RULES,
    ARCH_SCALES,
    VOCAB_LIMIT,
)
from meshwright.config.run import FP8_KEYS, Data, Optim, Run
from meshwright.config.tuning import TUNED_MODEL_RULES, TUNING_RULES
from meshwright.spec import plan as recompute
from meshwright.spec.addresses import has_secret, is_address, without_secret
from meshwright.spec.communication import MOST_TP, block_length
from meshwright.spec.optimizers import OPTIMIZERS, in_state_dtype
from meshwright.spec.params import cut_widths, params, shares_heads
from meshwright.spec.plan import AXES, FP8_MULTIPLE, Plan
from meshwright.spec.problem import InputError as InputError
from meshwright.spec.problem import Problem
from meshwright.spec.quantized import FORMATS
from meshwright.spec.schedule import misfits

POSITIVE = (
    "steps", "sequence", "batch", "plan.microbatch", "plan.grad_accum", *(f"plan.{axis}" for axis in AXES), "plan.ep",
    "plan.chunks", "plan.sync_every", "plan.outer_fragments", "plan.secondary_shard", "optim.var_update_scaler",
    "optim.local_step_scaler", "optim.local_step_clipper", "log.every", "eval.batches", "checkpoint.keep_last",
)  # fmt: skip
NATURAL = (
    "seed", "eval.every", "checkpoint.every", "checkpoint.keep_every", "eval.sample_tokens", "optim.warmup",
    "eval.prompts_every", "eval.command_every",
    "optim.sync_warmup", "optim.freeze_step", "faults.restarts", "faults.not_finite", "faults.compare_every",
    "faults.check_matmuls_every", "faults.memory_every", "faults.spares", "arch.experts", "arch.shared_experts",
    "plan.powersgd",
    *(f"arch.{name}" for name in ("window", "full_every", "no_rope_every", "dense_layers", "mtp_layers")),
    *(f"arch.{name}" for name in ("kv_rank", "q_rank", "rope_dim", "v_dim")),
)  # fmt: skip
MOST = 10**12  # steps, samples or tokens: a typing slip, and still exact wherever they are counted
SEEDS = 2**63  # what fits a signed word, in which seeds travel and are kept
MOST_LIVE_RANKS = 1023  # whose wishes fit beside each other in one number
COMPILERS = ("g++", "clang++", "c++", "icpx")


def problems(run: Run, *, decided: bool = True) -> list[Problem]:
    """Everything that is wrong with a run, in the order of the rules; `decided`: its plan is the one to run."""
    rules = [rule for rule in RULES if decided or rule is not _nobody_to_tell]
    return [problem for rule in rules for problem in rule(run)]


def warnings(run: Run) -> list[str]:
    """What is allowed but should be known before it is believed."""
    notes = []
    if run.arch.experts and run.arch.router == "expert_choice":
        notes.append(
            "arch.router = expert_choice: an expert picks its tokens among the whole sequence, so a token's output "
            "depends on later tokens. The training loss is optimistic and generation will not match it."
        )
    if run.arch.experts and run.arch.router == "gshard":
        notes.append(
            "arch.router = gshard: first choices are served before any second one, so a later token can take the slot "
            "of an earlier one's second expert. Generation may differ slightly from training; more capacity lessens it."
        )
    if run.plan.sync_every == 1 and run.plan.uses("outer"):
        notes.append(
            f"plan.outer = {run.plan.outer} is not used: with plan.sync_every = 1 replicas never part, and training "
            "is plain. Set plan.sync_every to the steps between two syncs."
        )
    return [*notes, *communication.warnings(run)]


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
    whole = (
        "latent attention" if arch.is_latent else "multi-token prediction (arch.mtp_layers)" if arch.mtp_layers else ""
    )
    if whole:
        what = f"{stated} is not offered for {whole}, which has matrices that every rank holds whole"
        yield Problem(what, f"use plan.tp = 1 and plan.shard, {remedy}", "plan.tp")
        return
    if shares_heads(arch, plan.tp):
        what = f"{stated} would round the gradient of arch.kv_heads = {arch.kv_heads} shared heads in parts"
        yield Problem(what, f"use plan.tp of at most {arch.kv_heads}, {remedy}", "plan.tp")
        return
    widths = {"heads · head_dim": arch.q_width, "kv_heads · head_dim": arch.kv_width}
    if not all(map(arch.is_moe, range(arch.layers))):
        widths["ffn"] = arch.ffn
    widths["shared_experts · expert_ffn"] = arch.shared_experts * arch.expert_ffn
    for name, width in widths.items():
        in_fp8 = width % FP8_MULTIPLE == 0 and arch.hidden % FP8_MULTIPLE == 0
        if in_fp8 and width % plan.tp == 0 and width // plan.tp % FP8_MULTIPLE:
            part = f"{width // plan.tp} of arch.{name} = {width}"
            what = f"{stated} leaves each rank {part}, which is no multiple of {FP8_MULTIPLE}"
            yield Problem(what, f"use a smaller plan.tp, {remedy}", "plan.tp")


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


def _routes(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if run.arch.experts and plan.activation_quant != "none" and plan.recompute != "none":
        yield Problem(
            f"plan.recompute = {plan.recompute} would recompute the routing, and send some tokens to other experts: "
            f"plan.activation_quant = {plan.activation_quant} has rounded what the router reads",
            "leave one of them out, or use plan.activation_offload = true, which is exact",
            "plan.activation_quant",
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


def _outer(run: Run) -> Iterator[Problem]:
    """Replicas that sync every so many steps."""
    plan, optim, key = run.plan, run.optim, "plan.sync_every"
    if plan.sync_every <= 1:
        yield from _no_outer(run)
        return
    stated = f"{key} = {plan.sync_every}"
    if plan.replicate == 1:
        what = f"{stated} (plan.outer = {plan.outer}) is for replicas that sync rarely, and plan.replicate = 1"
        yield Problem(what, f"set plan.replicate to 2 or more, or leave {key} out", key)
    if plan.sync_every > run.steps:
        what = f"{stated} is more than the steps = {run.steps} of the run: replicas would never sync before its end"
        yield Problem(what, f"use {key} of at most {run.steps}, or more steps", key)
    if optim.sync_warmup >= run.steps:
        what = f"optim.sync_warmup = {optim.sync_warmup} is not shorter than the run, whose steps = {run.steps}"
        yield Problem(what, f"use at most {run.steps - 1}, or leave {key} out", "optim.sync_warmup")
    most = min(plan.sync_every, run.arch.layers)
    if plan.outer_fragments > most:
        what = f"plan.outer_fragments = {plan.outer_fragments} is more than the layers, or the steps between two syncs"
        yield Problem(what, f"use at most {most}", "plan.outer_fragments")
    if plan.outer == "average":
        yield from _idle_keys(run, "plan.outer = average takes no outer step", "set plan.outer = diloco or slowmo")
    yield from _outer_beside(run, stated)


def _no_outer(run: Run) -> Iterator[Problem]:
    """What would be ignored without an outer loop."""
    remedy = "set plan.sync_every to 2 or more"
    for name in ("outer_fragments", "outer_quant"):
        if run.plan.uses(name) and run.plan.sync_every == 1:
            what = f"plan.{name} = {getattr(run.plan, name)} is of an outer loop, and plan.sync_every = 1 has none"
            yield Problem(what, f"{remedy}, or leave plan.{name} out", f"plan.{name}")
    yield from _idle_keys(run, "plan.sync_every = 1 is plain training, without an outer loop", remedy)
    if run.optim.sync_warmup > 0:
        what = f"optim.sync_warmup = {run.optim.sync_warmup} is of an outer loop, and plan.sync_every = 1 has none"
        yield Problem(what, f"{remedy}, or leave optim.sync_warmup out", "optim.sync_warmup")


def _staleness(run: Run) -> Iterator[Problem]:
    """Asynchronous replicas with a parameter server."""
    plan, key, spec = run.plan, "plan.staleness", OPTIMIZERS[run.optim.name]
    if plan.staleness is None:
        return
    stated, without = f"{key} = {plan.staleness}", f"leave {key} out"
    if plan.staleness < 0:
        yield Problem(f"{stated} is negative", "give it a whole number of at least 0; 0 is synchronous", key)
    if plan.replicate == 1:
        what = f"{stated} is for replicas that do not wait for each other, and plan.replicate = 1"
        yield Problem(what, f"set plan.replicate to 2 or more, or {without}", key)
    others = dict.fromkeys(("shard", "tp", "cp", "pp", "ep", "sync_every"), 1)
    others |= {"zero": 0, "deterministic": False, "cpu_offload": False, "optimizer_offload": "none"}
    for name, neutral in others.items():
        if getattr(plan, name) != neutral:
            what = f"{stated} is for replicas of whole models, each in its own time, without plan.{name}"
            yield Problem(what, f"leave plan.{name} out, or {without}", key)
    if plan.precision == "fp16":
        what = f"{stated} has no step in which all ranks agree on the loss scale of plan.precision = fp16"
        yield Problem(what, f"use plan.precision = bf16, or {without}", key)
    if spec.whole or run.optim.state_dtype != "fp32" or run.optim.master_weights != "fp32":
        what = f"{stated} keeps fp32 rows of weights and states on the hosts, and its update is by elements"
        elementwise = ", ".join(name for name, each in OPTIMIZERS.items() if not each.whole)
        remedy = f"use {elementwise} with optim.state_dtype and optim.master_weights = fp32, or {without}"
        yield Problem(what, remedy, key)


def _idle_keys(run: Run, what: str, remedy: str) -> Iterator[Problem]:
    for name in ("outer_lr", "outer_momentum"):
        if getattr(run.optim, name) != getattr(Optim(), name):
            value = f"optim.{name} = {getattr(run.optim, name):g} is not used: {what}"
            yield Problem(value, f"{remedy}, or leave optim.{name} out", f"optim.{name}")


def _outer_beside(run: Run, stated: str) -> Iterator[Problem]:
    """What replicas that sync rarely cannot be combined with."""
    plan, key = run.plan, "plan.sync_every"
    if plan.deterministic:
        what = f"plan.deterministic has the same bits for every plan.replicate, which {stated} makes other mathematics"
        yield Problem(what, "leave one of them out", key)
    if plan.cpu_offload:
        what = f"{stated} syncs weights on the device, and plan.cpu_offload keeps them in host memory"
        yield Problem(what, "leave one of them out; plan.zero = 3 shards weights over plan.shard ranks", key)
    if run.optim.master_weights != "fp32":
        what = f"{stated} averages fp32 master weights, and optim.master_weights = {run.optim.master_weights} has none"
        yield Problem(what, "leave one of them out", key)
    cut = (
        [param for param in params(run.arch) if communication.cuts_a_block(param, plan)]
        if plan.outer_quant != "none"
        else []
    )
    if cut:
        what = f"plan.tp = {plan.tp} cuts {cut[0].name} within a block of {block_length(cut[0].shape[-1])} elements"
        remedy = f"use plan.tp up to {MOST_TP} of rows that are a multiple of it, or leave plan.outer_quant out"
        yield Problem(
            f"{what}, which share a scale of plan.outer_quant = {plan.outer_quant}", remedy, "plan.outer_quant"
        )


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


def _counts(run: Run) -> Iterator[Problem]:
    for key in (*POSITIVE, *(f"arch.{name}" for name in ARCH_COUNTS)):
        if (value := attrgetter(key)(run)) < 1:
            yield Problem(f"{key} = {value} is not a count", f"give {key} a whole number of at least 1", key)
    for key in NATURAL:
        if (value := attrgetter(key)(run)) < 0:
            yield Problem(f"{key} = {value} is negative", f"give {key} a whole number of at least 0", key)
    told = ("seed", *(("plan.microbatch", "plan.grad_accum") if run.batch > MOST else ()))  # which divide the batch
    for key in (*POSITIVE, *NATURAL):
        if (value := attrgetter(key)(run)) > MOST and key not in told:
            yield Problem(f"{key} = {value} is beyond any run", f"use at most {MOST}", key)
    if run.seed >= SEEDS:
        yield Problem(f"seed = {run.seed} has more than 63 bits", f"use 0 to {SEEDS - 1}", "seed")
    for name in ARCH_COUNTS:
        limit = VOCAB_LIMIT if name == "vocab" else ARCH_LIMIT
        if (value := getattr(run.arch, name)) > limit:
            yield Problem(f"arch.{name} = {value} is beyond any model", f"use at most {limit}", f"arch.{name}")


def _addresses(run: Run) -> Iterator[Problem]:
    """Addresses are kept in run folders and shown on screens, so none may hold a secret."""
    named = {"data.source": run.data.source, "checkpoint.remote": run.checkpoint.remote, "init.from": run.init.folder}
    for key, address in [*named.items(), *(("data.mix", one.source) for one in run.data.mix)]:
        if address and has_secret(address):
            what = f"{key} has a password or a signature in it ({without_secret(address)}), and run folders keep both"
            yield Problem(what, "leave it out: fsspec reads credentials from their own files and variables", key)
    if (remote := run.checkpoint.remote) and not is_address(remote):
        what = f"checkpoint.remote = {remote!r} is not an address"
        yield Problem(what, "use one such as s3://bucket/runs/a, or leave it out", "checkpoint.remote")


def _rates(run: Run) -> Iterator[Problem]:
    optim = run.optim
    bounds = {
        "optim.lr": (optim.lr, 0.0, 1e3),
        "optim.eps": (optim.eps, 1e-30, 1.0),  # 0 ÷ (0 + eps) is 0, in 32 bits too
        "optim.eps1": (optim.eps1, 1e-37, 1.0),  # above 0 in 32 bits too
        "optim.eps2": (optim.eps2, 0.0, 1.0),
        "optim.min_lr_ratio": (optim.min_lr_ratio, 0.0, 1.0),
        "optim.decay_fraction": (optim.decay_fraction, 0.0, 1.0),
        "optim.weight_decay": (optim.weight_decay, 0.0, 1e3),
        "optim.grad_clip": (optim.grad_clip, 0.0, 1e9),
        "optim.outer_lr": (optim.outer_lr, 0.0, 1e3),
        "epochs": (run.epochs, 0.0, 1e6),
        "data.eval_fraction": (run.data.eval_fraction, 0.0, 0.5),
        "eval.temperature": (run.eval.temperature, 0.0, 100.0),
        "arch.capacity": (run.arch.capacity, 0.0, 1e3),
        **{f"arch.{name}": (getattr(run.arch, name), 1e-12, 1e12) for name in ARCH_SCALES},
        **{f"arch.{name}": (getattr(run.arch, name), 0.0, 1e12) for name in ARCH_CAPS},
        "faults.grace_seconds": (run.faults.grace_seconds, 0.0, 1e9),
        "faults.hang_seconds": (run.faults.hang_seconds, 0.1, 1e9),
        "faults.meet_seconds": (run.faults.meet_seconds, 0.1, 1e9),
        "faults.spike": (run.faults.spike, 0.0, 1e9),
        "faults.straggler": (run.faults.straggler, 0.0, 1e9),
    }
    for name in ("memory_gib", "host_gib", "disk_gib"):
        if (size := getattr(run.goal, name)) is not None:
            bounds[f"goal.{name}"] = (size, 2.0**-20, 1e6)
    for key, (value, low, high) in bounds.items():
        if not low <= value <= high:  # a NaN lands here too
            yield Problem(f"{key} = {value} is out of range", f"use {low:g} to {high:g}", key)
    for name in ("beta1", "beta2", "momentum", "outer_momentum"):
        if not 0 <= getattr(optim, name) < 1:
            yield Problem(f"optim.{name} = {getattr(optim, name)} is out of range", "use 0 to below 1", f"optim.{name}")
    for source in run.data.mix:
        if not 0 < source.weight < 1e9:
            what = f"data.mix: the weight {source.weight} of {source.source} is not positive"
            yield Problem(what, "use a number above 0", "data.mix")


def _optimizer(run: Run) -> Iterator[Problem]:
    """What only another optimizer reads would be ignored."""
    usual, chosen = Optim(), OPTIMIZERS[run.optim.name]
    read = {name for member in chosen.members for name in member.keys}
    others = {name: other for other in reversed(list(OPTIMIZERS.values())) for name in other.keys if name not in read}
    for name, other in sorted(others.items()):
        if getattr(run.optim, name) != getattr(usual, name):
            yield Problem(
                f"optim.{name} is for {other.label}, and optim.name = {chosen.name}",
                f"leave optim.{name} out, or set optim.name = {other.name}",
                f"optim.{name}",
            )


def _whole_tensors(run: Run) -> Iterator[Problem]:
    """An update of whole tensors has all of its weights and states on the device, and sums over their parts."""
    plan, spec = run.plan, OPTIMIZERS[run.optim.name]
    if not spec.whole:
        return
    elementwise = ", ".join(name for name, each in OPTIMIZERS.items() if not each.whole)
    other = f"use an optimizer that updates elements ({elementwise})"
    for key in ("optimizer_offload", "cpu_offload"):
        if plan.uses(key):
            what = f"plan.{key} moves pieces of states, and optim.name = {spec.name} updates whole tensors"
            yield Problem(what, f"leave plan.{key} out, or {other}", f"plan.{key}")
    if run.optim.state_dtype != "fp32":
        kept = f"optim.state_dtype = {run.optim.state_dtype}"
        what = f"{kept} is for updates by elements, and optim.name = {spec.name} updates whole tensors"
        yield Problem(what, f"leave optim.state_dtype out, or {other}", "optim.state_dtype")
    if plan.deterministic and not spec.is_exact:
        what = (
            f"plan.deterministic has one order of sums whatever the shards, and optim.name = {spec.name} adds up parts "
            "of a weight rank by rank"
        )
        yield Problem(what, f"leave plan.deterministic out, or {other}", "plan.deterministic")


def _onebit(run: Run) -> Iterator[Problem]:
    """Optimizers that compress what replicas exchange."""
    plan, spec = run.plan, OPTIMIZERS[run.optim.name]
    if not spec.compresses:
        return
    chosen, plain = f"optim.name = {spec.name}", "lamb" if spec.name == "onebit_lamb" else "adamw"
    other = f"or use optim.name = {plain}"
    for axis in ("shard", "tp", "cp", "pp", "ep"):
        if getattr(plan, axis) > 1:
            what = (
                f"{chosen} compresses whole weights of replicas, and plan.{axis} = {getattr(plan, axis)} cuts the model"
            )
            yield Problem(what, f"use plan.{axis} = 1 and plan.replicate, {other}", f"plan.{axis}")
    if plan.zero:
        what = f"{chosen} keeps every state on every replica, and plan.zero = {plan.zero} shards them"
        yield Problem(what, f"use plan.zero = 0, {other}", "plan.zero")
    if plan.parts > 1:
        what = f"{chosen} exchanges momenta by its own calendar, and plan.sync_every = {plan.sync_every} has another"
        yield Problem(what, f"use plan.sync_every = 1, {other}", "plan.sync_every")
    if run.optim.master_weights != "fp32":
        what = (
            f"{chosen} adds up errors in fp32, and optim.master_weights = {run.optim.master_weights} has bf16 gradients"
        )
        yield Problem(what, f"leave optim.master_weights out, {other}", "optim.master_weights")
    if run.measures_noise:
        key = "optim.adascale" if run.optim.adascale else "log.noise_scale"
        what = f"{key} compares gradients of microbatches with their sum, which {chosen} never has after its warm-up"
        yield Problem(what, f"leave {key} out, {other}", key)


def _nobody_to_tell(run: Run) -> Iterator[Problem]:
    if run.compresses and run.plan.replicate == 1:
        what = (
            f"optim.name = {run.optim.name} compresses what replicas tell each other, and plan.replicate = 1 has none"
        )
        yield Problem(what, "set plan.replicate to 2 or more, or use another optimizer, such as adamw", "optim.name")


def _freeze(run: Run) -> Iterator[Problem]:
    """A warm-up that does not end leaves nothing to compress."""
    freeze = run.optim.freeze_step
    if run.compresses and not 1 <= freeze < run.steps:
        warm_up = f"optim.freeze_step = {freeze}, the warm-up of optim.name = {run.optim.name}"
        what = f"{warm_up}, is not shorter than the run, whose steps = {run.steps}"
        yield Problem(what, f"use 1 to {max(run.steps - 1, 1)}, or more steps", "optim.freeze_step")


def _noise_scale(run: Run) -> Iterator[Problem]:
    plan, base = run.plan, run.optim.adascale_batch
    key = "optim.adascale" if run.optim.adascale else "log.noise_scale"
    if base and not run.optim.adascale:
        what = "optim.adascale_batch is for AdaScale, and optim.adascale = false"
        yield Problem(what, "set optim.adascale = true, or leave optim.adascale_batch out", "optim.adascale_batch")
    if not 0 <= base <= run.batch:
        what = f"optim.adascale_batch = {base} is no part of a batch of {run.batch} sequences"
        yield Problem(what, "use 1 up to the batch, or 0 for a microbatch", "optim.adascale_batch")
    if not (run.optim.adascale or run.log.noise_scale):
        return
    remedy = f"leave {key} out"
    if plan.data * plan.grad_accum < 2:
        what = f"{key} compares the microbatches of a step, and there is one"
        yield Problem(what, f"use a smaller plan.microbatch, or {remedy}", key)
    if plan.cp > 1:
        what = f"{key} needs each rank to see whole sequences, and plan.cp = {plan.cp} cuts them"
        yield Problem(what, f"use plan.cp = 1, or {remedy}", key)
    if plan.parts > 1:
        what = f"{key} compares microbatches of one gradient, and replicas that do not sum theirs have one each"
        yield Problem(what, f"use plan.sync_every = 1 without plan.staleness, or {remedy}", key)
    yield from _adascale_parts(run)
    if run.optim.adascale and plan.deterministic:
        what = "optim.adascale adds up norms of shards, and plan.deterministic allows no sum that depends on the shards"
        yield Problem(what, f"leave plan.deterministic out, or {remedy}", key)


def _adascale_parts(run: Run) -> Iterator[Problem]:
    """Where the meter leaves weights out, a rate that it sets would depend on the plan."""
    plan = run.plan
    tied = plan.pp > 1 and run.arch.embeds_at_both_ends
    left_out = {"tp": plan.tp > 1, "ep": plan.ep > 1, "pp": tied}
    for axis in (axis for axis, leaves in left_out.items() if leaves and run.optim.adascale):
        tells = f"plan.{axis} = {getattr(plan, axis)}{' with two embeddings' if axis == 'pp' else ''}"
        what = f"optim.adascale sets the rate by gradients of microbatches, and {tells} has some weights' only in parts"
        yield Problem(what, f"use plan.{axis} = 1, or leave optim.adascale out", "optim.adascale")


def _data(run: Run) -> Iterator[Problem]:
    if run.data.pack == "documents" and run.data.mask_documents:
        what = "data.mask_documents = true has no meaning for data.pack = documents, where a sample is one document"
        yield Problem(what, "leave one of them out", "data.mask_documents")
    if run.data.pack == "best_fit" and run.data.mask_documents:
        what = "data.pack = best_fit masks documents by itself, without data.mask_documents"
        yield Problem(what, "leave data.mask_documents out", "data.mask_documents")
    if run.data.is_chat and run.data.pack == "stream":
        what = "data.pack = stream cuts one long stream into samples, and data.format = chat has samples of its own"
        yield Problem(what, "leave data.pack out, or set data.pack = best_fit or documents", "data.pack")
    for name in () if run.data.is_chat else ("template", "train_on", "truncation_side", "columns"):
        if (value := getattr(run.data, name)) != getattr(Data(), name):
            what = f"data.{name} = {value} is for data.format = chat, and data.format = {run.data.format}"
            yield Problem(what, f"set data.format = chat, or leave data.{name} out", f"data.{name}")
    if run.epochs and run.data.mix:
        what = f"epochs = {run.epochs:g} counts one source, and those of data.mix have epochs of their own length"
        yield Problem(what, "state steps; `train` prints how many are an epoch of each source", "epochs")
    # With several sources each has its own settings, and those beside them would be ignored.
    for name in ("source", "format", "field", "columns") if run.data.mix else ():
        if (value := getattr(run.data, name)) != getattr(Data(), name):
            what = f"data.{name} = {value} has no meaning beside data.mix, whose entries have their own {name}"
            yield Problem(what, f"set {name} in the entries of data.mix, and leave data.{name} out", f"data.{name}")


def _live(run: Run) -> Iterator[Problem]:
    """Replicas that can do without each other must be alike, whole, and add up plain gradients in every step."""
    plan = run.plan
    if run.faults.spares and not run.faults.live:
        what = (
            f"faults.spares = {run.faults.spares} take the place of replicas that are lost, which faults.live lets go"
        )
        yield Problem(what, "set faults.live = true, or leave faults.spares out", "faults.spares")
    if not run.faults.live:
        return
    if plan.replicate == 1:
        what = "faults.live lets replicas go on without one that is lost, and plan.replicate = 1 has no other"
        yield Problem(
            what, "set plan.replicate to 2 or more, beside plan.shard, or leave faults.live out", "faults.live"
        )
    if run.faults.memory_every:
        what = "faults.memory_every is for ranks that all start again, and with faults.live replicas have the state"
        yield Problem(what, "leave one of them out", "faults.memory_every")
    ranks = plan.world + run.faults.spares * (plan.world // plan.replicate)
    if ranks > MOST_LIVE_RANKS:
        what = f"faults.live is for up to {MOST_LIVE_RANKS} ranks, spares among them, and there are {ranks}"
        yield Problem(what, "use fewer, or leave faults.live out", "faults.live")
    refused = {
        "plan.outer_fragments": (plan.outer_fragments > 1, "syncs parts of the model at different steps"),
        "plan.outer_quant": (plan.outer_quant != "none", "sends codes in collectives of its own"),
        "optim.sync_warmup": (run.optim.sync_warmup > 0, "adds up gradients in collectives of its own"),
        "plan.staleness": (plan.staleness is not None, "lets replicas part"),
        f"optim.name = {run.optim.name}": (run.compresses, "keeps errors of its own on each replica"),
        "plan.grad_reduce and plan.powersgd": (plan.reduces_lossily, "round what replicas send in ways of their own"),
        "plan.optimizer_offload": (plan.optimizer_offload != "none", "has states that no peer can be given"),
        "plan.cpu_offload": (plan.cpu_offload, "has states that no peer can be given"),
        "arch.router_load_bias": (run.arch.router_load_bias, "counts tokens over all replicas"),
        "log.noise_scale": (run.log.noise_scale, "compares the gradients of all replicas"),
        "optim.adascale": (run.optim.adascale, "compares the gradients of all replicas"),
        "objective = dpo": (run.objective == "dpo", "counts pairs, not tokens"),
    }
    for key, (is_used, why) in refused.items():
        if is_used:
            yield Problem(
                f"faults.live cannot be combined with {key}, which {why}", "leave one of them out", key.split()[0]
            )
    if run.faults.spares and plan.has_outer_loop:
        what = "faults.spares take the part of a lost replica in every step, and plan.sync_every lets replicas part"
        yield Problem(what, "leave one of them out", "faults.spares")
    if plan.ep > 1 and not plan.zero:
        what = f"faults.live needs every replica to be whole, and plan.ep = {plan.ep} shares experts among replicas"
        yield Problem(what, "set plan.zero = 1 or more with plan.shard, or leave faults.live out", "plan.ep")


def _preference(run: Run) -> Iterator[Problem]:
    """What DPO asks of a run: a reference, and pairs of answers."""
    if run.objective != "dpo":
        if run.dpo.beta != 0.1:
            yield Problem(
                f"dpo.beta = {run.dpo.beta} is of DPO, and objective = {run.objective}", "leave it out", "dpo.beta"
            )
        return
    if not 0 < run.dpo.beta < 1e3:  # a NaN lands here too
        yield Problem(f"dpo.beta = {run.dpo.beta} is out of range", "use a number above 0, usually 0.1", "dpo.beta")
    if not all(source.format == "chat" for source in run.data.sources) or run.data.pack != "best_fit":
        what = "objective = dpo has pairs of answers, each in one row"
        yield Problem(what, "set data.format = chat, and leave data.pack out", "data.format")
    if run.data.train_on == "all":
        yield Problem("objective = dpo compares answers, not questions", "leave data.train_on out", "data.train_on")


def _compared(run: Run) -> Iterator[Problem]:
    """What it cannot have yet."""
    if run.objective != "dpo":
        return
    if run.arch.copies_reference and run.arch.router_load_bias:
        what = "objective = dpo is not offered beside a frozen copy with arch.router_load_bias, which every step moves"
        yield Problem(what, "set adapter.kind = lora", "objective")
    others = {
        "plan.compile": run.plan.compile,
        "plan.deterministic": run.plan.deterministic,
        "plan.sync_every": run.plan.sync_every > 1,
        "plan.secondary_shard": run.plan.secondary_shard > 1,
        "log.noise_scale": run.log.noise_scale,
        "optim.adascale": run.optim.adascale,
    }
    for name in (name for name, is_set in others.items() if is_set):
        yield Problem(f"objective = dpo is not offered with {name}", f"leave {name} out", name)


def need_own_starter(run: Run, launcher: str, has_memory: bool = False) -> Iterator[Problem]:
    """What a run asks for that no ranks have which somebody else starts; `has_memory`: our own start of one machine."""
    is_asked = {"faults.live": run.faults.live, "faults.spares": run.faults.spares}
    is_asked["faults.memory_every"] = run.faults.memory_every and not has_memory
    for key in (key for key in is_asked if is_asked[key]):
        what = f"{key} needs our own starter, which starts ranks again, and not {launcher}"
        own = "`meshwright train` on one machine, or `meshwright launch --node-rank` on each of several"
        yield Problem(what, f"use {own}, or leave {key} out", key)


def divide_replicas(run: Run, machines: int) -> Iterator[Problem]:
    """Replicas that can do without each other are whole on one machine, or the loss of one would take two of them."""
    there = run.plan.replicate + run.faults.spares
    if run.faults.live and there % machines:
        what = f"faults.live needs whole replicas on each of {machines} machines, and there are {there}"
        remedy = "make plan.replicate and faults.spares together a multiple of the machines, or leave faults.live out"
        yield Problem(what, remedy, "plan.replicate")


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


PLAN_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _batch, _precision, _bf16_params, _rounding, _offload, _quantized, _cpu_offload, _zero, _tensor, _sequence,
    _ulysses, _pipeline, _experts, _deterministic, _noise_scale, _outer, _routes, _whole_tensors,
    _onebit, _nobody_to_tell, _staleness, communication.rules, _live, lambda run: how_blocks_run(run.plan),
)  # fmt: skip
# Whether a model can be tuned as a run says, whatever its plan.
MODEL_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (_compared, *TUNED_MODEL_RULES)
RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _counts, *ARCH_RULES, _rates, _optimizer, _freeze, _data, _preference,
    _compared, _addresses, evaluation.rules, *TUNING_RULES, *PLAN_RULES,
)  # fmt: skip
