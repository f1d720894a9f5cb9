"""Rules of a model's own fields: dimensions, heads, routers, windows, latent attention."""

from collections.abc import Callable, Iterator

from meshwright.config.run import Run
from meshwright.spec.arch import Arch
from meshwright.spec.problem import Problem

ARCH_COUNTS = ("vocab", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "context", "moe_every")
ARCH_SCALES = ("embed_scale", "residual_scale", "logit_scale", "router_scale")
ARCH_CAPS = (
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "rope_local_theta",
    "router_load_rate",
    "mtp_loss_weight",
)
ARCH_LIMIT = 10**9  # no dimension of any model; stops a typing slip before it asks for the memory
LAYER_LIMIT = 10_000  # ten times the deepest model known; a parameter table is built from this number
EXPERT_LIMIT = 100_000  # of all layers together: four times the most known; a list of tensors is built from this number
VOCAB_LIMIT = 10**7  # the largest public vocabularies have a million entries
PLAIN_ARCH = Arch(vocab=1, layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, context=1)  # for its defaults


def endless(layers: int, experts: int) -> Iterator[Problem]:
    """Counts that a table of all parameters would be built from: asked before anything else of a model."""
    if layers > LAYER_LIMIT:
        yield Problem(f"arch.layers = {layers} is beyond any model", f"use at most {LAYER_LIMIT}", "arch.layers")
    if layers * experts > EXPERT_LIMIT:
        what = f"{layers * experts} experts in all layers are beyond any model"
        yield Problem(what, f"use at most {EXPERT_LIMIT}", "arch.experts")


def _heads(run: Run) -> Iterator[Problem]:
    arch = run.arch
    if arch.heads > 0 and arch.hidden % arch.heads and arch.head_dim == arch.hidden // arch.heads:
        what = f"arch.hidden = {arch.hidden} does not divide into arch.heads = {arch.heads}"
        yield Problem(what, f"use a multiple of {arch.heads}, or state arch.head_dim", "arch.heads")
    if arch.kv_heads > 0 and arch.heads % arch.kv_heads:
        what = f"arch.heads = {arch.heads} cannot be divided by arch.kv_heads = {arch.kv_heads} evenly"
        yield Problem(what, "use a number of kv_heads that divides heads", "arch.kv_heads")
    if arch.positions == "rope" and not arch.is_latent and arch.head_dim % 2:
        what = f"arch.head_dim = {arch.head_dim} is odd, and RoPE rotates pairs"
        yield Problem(what, "use an even head_dim, or other positions", "arch.head_dim")


def _moe(run: Run) -> Iterator[Problem]:
    arch = run.arch
    if arch.experts <= 0:
        return
    if arch.expert_ffn < 1:
        yield Problem("arch.expert_ffn is missing", "state the width inside one expert", "arch.expert_ffn")
    if arch.router != "expert_choice" and not 1 <= arch.top_k <= arch.experts:
        what = f"arch.top_k = {arch.top_k} cannot be chosen among arch.experts = {arch.experts}"
        yield Problem(what, f"use 1 to {arch.experts}", "arch.top_k")
    fixed = {"switch": 1, "gshard": 2}.get(arch.router)
    if fixed is not None and arch.top_k != fixed:
        yield Problem(f"arch.router = {arch.router} chooses {fixed}", f"set arch.top_k = {fixed}", "arch.top_k")
    if arch.router in ("switch", "gshard", "expert_choice") and arch.capacity <= 0:
        what = f"arch.router = {arch.router} needs arch.capacity above 0"
        yield Problem(what, "set arch.capacity = 1.25, or use the topk router, which drops nothing", "arch.capacity")


def _routers(run: Run) -> Iterator[Problem]:
    """What only the topk router has."""
    arch = run.arch
    others = ("router_score", "router_load_bias", "router_groups", "router_renormalise", "router_scale")
    for name in others if arch.router != "topk" else ():
        if getattr(arch, name) != getattr(PLAIN_ARCH, name):
            what = f"arch.{name} is for arch.router = topk, and arch.router = {arch.router}"
            yield Problem(what, f"leave arch.{name} out", f"arch.{name}")
    if arch.router_groups < 1 or arch.experts % max(arch.router_groups, 1):
        what = f"arch.experts = {arch.experts} cannot be put into arch.router_groups = {arch.router_groups}"
        yield Problem(what, "use groups that divide the experts", "arch.router_groups")
        return
    if arch.router_groups > 1 and arch.router_score == "sigmoid" and 0 < arch.experts < 2 * arch.router_groups:
        what = (
            f"arch.router_groups = {arch.router_groups} leaves a group one expert, and its best two say how good it is"
        )
        yield Problem(what, "use groups of two experts or more, or 1 for none", "arch.router_groups")
    if not 1 <= arch.router_top_groups <= arch.router_groups:
        what = f"arch.router_top_groups = {arch.router_top_groups} cannot be chosen among {arch.router_groups}"
        yield Problem(what, f"use 1 to {arch.router_groups}", "arch.router_top_groups")
    elif (
        arch.experts
        and arch.router_groups > 1
        and arch.top_k > (most := arch.experts // arch.router_groups * arch.router_top_groups)
    ):
        what = f"arch.top_k = {arch.top_k} is more than the {most} experts of arch.router_top_groups"
        yield Problem(what, f"use at most {most}, or more groups", "arch.top_k")
    if arch.router_load_bias and run.plan.parts > 1:
        key = "staleness" if run.plan.is_served else "sync_every"
        what = f"arch.router_load_bias moves by the load of all replicas, and plan.{key} = {getattr(run.plan, key)}"
        remedy = f"set arch.router_load_bias = false, or leave plan.{key} out"
        yield Problem(f"{what} lets them part", remedy, "arch.router_load_bias")


def _layers(run: Run) -> Iterator[Problem]:
    """What a block is made of: pairs of fields that say nothing together, or too much."""
    arch = run.arch
    if arch.window > arch.context:
        what = f"arch.window = {arch.window} is longer than arch.context = {arch.context}"
        yield Problem(what, "use a shorter window, or 0 for none", "arch.window")
    if (arch.full_every or arch.rope_local_theta) and not arch.window:
        what = "arch.full_every and arch.rope_local_theta are of layers with a window, and arch.window = 0"
        yield Problem(what, "set arch.window, or leave them out", "arch.window")
    if arch.parallel_residual != "none" and arch.norm_position != "pre":
        what = f"arch.parallel_residual = {arch.parallel_residual} reads norms of the block's input, and"
        what = f"{what} arch.norm_position = {arch.norm_position} has others"
        yield Problem(what, 'use arch.norm_position = "pre", or leave it out', "arch.parallel_residual")
    if arch.norm_offset and (arch.norm != "rms" or arch.qk_norm == "layer"):
        what = "arch.norm_offset is for RMSNorm, and arch.norm or arch.qk_norm is layer"
        yield Problem(what, "leave it out, or use RMSNorm", "arch.norm_offset")
    if not 0 < arch.rope_share <= 1:
        yield Problem(f"arch.rope_share = {arch.rope_share:g} is no share", "use above 0 up to 1", "arch.rope_share")
    pairs = arch.rotated // 2 if arch.rope_scaling == "longrope" else 0
    for name in ("rope_short", "rope_long"):
        if len(getattr(arch, name)) != pairs:
            what = (
                f"arch.{name} has {len(getattr(arch, name))} numbers, and a head has {pairs} pairs that longrope scales"
            )
            yield Problem(what, f"give {pairs}, and only with arch.rope_scaling = longrope", f"arch.{name}")
    yield from _latent(run)
    yield from _ahead(run)


def _ahead(run: Run) -> Iterator[Problem]:
    """Multi-token prediction: the models that it is not of."""
    arch, remedy = run.arch, "set arch.mtp_layers = 0"
    if arch.mtp_layers > 1:
        what = f"arch.mtp_layers = {arch.mtp_layers}: only one token beyond the next is predicted"
        yield Problem(what, "use arch.mtp_layers = 1, or 0", "arch.mtp_layers")
    if not arch.mtp_layers:
        return
    if arch.adapter.kind != "none" or arch.compared:
        yield Problem("arch.mtp_layers trains the whole model by next tokens, without adapters or preferences", remedy)
    for key, other in (("tied", False), ("norm_position", "pre"), ("positions", "rope")):
        if (value := getattr(arch, key)) != other:
            what = f"arch.mtp_layers is not of models with arch.{key} = {str(value).lower()}"
            yield Problem(what, f"{remedy}, or arch.{key} = {str(other).lower()}", f"arch.{key}")


def _latent(run: Run) -> Iterator[Problem]:
    """Multi-head latent attention."""
    arch = run.arch
    if not arch.is_latent:
        if arch.q_rank or arch.rope_dim:
            what = "arch.q_rank and arch.rope_dim are of latent attention, and arch.kv_rank = 0"
            yield Problem(what, "set arch.kv_rank, or leave them out", "arch.kv_rank")
        return
    if not 0 < arch.rope_dim < arch.head_dim or arch.rope_dim % 2:
        what = f"arch.rope_dim = {arch.rope_dim} is no even part of arch.head_dim = {arch.head_dim}"
        yield Problem(what, "use an even number below head_dim", "arch.rope_dim")
    if arch.kv_heads != arch.heads:
        what = f"latent attention (arch.kv_rank) makes keys for all heads, and arch.kv_heads = {arch.kv_heads}"
        yield Problem(what, f"set arch.kv_heads = {arch.heads}", "arch.kv_heads")
    for name in ("sinks", "qk_norm"):
        if getattr(arch, name) != getattr(PLAIN_ARCH, name):
            what = f"arch.{name} is not of latent attention (arch.kv_rank)"
            yield Problem(what, f"leave arch.{name} out", f"arch.{name}")


def _dropout(run: Run) -> Iterator[Problem]:
    arch = run.arch
    if not 0 <= arch.dropout < 1:
        yield Problem(f"arch.dropout = {arch.dropout:g} is no probability", "use 0 up to below 1", "arch.dropout")
    if arch.attention_dropout:
        what = "arch.attention_dropout is not supported: its draws would differ from plan to plan in fused attention"
        yield Problem(what, "leave it out, or use arch.dropout", "arch.attention_dropout")


def _context(run: Run) -> Iterator[Problem]:
    if run.arch.positions == "learned" and run.sequence > run.arch.context:
        what = f"sequence = {run.sequence} is longer than the {run.arch.context} learned positions"
        longer = "" if run.init.folder else ", or set arch.context"  # else the weights have as many
        yield Problem(what, f"use a sequence of at most {run.arch.context}{longer}", "sequence")


ARCH_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (_heads, _layers, _moe, _routers, _dropout, _context)
