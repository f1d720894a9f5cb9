"""Why a plan is what it is: its waterfall and ledger in words, what each neighbour would cost, which plans are ties.

Where nothing fits: the plans that miss by the least memory, and what else to ask for.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from meshwright.cost.activations import activation_policy
from meshwright.cost.job import Job
from meshwright.cost.layout import state_layout
from meshwright.hardware.cluster import cards
from meshwright.search.best_first import Candidate, SearchResult, fit_of, priced, search
from meshwright.search.bounds import MemoryBound, PlanGroup, frugal_split, groups, largest
from meshwright.search.question import Question
from meshwright.search.sizes import gpus_needed, largest_model, largest_sequence
from meshwright.search.space import CHUNKS, SCHEDULES, PipelineChoice, compiles, divisors, locations, problems
from meshwright.spec.communication import described
from meshwright.spec.optimizers import DESCRIPTIONS, OPTIMIZERS, in_state_dtype
from meshwright.spec.plan import AXES, FIELDS, Plan, balanced_stages
from meshwright.spec.schedule import default_chunks
from meshwright.spec.units import GIB, gib

ROUNDED = {
    "int8": "about 1 %",
    "int4": "about 15 %",
    "fp8": "about 3 %",
}  # root mean square, of normally distributed values
LOSSES = 3  # of the waterfall that are named

SMALL = 0.01  # of a step; smaller losses are not worth a word

TRIED = 12  # of the least by the closed form, whose ledgers are then made


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that differs in one choice, or why there is none."""

    change: str  # as a person would say it: "tp 8 → 4"
    plan: Plan | None = None
    problem: str = ""


class NeighbourPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What one changed choice would cost, or why it cannot be."""

    change: str
    plan: Plan | None = None
    seconds: float = 0.0
    peak_bytes: float = 0.0
    fits: bool | None = False  # None: on the device, and nobody says whether the host has room
    problem: str = ""  # why it is not legal, or does not fit, or what it would have to have beside the device


class SuggestedChange(msgspec.Struct, frozen=True, kw_only=True):
    """Something else to ask for, and the best plan it has."""

    change: str
    found: Candidate


def why(found: Candidate) -> str:
    """The waterfall and the ledger, in words."""
    price = found.price
    ideal = next((share.seconds for share in price.waterfall if share.name == "ideal"), 0.0)
    losses = sorted((share for share in price.waterfall if share.name != "ideal"), key=lambda share: -share.seconds)
    named = [share for share in losses[:LOSSES] if share.seconds >= SMALL * price.seconds]
    text = f"{ideal / price.seconds:.0%} of the step is the model's FLOPs at the data sheet's peak"
    for word, share in zip(("most is lost to", "then", "then"), named, strict=False):
        text += f"; {word} {share.label} ({share.seconds / price.seconds:.0%}): {share.why}"
    changed = f"{narrowed(found)}{quantized(found)}{rounded(found)}"
    return f"{text}. {room(found)}{offloaded(found)}{unchanged(found.job)}{changed}"


def room(found: Candidate) -> str:
    """The ledger in a sentence."""
    ledger, fit = found.ledger, found.fit
    memory = found.job.cluster.gpu.memory_bytes / GIB
    left = f"{gib(abs(fit.headroom_bytes))} GiB {'headroom' if fit.headroom_bytes >= 0 else 'short'}"
    beyond = f" It does not fit: {fit.why}." if fit.headroom_bytes >= 0 and fit.fits is False else ""
    return (
        f"The most loaded rank needs {memory - fit.headroom_bytes / GIB:.1f} GiB; the card has {memory:.1f} "
        f"({left}). The largest entry is {largest(ledger).label}, at {ledger.moment}.{beyond}"
    )


def offloaded(found: Candidate) -> str:
    """What is offloaded, how much of the host's memory and disk that takes, and what would be without."""
    layout, plan, offloaded, cluster = state_layout(found.job), found.plan, found.ledger.offloaded, found.job.cluster
    if not (offloaded.host or offloaded.disk):
        return ""
    said = []
    if layout.offloaded:
        where = {"host": "host memory", "disk": "the disk"}[layout.offloaded.location]
        said.append(f"fp32 master weights and optimizer states offloaded to {where}")
    said += ["weights, gradients and optimizer states offloaded to host memory"] if layout.cpu_offload else []
    said += ["saved activations offloaded to host memory"] if activation_policy(found.job).offload else []
    if not said:
        return f" Parameter servers need {_share('host RAM', 'host_gib', offloaded.host_bytes, cluster.host_bytes)}."
    plain = msgspec.structs.replace(plan, optimizer_offload="none", cpu_offload=False, activation_offload=False)
    without = fit_of(msgspec.structs.replace(found.job, plan=plain))
    need = (cluster.gpu.memory_bytes - without.headroom_bytes) / GIB
    text = f" Numerics unchanged: {' and '.join(said)}; needs "
    text += _share("host RAM", "host_gib", offloaded.host_bytes, cluster.host_bytes)
    text += f" and {_share('disk', 'disk_gib', offloaded.disk_bytes, cluster.disk_bytes)}" if offloaded.disk else ""
    return f"{text}. Without offload this plan would need {need:.1f} GiB on the device."


def _share(place: str, key: str, size: float, room: float) -> str:
    """How much of the host's memory or disk a rank takes."""
    have = f"{room / GIB:.0f} there" if room else f"yours is unknown: set {key}"
    return f"{gib(size)} GiB of {place} per GPU ({have})"


def unchanged(job: Job) -> str:
    """What was chosen beside the split and leaves the numerics unchanged, and how to turn it off."""
    chosen = []
    if activation_policy(job).compiled:
        chosen.append("torch.compile per block (plan.compile=false turns it off)")
    if state_layout(job).reads == "resident":
        chosen.append("a resident bf16 copy of the parameters (plan.bf16_params=false casts them at each use)")
    return f" Numerics unchanged: {' and '.join(chosen)}." if chosen else ""


def narrowed(found: Candidate) -> str:
    """What weights and states of 16 bits round, and what fp32 ones would take more."""
    job, said = found.job, []
    if job.master_weights == "none":
        said.append("weights in bf16 without master weights, rounded stochastically (optim.master_weights=none)")
    if job.state_dtype == "bf16":
        said.append("optimizer states in bf16, rounded stochastically (optim.state_dtype=bf16)")
    if not said:
        return ""
    in_fp32 = fit_of(msgspec.structs.replace(job, master_weights="fp32", state_dtype="fp32"))
    more = (found.fit.headroom_bytes - in_fp32.headroom_bytes) / GIB
    return f" Numerics changed: {' and '.join(said)}; with fp32 this plan would need {more:.1f} GiB more."


def quantized(found: Candidate) -> str:
    """What states of 8 or 4 bits round, and what fp32 ones would take more."""
    spec = DESCRIPTIONS[found.job.optimizer]
    if not spec.quantized:
        return ""
    in_fp32 = fit_of(msgspec.structs.replace(found.job, state_dtype="fp32", optimizer=spec.name))
    more = (found.fit.headroom_bytes - in_fp32.headroom_bytes) / GIB
    return (
        f" Numerics changed: {spec.held} in {spec.quantized} codes, rounded by {ROUNDED[spec.quantized]} of their size "
        f"at every update; in fp32 (optim.state_dtype=fp32) this plan would need {more:.1f} GiB more."
    )


def rounded(found: Candidate) -> str:
    """What a plan rounds of gradients and weights on their way between ranks, and what it would take without."""
    plan = found.plan
    said = [text.partition(": ")[2] for text in described(plan)]
    if not said:
        return ""
    plain = msgspec.structs.replace(
        plan, grad_reduce="default", powersgd=0, gather="default", error_feedback=True, grad_reduce_node=1
    )
    without = priced(msgspec.structs.replace(found.job, plan=plain)).price.seconds
    return (
        f" Numerics changed: {said[0]}: another run than one that sends everything as it is, and no "
        f"prediction of its loss is made. Without, this plan would take {without / found.price.seconds:.2f} × as long."
    )


def ties(answer: SearchResult) -> int:
    """How many of the best plans lie within the interval of the first: the prediction alone cannot rank them."""
    if not answer.found:
        return 0
    first = answer.found[0].price
    return sum(found.price.seconds <= first.high_seconds for found in answer.found)


def beside(question: Question, plan: Plan) -> list[NeighbourPrice]:
    """What each neighbour of a plan would cost."""
    return [_neighbour_price(question, neighbour) for neighbour in neighbours(question, plan)]


def other_optimizers(question: Question, plan: Plan) -> list[NeighbourPrice]:
    """What each other optimizer would cost under a plan, or why it cannot be; whole tensors have fp32 states."""
    now, found = DESCRIPTIONS[question.optimizer].name, []
    for name, spec in OPTIMIZERS.items():
        if name == now:
            continue
        kept = in_state_dtype(name, question.state_dtype)
        change, other = f"optim.name {now} → {name}", msgspec.structs.replace(question, optimizer=kept)
        if spec.whole and question.state_dtype != "fp32":
            change += f", optim.state_dtype {question.state_dtype} → fp32"
            other = msgspec.structs.replace(other, state_dtype="fp32")
        problem = next((problem.text for problem in problems(other, plan)), "")
        changed = Neighbour(change=change, plan=None if problem else plan, problem=problem)
        found.append(_neighbour_price(other, changed))
    return found


def _neighbour_price(question: Question, neighbour: Neighbour) -> NeighbourPrice:
    if neighbour.plan is None:
        return NeighbourPrice(change=neighbour.change, problem=neighbour.problem)
    found = priced(question.job(neighbour.plan))
    problem = "" if found.fits is not False else f"does not fit: {found.fit.why}"
    if found.fits is None:
        offloaded = found.ledger.offloaded
        places = (("host RAM", offloaded.host_bytes), ("disk", offloaded.disk_bytes))
        wanted = " and ".join(f"{gib(size)} GiB of {name}" for name, size in places if size)
        problem = f"if there are {wanted} per GPU"
    if found.fit.headroom_bytes < 0:
        memory = found.job.cluster.gpu.memory_bytes / GIB
        short = f"needs {gib(found.peak_bytes)} GiB; the card has {memory:.1f}"
        problem = f"does not fit: {short}; the largest entry is {largest(found.ledger).label}"
    return NeighbourPrice(
        change=neighbour.change,
        plan=neighbour.plan,
        seconds=found.price.seconds,
        peak_bytes=found.peak_bytes,
        fits=found.fits,
        problem=problem,
    )


def neighbours(question: Question, plan: Plan) -> Iterator[Neighbour]:
    """Each way to change one choice of a plan, whether or not it is legal, field by field."""
    for field in FIELDS:
        if field.when and not plan.uses(field.when):
            continue
        if field.name in OWN_WAYS:
            yield from OWN_WAYS[field.name](question, plan)
        value = getattr(plan, field.name)
        if field.halves:
            change, odd = (_moved, value % 2) if field.name in AXES else (_changed, 0)
            for other in (value * 2,) if odd else (value // 2, value * 2):
                if other >= 1:
                    yield change(question, plan, field.name, other)
        for other in field.others:
            if other != value:
                yield _changed(question, plan, field.name, other)


def smaller_microbatches(question: Question, plan: Plan) -> Iterator[Neighbour]:
    """The same batch in ever more and smaller microbatches."""
    for size in reversed(divisors(question.batch // plan.data)):
        if size < plan.microbatch:
            yield _changed(question, plan, "microbatch", size)


def _zeros(question: Question, plan: Plan) -> Iterator[Neighbour]:
    """One more or one less thing sharded; and between copies and shards where one of them is all there is."""
    if plan.data * plan.cp == 1:
        return
    if plan.zero == 0:
        yield _changed(question, plan, "zero", 1, shard=plan.replicate, replicate=1)
        yield _changed(question, plan, "zero", 3, shard=plan.replicate, replicate=1)
        return
    for other in (plan.zero - 1, plan.zero + 1):
        if other == 0:
            yield _changed(question, plan, "zero", 0, replicate=plan.data, shard=1)
        elif other <= 3:
            yield _changed(question, plan, "zero", other)
    if plan.shard % 2 == 0:
        yield _changed(question, plan, "shard", plan.shard // 2, replicate=plan.replicate * 2)
    if plan.replicate % 2 == 0:
        yield _changed(question, plan, "shard", plan.shard * 2, replicate=plan.replicate // 2)


def _schedules(question: Question, plan: Plan) -> Iterator[Neighbour]:
    for schedule in SCHEDULES:
        if schedule not in (plan.schedule, "naive"):
            yield _changed(question, plan, "schedule", schedule, chunks=default_chunks(schedule))
    for chunks in CHUNKS:
        if chunks > 1 and plan.chunks > 1 and chunks in (plan.chunks // 2, plan.chunks * 2):
            yield _changed(question, plan, "chunks", chunks)


def _activations(question: Question, plan: Plan) -> Iterator[Neighbour]:
    """A host whose memory nobody tells is not counted on."""
    if question.cluster.host_bytes:
        yield _changed(question, plan, "activation_offload", not plan.activation_offload)


def _states(question: Question, plan: Plan) -> Iterator[Neighbour]:
    """Where a single rank may keep its optimizer states, and who updates them there."""
    here = (plan.optimizer_offload, plan.optimizer_offload_update)
    for location, update in locations(question) if plan.world == 1 else ():
        if (location, update) != here and (location, here[0]) != ("none", "none"):
            found = _changed(question, plan, "optimizer_offload", location, optimizer_offload_update=update)
            words = f"{found.change}, updated on the {update}" if location != "none" else found.change
            yield msgspec.structs.replace(found, change=words)


OWN_WAYS: Mapping[str, Callable[[Question, Plan], Iterator[Neighbour]]] = {
    "zero": _zeros,
    "schedule": _schedules,
    "activation_offload": _activations,
    "optimizer_offload": _states,
}


def _moved(question: Question, plan: Plan, axis: str, degree: int) -> Neighbour:
    """Another degree of an axis, with the ranks taken from, or given to, those that read different samples."""
    old = getattr(plan, axis)
    if degree < old:
        lender = "shard" if plan.zero else "replicate"
        return _changed(question, plan, axis, degree, **{lender: getattr(plan, lender) * old // degree})
    for lender in ("shard", "replicate"):
        if getattr(plan, lender) % (degree // old) == 0:
            return _changed(question, plan, axis, degree, **{lender: getattr(plan, lender) * old // degree})
    return Neighbour(change=f"{axis} {old} → {degree}", problem="no data-parallel axis has the ranks for it")


def _changed(question: Question, plan: Plan, name: str, value: Any, **others: Any) -> Neighbour:
    change = f"{name} {_said(getattr(plan, name))} → {_said(value)}"
    changed = msgspec.structs.replace(plan, **{name: value}, **others)
    shared = plan.shards > 1 or not plan.zero  # else zero 3 has another purpose than to share
    if shared and changed.shard * changed.cp == 1 and changed.zero and name != "zero" and not changed.cpu_offload:
        changed = msgspec.structs.replace(changed, zero=0)
    if name in ("schedule", "pp") and plan.compile and "compile" not in question.fixed:
        order = PipelineChoice(changed.schedule, changed.chunks)
        changed = msgspec.structs.replace(changed, compile=compiles(question, changed.pp, order))
    return _completed(question, changed, change)


def _said(value: Any) -> str:
    """A value as run files have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _completed(question: Question, plan: Plan, change: str) -> Neighbour:
    """The same batch in as many microbatches as it now takes, the same layers in as many stages."""
    share, rest = divmod(question.batch, plan.data)
    if rest or share % plan.microbatch:
        per_rank = f"{plan.data} data-parallel ranks × microbatch {plan.microbatch}"
        return Neighbour(change=change, problem=f"batch {question.batch} is not a multiple of {per_rank}")
    stages = plan.pp * plan.chunks
    plan = msgspec.structs.replace(plan, grad_accum=share // plan.microbatch)
    if plan.pp == 1:
        plan = msgspec.structs.replace(plan, stages=(), chunks=1, schedule="1f1b")
    elif len(plan.stages) != stages:
        plan = msgspec.structs.replace(plan, stages=balanced_stages(question.arch, stages))
    if found := problems(question, plan):
        return Neighbour(change=change, problem=found[0].text)
    return Neighbour(change=change, plan=plan)


def nearest(question: Question, top: int = 3) -> list[Candidate]:
    """The plans that miss by the least memory, whatever the host."""
    question = question.with_unknown_host("too")
    room = MemoryBound(question)
    least: dict[float, PlanGroup] = {}
    for group in groups(question):
        for order in group.parts():
            for part in order.parts():
                least.setdefault(room.least(part), part)
    tried = [priced(question.job(least[size].plan(frugal_split(least[size])))) for size in sorted(least)[:TRIED]]
    return sorted(tried, key=lambda found: -found.fit.headroom_bytes)[:top]


def changes(question: Question, top: int = 3) -> list[SuggestedChange]:
    """The first few changes that let something fit for sure: what was fixed, machines, the sequence and the model."""
    return list(islice(_changes(question.with_unknown_host("never")), top))


def _changes(question: Question) -> Iterator[SuggestedChange]:
    for name, value in question.fixed.items():
        others = {key: kept for key, kept in question.fixed.items() if key != name}
        for found in search(msgspec.structs.replace(question, fixed=others), top=1).found:
            yield SuggestedChange(change=f"leave plan.{name} = {value} to the search", found=found)
    if (needed := gpus_needed(question)) is not None:
        gpus, answer = needed
        yield SuggestedChange(change=f"{gpus} of these GPUs", found=answer.found[0])
    yield from _larger_cards(question)
    if (longest := largest_sequence(question)) is not None:
        yield SuggestedChange(change=f"a sequence of {longest.value}", found=longest.found)
    if (model := largest_model(question)) is not None:
        yield SuggestedChange(change=f"{model.value} instead of this model", found=model.found)


def _larger_cards(question: Question) -> Iterator[SuggestedChange]:
    memory = question.cluster.gpu.memory_bytes
    if question.is_limited:  # no card lets more be used
        return
    for card in sorted(cards(), key=lambda card: card.gpu.memory_bytes):
        if card.gpu.memory_bytes <= memory or not card.gpu.peak(question.precision):
            continue
        name = f"{question.cluster.gpus}x{card.gpu.name}"
        machines = msgspec.structs.replace(card, gpus=question.cluster.gpus, name=name)
        answer = search(question.on(machines), top=1)
        if answer.found:
            yield SuggestedChange(change=f"{machines.name} instead", found=answer.found[0])
            return
