"""What adapters and frozen weights ask of a run: rules between `[adapter]`, `optim.freeze`, the model and the plan."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate

import msgspec

from meshwright.config.run import Run
from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, Split, buffers, cuts_adapters, params, trained
from meshwright.spec.plan import Plan
from meshwright.spec.problem import Problem
from meshwright.spec.quantized import BLOCK, is_whole
from meshwright.spec.tuning import ALIASES, ALL_LINEAR, DOWN, UP, Adapter, companion, freezes, matches


def _kind(run: Run) -> Iterator[Problem]:
    adapter = run.adapter
    if adapter.kind == "none":
        for field in msgspec.structs.fields(Adapter):
            if (value := getattr(adapter, field.name)) != field.default:
                what = f"adapter.{field.name} = {value} is of an adapter, and adapter.kind = none"
                yield Problem(what, "set adapter.kind = lora, or leave [adapter] out", f"adapter.{field.name}")
        return
    if run.init.optimizer_state:
        what = "init.optimizer_state takes the states of all weights, and an adapter starts without any"
        yield Problem(what, "leave it out", "init.optimizer_state")
    if not 0 <= adapter.dropout < 1:
        yield Problem(f"adapter.dropout = {adapter.dropout} is out of range", "use 0 to below 1", "adapter.dropout")
    if not 0 < adapter.alpha < 1e6:  # a NaN lands here too
        yield Problem(f"adapter.alpha = {adapter.alpha} is out of range", "use a number above 0", "adapter.alpha")


def _experts(run: Run) -> Iterator[Problem]:
    """What adapters of routed experts do not have."""
    if run.arch.tuning is msgspec.UNSET or not run.arch.experts or not adapts_experts(run.arch):
        return
    if run.adapter.dropout:
        what = "adapter.dropout is not of routed experts: peft has none there either"
        yield Problem(what, 'leave it out, or use adapter.targets = ["attn.*"]', "adapter.dropout")


def _targets(run: Run) -> Iterator[Problem]:
    adapter = run.adapter
    if adapter.kind == "none":
        return
    layers = linear_layers(run.arch)
    for target in adapter.targets:
        if not any(matches(layer, target) for layer in layers):
            known = ", ".join(sorted(set(layers) | {name for name in ALIASES if _known(name, layers)}))
            what = f"adapter.targets: {target!r} is none of the linear layers"
            yield Problem(what, f'use "{ALL_LINEAR}", or some of {known}', "adapter.targets")
    if not adapter.targets:
        yield Problem("adapter.targets is empty", f'use ["{ALL_LINEAR}"], or leave it out', "adapter.targets")
    if adapter.rank < 1:
        yield Problem(f"adapter.rank = {adapter.rank} is not a count", "use at least 1", "adapter.rank")
    for layer, (out, into) in layers.items():
        if adapter.takes(layer) and adapter.rank > min(out, into):
            what = f"adapter.rank = {adapter.rank} is larger than the {out} × {into} matrix of {layer}"
            yield Problem(
                what, f"use at most {min(out, into)}, or leave {layer} out of adapter.targets", "adapter.rank"
            )
            return


def _known(alias: str, layers: dict[str, tuple[int, int]]) -> bool:
    return any(matches(layer, alias) for layer in layers)


def linear_layers(arch: Arch) -> dict[str, tuple[int, int]]:
    """The linear layers of blocks that can have an adapter, named without their block: their outputs and inputs."""
    every = msgspec.structs.replace(arch.adapter, kind="lora", targets=(ALL_LINEAR,), rank=1)
    tuning = msgspec.structs.replace(arch.tuning, adapter=every) if arch.tuning is not msgspec.UNSET else msgspec.UNSET
    table = {param.name: param.shape for param in params(msgspec.structs.replace(arch, tuning=tuning))}
    pairs = {name: (companion(name, UP), companion(name, DOWN)) for name in table}
    return {
        name.split(".", 2)[2].removesuffix(".weight"): (table[up][-2], table[down][-1])
        for name, (up, down) in pairs.items()
        if down in table
    }


def adapts_experts(arch: Arch) -> bool:
    """Whether routed experts have adapters."""
    return any(param.expert for param in trained(arch)) if arch.adapter.kind != "none" else False


def _freeze(run: Run) -> Iterator[Problem]:
    patterns = run.optim.freeze
    if not patterns:
        return
    if run.adapter.kind != "none":
        what = "optim.freeze says what is not trained, and beside an adapter nothing is"
        yield Problem(what, "leave optim.freeze out, or [adapter]", "optim.freeze")
    names = [param.name for param in (*params(run.arch), *buffers(run.arch))]
    for pattern in patterns:
        if not any(freezes(pattern, name) for name in names):
            what = f"optim.freeze: {pattern!r} is no weight and no part of the model"
            remedy = 'name weights or what holds them, as in ["embed", "blocks.0", "blocks.*.attn"]'
            yield Problem(what, remedy, "optim.freeze")
    if not trained(run.arch):
        yield Problem("optim.freeze leaves nothing to train", "leave some weights out of it", "optim.freeze")


def _plan(run: Run) -> Iterator[Problem]:
    """What cannot be beside weights that are frozen, or a copy that is."""
    plan, arch = run.plan, run.arch
    if arch.tuning is msgspec.UNSET:  # asked first: of an architecture that is nonsense no table is made
        return
    if arch.copies_reference:
        yield from _beside_copy(plan)
        return
    key = "adapter.kind" if run.adapter.kind != "none" else "optim.freeze"
    for name in ("grad_reduce", "powersgd", "gather", "staleness"):
        if plan.uses(name):
            what = f"plan.{name} is for weights that are all trained, and {key} freezes some"
            yield Problem(what, f"leave plan.{name} out: gradients of few weights are small", f"plan.{name}")
    if plan.tp > 1 and not cuts_adapters(arch, plan.tp):
        what = f"adapters of {arch.kv_heads} heads of keys and values are not cut by plan.tp = {plan.tp}"
        yield Problem(what, "use plan.tp = 1 with plan.shard, or a smaller plan.tp", "plan.tp")
    if plan.tp > 1 and drops_beside_experts(arch):
        what = f"adapter.dropout beside routed experts is not proved under plan.tp = {plan.tp}"
        yield Problem(what, "use plan.tp = 1, or leave adapter.dropout out", "adapter.dropout")
    if plan.precision == "fp8":
        yield from _multiplied(run)
        if plan.tp > 1 and drops_beside_fp8(arch, plan.precision):
            what = f"adapter.dropout of DoRA with plan.precision = fp8 is not proved under plan.tp = {plan.tp}"
            yield Problem(what, "use plan.tp = 1 or plan.precision = bf16, or leave it out", "adapter.dropout")


def multiplies_codes(arch: Arch) -> bool:
    """Whether matmuls in FP8 can take frozen weights as they are held."""
    return arch.adapter.kind != "none" and arch.adapter.held == "fp8" and not arch.experts


def _multiplied(run: Run) -> Iterator[Problem]:
    """What matmuls in FP8 ask of weights that are frozen."""
    if multiplies_codes(run.arch):
        return
    what, remedy = "plan.precision = fp8 is for weights that are all trained, and optim.freeze freezes some", ""
    if run.adapter.kind != "none" and run.arch.experts:
        what = "plan.precision = fp8 is not offered for adapters of MoE models"
    elif run.adapter.kind != "none":
        what = "plan.precision = fp8 multiplies a frozen base as it is held, and it is not held in FP8"
        remedy = "adapter.kind = lora with adapter.base = fp8, or " if run.adapter.kind == "qlora" else ""
        remedy = remedy or "adapter.base = fp8, or "
    yield Problem(what, f"use {remedy}plan.precision = bf16", "plan.precision")


def drops_beside_experts(arch: Arch) -> bool:
    """Whether adapters drop something in a model with routed experts."""
    return arch.adapter.dropout > 0 and arch.experts > 0


def drops_beside_fp8(arch: Arch, precision: str) -> bool:
    """Whether frozen matrices are multiplied twice in FP8, once with what dropout leaves."""
    return precision == "fp8" and arch.adapter.drops_rows


def cuts_tuned(arch: Arch, tp: int, precision: str) -> bool:
    """Whether so many ranks of tp can cut a model's adapters and what is in few bits, by the rules of this file."""
    if tp == 1 or arch.tuning is msgspec.UNSET:
        return True
    dropped = drops_beside_experts(arch) or drops_beside_fp8(arch, precision)
    return cuts_adapters(arch, tp) and not dropped and next(_cut_blocks(arch, tp), None) is None


def _cut_blocks(arch: Arch, tp: int) -> Iterator[Param]:
    """Weights in NF4 of which so many ranks of tp would cut elements that share a scale."""
    held = arch.adapter.held
    rows = (param for param in params(arch) if param.held == "nf4" and param.split is Split.ROW)
    return (param for param in rows if is_whole(held, param.shape[-1]) and not is_whole(held, param.shape[-1], tp))


def _held(run: Run) -> Iterator[Problem]:
    """What weights in few bits ask for: scales that no two rows, and no two ranks, share."""
    held, arch, tp = run.adapter.held, run.arch, run.plan.tp
    if run.adapter.kind == "none" or held == "bf16":
        return
    key = "adapter.base" if run.adapter.base != "bf16" else "adapter.kind"
    plain = "use adapter.kind = lora with adapter.base = bf16" if key == "adapter.kind" else "use adapter.base = bf16"
    for param in (each for each in params(arch) if each.held == "nf4"):
        layer, into = param.name.removesuffix(".weight"), param.shape[-1]
        if not is_whole(held, into):
            what = f"NF4 has one scale for {BLOCK} inputs, and {layer} has {into}"
            yield Problem(what, f"{plain}, or arch with widths that {BLOCK} divides", key)
            return
    for param in _cut_blocks(arch, tp) if tp > 1 else ():
        layer, into = param.name.removesuffix(".weight"), param.shape[-1]
        what = f"plan.tp = {tp} would cut NF4 blocks: {layer} has {into} inputs, in blocks of {BLOCK}"
        most = max(ranks for ranks in range(1, tp) if tp % ranks == 0 and is_whole(held, into, ranks))
        yield Problem(what, f"use plan.tp = {most} with plan.shard, or {plain.removeprefix('use ')}", "plan.tp")
        return


def _compressing(run: Run) -> Iterator[Problem]:
    if run.compresses and run.arch.copies_reference:
        what = f"optim.name = {run.optim.name} is not offered with objective = dpo"
        yield Problem(what, "use optim.name = adamw", "optim.name")
    elif run.compresses and run.arch.tuning is not msgspec.UNSET:
        what = f"optim.name = {run.optim.name} compresses the momenta of all weights, and some are frozen"
        yield Problem(what, "use optim.name = adamw: gradients of few weights are small", "optim.name")


def _stages(run: Run) -> Iterator[Problem]:
    """Every stage of a pipeline trains something, so that its backward has one."""
    plan, arch, stages = run.plan, run.arch, run.plan.pp * run.plan.chunks
    if plan.pp == 1 or arch.tuning is msgspec.UNSET or len(plan.stages) != stages:
        return
    if (stage := idle_stage(arch, plan.stages)) is not None:
        what = f"all weights of stage {stage} of the pipeline are frozen"
        yield Problem(what, "use plan.pp = 1, or train something in every stage", "plan.pp")


def _beside_copy(plan: Plan) -> Iterator[Problem]:
    """What a frozen copy of all weights is not proved with."""
    for name in ("optimizer_offload", "cpu_offload", "grad_reduce", "powersgd", "gather", "staleness"):
        if plan.uses(name):
            what = f"plan.{name} is not offered with the frozen copy of all weights that objective = dpo compares with"
            yield Problem(what, f"leave plan.{name} out, or set adapter.kind = lora", f"plan.{name}")
    if plan.precision == "fp8":
        what = "plan.precision = fp8 is not offered with objective = dpo"
        yield Problem(what, "use plan.precision = bf16", "plan.precision")


@lru_cache(maxsize=1024)
def idle_stage(arch: Arch, stages: tuple[int, ...]) -> int | None:
    """The first stage of so many layers each that trains nothing, if there is one."""
    for stage, end in enumerate(accumulate(stages)):
        layers = range(end - stages[stage], end)
        if not any(_in_stage(param, layers, stage, len(stages)) for param in trained(arch)):
            return stage
    return None


def _in_stage(param: Param, layers: range, stage: int, stages: int) -> bool:
    if param.layer >= 0:
        return param.layer in layers
    begins = param.name.startswith(("embed", "positions"))
    return stage == (0 if begins else stages - 1)


TUNED_PLAN_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (_plan, _held, _stages)
# What they ask of the model alone: of a tp of one, weights in few bits ask nothing of a plan.
TUNED_MODEL_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (_targets, _experts, _freeze, _held)
TUNING_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _kind,
    _targets,
    _experts,
    _freeze,
    *TUNED_PLAN_RULES,
    _compressing,
)
