"""Floating-point operations of a model, and how well a machine is used.

Attention is counted by two conventions. *Full*: every token with all of its document, as torchtitan, nanoGPT and
Megatron report it, so that utilizations compare. *Causal*: every token with itself and earlier ones, which is what is
computed. Both are of the documents that there are where these are masked: a token's span is the length of its document
as far as the sample shows it, and the sequence where nothing is masked.
"""

import math
from functools import cache, lru_cache
from itertools import accumulate

from meshwright.cost.activations import ActivationPolicy, policy_of
from meshwright.cost.rank_view import (
    GradFlow,
    grad_flow,
    has_row_norms,
    reaches_projection_input,
    stage_lengths,
    still_blocks,
)
from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, params
from meshwright.spec.plan import Plan
from meshwright.spec.tuning import DOWN, UP

TABLES = frozenset({"embed.weight", "positions.weight"})  # looked up, but for a tied projection
TRAINING = 3  # one forward, and a backward of two matmuls for each of its one


@cache
def matmul_flops_per_token(arch: Arch) -> float:
    """Multiplications and additions of matmuls with weights, for one token going forward."""
    # The output projection, tied or not, of the next token and of those beyond it; tables are looked up.
    weights = float(arch.vocab * arch.hidden) * (1 + arch.mtp_layers)
    for param in params(arch):
        if param.name not in TABLES | {"head.weight"} and param.is_matrix:
            weights += param.numel * _uses(arch, param)
    return 2 * weights


def _uses(arch: Arch, param: Param) -> float:
    """How often a token going forward is multiplied with a matrix of a block."""
    again = arch.adapter.drops_rows and has_row_norms(param, arch)
    return (_share(arch) if param.expert else 1) * (1 + again)


def attention_flops_per_token(arch: Arch, span: float, causal: bool = False) -> float:
    """Those of attention: scores, and values by them."""
    return sum(_attention(arch, layer, span, causal) for layer in range(arch.blocks))


def _attention(arch: Arch, layer: int, span: float, causal: bool = False) -> float:
    """One layer's, for one token."""
    return 2 * (arch.q_width + arch.out_width) * seen(span, arch.window_of(layer), causal)


def seen(span: float, window: int, causal: bool) -> float:
    """Keys that a token meets on average, of a document of so many: all of them, or itself and earlier ones.

    Within a window the first tokens meet fewer than the others.
    """
    if not 0 < window < span:
        return (span + 1) / 2 if causal else span
    return window - window * (window - 1) / (2 * span) if causal else window


def passes(arch: Arch) -> int:
    """Forwards and backwards of a step, counted in forwards: with that of the reference of DPO, where there is one."""
    return TRAINING + arch.compared


def step_flops(arch: Arch, sequence: int, batch: int, span: float | None = None) -> float:
    """The model's operations in one optimizer step, attention in full, recomputation not counted.

    `span` is the mean over tokens of the document that each is in; None: nothing is masked. DoRA's norms of rows, of
    which weights alone have a part, count once: they are the same in every microbatch.
    """
    by_token = _products_per_token(arch) + _attended_per_token(arch, span or sequence, False)
    return by_token * sequence * batch + sum(norm_flops(arch))


def attention_share(arch: Arch, span: float) -> float:
    """Attention's share of `step_flops`."""
    attended = _attended_per_token(arch, span, False)
    return attended / (_products_per_token(arch) + attended)


def _products_per_token(arch: Arch) -> float:
    """Products with weights in a step, forward and back."""
    return passes(arch) * matmul_flops_per_token(arch) - spared_flops_per_token(arch)


@lru_cache(maxsize=4096)
def _attended_per_token(arch: Arch, span: float, causal: bool) -> float:
    """Attention in a step, forward and back: beneath the first weight that is trained there is no way back."""
    still = (layer for layer, flow in enumerate(grad_flow(arch)) if not flow.attended)
    spared = sum((TRAINING - 1) * _attention(arch, layer, span, causal) for layer in still)
    return passes(arch) * attention_flops_per_token(arch, span, causal) - spared


@cache
def spared_flops_per_token(arch: Arch) -> float:
    """The matmuls that a backward does not have: for gradients of frozen weights, and of inputs that have none."""
    projects = "embed.weight" if arch.tied else "head.weight"
    spared = 0.0
    for param in params(arch):
        if not param.is_matrix or param.name in TABLES - {projects}:
            continue
        times = 1 + arch.mtp_layers if param.name == projects else _uses(arch, param)
        spared += 2 * param.numel * times * ((not param.trained) + (not reads_gradient(arch, param)))
        if arch.compared and arch.adapter.drops_rows and has_row_norms(param, arch):  # a reference drops nothing
            spared += 2 * param.numel
    return spared


def reads_gradient(arch: Arch, param: Param) -> bool:
    """Whether what a matrix reads has a gradient."""
    if param.layer < 0:
        return reaches_projection_input(arch)
    name, flow = param.name.split(".", 2)[2], grad_flow(arch)[param.layer]
    if name.endswith(UP) or arch.looks_ahead(param.layer):
        return True  # an adapter's first matrix is trained with its second
    return _flows_into(name, flow, {each.name.split(".", 2)[2] for each in _trained_beside(arch, param.layer)})


def _flows_into(name: str, flow: GradFlow, trained: set[str]) -> bool:
    module = name.split(".")
    if module[0] == "attn":
        if module[1] == "out":
            return flow.attended
        ways = {"q_up": "attn.q_down", "kv_up": "attn.kv_down"}
        return flow.attn_in or (module[1] in ways and any(each.startswith(ways[module[1]]) for each in trained))
    *path, last = (each.removesuffix(f"_{DOWN}") for each in module if each not in ("weight", DOWN))
    inward = tuple(".".join([*path, each]) for each in ("gate", "up"))
    return flow.mlp_in or (last == "down" and any(each.startswith(inward) for each in trained))


@cache
def _trained_beside(arch: Arch, layer: int) -> tuple[Param, ...]:
    return tuple(param for param in params(arch) if param.layer == layer and param.trained)


def causal_step_flops(arch: Arch, sequence: int, batch: int, span: float | None = None) -> float:
    """The same with attention as it is computed: a token sees itself and what came before it in its document."""
    by_token = _products_per_token(arch) + _attended_per_token(arch, span or sequence, True)
    return by_token * sequence * batch + sum(norm_flops(arch))


def attention_flops(arch: Arch, sequence: int, batch: int, span: float | None = None) -> float:
    """Attention's share of `step_flops`; matmuls with weights are the rest."""
    return _attended_per_token(arch, span or sequence, False) * sequence * batch


def document_span(sequence: int, mean_document: float) -> float:
    """The span to expect of documents whose ends fall anywhere, so many tokens apart in the mean.

    Two tokens are in one document where no end lies between them, exp(−distance ÷ mean): summed over the pairs of a
    sample, ÷ its tokens.
    """
    share = mean_document / sequence
    return 2 * mean_document * (1 - share * -math.expm1(-1 / share))


def hardware_flops(arch: Arch, plan: Plan, sequence: int, batch: int, span: float | None = None) -> float:
    """What the machines do in one optimizer step: the model's operations, and those that the backward recomputes.

    Recomputation by operation saves what all matmuls return, and so repeats none of these operations. Norms of rows are
    made by every rank that reads data, for every microbatch.
    """
    return recomputed_flops(arch, plan, sequence, batch, policy_of(plan), span)


def recomputed_flops(
    arch: Arch, plan: Plan, sequence: int, batch: int, policy: ActivationPolicy, span: float | None = None
) -> float:
    """The same where blocks recompute by a policy that may be another stack's."""
    norms, times = norm_flops(arch, plan.ep), plan.grad_accum * plan.data * plan.cp
    every = step_flops(arch, sequence, batch, span) + times * sum(norms) - sum(norm_flops(arch))
    if policy.by_operation:
        return every
    recomputed = 0.0
    lengths = stage_lengths(arch, plan)
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        stage = range(end - length, end)
        for run in policy.runs(len(stage), arch.looks_ahead(end - 1)):
            layers = [stage[number] for number in run]
            if layers[-1] < still_blocks(arch):  # no backward asks for it
                continue
            recomputed += sum(block_flops_per_token(arch, layer, span or sequence) for layer in layers)
            recomputed -= 0 if policy.to_the_end else _unneeded(arch, layers[-1])
            every += times * sum(norms[layer] for layer in layers)
    return every + recomputed * sequence * batch


def block_flops_per_token(arch: Arch, layer: int, span: float) -> float:
    """One layer's FLOPs for one token going forward, attention counted in full."""
    return _block_matmuls(arch, layer) + _attention(arch, layer, span)


@cache
def _block_matmuls(arch: Arch, layer: int) -> float:
    weights = (param for param in params(arch) if param.layer == layer and param.is_matrix)
    return 2 * sum(param.numel * _uses(arch, param) for param in weights)


@cache
def norm_flops(arch: Arch, ep: int = 1) -> tuple[float, ...]:
    """What one forward of each block multiplies for the norms of DoRA's rows: W Aᵀ, A Aᵀ, and B with that.

    Of routed experts, those of one of `ep` ranks.
    """
    found, rank = [0.0] * arch.blocks, arch.adapter.rank
    for param in params(arch) if arch.adapter.kind == "dora" else ():
        if has_row_norms(param, arch):
            *experts, out, into = param.shape
            matrices = math.prod(experts) / (ep if param.expert else 1)
            found[param.layer] += 2 * matrices * rank * (out * into + rank * into + rank * out)
    return tuple(found)


def _unneeded(arch: Arch, layer: int) -> float:
    """What need not be recomputed of a run that ends with this layer: its last matmul, as the backward needs no output.

    An MoE layer ends with its shared experts, and then only if no loss of its own comes after them. What a compiler
    made is computed to its end.
    """
    if arch.looks_ahead(layer) or arch.ends_in_norm:
        return 0.0  # a norm comes after it, and saves something
    if arch.adapter.takes("mlp.down"):  # the last matmul is the adapter's; magnitudes save what they multiply
        return 0.0 if arch.adapter.kind == "dora" or arch.is_moe(layer) else 2.0 * arch.adapter.rank * arch.hidden
    if not arch.is_moe(layer):
        return 2.0 * arch.ffn * arch.hidden
    if arch.balance_loss or arch.z_loss:
        return 0.0
    return 2.0 * arch.shared_experts * arch.expert_ffn * arch.hidden


def utilization(flops: float, seconds: float, peak_flops_per_second: float) -> float:
    """0 to 1. Of the model's FLOPs, recomputation not counted, it is the MFU; of `hardware_flops` the HFU."""
    return flops / (seconds * peak_flops_per_second)


def _share(arch: Arch) -> float:
    """The part of the routed experts that works on one token."""
    if arch.router == "expert_choice":
        return arch.capacity / arch.experts
    return arch.top_k / arch.experts
