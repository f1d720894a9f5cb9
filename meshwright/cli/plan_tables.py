"""What `meshwright plan` prints for people, and a plan as scripts read it."""

from collections.abc import Iterable, Iterator

import msgspec

from meshwright.cli.query import PlanQuery
from meshwright.cost.layout import LABELS, LedgerEntry
from meshwright.hardware.cluster import Cluster
from meshwright.report.plan_charts import in_column
from meshwright.search import explain
from meshwright.search.best_first import ALIKE, KINDS, Candidate, SearchCounts, SearchResult, kind
from meshwright.search.explain import NeighbourPrice, SuggestedChange
from meshwright.search.question import Question
from meshwright.search.sizes import Duration, Layer
from meshwright.spec.optimizers import DESCRIPTIONS
from meshwright.spec.params import active, count
from meshwright.spec.plan import AXES, FIELDS, Plan
from meshwright.spec.units import GIB, gib, plural

UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
LINES = {  # the largest entry of a plan that does not fit, as the counts name it
    **LABELS,
    "states": "weights, gradients and optimizer states",
    "unreduced_grads": "unreduced gradients",
}
PLACES = {"host": "host RAM", "disk": "disk"}  # outside the device, as the counts name them
FABRICS = {  # links and networks by the beginning of their name in the catalogue
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "xgmi": "xGMI",
    "ici": "ICI",
    "neuronlink": "NeuronLink",
    "ib": "InfiniBand",
    "roce": "RoCE",
    "efa": "EFA",
    "ethernet": "Ethernet",
}
SAID_BEFORE = {"zero", "cp_kind", "schedule", "stages", "microbatch", "grad_accum", "precision", "kernels", *AXES, "ep"}


def plan_words(plan: Plan) -> str:
    """A plan without what is the same for all plans of a table."""
    used = [f"{name}={value}" for name in (*AXES, "ep") if (value := getattr(plan, name)) > 1]
    if plan.shards > 1 or plan.zero:  # on one shard, whether a gathered copy of the weights stays
        used.append(f"zero={plan.zero}")
    if plan.cp > 1:
        used.append(plan.cp_kind)
    if plan.pp > 1:
        used.append(plan.schedule + (f"×{plan.chunks}" if plan.chunks > 1 else ""))
    used.append(f"microbatch={plan.microbatch}×{plan.grad_accum}")
    used += [text for field in FIELDS if field.name not in SAID_BEFORE and (text := field.text(plan))]
    return " ".join(used)


def chosen(found: Candidate) -> dict[str, object]:
    """What a plan says of the numerics, by the names of a question."""
    job = found.job
    return {
        "batch": found.plan.batch,
        "precision": found.plan.precision,
        "master_weights": job.master_weights,
        "state_dtype": job.state_dtype,
    }


def found_words(found: Candidate, asked: Question) -> str:
    """A plan, and which of the numerics are not as they were asked."""
    other = [f"{name}={value}" for name, value in chosen(found).items() if value != getattr(asked, name)]
    return " ".join([plan_words(found.plan), *other])


def number(value: float) -> str:
    """Three digits, and a letter for the thousands."""
    for scale, letter in ((1e15, " P"), (1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def time(seconds: float) -> str:
    """In the unit in which the number is at least one."""
    for scale, unit in UNITS:
        if seconds >= scale:
            return f"{seconds / scale:,.{0 if seconds >= 100 * scale else 1}f} {unit}"
    return f"{seconds * 1e3:.3g} milliseconds"


def as_record(found: Candidate, why: str) -> dict[str, object]:
    """A plan as scripts read it."""
    price, ledger, fit = found.price, found.ledger, found.fit
    return {
        "plan": msgspec.to_builtins(found.plan),
        "kind": kind(found.plan),
        "words": plan_words(found.plan),
        "batch": found.plan.batch,
        "seconds": price.seconds,
        "low_seconds": price.low_seconds,
        "high_seconds": price.high_seconds,
        "tokens_per_second_per_gpu": price.tokens_per_second_per_gpu,
        "mfu": price.mfu,
        "mfu_causal": price.mfu_causal,
        "tflops": price.flops_per_second / 1e12,
        "hfu": price.hfu,
        "peak_bytes": found.peak_bytes,
        "allocated_bytes": ledger.allocated,
        "reserved_bytes": ledger.reserved,
        "ledger": msgspec.to_builtins(ledger.lines),
        "host_bytes": ledger.offloaded.host_bytes,
        "disk_bytes": ledger.offloaded.disk_bytes,
        "host": msgspec.to_builtins(ledger.offloaded.host),
        "disk": msgspec.to_builtins(ledger.offloaded.disk),
        "master_weights": found.job.master_weights,
        "state_dtype": found.job.state_dtype,
        "optimizer": DESCRIPTIONS[found.job.optimizer].name,
        "moment": ledger.moment,
        "role": ledger.role,
        "waterfall": msgspec.to_builtins(price.waterfall),
        "fits": fit.fits,
        "headroom_bytes": fit.headroom_bytes,
        "low_peak_bytes": round(found.peak_bytes * ledger.low),
        "high_peak_bytes": round(found.peak_bytes * ledger.high),
        "why": why,
    }


def fabric(name: str) -> str:
    """A link or a network as people call it."""
    if name.endswith("gbe") and name[:-3].isdecimal():
        return f"{name[:-3]} GbE"
    return next((known for begin, known in FABRICS.items() if name.startswith(begin)), name)


def _links(machines: Cluster) -> str:
    """What joins the GPUs of a cluster."""
    if machines.gpus == 1:
        return "1 GPU"
    inside = f"{fabric(machines.scale_up.name)} domain"
    if machines.gpus <= machines.domain:
        return f"{machines.gpus} GPUs in one {inside}"
    each = f"{machines.domain} GPUs per {inside}" if machines.domain > 1 else "1 GPU per node"
    return f"{each}, {fabric(machines.network.name)} between"


def plan_heading(put: PlanQuery, question: Question) -> Iterator[str]:
    """What was asked."""
    held, used = count(question.arch), active(question.arch)
    size = f"{number(held)} parameters" + (f", {number(used)} active" if used != held else "")
    machines = question.cluster
    yield f"{put.model} ({size}) on {machines.name} ({_links(machines)})"
    tokens = f"{question.tokens:,} tokens/step"
    yield f"sequence {question.sequence:,}, batch {question.batch:,} ({tokens}), {question.precision}"
    if question.vary:
        yield f"also search over: {', '.join(question.vary)}"
    if question.is_limited:
        yield f"memory limit: {gib(question.limit_bytes)} GiB per GPU (goal.memory_gib)"
    yield from without_rate(question)
    if machines.efficiency is not None:
        yield f"predicted from a measured profile ({machines.efficiency.name})"
    if put.approximate:
        yield f"approximate: {put.approximate}"
    if put.assumed:
        yield f"assumed: {', '.join(put.assumed)}"


def fitting(found: Candidate) -> str:
    """Whether a plan fits, and with how much room."""
    memory, margin = found.job.cluster.gpu.memory_bytes, found.ledger.high - 1
    if found.fits is False:
        return f"Does not fit: {lacking(found)}"
    room = f"{gib(found.peak_bytes)} of {gib(memory)} GiB per GPU, {gib(found.fit.headroom_bytes)} GiB headroom"
    if found.is_tight:
        return f"Fits by the estimate alone: {room}, less than the margin of {margin:.0%}: try it before relying on it."
    worst = gib(memory - found.peak_bytes * found.ledger.high)
    return f"Fits: {room}" + (f" ({worst} GiB if the prediction is {margin:.0%} too low)." if margin else ".")


def lacking(found: Candidate) -> str:
    """What a plan that does not fit lacks."""
    if found.fit.headroom_bytes >= 0:
        return f"{'the most loaded rank ' if found.fit.why.startswith('needs') else ''}{found.fit.why}."
    memory, short = found.job.cluster.gpu.memory_bytes, -found.fit.headroom_bytes
    return f"the most loaded rank needs {gib(memory + short)} GiB; the card has {gib(memory)} ({gib(short)} GiB short)."


def speed(found: Candidate) -> str:
    """How fast a plan is, with intervals."""
    price, tokens = found.price, found.plan.batch * found.job.sequence
    slow, fast = (price.seconds / each for each in (price.high_seconds, price.low_seconds))
    rate = tokens / price.seconds
    return (
        f"{in_column(price.seconds)} s/step ({in_column(price.low_seconds)} – {in_column(price.high_seconds)}), "
        f"{rate:,.0f} tokens/s ({rate * slow:,.0f} – {rate * fast:,.0f}), "
        f"MFU {price.mfu:.1%} ({price.mfu * slow:.1%} – {price.mfu * fast:.1%})"
    )


def without_rate(question: Question) -> Iterator[str]:
    """A precision that the machines are not known to have."""
    gpu = question.cluster.gpu
    if not gpu.peak(question.precision):
        yield f"{gpu.name} has no {question.precision} peak in the catalogue: predicted at the rate of what it has"


def ranking(answer: SearchResult, asked: Question, columns: int | None = None) -> Iterator[str]:
    """The best plans, best first; on a terminal with fewer columns than that takes, figures go below their plan."""
    plans = _distinct(answer, asked)
    width = max(map(len, [*plans, "plan"]))
    prices = [found.price for found in answer.found]
    intervals = [f"{in_column(price.low_seconds)} – {in_column(price.high_seconds)}" for price in prices]
    wide = max(map(len, [*intervals, "interval"]))
    names = f"{'s/step':>8}  {'interval':>{wide}}  {'tokens/s/GPU':>12}  {'MFU':>6}  {'GiB':>6}  {'headroom':>9}"
    is_narrow = columns is not None and width + len(names) + 6 > columns
    between = f"\n{'':>4}" if is_narrow else "  "
    said: set[str] = set()
    yield from f"{'':>2}  {'plan':<{width}}{between}{names}".splitlines()
    for place, (found, plan, interval) in enumerate(zip(answer.found, plans, intervals, strict=True), 1):
        price = found.price
        figures = (
            f"{in_column(price.seconds):>8}  {interval:>{wide}}  "
            f"{price.tokens_per_second_per_gpu:>12,.0f}  {price.mfu:>6.1%}  {gib(found.peak_bytes):>6}  "
            f"{gib(found.fit.headroom_bytes):>8}{'?' if found.is_tight else ' '}"
        )
        yield from f"{place:>2}  {plan:<{width}}{between}{figures}".splitlines()
        if (name := kind(found.plan)) not in said:
            said.add(name)
            yield f"    {name}: {KINDS[name]}"
    if any(found.is_tight for found in answer.found):
        yield "? = within the margin of the memory prediction: try it before relying on it."
    equal = f"Times within {ALIKE:.0%} count as equal"
    yield f"{equal}: then the simpler plan is first, then the faster, then the one with more headroom."
    if answer.left_out:
        reasons = dict.fromkeys(answer.left_out.values())
        names = {why: ", ".join(name for name in answer.left_out if answer.left_out[name] == why) for why in reasons}
        yield f"Left out: {'; '.join(f'{alike} ({why})' for why, alike in names.items())}."
    if (ties := explain.ties(answer)) > 1:
        yield f"{ties} of them lie within the interval of the first: measure before preferring one."


def _distinct(answer: SearchResult, asked: Question) -> list[str]:
    """Plans in words, with the numerics where one of them has them otherwise than asked."""
    words = [plan_words(found.plan) for found in answer.found]
    kinds = [chosen(found) for found in answer.found]
    for name in kinds[0] if kinds else ():
        if any(each[name] != getattr(asked, name) for each in kinds):
            words = [f"{word} {name}={each[name]}" for word, each in zip(words, kinds, strict=True)]
    return words


def counted(counts: SearchCounts) -> Iterator[str]:
    """What became of all plans."""
    yield f"{counts.legal:,} legal plans:"
    for line, plans in counts.too_large.items():
        largest = LINES.get(line, line.replace("_", " "))
        why = f"too little {PLACES[line]}" if line in PLACES else f"the largest entry is {largest}"
        yield f"{plans:>12,}  do not fit: {why}"
    yield f"{counts.slower:>12,}  pruned by lower bound: slower than the ones above"
    yield f"{counts.priced:>12,}  fully evaluated"


def neighbours(base: Candidate, others: Iterable[NeighbourPrice]) -> Iterator[str]:
    """What each changed choice would cost."""
    others = list(others)
    width = max((len(each.change) for each in others), default=0)
    for each in others:
        if each.plan is None or each.fits is False:
            yield f"  {each.change:<{width}}  {each.problem}"
            continue
        change = each.seconds / base.price.seconds - 1
        cost = f"{in_column(each.seconds):>7} s  {change:>+7.1%}  {gib(each.peak_bytes):>6} GiB"
        yield f"  {each.change:<{width}}  {cost}" + (f", {each.problem}" if each.problem else "")


def ledger(found: Candidate) -> Iterator[str]:
    """Every entry of the most loaded rank's memory, and whether it fits."""
    memory = found.job.cluster.gpu.memory_bytes
    role = "" if found.ledger.role == "only" else f" ({found.ledger.role} pipeline rank)"
    yield f"memory of the most loaded rank{role}, at {found.ledger.moment}:"
    yield from (_entry(line) for line in found.ledger.lines if line.bytes)
    allocated, reserved, driver = found.ledger.allocated, found.ledger.reserved, found.ledger.shown
    kinds = (("allocated", allocated), ("reserved", reserved), ("nvidia-smi", driver))
    yield "  " + ", ".join(f"{name} {gib(size)}" for name, size in kinds) + f" of {gib(memory)} GiB"
    yield from _offloaded(found)
    fits = {True: "yes", False: "no", None: "on the GPU, host memory not known"}[found.fits]
    amount = "headroom" if found.fit.headroom_bytes >= 0 else "short"
    doubt = " (within the error of the prediction)" if found.is_tight else ""
    yield f"fits: {fits}, {gib(abs(found.fit.headroom_bytes))} GiB {amount}{doubt}"


def _offloaded(found: Candidate) -> Iterator[str]:
    """What is offloaded, beside a GPU's share of its node."""
    cluster, offloaded = found.job.cluster, found.ledger.offloaded
    for place, lines, room in (
        ("host", offloaded.host, cluster.host_bytes),
        ("disk", offloaded.disk, cluster.disk_bytes),
    ):
        if lines:
            have = f"{gib(room)} there" if room else f"yours is unknown: set {place}_gib"
            yield f"needs {gib(sum(line.bytes for line in lines))} GiB of {PLACES[place]} per GPU ({have}):"
            yield from map(_entry, lines)


def _entry(line: LedgerEntry) -> str:
    return f"  {line.label:<22}{gib(line.bytes):>8} GiB  {line.why}"


def waterfall(found: Candidate) -> Iterator[str]:
    """Where the seconds go."""
    price = found.price
    yield (
        f"time: {in_column(price.seconds)} s/step ({in_column(price.low_seconds)} – {in_column(price.high_seconds)}), "
        f"{price.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
        f"MFU {price.mfu:.1%} (attention in full), {price.mfu_causal:.1%} (causal: "
        f"{price.flops_per_second / 1e12:,.0f} TFLOP/s), HFU {price.hfu:.1%}"
    )
    for share in price.waterfall:
        yield f"  {share.label:<15}{in_column(share.seconds):>8} s  {share.seconds / price.seconds:>6.1%}  {share.why}"


def missed(misses: Iterable[Candidate], suggestions: Iterable[SuggestedChange], asked: Question) -> Iterator[str]:
    """What to do when nothing fits."""
    yield "The nearest:"
    for found in misses:
        yield f"  {plan_words(found.plan)}: {explain.room(found)}"
    yield "What would fit:"
    for each in suggestions:
        price, headroom = each.found.price, gib(each.found.fit.headroom_bytes)
        plan = found_words(each.found, asked)
        yield f"  {each.change}: {plan}, {in_column(price.seconds)} s/step, {headroom} GiB headroom"


def lasting(span: Duration) -> str:
    """How long and how much."""
    return (
        f"{number(span.tokens)} tokens: {plural(span.steps, 'step')}, {time(span.seconds)} "
        f"({time(span.low_seconds)} – {time(span.high_seconds)}), {span.gpu_hours:,.0f} GPU-hours"
        + (f", {span.dollars:,.0f} dollars" if span.dollars is not None else "")
    )


def layer_table(layers: tuple[Layer, ...]) -> Iterator[str]:
    """The model from the bottom to the top."""
    columns = f"{'FLOPs/token':>14}{'states GiB':>12}{'activations MiB/sequence':>26}"
    yield f"{'layer':<20}{'count':>6}{'parameters':>18}{columns}"
    for layer in layers:
        yield (
            f"{layer.name:<20}{layer.count:>6}{layer.parameters:>18,}{number(layer.flops_per_token):>14}"
            f"{layer.state_bytes / GIB:>12.2f}{layer.activation_bytes / 2**20:>26,.1f}"
        )
    total = sum(layer.count * layer.parameters for layer in layers)
    flops = sum(layer.count * layer.flops_per_token for layer in layers)
    states = sum(layer.count * layer.state_bytes for layer in layers)
    saved = sum(layer.count * layer.activation_bytes for layer in layers)
    yield f"{'total':<26}{total:>18,}{number(flops):>14}{states / GIB:>12.2f}{saved / 2**20:>26,.1f}"
