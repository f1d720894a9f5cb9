"""Seconds of one microbatch in one layer, in the embedding and in the projection.

    forward   = matmuls + attention + element-wise traffic + exposed collectives of tp, cp and ep + launches
    backward  = the same for the gradient of the input, matmuls for those of the weights, and what is recomputed
    quantized = + the traffic of encoding and decoding;  offloaded = + what the host link takes beyond a pass

Kernels and collectives are timed in cost/primitives.py; a stack's factors are in hardware/stacks.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from operator import add
from typing import NamedTuple

import msgspec

from meshwright.cost.activations import (
    CODE,
    OURS,
    ActivationPolicy,
    activation_policy,
    as_saved,
    block_saved,
    microbatch_shape,
    moved_bytes,
    projects,
    sent_rows,
)
from meshwright.cost.flops import reads_gradient
from meshwright.cost.job import Job
from meshwright.cost.layout import state_layout
from meshwright.cost.primitives import (
    Rates,
    achieved,
    attention_flops,
    axis_span,
    collective_seconds,
    flash_seconds,
    matmul_seconds,
    moved_seconds,
    rates,
)
from meshwright.cost.rank_view import (
    grad_flow,
    has_row_norms,
    is_multiplied_as_held,
    reaches_projection_input,
    still_blocks,
)
from meshwright.cost.traffic import Axis, Kind, fp8_scales, fp8_scales_ahead
from meshwright.hardware.stacks import Efficiency, StackSpeed, efficiency_of
from meshwright.spec.arch import Arch
from meshwright.spec.params import kv_part, layer_params, params
from meshwright.spec.plan import Plan
from meshwright.spec.tuning import DOWN, UP, is_adapter

ACCUM_BYTES = 4  # of an element where low precision would spoil it
NORMS_AND_SUMS = 10  # of a layer's hidden states: two norms read and write, two sums read twice and write
DROPOUT_BYTES = 100  # moved for each element by the operators of models/dropout.py: some fifteen passes of int32
MERGED_BYTES = 12  # of a ring, for each number of a block's output: it is read, the sum in fp32 read and written
MET = 0.75  # of a rank's rows that another's block concerns: all where it is earlier, the late half where it is later
BACKWARD_BYTES = 2.0  # the backward of an element-wise operation reads its input and its gradient, and writes one
# Attention within documents is computed by blocks, which documents do not fill, by a kernel that reaches so much of the
# causal one's rate: 4.01 ÷ 5.76 ms over one document of a whole sample (results/documents.json).
DOCUMENT_BLOCK, DOCUMENT_RATE = 128, 0.7
BACKWARD_SCORES = 1.5  # scores are moved in the backward of unfused attention, ÷ its forward
# Bytes moved to make an FP8 number. One of an input: two read, where the kernel that wrote them found the maximum, and
# one written. Of a weight or a gradient: read once more, for the maximum. Transposed, of inputs and gradients one more
# is written at once; a weight is read and written again in the backward.
FP8_INPUT, FP8_OTHER, FP8_TRANSPOSED, FP8_WEIGHT_TRANSPOSED = 3, 5, 1, 3
FP8_CODES_TRANSPOSED = 2  # of a weight that is held in FP8: read and written
# Bytes that quantizing an element moves beside the element and its code, encoded and decoded, by the operators of
# parallel/activation_offload.py. fp8: one kernel; codes cast up, scaled and cast down. int8: extremes, an fp32
# multiplication, its rounding; an fp32 multiplication, cast down.
QUANTIZED_BYTES = {"fp8": (1.0, 17.0), "int8": (17.0, 9.0)}
# Bytes moved for an element that is decoded by the operators of kernels/quantized.py: half a byte becomes half an
# index of four, which is read for an fp32 number; that is scaled in place, and read to be written in 16 bits.
DECODED_BYTES = 0.5 + 2 * 2 + 4 + 2 * 4 + 4 + 2
NF4_BYTES = 0.5 + 2  # the same by the kernel that decodes NF4
# Passes over an adapter's output, added to its layer's: both are read, and the sum written; a compiled block adds where
# it multiplies, and reads one.
SUM_PASSES, COMPILED_SUM_PASSES = 3, 1
SELECTED = 0.5  # of all blocks, where a stack recomputes some of them and does not say how many
CAP_PASSES = 11  # of the logits, by a softcap and its gradient, none of them fused
EMBEDDING_PASSES = 6  # of the hidden states, by the lookup, its dropout and the scattered gradient


Shape = tuple[float, float, float, float]  # count, m, n and k of matmuls, as tp cuts them


class TimeTerms(NamedTuple):
    """Seconds of one piece of work on one rank. Communication is what arithmetic does not hide."""

    matmuls: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    launch: float = 0.0  # the device waits for the host
    link: float = 0.0  # and for activations on their way to and from the host's memory

    @property
    def seconds(self) -> float:
        work = self.matmuls + self.attention + self.elementwise + self.launch
        return work + self.tp + self.cp + self.ep + self.link

    def __add__(self, other: "TimeTerms") -> "TimeTerms":  # pyright: ignore[reportIncompatibleMethodOverride]
        return TimeTerms._make(map(add, self, other))

    def __mul__(self, times: float) -> "TimeTerms":  # pyright: ignore[reportIncompatibleMethodOverride]
        return TimeTerms._make([each * times for each in self])


NOTHING = TimeTerms()


class PassTimes(NamedTuple):
    """One microbatch through some part of the model."""

    forward: TimeTerms = NOTHING
    recompute: TimeTerms = NOTHING  # what the backward recomputes
    input: TimeTerms = NOTHING  # gradient of the part's input
    weight: TimeTerms = NOTHING  # gradients of its weights

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.recompute.seconds + self.input.seconds + self.weight.seconds

    def __add__(self, other: "PassTimes") -> "PassTimes":  # pyright: ignore[reportIncompatibleMethodOverride]
        return PassTimes._make(map(add, self, other))

    def __mul__(self, times: float) -> "PassTimes":  # pyright: ignore[reportIncompatibleMethodOverride]
        return PassTimes._make([each * times for each in self])


class LayerModel(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True):
    """Everything that a layer's time depends on, looked up once."""

    job: Job
    rates: Rates
    head: Rates  # of the projection to logits, whose matmuls are no narrower than bf16
    tokens: float  # of one microbatch on one rank, whole over tp
    host: float  # seconds in which the host starts the forward of a layer
    adding: float  # bytes that adding one microbatch's gradient moves, for each weight
    policy: ActivationPolicy  # levelled: what blocks recompute and save is priced apart

    @property
    def arch(self) -> Arch:
        return self.job.arch

    @property
    def plan(self) -> Plan:
        return self.job.plan

    @property
    def speed(self) -> StackSpeed:
        return self.job.stack.speed

    @property
    def between(self) -> float:
        """Tokens that a rank has between matmuls: without sequence parallelism all of them."""
        return self.tokens / self.plan.tp if self.job.stack.sequence_parallel else self.tokens

    @property
    def fusion(self) -> float:
        """Bytes that element-wise kernels move, ÷ the least."""
        return max(self.speed.elementwise * (self.speed.compiled if self.policy.compiled else 1.0), 1.0)

    def collective(self, kind: Kind, axis: Axis, size: float) -> float:
        """Seconds of one call on an axis of the plan."""
        return collective_seconds(kind, size, axis_span(axis, self.plan, self.job.cluster), self.job.cluster)


def layer_model(job: Job, efficiency: Efficiency | None = None) -> LayerModel:
    """What does not matter to a single layer is levelled, so that plans that differ in it share their layers' times.

    `efficiency` replaces what was measured on the cluster, which replaces the catalogue's entry.
    """
    reached = efficiency or job.cluster.efficiency or efficiency_of(job.cluster.gpu)
    plan, speed, policy = job.plan, job.stack.speed, activation_policy(job)
    # Some stacks are late with the collectives of tp, and later where messages of a pipeline cross the network.
    host = speed.layer_seconds + (plan.tp - 1) * speed.tp_seconds
    if plan.pp > 1 and plan.tp > 1 and plan.world > job.cluster.domain:
        host += plan.tp * speed.tp_across_seconds
    levelled = Plan(
        tp=plan.tp,
        cp=plan.cp,
        cp_kind=plan.cp_kind,
        ep=plan.ep,
        shard=_fewest_shards(plan, job.cluster.domain),
        zero=1,
        microbatch=plan.microbatch,
        precision=plan.precision,
        fp8_scaling=plan.fp8_scaling,
        kernels=plan.kernels,
        compile=policy.compiled,
    )
    return LayerModel(
        job=msgspec.structs.replace(job, plan=levelled, masked=False),
        rates=rates(job.cluster.gpu, reached, plan.arithmetic, plan.fp8_accumulate == "exact"),
        head=rates(job.cluster.gpu, reached, "bf16" if plan.precision == "fp8" else plan.arithmetic),
        tokens=plan.microbatch * job.sequence / plan.cp,
        host=host * (speed.compiled_host if policy.compiled else 1.0),
        policy=activation_policy(msgspec.structs.replace(job, plan=levelled)),
        adding=0.0 if state_layout(job).sums == "never" else speed.accumulate_bytes,
    )


def _fewest_shards(plan: Plan, domain: int) -> int:
    """As few as the experts need, in one domain or in several as the plan's are: a layer's time depends on no more."""
    fewest = plan.ep // math.gcd(plan.ep, plan.cp)
    ranks = fewest * plan.cp * plan.tp
    return fewest if plan.data * plan.cp * plan.tp <= domain else fewest * (domain // ranks + 1)


@lru_cache(maxsize=16384)
def block(at: LayerModel, moe: bool) -> PassTimes:
    """One layer without recomputation."""
    arch, tp = at.arch, at.plan.tp
    experts: list[Shape] = list(_expert_matmuls(at)) if moe else []
    shapes: list[Shape] = [
        *_projections(at),
        (1, at.tokens, arch.hidden, arch.out_width / tp),
        *(_beside_experts(at) if moe else _dense_matmuls(at)),
    ]
    forward, backward = _attention(at)
    scales, back_scales = _scales_over_tp(at, moe)
    moved = _between_bytes(at, moe)
    casts, back_casts = (at.speed.casts * each for each in _cast_bytes(shapes, experts, at))
    weight_matmuls = sum(_matmul(count, n, k, m, at, back=True) for count, m, n, k in shapes)
    # Of experts they are no narrower than bf16, see kernels/experts.py.
    weight_matmuls += sum(count * _head_matmul(n, k, m, at) for count, m, n, k in experts)
    matmuls = sum(_matmul(count, m, n, k, at) for count, m, n, k in shapes)
    matmuls += sum(_expert_matmul(count, m, n, k, at) for count, m, n, k in experts)
    input_matmuls = sum(_matmul(count, m, k, n, at, back=True) for count, m, n, k in shapes)
    input_matmuls += sum(_expert_matmul(count, m, k, n, at, back=True) for count, m, n, k in experts)
    shapes += experts
    share = trained_share(arch)  # the others have no gradient
    weights = share * sum(count * n * k for count, _, n, k in shapes)
    ep = _over_ep(at, matmuls) if moe else 0.0
    going = TimeTerms(
        matmuls=matmuls,
        attention=forward,
        elementwise=moved_seconds(moved + casts, at.rates),
        tp=_over_tp(at, matmuls) + scales,
        cp=_over_cp(at, forward),
        ep=ep,
    )
    coming = TimeTerms(
        matmuls=input_matmuls,
        attention=backward,
        elementwise=moved_seconds(BACKWARD_BYTES * moved + back_casts, at.rates),
        tp=_over_tp(at, input_matmuls) + back_scales,
        cp=_over_cp(at, backward, back=True),
        ep=ep,
    )
    if arch.adapter.held != "bf16":
        decoded, decoded_back = _decoding(at, moe)
        going, coming = going + decoded, coming + decoded_back
    weight = TimeTerms(matmuls=share * weight_matmuls, elementwise=moved_seconds(weights * at.adding, at.rates))
    # The device waits for the host: each pass takes no less than its launches.
    host = at.host + moe * at.speed.moe_seconds
    late = max(host - going.seconds, 0.0)
    late_back = max(host - coming.seconds - weight.seconds, 0.0)
    plain = PassTimes(forward=going + TimeTerms(launch=late), input=coming + TimeTerms(launch=late_back), weight=weight)
    return plain + _adapters(at, moe) if arch.adapter.kind != "none" else plain


def _decoding(at: LayerModel, moe: bool) -> Iterator[TimeTerms]:
    """What decoding a block's weights adds to its forward, and to its backward."""
    each = NF4_BYTES if at.arch.adapter.held == "nf4" and at.plan.kernels != "plain" else DECODED_BYTES
    for elements in decoded_elements(at.arch, at.plan, moe):
        yield TimeTerms(elementwise=moved_seconds(elements / at.plan.tp * each, at.rates))


@cache
def decoded_elements(arch: Arch, plan: Plan, moe: bool) -> tuple[int, int]:
    """Elements of a block's weights in few bits that a forward decodes, and a backward, of experts one rank's.

    A forward of DoRA decodes what it needs the norms of once more, also where codes are multiplied as they are.
    """
    forward = backward = 0
    for param in (each for each in layer_params(arch, moe) if each.held != "bf16"):
        elements = param.numel // (plan.ep if param.expert else 1)
        normed = has_row_norms(param, arch)
        multiplied = 0 if is_multiplied_as_held(param, plan) else elements * (1 + normed * arch.adapter.drops_rows)
        forward += multiplied + elements * normed
        backward += multiplied
    return forward, backward


@cache
def trained_share(arch: Arch) -> float:
    """Of the elements of all matrices in blocks that a backward reaches, adapters apart, those that have a gradient."""
    matrices = [
        param
        for param in params(arch)
        if param.layer >= still_blocks(arch) and len(param.shape) > 1 and not is_adapter(param.name)
    ]
    return sum(param.numel for param in matrices if param.trained) / max(sum(param.numel for param in matrices), 1)


def _adapters(at: LayerModel, moe: bool) -> PassTimes:
    """Low-rank matmuls beside a block's own: they are thin, and what they move is priced beside what they multiply.

    None is in FP8.
    """
    forward = coming = weight = NOTHING
    passes = COMPILED_SUM_PASSES if at.policy.compiled else SUM_PASSES
    for out, into, routed in adapted_shapes(at.arch, moe):
        rank, out, into = at.arch.adapter.rank, out / at.plan.tp, into
        held = at.arch.experts / at.plan.ep if routed else 1
        tokens = at.tokens * (_rows_per_token(at) if routed else 1)
        down, up = (held * _head_matmul(tokens / held, n, k, at) for n, k in ((rank, into), (out, rank)))
        summed = moved_seconds(passes * tokens * out * at.rates.width, at.rates)
        forward += TimeTerms(matmuls=down + up, elementwise=summed)
        coming += TimeTerms(matmuls=down + up, elementwise=summed * into / out)
        if at.arch.adapter.dropout:  # drawn, and drawn again
            dropped = moved_seconds(DROPOUT_BYTES / 2 * tokens * into, at.rates)
            forward, coming = forward + TimeTerms(elementwise=dropped), coming + TimeTerms(elementwise=dropped)
        if at.arch.adapter.kind == "dora":
            # The weight is read for the norms of its rows, and multiplied with A; an output is read and written.
            norms = held * _head_matmul(out, rank, into, at)
            read, passed = (
                moved_seconds(size * at.rates.width, at.rates) for size in (held * out * into, 2 * tokens * out)
            )
            forward += TimeTerms(matmuls=norms, elementwise=read + passed)
            coming += TimeTerms(elementwise=BACKWARD_BYTES * passed)
        if at.arch.adapter.drops_rows:  # multiplied with what is left of the input too, which is drawn once more
            again, back = (
                held * _matmul(1, tokens / held, n, k, at, way) for n, k, way in ((out, into, False), (into, out, True))
            )
            dropped = moved_seconds(DROPOUT_BYTES / 2 * tokens * into, at.rates)
            forward += TimeTerms(matmuls=again, elementwise=dropped + summed)
            coming += TimeTerms(matmuls=back, elementwise=dropped + summed * into / out)
        weight += TimeTerms(matmuls=down + up)
    return PassTimes(forward=forward, input=coming, weight=weight)


@cache
def adapted_shapes(arch: Arch, moe: bool) -> tuple[tuple[int, int, bool], ...]:
    """The outputs and inputs of a block's linear layers that have adapters, and whether they are routed experts'."""
    table = {param.name: param for param in layer_params(arch, moe)}
    pairs = ((param, table[name.replace(DOWN, UP)]) for name, param in table.items() if name.endswith(DOWN))
    return tuple((up.shape[-2], down.shape[-1], down.expert) for down, up in pairs)


@lru_cache(maxsize=1024)
def unreached(at: LayerModel, layer: int) -> TimeTerms:
    """Of a block's gradient of its input, what the first layer that a backward reaches does not have.

    Where its attention is frozen, what that reads has no gradient.
    """
    arch, flow = at.arch, grad_flow(at.arch)[layer]
    matrices = [param for param in params(arch) if param.layer == layer and param.is_matrix]
    elements = {each.name: each.numel * (_rows_per_token(at) / arch.experts if each.expert else 1) for each in matrices}
    still = sum(elements[each.name] for each in matrices if not reads_gradient(arch, each)) / sum(elements.values())
    coming = block(at, arch.is_moe(layer)).input
    return TimeTerms(
        matmuls=coming.matmuls * still,
        attention=coming.attention * (not flow.attended),
        elementwise=coming.elementwise * still,
        tp=coming.tp * ((not flow.attn_in) + (not flow.attn_out) + (not flow.mlp_in) + (not flow.mlp_out)) / 4,
        cp=coming.cp * (not flow.attended),
        ep=coming.ep * ((not flow.mlp_in) + (not flow.mlp_out)) / 2,
    )


@lru_cache(maxsize=16384)
def ends(at: LayerModel, first: bool, last: bool) -> PassTimes:
    """What is outside the blocks: the embedding of the first part, the projection and the loss of the last."""
    found = PassTimes()
    if first:
        moved = moved_seconds(EMBEDDING_PASSES / 2 * at.between * at.arch.hidden * at.rates.width, at.rates)
        back = moved if at.arch.trains("embed.weight") else 0.0
        found += PassTimes(forward=TimeTerms(elementwise=moved), weight=TimeTerms(elementwise=back))
    if not last:
        return found
    return found + _projection(at) + (_ahead(at) if at.arch.mtp_layers else PassTimes())


def _ahead(at: LayerModel) -> PassTimes:
    """What multi-token prediction adds outside its block: embeddings, the matrix that joins them, a projection.

    Ranks of tp join each their part of the sequence.
    """
    hidden = at.arch.hidden
    joined = _matmul(1, at.between, hidden, 2 * hidden, at)
    moved = moved_seconds(EMBEDDING_PASSES * at.between * hidden * at.rates.width, at.rates)
    scattered = at.collective("reduce_scatter", "tp", at.tokens * hidden * at.rates.width)
    ahead, back = _agreeing(at, fp8_scales_ahead(at.arch, at.plan))
    return _projection(at) + PassTimes(
        forward=TimeTerms(matmuls=joined, elementwise=moved, tp=scattered + ahead),
        input=TimeTerms(matmuls=joined, elementwise=moved, tp=scattered + back),
        weight=TimeTerms(matmuls=joined),
    )


def recomputed_terms(at: LayerModel, moe: bool, by_operation: bool) -> TimeTerms:
    """What one recomputed layer adds to its backward."""
    one = block(at, moe).forward
    if not by_operation and (moe or at.policy.to_the_end or at.arch.ends_in_norm):
        return one
    if not by_operation:  # up to the last matmul, whose sum over tp is one of four collectives
        *_, last = _dense_matmuls(at)
        return one._replace(matmuls=one.matmuls - _matmul(*last, at), tp=one.tp * 3 / 4)
    if at.policy.selective == "attention":
        return TimeTerms(attention=one.attention)
    return one * SELECTED if at.policy.selective == "blocks" else TimeTerms(elementwise=one.elementwise)


def with_policy(at: LayerModel, policy: ActivationPolicy, moe: bool, one: PassTimes) -> PassTimes:
    """A block's passes with activations quantized and read back, and what the host link takes beyond arithmetic.

    A block that is recomputed saves its input alone.
    """
    if policy.saves_plainly:
        return one
    work = msgspec.structs.replace(microbatch_shape(at.job), quantized=policy.quant != "none")
    recomputed = one.recompute.seconds > 0
    whole = work.hidden_states if recomputed else block_saved(work, moe)
    if policy.quant != "none":
        encode, decode = (
            moved_seconds(whole / work.compute_bytes * (at.rates.width + more + CODE - 1), at.rates)
            for more in QUANTIZED_BYTES[policy.quant]
        )
        going, coming = TimeTerms(elementwise=encode), TimeTerms(elementwise=decode)
        one = one._replace(forward=one.forward + going, input=one.input + coming)
    if not policy.offload:
        return one
    travels = moved_bytes(work, as_saved(work, moe, whole), recomputed) / achieved(at.job.cluster.host)
    back = one.recompute.seconds + one.input.seconds + one.weight.seconds
    going = TimeTerms(link=max(travels - one.forward.seconds, 0.0))
    coming = TimeTerms(link=max(travels - back, 0.0))
    return one._replace(forward=one.forward + going, input=one.input + coming)


def exposed(communication: float, hidden_by: float, overlap: float) -> float:
    """What is left of communication when a share of it runs beside arithmetic, as far as there is any."""
    return communication - min(overlap * communication, hidden_by)


def chosen(arch: Arch) -> float:
    """Experts that work on a token, on average."""
    return arch.capacity if arch.router == "expert_choice" else arch.top_k


def _matmul(count: float, m: float, n: float, k: float, at: LayerModel, back: bool = False) -> float:
    return count * matmul_seconds(m, n, k, at.rates, back) / at.speed.product


def _expert_matmul(count: float, m: float, n: float, k: float, at: LayerModel, back: bool = False) -> float:
    """Of routed experts, in the precision that these have."""
    return count * _head_matmul(m, n, k, at) if _experts_stay_wide(at) else _matmul(count, m, n, k, at, back)


def _experts_stay_wide(at: LayerModel) -> bool:
    """Whether routed experts are in bf16 beside FP8: under tp our ranks have parts of the rows that share a scale."""
    return at.job.stack.name == OURS and at.plan.tp > 1


def _dense_matmuls(at: LayerModel, width: int = 0) -> Iterator[Shape]:
    arch, tp = at.arch, at.plan.tp
    inner = (width or arch.ffn) / tp
    yield 1, at.tokens, (2 if arch.gated else 1) * inner, arch.hidden
    yield 1, at.tokens, arch.hidden, inner


def _projections(at: LayerModel) -> Iterator[Shape]:
    """Queries, keys and values; of latent attention the ways down, which every rank of tp computes, and up."""
    arch, tp = at.arch, at.plan.tp
    if not arch.is_latent:
        yield 1, at.tokens, arch.q_width / tp + kv_part(arch, tp), arch.hidden
        return
    down = arch.q_rank + arch.kv_rank + arch.rope_dim
    yield 1, at.tokens, down + (0 if arch.q_rank else arch.q_width / tp), arch.hidden
    if arch.q_rank:
        yield 1, at.tokens, arch.q_width / tp, arch.q_rank
    yield 1, at.tokens, arch.heads * (arch.head_dim - arch.rope_dim + arch.v_head) / tp, arch.kv_rank


def _expert_matmuls(at: LayerModel) -> Iterator[Shape]:
    """The experts that a rank holds, with a fair share of the rows."""
    arch, plan = at.arch, at.plan
    held = arch.experts / plan.ep
    rows = at.tokens * _rows_per_token(at) / held
    inner = arch.expert_ffn / plan.tp
    yield held, rows, (2 if arch.gated else 1) * inner, arch.hidden
    yield held, rows, arch.hidden, inner


def _beside_experts(at: LayerModel) -> Iterator[Shape]:
    """The router, and the experts that all tokens pass."""
    arch = at.arch
    yield 1, at.tokens, arch.experts, arch.hidden
    if arch.shared_experts:
        yield from _dense_matmuls(at, arch.shared_experts * arch.expert_ffn)


def _attention(at: LayerModel) -> tuple[float, float]:
    """Forward and backward of attention itself."""
    arch, plan, sequence = at.arch, at.plan, at.job.sequence
    width = (arch.q_width + arch.out_width) / 2 / plan.tp
    if at.job.stack.attention == "flash":
        span, rate = sequence, at.speed.attention
        if at.job.span is not None:
            span, rate = min(at.job.span + DOCUMENT_BLOCK, sequence), rate * DOCUMENT_RATE
        elif arch.window or not arch.scores_plainly:  # by blocks too
            rate *= DOCUMENT_RATE
        # A causal token meets half its span, and half a block at either end of its window.
        span = arch.mean_over_layers(lambda window: min(2 * (window + DOCUMENT_BLOCK), span) if window else span)
        forward, backward = flash_seconds(at.tokens, span, width, at.rates)
        return forward / rate, backward / rate
    scores = at.tokens * sequence
    matmuls = attention_flops(scores, width) / at.rates.matmul
    passes = moved_seconds(scores * arch.heads / plan.tp * at.rates.width * at.speed.score_passes, at.rates)
    return matmuls + passes, 2 * matmuls + BACKWARD_SCORES * passes


def _between_bytes(at: LayerModel, moe: bool) -> float:
    """What element-wise kernels of a forward move: norms and sums, the rotation, the activation, the experts' rows."""
    arch, plan = at.arch, at.plan
    norms = 4 if arch.norm_position == "both" else 2
    whole = (NORMS_AND_SUMS + 2 * (norms - 2)) * arch.hidden * at.between
    if arch.qk_norm != "none":
        whole += 2 * (arch.q_width + arch.kv_width) / plan.tp * at.tokens
    if arch.dropout and not at.policy.compiled:  # the compiler draws where it adds
        whole += 2 * DROPOUT_BYTES / at.rates.width / at.fusion * arch.hidden * at.between
    share = arch.rotated / arch.head_dim
    rotated = 2 * (arch.q_width + arch.kv_width) * share / plan.tp * at.tokens if arch.positions == "rope" else 0.0
    passes = 3 if arch.gated else 2
    if moe:
        routed = _rows_per_token(at) * (passes * arch.expert_ffn / plan.tp + 4 * arch.hidden)
        inner = at.tokens * (routed + passes * arch.shared_experts * arch.expert_ffn / plan.tp)
    else:
        inner = at.tokens * passes * arch.ffn / plan.tp
    return at.fusion * at.rates.width * (whole + rotated + inner)


def _cast_bytes(shapes: list[Shape], experts: list[Shape], at: LayerModel) -> tuple[float, float]:
    """What making FP8 numbers for matmuls moves, forward and backward.

    Experts quantize their weights in both, and of what the backward has transpose these alone.
    """
    if at.plan.precision != "fp8":
        return 0.0, 0.0
    inputs, weights, gradients = _operands(shapes)
    if _multiplies_codes(at):  # the output is read and written once more, and scaled; the weight alone is transposed
        by_rows = 0.0 if at.plan.fp8_scaling == "rowwise" else 2 * at.fusion * at.rates.width
        return FP8_INPUT * inputs + by_rows * gradients, FP8_OTHER * gradients + FP8_CODES_TRANSPOSED * weights
    transposed = FP8_TRANSPOSED * gradients + FP8_WEIGHT_TRANSPOSED * weights
    rows, stacks, row_gradients = _operands([] if _experts_stay_wide(at) else experts)
    forward = (FP8_INPUT + FP8_TRANSPOSED) * inputs + FP8_INPUT * rows + FP8_OTHER * (weights + stacks)
    return forward, FP8_OTHER * (gradients + row_gradients + stacks) + transposed + FP8_TRANSPOSED * stacks


def _multiplies_codes(at: LayerModel) -> bool:
    """Whether matmuls in FP8 read a frozen base as it is held."""
    return at.plan.precision == "fp8" and at.arch.adapter.held == "fp8"


def _operands(shapes: list[Shape]) -> tuple[float, float, float]:
    """Elements of all inputs, weights and gradients of some matmuls."""
    inputs = sum(count * m * k for count, m, _, k in shapes)
    weights = sum(count * n * k for count, _, n, k in shapes)
    return inputs, weights, sum(count * m * n for count, m, n, _ in shapes)


def _over_tp(at: LayerModel, hidden_by: float) -> float:
    """Hidden states are gathered before and summed after attention and the feed-forward layer."""
    if at.plan.tp == 1:
        return 0.0
    size = at.tokens * at.arch.hidden * at.rates.width
    if at.job.stack.sequence_parallel:
        each = at.collective("all_gather", "tp", size) + at.collective("reduce_scatter", "tp", size)
    else:
        each = at.collective("all_reduce", "tp", size)
    return exposed(2 * each, hidden_by, at.speed.overlap_tp)


def _scales_over_tp(at: LayerModel, moe: bool) -> tuple[float, float]:
    """Ranks agree on the scales of FP8 matmuls before these, forward and backward: all of it is waited for."""
    if at.job.stack.name != OURS:
        return 0.0, 0.0
    return _agreeing(at, fp8_scales(at.arch, at.plan, round(at.tokens), moe))


def _agreeing(at: LayerModel, calls: Iterable[tuple[int, int, int]]) -> tuple[float, float]:
    """Seconds of all-reduces over tp, forward and backward: of each the bytes, and how often in either."""
    found = [(at.collective("all_reduce", "tp", size), forward, backward) for size, forward, backward in calls]
    return sum(each * forward for each, forward, _ in found), sum(each * backward for each, _, backward in found)


def _over_cp(at: LayerModel, attention: float, back: bool = False) -> float:
    """A ring hides behind attention as far as that goes, which loses by it; heads that change places are waited for.

    Of a ring written in torch: arithmetic loses beside its bytes as beside those of weights, `contention` · their time
    over the scale-up link; and each block that comes round is merged with those before it, in fp32. Published runs with
    cp of Megatron, whose kernels merge, show neither.
    """
    plan, arch = at.plan, at.arch
    if plan.cp == 1:
        return 0.0
    if plan.cp_kind == "ring":
        size = at.tokens * kv_part(arch, plan.tp) * (at.rates.width + (ACCUM_BYTES if back else 0))
        sent = exposed((plan.cp - 1) * at.collective("send", "cp", size), attention, 1.0)
        if not at.speed.torch_ring:
            return sent
        beside = at.speed.contention * (plan.cp - 1) * size / achieved(at.job.cluster.scale_up)
        merged = (plan.cp - 1) * MET * at.tokens * arch.out_width / plan.tp * MERGED_BYTES
        return sent + beside + moved_seconds(merged, at.rates)
    widths = arch.q_width / plan.tp + kv_part(arch, plan.tp), arch.out_width / plan.tp
    sizes = (at.tokens * width * at.rates.width for width in widths)
    return sum(at.collective("all_to_all", "cp", size) for size in sizes)


def _rows_per_token(at: LayerModel) -> float:
    """Rows that experts get for a token: those that chose it, or under ep all slots of a capacity."""
    if at.job.stack.name == OURS and at.plan.ep > 1 and at.arch.capacity:
        return sent_rows(at.arch, at.plan, at.job.sequence) / at.tokens
    return chosen(at.arch)


def _over_ep(at: LayerModel, hidden_by: float) -> float:
    """Rows go to the experts' ranks and come back. Ours go there beside the shared experts' matmuls."""
    if at.plan.ep == 1:
        return 0.0
    size = at.tokens / at.plan.tp * _rows_per_token(at) * at.arch.hidden * at.rates.width
    one = at.collective("all_to_all", "ep", size)
    if at.speed.once_a_node:
        across = at.collective("all_to_all", "ep", size * _once_a_node(at))
        one = min(one, max(across, size / achieved(at.job.cluster.scale_up)))
    if at.job.stack.name != OURS:
        return exposed(2 * one, hidden_by, at.speed.overlap_ep)
    shared = _dense_matmuls(at, at.arch.shared_experts * at.arch.expert_ffn) if at.arch.shared_experts else ()
    return one + exposed(one, sum(_matmul(*shape, at) for shape in shared), 1.0)


def _once_a_node(at: LayerModel) -> float:
    """Nodes that a token's rows go to ÷ its rows, of evenly loaded experts: each node hands its rows on by itself."""
    nodes = axis_span("ep", at.plan, at.job.cluster).domains
    return nodes * (1 - (1 - 1 / nodes) ** at.arch.top_k) / at.arch.top_k


def _projection(at: LayerModel) -> PassTimes:
    arch, plan = at.arch, at.plan
    vocab, size = arch.vocab / plan.tp, at.tokens * arch.hidden * at.rates.width
    logits = moved_seconds(at.tokens * vocab * ACCUM_BYTES * at.speed.logit_passes, at.rates)
    logits += moved_seconds(at.tokens * vocab * CAP_PASSES * at.rates.width, at.rates) if arch.logit_softcap else 0.0
    collected = at.collective("all_gather", "tp", size)
    kept = moved_seconds(vocab * arch.hidden * at.adding, at.rates)
    back = _head_matmul(at.tokens, arch.hidden, vocab, at) if reaches_projection_input(arch) else 0.0
    return PassTimes(
        forward=TimeTerms(
            matmuls=_head_matmul(at.tokens, vocab, arch.hidden, at), elementwise=logits / 3, tp=collected
        ),
        input=TimeTerms(matmuls=back, elementwise=2 * logits / 3, tp=collected),
        weight=TimeTerms(matmuls=_head_matmul(vocab, arch.hidden, at.tokens, at), elementwise=kept)
        if projects(arch)
        else NOTHING,
    )


def _head_matmul(m: float, n: float, k: float, at: LayerModel) -> float:
    return matmul_seconds(m, n, k, at.head) / at.speed.product
