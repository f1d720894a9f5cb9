"""Every rule between fields of a run. All problems are found at once, each with its remedy."""

from collections.abc import Callable, Iterator

from meshwright.spec import check_plan
from meshwright.spec.arch import Arch
from meshwright.spec.plan import AXES
from meshwright.spec.problem import InputError as InputError  # re-exported: whoever checks also refuses
from meshwright.spec.problem import Problem as Problem
from meshwright.spec.run import Data, Run


def problems(run: Run) -> list[Problem]:
    """Everything that is wrong with a run, in the order of the rules."""
    return [problem for rule in RULES for problem in rule(run)]


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
    return notes


def _counts(run: Run) -> Iterator[Problem]:
    positive = {
        "steps": run.steps,
        "sequence": run.sequence,
        "batch": run.batch,
        "plan.microbatch": run.plan.microbatch,
        "plan.accumulate": run.plan.accumulate,
        **{f"plan.{axis}": getattr(run.plan, axis) for axis in (*AXES, "ep", "chunks")},
        "plan.ep": run.plan.ep,
        "log.every": run.log.every,
        "held.batches": run.held.batches,
        "checkpoint.keep_last": run.checkpoint.keep_last,
        **{f"arch.{name}": getattr(run.arch, name) for name in ARCH_COUNTS},
    }
    for key, value in positive.items():
        if value < 1:
            yield Problem(f"{key} = {value} is not a count", f"give {key} a whole number of at least 1", key)
    natural = {
        "seed": run.seed,
        "held.every": run.held.every,
        "checkpoint.every": run.checkpoint.every,
        "checkpoint.keep_every": run.checkpoint.keep_every,
        "held.sample_tokens": run.held.sample_tokens,
        "optim.warmup": run.optim.warmup,
        "faults.restarts": run.faults.restarts,
        "faults.not_finite": run.faults.not_finite,
        "faults.compare_every": run.faults.compare_every,
        "arch.experts": run.arch.experts,
        "arch.shared_experts": run.arch.shared_experts,
    }
    for key, value in natural.items():
        if value < 0:
            yield Problem(f"{key} = {value} is negative", f"give {key} a whole number of at least 0", key)
    if run.seed >= SEEDS:
        yield Problem(f"seed = {run.seed} has more than 63 bits", f"use 0 to {SEEDS - 1}", "seed")


ARCH_COUNTS = ("vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "context", "moe_every")
SEEDS = 2**63  # what fits a signed word, in which seeds travel and are kept
ARCH_LIMIT = 10**9  # no dimension of any model; stops a typing slip before it asks for the memory


def _sizes(run: Run) -> Iterator[Problem]:
    for name in ARCH_COUNTS:
        if (value := getattr(run.arch, name)) > ARCH_LIMIT:
            yield Problem(f"arch.{name} = {value} is beyond any model", f"use at most {ARCH_LIMIT}", f"arch.{name}")


def _heads(run: Run) -> Iterator[Problem]:
    arch = run.arch
    if arch.heads > 0 and arch.hidden % arch.heads and arch.head_dim == arch.hidden // arch.heads:
        yield Problem(
            f"arch.hidden = {arch.hidden} does not divide into arch.heads = {arch.heads}",
            f"use a multiple of {arch.heads}, or state arch.head_dim",
            "arch.heads",
        )
    if arch.kv_heads > 0 and arch.heads % arch.kv_heads:
        yield Problem(
            f"arch.heads = {arch.heads} cannot share arch.kv_heads = {arch.kv_heads} evenly",
            "use a number of kv_heads that divides heads",
            "arch.kv_heads",
        )
    if arch.positions == "rope" and arch.head_dim % 2:
        yield Problem(
            f"arch.head_dim = {arch.head_dim} is odd, and rotary positions turn pairs",
            "use an even head_dim, or other positions",
            "arch.head_dim",
        )


def _mixture(run: Run) -> Iterator[Problem]:
    arch = run.arch
    if arch.experts <= 0:
        return
    yield from _mixture_sizes(arch)
    if arch.router in ("switch", "gshard", "expert_choice") and arch.capacity <= 0:
        yield Problem(
            f"arch.router = {arch.router} needs arch.capacity above 0",
            "set arch.capacity = 1.25, or use the topk router, which drops nothing",
            "arch.capacity",
        )


def _mixture_sizes(arch: Arch) -> Iterator[Problem]:
    if arch.expert_ffn < 1:
        yield Problem("arch.expert_ffn is missing", "state the width inside one expert", "arch.expert_ffn")
    if arch.router != "expert_choice" and not 1 <= arch.top_k <= arch.experts:
        yield Problem(
            f"arch.top_k = {arch.top_k} cannot be chosen among arch.experts = {arch.experts}",
            f"use 1 to {arch.experts}",
            "arch.top_k",
        )
    fixed = {"switch": 1, "gshard": 2}.get(arch.router)
    if fixed is not None and arch.top_k != fixed:
        yield Problem(f"arch.router = {arch.router} chooses {fixed}", f"set arch.top_k = {fixed}", "arch.top_k")


def _context(run: Run) -> Iterator[Problem]:
    if run.arch.positions == "learned" and run.sequence > run.arch.context:
        yield Problem(
            f"sequence = {run.sequence} is longer than the {run.arch.context} learned positions",
            f"use a sequence of at most {run.arch.context}, or set arch.context",
            "sequence",
        )


def _rates(run: Run) -> Iterator[Problem]:
    optim = run.optim
    bounds = {
        "optim.rate": (optim.rate, 0.0, 1e3),
        "optim.eps": (optim.eps, 1e-30, 1.0),  # 0 ÷ (0 + eps) is 0, in 32 bits too
        "optim.floor": (optim.floor, 0.0, 1.0),
        "optim.decay": (optim.decay, 0.0, 1.0),
        "optim.weight_decay": (optim.weight_decay, 0.0, 1e3),
        "optim.clip": (optim.clip, 0.0, 1e9),
        "data.held_out": (run.data.held_out, 0.0, 0.5),
        "held.temperature": (run.held.temperature, 0.0, 100.0),
        "arch.capacity": (run.arch.capacity, 0.0, 1e3),
        "faults.grace_seconds": (run.faults.grace_seconds, 0.0, 1e9),
        "faults.hang_seconds": (run.faults.hang_seconds, 0.1, 1e9),
        "faults.spike": (run.faults.spike, 0.0, 1e9),
        "faults.straggler": (run.faults.straggler, 0.0, 1e9),
    }
    if run.goal.memory_gib is not None:
        bounds["goal.memory_gib"] = (run.goal.memory_gib, 2.0**-20, 1e6)
    for key, (value, low, high) in bounds.items():
        if not low <= value <= high:  # a NaN lands here too
            yield Problem(f"{key} = {value} is out of range", f"use {low:g} to {high:g}", key)
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optim, name) < 1:
            yield Problem(f"optim.{name} = {getattr(optim, name)} is out of range", "use 0 to below 1", f"optim.{name}")
    for source in run.data.mix:
        if not 0 < source.weight < 1e9:
            yield Problem(
                f"data.mix: the weight {source.weight} of {source.source} is not positive",
                "use a number above 0",
                "data.mix",
            )


def _packing(run: Run) -> Iterator[Problem]:
    if run.data.pack == "documents" and run.data.mask_documents:
        yield Problem(
            "data.mask_documents = true has no meaning for data.pack = documents, where a sample is one document",
            "leave one of them out",
            "data.mask_documents",
        )


def _mix(run: Run) -> Iterator[Problem]:
    """In a mixture each source has its own settings, and those beside it would be read by nobody."""
    usual = Data()
    for name in ("source", "format", "field"):
        if run.data.mix and (value := getattr(run.data, name)) != getattr(usual, name):
            yield Problem(
                f"data.{name} = {value} has no meaning beside data.mix, whose entries have their own {name}",
                f"set {name} in the entries of data.mix, and leave data.{name} out",
                f"data.{name}",
            )


RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _counts, _sizes, _heads, _mixture, _context, _rates, _packing, _mix, *check_plan.RULES,
)  # fmt: skip
