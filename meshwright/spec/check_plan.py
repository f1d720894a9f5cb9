"""The rules between a plan, the model it splits and the batch it serves."""

from collections.abc import Callable, Iterator

from meshwright.spec import recompute
from meshwright.spec.plan import Plan
from meshwright.spec.problem import Problem
from meshwright.spec.run import Run
from meshwright.spec.schedule import Schedule, misfits

SPLIT_BACKWARD: tuple[Schedule, ...] = ("zb1p", "zbv", "dualpipev")  # for a block's input, and later for its weights
FP8_MULTIPLE = 16  # of every dimension of a product, the summed one too


def _batch(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if plan.batch != run.batch:
        yield Problem(
            f"batch = {run.batch} is not microbatch {plan.microbatch} × accumulate {plan.accumulate} × "
            f"{plan.data} data ranks = {plan.batch}",
            f"set batch = {plan.batch}, or a microbatch and accumulate whose product is batch ÷ {plan.data}",
            "batch",
        )


def _precision(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if plan.precision == "fp8" and plan.tp > 1:
        what = f"plan.precision = fp8 multiplies whole matrices, and plan.tp = {plan.tp} cuts them"
        yield Problem(what, "use plan.tp = 1 and plan.shard, or plan.precision = bf16", "plan.precision")
    if plan.precision == "fp8" and (tokens := plan.microbatch * run.sequence // plan.cp) % FP8_MULTIPLE:
        what = f"plan.precision = fp8 sums over the {tokens} tokens of a microbatch, no multiple of {FP8_MULTIPLE}"
        yield Problem(what, "use a sequence or a microbatch that makes it one, or plan.precision = bf16", "sequence")
    if plan.precision == "fp8" and plan.deterministic:
        what = "plan.precision = fp8 finds its scales from whole tensors, and plan.deterministic cuts them otherwise"
        yield Problem(what, "use plan.precision = bf16, or leave plan.deterministic out", "plan.precision")


def _shadow(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if not plan.shadow:
        return
    remedy = "leave plan.shadow out"
    if plan.world > 1:
        what = f"plan.shadow keeps a narrow copy on a rank that shares nothing, and this plan has {plan.world} ranks"
        yield Problem(what, f"{remedy}: sharded weights are cast when they are gathered", "plan.shadow")
    if plan.precision in ("fp32", "fp64"):
        what = f"plan.shadow is a narrow copy, and plan.precision = {plan.precision} is as wide as the weights"
        yield Problem(what, f"{remedy}, or set plan.precision = bf16", "plan.shadow")
    if plan.deterministic:
        yield Problem("plan.deterministic adds up gradients by itself, without plan.shadow", remedy, "plan.shadow")


def _rounding(run: Run) -> Iterator[Problem]:
    plan, rounding = run.plan, run.optim.rounding
    if rounding == "master":
        return
    if plan.precision not in ("bf16", "fp8"):
        yield Problem(
            f"optim.rounding = {rounding} holds weights in bf16, and plan.precision = {plan.precision} is not bf16",
            "set plan.precision = bf16, or leave optim.rounding out",
            "optim.rounding",
        )
    if plan.deterministic:
        yield Problem(
            f"plan.deterministic adds up wide gradients, and optim.rounding = {rounding} has none",
            "leave one of them out",
            "optim.rounding",
        )


def _offload(run: Run) -> Iterator[Problem]:
    plan, states = run.plan, run.optim.states
    if plan.offload == "none":
        if states == "bf16":
            what = "optim.states = bf16 rounds states that are kept off the device, and plan.offload = none keeps none"
            yield Problem(what, "set plan.offload = host, or leave optim.states out", "optim.states")
        return
    remedy = "leave plan.offload out"
    if plan.world > 1:
        what = f"plan.offload moves the states of a rank that shares nothing, and this plan has {plan.world} ranks"
        yield Problem(what, f"{remedy}: plan.zero = 1 to 3 shares them out over plan.shard ranks", "plan.offload")
    if plan.deterministic:
        what = "plan.deterministic adds up gradients and moves weights by itself, without plan.offload"
        yield Problem(what, f"{remedy}, or plan.deterministic", "plan.offload")
    if plan.precision in ("bf16", "fp16", "fp8") and plan.world == 1 and not plan.shadow:
        what = "plan.offload leaves narrow weights on the device, and plan.shadow = false keeps none"
        yield Problem(what, "leave plan.shadow out", "plan.shadow")
    if states == "bf16" and plan.precision not in ("bf16", "fp8"):
        what = f"optim.states = bf16 completes weights of bf16, and plan.precision = {plan.precision} has none"
        yield Problem(what, "set plan.precision = bf16, or leave optim.states out", "optim.states")
    if run.optim.rounding != "master":
        what = f"plan.offload keeps what bf16 leaves out by itself, without optim.rounding = {run.optim.rounding}"
        yield Problem(what, "leave optim.rounding out, or plan.offload", "optim.rounding")
    if plan.offload_host_bytes < 0:
        what = f"plan.offload_host_bytes = {plan.offload_host_bytes} is negative"
        yield Problem(what, "use 0 to have every state on the disk", "plan.offload_host_bytes")


def _offload_weights(run: Run) -> Iterator[Problem]:
    plan, key = run.plan, "plan.offload_weights"
    if not plan.offload_weights:
        return
    remedy = "leave plan.offload_weights out"
    if plan.zero != 3:
        what = f"plan.offload_weights gives a block's weights up after use, and plan.zero = {plan.zero} keeps them all"
        yield Problem(what, f"set plan.zero = 3, on one rank too, or {remedy}", "plan.zero")
    if plan.pp > 1:
        what = f"plan.offload_weights brings one block at a time, and plan.pp = {plan.pp} keeps whole stages gathered"
        yield Problem(what, f"set plan.pp = 1 and use plan.shard, or {remedy}", key)
    if plan.shadow:
        what = "plan.shadow keeps a narrow copy of all weights on the device, and plan.offload_weights keeps none there"
        yield Problem(what, "leave one of them out", "plan.shadow")
    if plan.offload != "none":
        what = f"plan.offload_weights keeps every state in host memory, and plan.offload = {plan.offload} moves some"
        yield Problem(what, "leave one of them out: plan.offload is for weights that fit on the device", key)
    if plan.deterministic:
        what = "plan.deterministic adds up gradients on the device by itself, without plan.offload_weights"
        yield Problem(what, "leave one of them out", key)


def _routes(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if run.arch.experts and plan.compress != "none" and plan.recompute != "none":
        yield Problem(
            f"plan.recompute = {plan.recompute} would route tokens anew, and some to other experts: "
            f"plan.compress = {plan.compress} has rounded what the router reads",
            "leave one of them out, or use plan.activations = host, which is exact",
            "plan.compress",
        )


def _zero(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if plan.zero == 0 and plan.shard > 1:
        yield Problem(
            f"plan.shard = {plan.shard} with plan.zero = 0 shards nothing",
            f"set plan.zero = 1, 2 or 3, or use plan.replicate = {plan.shard}",
            "plan.zero",
        )


def _tensor(run: Run) -> Iterator[Problem]:
    arch, tp = run.arch, run.plan.tp
    if tp <= 1:
        return
    widths = {"heads": arch.heads, "kv_heads": arch.kv_heads, "ffn": arch.ffn}
    if arch.experts:
        widths["expert_ffn"] = arch.expert_ffn
    works = max(degree for degree in range(1, tp + 1) if all(width % degree == 0 for width in widths.values()))
    for name, width in widths.items():
        if width % tp:
            what = f"arch.{name} = {width} cannot be shared by plan.tp = {tp} ranks"
            yield Problem(
                what, f"use plan.tp = {works}, and the other ranks for plan.shard or plan.replicate", "plan.tp"
            )


def _sequence(run: Run) -> Iterator[Problem]:
    cp, tp = run.plan.cp, run.plan.tp
    parts = (2 * cp if cp > 1 else 1) * tp  # each rank of cp holds an early and a late slice, to balance causal work
    if parts > 0 and run.sequence % parts:
        near = max(run.sequence // parts, 1) * parts
        what = (
            f"sequence = {run.sequence} cannot be cut into {parts} equal slices for plan.cp = {cp} and plan.tp = {tp}"
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
    plan, layers = run.plan, run.arch.layers
    if plan.pp <= 1:
        if plan.stages or plan.chunks != 1:
            yield Problem(
                "plan.stages and plan.chunks are for pipelines", "leave them out, or set plan.pp", "plan.stages"
            )
        return
    stages = plan.pp * plan.chunks
    if stages > layers:
        what = f"plan.pp = {plan.pp} × plan.chunks = {plan.chunks} are more stages than arch.layers = {layers}"
        yield Problem(what, f"use plan.pp of at most {max(layers // max(plan.chunks, 1), 1)}", "plan.pp")
    elif len(plan.stages) != stages or sum(plan.stages) != layers or min(plan.stages, default=0) < 1:
        what = f"plan.stages = {list(plan.stages)} is not {stages} stages of {layers} layers in all"
        yield Problem(what, "leave plan.stages out to have the layers balanced", "plan.stages")
    for misfit in misfits(plan.schedule, plan.pp, plan.chunks, plan.accumulate):
        yield Problem(misfit.text, misfit.remedy, misfit.key)


def _experts(run: Run) -> Iterator[Problem]:
    plan, experts = run.plan, run.arch.experts
    if plan.ep <= 1:
        return
    if experts == 0:
        yield Problem(
            f"plan.ep = {plan.ep} shares out experts, and this model has none",
            "leave plan.ep at 1, or state arch.experts",
            "plan.ep",
        )
    elif experts % plan.ep:
        yield Problem(
            f"arch.experts = {experts} cannot be shared evenly by plan.ep = {plan.ep} ranks",
            f"use a plan.ep that divides {experts}",
            "plan.ep",
        )
    lenders, axes = (plan.shards, "shard · cp") if plan.zero else (plan.copies, "replicate · cp")
    if lenders % plan.ep:
        yield Problem(
            f"plan.ep = {plan.ep} borrows its ranks from {axes} = {lenders}, which it does not divide",
            f"use a plan.ep that divides {lenders}, or another plan.{axes.split()[0]}",
            "plan.ep",
        )


def _deterministic(run: Run) -> Iterator[Problem]:
    plan = run.plan
    if not plan.deterministic:
        return
    for axis, sums in {"tp": "partial products", "cp": "parts of a sequence", "ep": "tokens of an expert"}.items():
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
    for name in ("replicate", "shard", "accumulate"):
        value = getattr(plan, name)
        if value > 0 and value & (value - 1):
            yield Problem(
                f"plan.deterministic adds in a binary tree, and plan.{name} = {value} is not a power of two",
                f"use plan.{name} = {1 << (value.bit_length() - 1)} or {1 << value.bit_length()}",
                f"plan.{name}",
            )


def _how_blocks_run(run: Run) -> Iterator[Problem]:
    return how_blocks_run(run.plan)


def how_blocks_run(plan: Plan) -> Iterator[Problem]:
    """Recomputation and compilation, for any model."""
    if (wrong := recompute.problem(plan.recompute)) is not None:
        yield wrong
        return
    yield from _kept(plan)
    if plan.pp <= 1 or plan.schedule not in SPLIT_BACKWARD:
        return
    near = f"use plan.schedule = {'1f1b' if plan.chunks == 1 else 'interleaved'}, whose backwards are whole"
    if plan.recompute != "none":
        # Right in float64 but for `selective`, which torch refuses; measured on the last of two stages: 11 forwards of
        # every block under full, 17 under every-2, where a whole backward takes 2.
        yield Problem(
            f"plan.recompute = {plan.recompute} computes a block anew for every backward through it, and plan.schedule "
            f"= {plan.schedule} goes back for the block's input and then for each of its weights",
            f"{near}, or leave plan.recompute out",
            "plan.recompute",
        )
    if plan.compile:
        yield Problem(
            f"plan.compile makes one backward of a block, and plan.schedule = {plan.schedule} needs its two halves",
            f"{near}, or leave plan.compile out",
            "plan.compile",
        )


def _kept(plan: Plan) -> Iterator[Problem]:
    """What happens to that which blocks keep for the backward."""
    said = {"compress": plan.compress} if plan.compress != "none" else {}
    said |= {"activations": plan.activations} if plan.activations != "device" else {}
    together = recompute.by_operation(plan.recompute) or any(len(run) > 1 for run in recompute.runs(plan.recompute, 4))
    for name, value in said.items() if together else ():
        yield Problem(
            f"plan.{name} = {value} takes what a block keeps, and plan.recompute = {plan.recompute} keeps it elsewhere",
            "use plan.recompute = none, first-K or full",
            f"plan.{name}",
        )
    if plan.compress != "none" and plan.precision == "fp64":
        yield Problem(
            f"plan.compress = {plan.compress} changes the mathematics, and plan.precision = fp64 is for proofs",
            "leave plan.compress out; plan.activations = host saves as much and is exact",
            "plan.compress",
        )


RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _batch, _precision, _shadow, _rounding, _offload, _offload_weights, _zero, _tensor, _sequence, _ulysses, _pipeline,
    _experts, _deterministic, _routes, _how_blocks_run,
)  # fmt: skip
