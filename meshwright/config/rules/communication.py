"""Rules of communication that is rare, rounded or asynchronous: local SGD, DiLoCo, PowerSGD, ZeRO++, staleness."""

from collections.abc import Callable, Iterator

from meshwright.config.run import Optim, Run
from meshwright.spec.communication import BITS, MOST_TP, block_length, factors
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.params import Param, Split, params
from meshwright.spec.plan import Plan
from meshwright.spec.problem import Problem


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
    cut = [param for param in params(run.arch) if cuts_a_block(param, plan)] if plan.outer_quant != "none" else []
    if cut:
        what = f"plan.tp = {plan.tp} cuts {cut[0].name} within a block of {block_length(cut[0].shape[-1])} elements"
        remedy = f"use plan.tp up to {MOST_TP} of rows that are a multiple of it, or leave plan.outer_quant out"
        yield Problem(
            f"{what}, which share a scale of plan.outer_quant = {plan.outer_quant}", remedy, "plan.outer_quant"
        )


def _lossy(run: Run) -> Iterator[Problem]:
    """What is wrong with how a plan's ranks round what they send."""
    plan = run.plan
    if plan.reduces_lossily:
        key = "plan.grad_reduce" if plan.grad_reduce != "default" else "plan.powersgd"
        stated = f"{key} = {plan.grad_reduce if plan.grad_reduce != 'default' else plan.powersgd}"
        yield from _whose_gradients(run, stated, key)
        yield from _how_gradients(run, stated, key)
        yield from _no_sum(run, stated, key)
    elif not plan.error_feedback:
        what = "plan.error_feedback = false is for gradients that are rounded, and none are"
        yield Problem(what, "leave it out, or set plan.grad_reduce or plan.powersgd", "plan.error_feedback")
    if plan.powersgd > 0:
        yield from _powersgd(run)
    if plan.grad_reduce_node > 1:
        yield from _grad_reduce_node(plan)
    if plan.gather != "default":
        yield from _gather(run)
    if plan.secondary_shard > 1:
        yield from _secondary_shard(run)


def _no_sum(run: Run, stated: str, key: str) -> Iterator[Problem]:
    """Ranks whose gradients are not summed by collectives."""
    if run.compresses:
        what = f"{stated} rounds summed gradients, and optim.name = {run.optim.name} exchanges momenta in one bit"
        yield Problem(what, f"leave {key} out, or use optim.name = adamw", key)
    if run.plan.is_served:
        what = f"{stated} rounds gradients in collectives, and plan.staleness sends them to a parameter server"
        yield Problem(what, f"leave {key} or plan.staleness out", key)


def _whose_gradients(run: Run, stated: str, key: str) -> Iterator[Problem]:
    """Ranks whose gradients are not rounded by themselves."""
    plan = run.plan
    remedy = f"leave {key} out"
    if plan.replicate * plan.shard == 1:
        what = f"{stated} rounds gradients on their way between ranks, and there is one data rank"
        yield Problem(what, f"set plan.replicate or plan.shard to 2 or more, or {remedy}", key)
    if plan.powersgd:
        yield from spread_replicas(plan, f"{stated} factors the gradients of whole replicas", f"or {remedy}")
    else:
        yield from _mixed_ranks(plan, stated, key)
    if plan.pp > 1 and run.arch.embeds_at_both_ends:
        which = "tied embedding" if run.arch.tied else "embedding of arch.mtp_layers"
        what = f"{stated} would round the gradient of the {which} in two stages of plan.pp = {plan.pp} apart"
        without = "arch.tied = false" if run.arch.tied else "arch.mtp_layers = 0"
        yield Problem(what, f"use {without} or plan.pp = 1, or {remedy}", key)
    if plan.sync_every > 1:
        rarely = f"plan.sync_every = {plan.sync_every} sums none over replicas"
        what = f"{stated} is for gradients of every step, and {rarely}"
        yield Problem(what, f"use plan.outer_quant for what is synced, or {remedy}", key)


def _mixed_ranks(plan: Plan, stated: str, key: str) -> Iterator[Problem]:
    """Axes over which a rank's gradient is not of sequences of its own."""
    if plan.cp > 1:
        what = f"{stated} rounds the gradient of whole sequences, and plan.cp = {plan.cp} cuts them"
        yield Problem(what, f"use plan.cp = 1, or leave {key} out", key)
    if plan.ep > 1:
        what = f"{stated} rounds each rank's gradient by itself, and plan.ep = {plan.ep} mixes the tokens of several"
        yield Problem(what, f"use plan.ep = 1, or leave {key} out", key)


def spread_replicas(plan: Plan, what: str, other: str) -> Iterator[Problem]:
    """For who needs replicas of ranks of their own."""
    for axis in ("cp", "ep"):
        if getattr(plan, axis) > 1 and not plan.zero:
            spread = (
                f"plan.{axis} = {getattr(plan, axis)} with plan.zero = 0 spreads each over the copies of the weights"
            )
            yield Problem(f"{what}, and {spread}", f"set plan.zero = 1, 2 or 3, {other}", f"plan.{axis}")


def _how_gradients(run: Run, stated: str, key: str) -> Iterator[Problem]:
    """What gradients that are rounded cannot be combined with."""
    plan, optim = run.plan, run.optim
    if plan.grad_reduce != "default" and plan.powersgd:
        what = f"plan.powersgd = {plan.powersgd} factors the gradients that {stated} would round"
        yield Problem(what, "leave one of them out", key)
    if plan.precision == "fp16" and plan.error_feedback:
        what = f"{stated} adds an error to the next gradient, and plan.precision = fp16 scales each step's otherwise"
        yield Problem(what, "use plan.precision = bf16, or plan.error_feedback = false", key)
    yield from _elsewhere(plan, stated, key)
    if optim.master_weights != "fp32":
        what = f"{stated} adds up in fp32, and optim.master_weights = {optim.master_weights} keeps bf16 gradients"
        yield Problem(what, "leave one of them out", key)
    if run.measures_noise:
        name = "optim.adascale" if optim.adascale else "log.noise_scale"
        yield Problem(f"{name} compares exact gradients, and {stated} rounds them", "leave one of them out", name)
    yield from _cut_blocks(run, plan.grad_reduce, key)


def _powersgd(run: Run) -> Iterator[Problem]:
    plan, key = run.plan, "plan.powersgd"
    stated = f"{key} = {plan.powersgd}"
    if plan.replicate == 1 < plan.shard:
        what = f"{stated} factors what replicas tell each other, and plan.replicate = 1 has none"
        yield Problem(what, "set plan.replicate to 2 or more, or use plan.grad_reduce = int8 between shards", key)
    most = max(each.short for param in params(run.arch) if (each := factors(param.shape, plan.powersgd)))
    if plan.powersgd > most:
        what = f"{stated} is more than the rank of any matrix of the model"
        yield Problem(what, f"use at most {most}, which is exact; 1 to 8 are usual", key)


def _gather(run: Run) -> Iterator[Problem]:
    plan, key = run.plan, "plan.gather"
    stated = f"{key} = {plan.gather}"
    if plan.shards == 1:
        what = f"{stated} rounds weights that are all-gathered, and none are sharded"
        yield Problem(what, f"set plan.shard to 2 or more and plan.zero to 1, 2 or 3, or leave {key} out", key)
    if 1 < plan.ep == plan.shards:
        what = f"{stated} rounds weights that are all-gathered, and with plan.ep = {plan.ep} no experts are"
        yield Problem(what, f"use fewer ranks for plan.ep than shards, or leave {key} out", key)
    yield from _elsewhere(plan, stated, key)
    if plan.sync_every > 1:
        what = f"{stated} beside plan.sync_every = {plan.sync_every} has no reference to be proved against"
        yield Problem(what, "leave one of them out", key)
    yield from _cut_blocks(run, plan.gather, key)


def _secondary_shard(run: Run) -> Iterator[Problem]:
    plan, key = run.plan, "plan.secondary_shard"
    stated = f"{key} = {plan.secondary_shard}"
    if plan.zero != 3 or plan.pp > 1:
        held = f"plan.zero = {plan.zero}" if plan.zero != 3 else f"plan.pp = {plan.pp}"
        what = f"{stated} is for weights that are given up between forward and backward, and {held} keeps them gathered"
        yield Problem(what, f"use plan.zero = 3 and plan.pp = 1, or leave {key} out", key)
    else:
        yield from _part_of_shards(plan, plan.secondary_shard, key)
    if plan.tp > 1 or run.arch.experts:
        other = f"plan.tp = {plan.tp} cuts" if plan.tp > 1 else "experts are stacked in"
        what = f"{stated} reshards whole weights, which torch cannot do with those that {other}"
        what = what if plan.tp > 1 else f"{stated} reshards weights row by row, and {other} matrices of few rows"
        yield Problem(what, f"leave {key} out", key)
    yield from _elsewhere(plan, stated, key)


def _grad_reduce_node(plan: Plan) -> Iterator[Problem]:
    key = "plan.grad_reduce_node"
    stated = f"{key} = {plan.grad_reduce_node} is for gradients that are rounded over shards, and"
    if plan.grad_reduce == "default":
        yield Problem(f"{stated} none are", f"set plan.grad_reduce = int8 or int4, or leave {key} out", key)
    elif plan.shards == 1:
        remedy = f"set plan.shard to 4 or more and plan.zero to 1, 2 or 3, or leave {key} out"
        yield Problem(f"{stated} no weight is sharded", remedy, key)
    else:
        yield from _part_of_shards(plan, plan.grad_reduce_node, key)


def _part_of_shards(plan: Plan, ranks: int, key: str) -> Iterator[Problem]:
    """So many of the ranks that share the weights are to be those of a node."""
    if plan.shards % ranks or ranks >= plan.shards:
        parts = [str(each) for each in range(2, plan.shards) if plan.shards % each == 0]
        what = f"{key} = {ranks} is no smaller part of the {plan.shards} ranks that share the weights"
        remedy = f"use {' or '.join(parts)} (the ranks of one node)" if parts else "take more shards"
        yield Problem(what, f"{remedy}, or leave {key} out", key)


def _elsewhere(plan: Plan, stated: str, key: str) -> Iterator[Problem]:
    """Modes with a reduction of their own, or whose weights and gradients are not on the device."""
    reasons = {
        "deterministic": "has the same bits under every plan, and sums in an order of its own",
        "cpu_offload": "keeps weights and gradients in host memory",
    }
    for name, reason in reasons.items():
        if plan.uses(name):
            what = f"{stated} changes how devices communicate, and plan.{name} {reason}"
            yield Problem(what, "leave one of them out", key)


def _cut_blocks(run: Run, form: str, key: str) -> Iterator[Problem]:
    """Weights of which several ranks have parts of one block; casts to 16 bits know none."""
    cut = [param for param in params(run.arch) if cuts_a_block(param, run.plan)] if form in BITS else []
    if cut:
        plan, name, block = run.plan, cut[0].name, block_length(cut[0].shape[-1])
        by = f"plan.tp = {plan.tp}" if cut[0].split is Split.ROW else f"plan.shard = {plan.shard}"
        what = f"{by} cuts {name} within a block of {block} elements, which share a scale of {key} = {form}"
        remedy = f"use plan.tp up to {MOST_TP} of rows that are a multiple of it, or leave {key} out"
        yield Problem(what, remedy, key)


def cuts_a_block(param: Param, plan: Plan) -> bool:
    """Whether ranks that hold parts of a weight have parts of elements that share a scale."""
    if len(param.shape) == 1:
        return False
    first, last = param.shape[0] // (plan.ep if param.expert else 1), param.shape[-1]
    block, width = block_length(last), last
    if param.split is Split.ROW:
        width = last // max(plan.tp, 1)
    elif param.expert and plan.zero and all(size % plan.shards for size in (first, param.shape[1])):
        width = last // plan.shards if last % plan.shards == 0 else last
    return width % block > 0


def warnings(run: Run) -> Iterator[str]:
    """What is allowed, and saves nothing."""
    rank = run.plan.powersgd
    if rank <= 0:
        return
    found = [(param.numel, each) for param in params(run.arch) if (each := factors(param.shape, rank))]
    sent, whole = sum(each.first + each.second for _, each in found), sum(numel for numel, _ in found)
    if sent >= whole:
        yield (
            f"plan.powersgd = {rank}: the factors have {sent:,} elements and the matrices {whole:,}, so replicas send "
            "more than without it. Ranks of 1 to 8 are usual."
        )


COMMUNICATION_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _outer,
    _staleness,
    _lossy,
)
