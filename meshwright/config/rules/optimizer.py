"""Rules of optimizers: rates, keys, whole tensors, one-bit exchange, noise scale and AdaScale."""

from collections.abc import Callable, Iterator

from meshwright.config.rules.arch import (
    ARCH_CAPS,
    ARCH_SCALES,
)
from meshwright.config.rules.communication import spread_replicas
from meshwright.config.run import Optim, Run
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.problem import Problem


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


def _freeze(run: Run) -> Iterator[Problem]:
    """A warm-up that does not end leaves nothing to compress."""
    freeze = run.optim.freeze_step
    if run.compresses and not 1 <= freeze < run.steps:
        warm_up = f"optim.freeze_step = {freeze}, the warm-up of optim.name = {run.optim.name}"
        what = f"{warm_up}, is not shorter than the run, whose steps = {run.steps}"
        yield Problem(what, f"use 1 to {max(run.steps - 1, 1)}, or more steps", "optim.freeze_step")


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
    yield from spread_replicas(plan, f"{chosen} has replicas that are whole", other)
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


def nobody_to_tell(run: Run) -> Iterator[Problem]:
    """One worker alone: shards are none, for each has a part of a sum of gradients and no momentum of its own."""
    if not run.compresses or run.plan.replicate > 1:
        return
    what = f"optim.name = {run.optim.name} compresses what replicas tell each other, and plan.replicate = 1 has none"
    remedy = "set plan.replicate to 2 or more, or use another optimizer, such as adamw"
    if run.plan.shard > 1:
        what += f": plan.shard = {run.plan.shard} sums gradients before there is a momentum"
        remedy += ", whose gradients plan.grad_reduce rounds between shards"
    yield Problem(what, remedy, "optim.name")


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


OPTIMIZER_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _rates,
    _optimizer,
    _freeze,
)

OPTIMIZER_PLAN_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _noise_scale,
    _whole_tensors,
    _onebit,
    nobody_to_tell,
)
