"""The well-known closed forms for a job, named, cited and selectable, beside the exact ledger.

They leave out what the ledger does not (stages that differ, moments that do not coincide, kernels that keep less), and
are what papers, talks and notes quote. Each entry says where it comes from and what to mind.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from meshwright.cost.activations import activation_policy
from meshwright.cost.job import Job
from meshwright.spec.arch import Arch
from meshwright.spec.optimizers import DESCRIPTIONS
from meshwright.spec.params import active, count, params


def gpt_parameters(layers: int, hidden: int, vocab: int, sequence: int) -> float:
    """12·L·h²·(1 + 13/(12h) + (V + s)/(12·L·h)): a GPT with biases, learned positions and a tied output."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + sequence) / (12 * layers * hidden))


def untied_parameters(layers: int, hidden: int, vocab: int, sequence: int) -> float:
    """The same with an output projection of its own and the norm before it: the GPT of the notes' worked example."""
    return gpt_parameters(layers, hidden, vocab, sequence) + vocab * hidden + 2 * hidden


def notes_parameters(layers: int, hidden: int, vocab: int) -> float:
    """V·E + E + L·(8.5·E² + 2·E): the decoder of the notes' memory formula."""
    return vocab * hidden + hidden + layers * (8.5 * hidden**2 + 2 * hidden)


ADAM_STATES = 2.0  # elements of its states for a parameter
States = Literal["fp32", "notes", "exact", "megatron", "bf16"]
# Bytes of a parameter and its gradient, then of an element of each of the optimizer's states, by who counts.
STATES: dict[States, tuple[float, int]] = {
    "fp32": (8.0, 4),  # 4 weight, 4 gradient
    "notes": (12.0, 4),  # 2 + 4 weight, 4 master copy, counted twice, 2 gradient
    "exact": (8.0, 4),  # 2 weight, 2 gradient, 4 master
    "megatron": (10.0, 4),  # the same with gradients summed in fp32
    "bf16": (4.0, 2),  # 2 weight, 2 gradient: everything in bf16
}


def states_bytes(parameters: float, counting: States = "exact", each: float = ADAM_STATES) -> float:
    """Model states without sharding: under Adam 16, 20, 16, 18 and 8 bytes a parameter.

    `each`: elements of the optimizer's states for a parameter, on average where parameters differ.
    """
    fixed, width = STATES[counting]
    return parameters * (fixed + width * each)


def zero_bytes(parameters: float, ranks: int, stage: Literal[0, 1, 2, 3], states: float = ADAM_STATES) -> float:
    """Model states of one rank under ZeRO: 4 + K, 4 + K/N, 2 + (2 + K)/N, (4 + K)/N bytes each; Adam's K is 12."""
    kept = 4.0 + 4 * states
    each = {0: 4 + kept, 1: 4 + kept / ranks, 2: 2 + (2 + kept) / ranks, 3: (4 + kept) / ranks}[stage]
    return parameters * each


def activation_bytes(shape: tuple[int, int, int, int], tp: int = 1, kind: str = "tensor") -> float:
    """Activations of one layer, 2 bytes an element, for a shape (s, b, h, a).

    "tensor": sbh(10 + 24/t + 5as/(ht)). "sequence": sbh/t·(34 + 5as/h). "flash" and "selective": the same without the
    scores. "full": 2sbh, the layer's input alone.
    """
    sequence, microbatch, hidden, heads = shape
    tokens = sequence * microbatch * hidden
    scores = 5 * heads * sequence / hidden
    kinds = {"tensor": 10 + 24 / tp + scores / tp, "sequence": (34 + scores) / tp, "flash": 10 + 24 / tp}
    kinds |= {"selective": 34 / tp, "full": 2.0}
    return tokens * kinds[kind]


def feed_forward_bytes(layers: int, width: int, tokens: int) -> float:
    """2·L·width·tokens: what the feed-forward layers keep at 2 bytes an element."""
    return 2.0 * layers * width * tokens


def notes_memory(parameters: float, batch: int, shape: tuple[int, int, int, int], vocab: int) -> float:
    """(4·P + 2·B·C·(2·V + l·(6e + h·C)))·2 bytes, for a shape (C, e, h, l): context, width, heads, layers."""
    context, width, heads, layers = shape
    return (4 * parameters + 2 * batch * context * (2 * vocab + layers * (6 * width + heads * context))) * 2


def bubble(pp: int, microbatches: int, chunks: int = 1) -> float:
    """The idle share of a pipelined step, (p − 1)/(v·m + p − 1)."""
    return (pp - 1) / (chunks * microbatches + pp - 1)


def bubble_over_ideal(pp: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time ÷ useful time, (p − 1)/(v·m): the other way in which papers print it."""
    return (pp - 1) / (chunks * microbatches)


def segment_memory(layers: int, segments: int) -> float:
    """Layers' worth of activations that live at most: one input a segment, and one segment whole."""
    return segments + math.ceil(layers / segments)


def sqrt_segments(layers: int) -> int:
    """The number of segments that makes `segment_memory` least: about √L."""
    return max(round(math.sqrt(layers)), 1)


def recompute_layers(layers: int, segments: int, keeps_segment: bool) -> float:
    """Layers recomputed in one backward.

    A segment that is kept while it is walked back costs one extra forward, L. One that keeps nothing inside computes
    each layer's input from the segment's: about L²/(2·C), which is L·√L/2 with √L segments.
    """
    if keeps_segment:
        return float(layers)
    length = layers / segments
    return segments * length * (length + 1) / 2


def training_flops(parameters: float, tokens: float, recompute: bool = False) -> float:
    """6·N·D; with every layer computed once more, 8·N·D."""
    return (8 if recompute else 6) * parameters * tokens


def palm_flops_per_token(parameters: float, layers: int, width: int, sequence: int) -> float:
    """6·N + 12·L·H·Q·s: with attention, as if it looked at all tokens."""
    return 6 * parameters + 12 * layers * width * sequence


def megatron_flops(shape: tuple[int, int, int, int, int], recompute: bool = True) -> float:
    """96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)) of a step, for a shape (B, s, l, h, V); 72 and V/12 without recomputing."""
    batch, sequence, layers, hidden, vocab = shape
    whole, head = (96, 16) if recompute else (72, 12)
    share = 1 + sequence / (6 * hidden) + vocab / (head * layers * hidden)
    return whole * batch * sequence * layers * hidden**2 * share


def training_seconds(tokens: float, parameters: float, gpus: int, flops_per_second: float) -> float:
    """8·T·P/(n·X): how long a run takes that recomputes every layer, at X achieved on each of n GPUs."""
    return 8 * tokens * parameters / (gpus * flops_per_second)


def ring_bytes(size: float, ranks: int) -> float:
    """What one rank sends in an all-reduce, 2·(N − 1)/N of the buffer; half of it for a gather or a scatter."""
    return 2 * size * (ranks - 1) / ranks


def checkpoint_interval(save_seconds: float, failure_seconds: float) -> float:
    """√(2·δ·M): how long to work between saves that take δ, when something fails every M."""
    return math.sqrt(2 * save_seconds * failure_seconds)


def goodput(interval: float, save_seconds: float, restart_seconds: float, failure_seconds: float) -> float:
    """The useful share of time: 1 − δ/τ − (τ/2 + R)/M, to first order."""
    return max(1 - save_seconds / interval - (interval / 2 + restart_seconds) / failure_seconds, 0.0)


NOTES = "notes"  # five study notes, 000 to 004, that this project began with; docs/textbook.md says what each holds
MEGATRON = "Narayanan et al. 2021 (Megatron-LM)"
KORTHIKANTI = "Korthikanti et al. 2022"
ZERO = "Rajbhandari et al. 2020 (ZeRO)"
PALM = "Chowdhery et al. 2022 (PaLM), appendix B"
NOTICES: dict[str, str] = {
    "gpt-parameters": "For a GPT with biases, learned positions and a tied output; the last norm is left out.",
    "gpt-parameters-untied": "The notes' first GPT has 147 million parameters (147,675,648) only with an untied output "
    "projection; tied it has 116.6 million.",
    "notes-parameters": "All three counts of the notes fit it. They print 4,769,521,664 beside embed-dim 2048, and the "
    "number belongs to 4096; 2048 gives 1,243,910,144.",
    "states-exact": "16 bytes with bf16 gradients. Schemes differ: the notes count 8 (all bf16), 16 and 20.",
    "states-megatron": "Gradients are summed in fp32, so 18.",
    "states-notes": "Counts the fp32 master copy twice: once as (2 + 4) of the model, once inside Adam's 12. Exact is "
    "16, or 18 with fp32 gradients. For the notes' GPT it hides behind activations: 25.29 GB, against 24.70 and 24.99. "
    "That mixed precision takes more memory is true of these states alone: activations halve.",
    "states-bf16": "Weights, gradients and moments all in bf16: 10 billion parameters fill 80 GB with nothing else. "
    "Updates smaller than a part in 256 of a weight are lost.",
    "zero-1": "4 × less is the limit for many ranks: 64 ranks save 3.8 ×.",
    "zero-2": "8 × less is the limit for many ranks: 64 ranks save 7.2 ×.",
    "zero-3": "Weights are all-gathered where the notes say broadcast. Hybrid sharding, inside a node only, is MiCS; "
    "the notes call it ZeRO++, whose secondary shards are torch's reshard_after_forward = a number of ranks.",
    "activations": "The notes' text leaves out the 10, and their worked number needs it: 349,175,808 bytes a sample, "
    "301,989,888 without. Without flash attention; GELU, dropout and 4·h are assumed.",
    "activations-flash": "Without the scores, which flash attention never stores.",
    "activations-selective": "Attention is recomputed from its inputs, with sequence parallelism.",
    "activations-full": "Only the input of each layer; while one layer is walked back it is whole for a moment.",
    "feed-forward": "The notes take 4·h for Llama 3 405B and find 63.0 GiB; its real width, 53,248, gives 51.2 GiB.",
    "notes-memory": "What the notes call samples a second there (482,427 on one GPU) must be tokens, and 2.198 × on "
    "two GPUs is more than two can give: the figure for one GPU was taken too early.",
    "notes-total": "With states that count the master copy twice; the factor 1.2 is a margin, not a measurement.",
    "sqrt-recompute": "At its best 2·√L instead of L.",
    "recompute-once": "A segment is kept while it is walked back: one extra forward.",
    "recompute-each": "Nothing is kept inside a segment, so every layer starts again from the segment's input. Two "
    "assumptions, two costs: no contradiction in the notes.",
    "bubble": "Interleaving divides it by the stages of a rank, and sends as many times more messages.",
    "bubble-over-ideal": "Papers print this or the share of the whole step; they differ by a factor of 1 + itself.",
    "batch": "With accumulation the backward runs for every microbatch and the optimizer once; the notes say that the "
    "backward is calculated at the last one. Skipping the sums in between is a choice (no_sync), not what DDP does "
    "by itself.",
    "6nd": "Counts neither attention nor recomputation.",
    "palm-flops": "Counts attention over the whole sequence; a causal kernel does half of that.",
    "megatron-flops": "96 holds where every layer is computed twice; percent of peak from it counts that work as well.",
    "data-traffic": "Sums of gradients, 2 bytes each; ZeRO-3 gathers weights twice more: half as much again.",
    "checkpoint-interval": "For saves of a minute and a failure in 50,000 hours of one GPU: measure your own.",
    "goodput": "To first order, with ten minutes to come back.",
}


class TextbookEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One closed form with a job's numbers in it."""

    name: str
    value: float
    unit: str
    formula: str
    source: str
    note: str = ""
    misfit: str = ""  # why the form does not apply to this model; "": it does

    @property
    def amount(self) -> str:
        """The value as people read it: counts in full, the rest to six digits."""
        is_count = self.unit.startswith(("parameters", "bytes", "sequences"))
        return f"{self.value:,.0f} {self.unit}" if is_count else f"{self.value:,.6g} {self.unit}"


HOUR = 3600.0
FAILURE_HOURS = 50_000  # of one GPU
SAVE_SECONDS, RESTART_SECONDS = 60.0, 600.0


class Form(NamedTuple):
    """A closed form of a job; `formula` may name sizes of the optimizer's states, as `_sizes` has them."""

    value: Callable[[Job], float]
    unit: str
    formula: str
    source: str


def table(job: Job) -> list[TextbookEntry]:
    """Every closed form that says something about a job; those made for another architecture are marked."""
    silent = ("bubble", "bubble-over-ideal") if job.plan.pp == 1 else ()
    silent += ("zero-1", "zero-2", "zero-3", "data-traffic") if job.plan.data == 1 else ()
    return [entry(name, job) for name in FORMS if name not in silent]


def entry(name: str, job: Job) -> TextbookEntry:
    """One closed form by its name, marked where it does not apply to the model."""
    form, arch = FORMS[name], job.arch
    value = form.value(job)
    misfit = "; ".join(said for kind in ASSUMES.get(name, ()) if (said := ASSUMED[kind](arch)))
    if form.unit == "parameters" and abs(value - count(arch)) > 2 * arch.hidden:  # a form may leave the last norm out
        misfit = f"this model has {count(arch):,} parameters; the form is for another architecture"
    note = NOTICES.get(name, "")
    if name.startswith(("states", "zero-")) and job.optimizer != "adamw":
        note = f"With Adam: {note}"
    return TextbookEntry(
        name=name,
        value=value,
        unit=form.unit,
        formula=form.formula.format(**_sizes(job)),
        source=form.source,
        note=note,
        misfit=misfit,
    )


# What forms take for granted of a model, and what to say of one that is otherwise.
ASSUMED: dict[str, Callable[[Arch], str]] = {
    "4·h": lambda arch: "" if arch.ffn == 4 * arch.hidden else f"the feed-forward is {arch.ffn:,} wide, not 4·h",
    "gelu": lambda arch: "the feed-forward is gated: three matrices, not two" if arch.gated else "",
    "heads": lambda arch: (
        f"{arch.kv_heads} heads of keys and values, not {arch.heads}" if arch.kv_heads != arch.heads else ""
    ),
    "dense": lambda arch: "feed-forwards are experts (MoE)" if arch.experts else "",
}
LAYER = ("4·h", "gelu", "heads", "dense")  # the layer of GPT-2 and GPT-3
ASSUMES: dict[str, tuple[str, ...]] = {
    "activations": LAYER,
    "activations-sequence": LAYER,
    "activations-flash": LAYER,
    "activations-selective": LAYER,
    "notes-total": LAYER,
    "megatron-flops": LAYER,
    "feed-forward": ("4·h", "dense"),
    "notes-memory": ("dense",),
}


def state_elements(job: Job) -> float:
    """Elements of the optimizer's states for a parameter of the model, on average."""
    return DESCRIPTIONS[job.optimizer].total_bytes(params(job.arch), 1) / count(job.arch)


def _sizes(job: Job) -> dict[str, str]:
    """What formulas name: bytes of optimizer states, alone and with others, and factors of Megatron's FLOPs."""
    each = state_elements(job)
    states = round(4 * each, 3)
    sizes = {"states": states, "states16": round(2 * each, 3), "master": 4 + states, "grads": 6 + states}
    megatron = {"whole": 96, "head": 16} if _recomputes(job) else {"whole": 72, "head": 12}
    sizes |= {"all": 8 + states, "notes": round(states_bytes(1, "notes", each), 3), **megatron}
    return {name: f"{size:g}" for name, size in sizes.items()}


def _recomputes(job: Job) -> bool:
    return activation_policy(job).recompute == "full"


def _states(counting: States, formula: str, source: str) -> Form:
    def value(job: Job) -> float:
        return states_bytes(count(job.arch), counting, state_elements(job))

    return Form(value, "bytes", formula, source)


def _zero(stage: Literal[1, 2, 3], formula: str) -> Form:
    def value(job: Job) -> float:
        return zero_bytes(count(job.arch), job.plan.data, stage, state_elements(job))

    return Form(value, "bytes a rank", formula, ZERO)


def _activations(kind: str, formula: str) -> Form:
    def value(job: Job) -> float:
        shape = (job.sequence, job.plan.microbatch, job.arch.hidden, job.arch.heads)
        return job.arch.layers * activation_bytes(shape, job.plan.tp, kind)

    return Form(value, "bytes", f"L · {formula}", KORTHIKANTI)


def _recompute(keeps_segment: bool, formula: str, source: str) -> Form:
    def value(job: Job) -> float:
        return recompute_layers(job.arch.layers, sqrt_segments(job.arch.layers), keeps_segment)

    return Form(value, "layers recomputed", formula, source)


def _dims(job: Job) -> tuple[int, int, int]:
    return job.arch.layers, job.arch.hidden, job.arch.vocab


def _tokens(job: Job) -> float:
    return float(job.plan.batch * job.sequence)


def _failure_seconds(job: Job) -> float:
    return FAILURE_HOURS * HOUR / job.cluster.gpus


def _notes_memory(job: Job) -> float:
    arch = job.arch
    shape = (job.sequence, arch.hidden, arch.heads, arch.layers)
    return notes_memory(count(arch), job.plan.microbatch, shape, arch.vocab)


def _notes_total(job: Job) -> float:
    """Model, optimizer, gradients and activations, and a fifth more."""
    return (FORMS["states-notes"].value(job) + FORMS["activations"].value(job)) * 1.2


def _palm(job: Job) -> float:
    arch = job.arch
    return palm_flops_per_token(active(arch), arch.layers, arch.q_width, job.sequence) * _tokens(job)


def _megatron(job: Job) -> float:
    shape = (job.plan.batch, job.sequence, *_dims(job))
    return megatron_flops(shape, _recomputes(job))


def _goodput(job: Job) -> float:
    failures = _failure_seconds(job)
    return goodput(checkpoint_interval(SAVE_SECONDS, failures), SAVE_SECONDS, RESTART_SECONDS, failures)


FORMS: dict[str, Form] = {
    "gpt-parameters": Form(
        lambda job: gpt_parameters(*_dims(job), job.arch.context),
        "parameters",
        "12·L·h²·(1 + 13/(12h) + (V + s)/(12·L·h))",
        MEGATRON,
    ),
    "gpt-parameters-untied": Form(
        lambda job: untied_parameters(*_dims(job), job.arch.context),
        "parameters",
        "12·L·h²·(1 + 13/(12h) + (V + s)/(12·L·h)) + V·h + 2·h",
        f"{NOTES} 002",
    ),
    "notes-parameters": Form(
        lambda job: notes_parameters(*_dims(job)), "parameters", "V·E + E + L·(8.5·E² + 2·E)", f"{NOTES} 004"
    ),
    "states-exact": _states("exact", "(2 + 2 + 4 + {states})·P", ZERO),
    "states-megatron": _states("megatron", "(2 + 4 + 4 + {states})·P", "Megatron-LM"),
    "states-notes": _states("notes", "(2 + 4 + {master} + 2)·P", f"{NOTES} 002"),
    "states-bf16": _states("bf16", "(2 + 2 + {states16})·P", f"{NOTES} 003"),
    "zero-1": _zero(1, "(4 + {master}/N)·P"),
    "zero-2": _zero(2, "(2 + {grads}/N)·P"),
    "zero-3": _zero(3, "{all}/N·P"),
    "activations": _activations("tensor", "s·b·h·(10 + 24/t + 5as/(ht))"),
    "activations-sequence": _activations("sequence", "s·b·h/t·(34 + 5as/h)"),
    "activations-flash": _activations("flash", "s·b·h·(10 + 24/t)"),
    "activations-selective": _activations("selective", "s·b·h·34/t"),
    "activations-full": _activations("full", "2·s·b·h"),
    "feed-forward": Form(
        lambda job: feed_forward_bytes(job.arch.layers, 4 * job.arch.hidden, job.sequence * job.plan.microbatch),
        "bytes",
        "2·L·(4·h)·tokens",
        f"{NOTES} 003",
    ),
    "notes-memory": Form(_notes_memory, "bytes", "(4·P + 2·B·C·(2·V + l·(6e + h·C)))·2", f"{NOTES} 004"),
    "notes-model-only": Form(lambda job: 8.0 * count(job.arch), "bytes", "4·P·2", f"{NOTES} 004"),
    "notes-total": Form(_notes_total, "bytes", "({notes}·P + s·b·h·L·(10 + 24/t + 5as/(ht))) · 1.2", f"{NOTES} 002"),
    "sqrt-recompute": Form(
        lambda job: segment_memory(job.arch.layers, sqrt_segments(job.arch.layers)),
        "layers' activations",
        "C + ⌈L/C⌉ with C = √L",
        "Chen et al. 2016",
    ),
    "recompute-once": _recompute(True, "L", f"{NOTES} 002"),
    "recompute-each": _recompute(False, "L²/(2·C) with C = √L", f"{NOTES} 003"),
    "bubble": Form(
        lambda job: bubble(job.plan.pp, job.plan.grad_accum, job.plan.chunks),
        "of the step",
        "(p − 1)/(v·m + p − 1)",
        MEGATRON,
    ),
    "bubble-over-ideal": Form(
        lambda job: bubble_over_ideal(job.plan.pp, job.plan.grad_accum, job.plan.chunks),
        "of the useful time",
        "(p − 1)/(v·m)",
        MEGATRON,
    ),
    "batch": Form(lambda job: job.plan.batch, "sequences/step", "microbatch · grad_accum · data ranks", f"{NOTES} 002"),
    "6nd": Form(
        lambda job: training_flops(active(job.arch), _tokens(job)), "FLOPs/step", "6·N·D", "Kaplan et al. 2020"
    ),
    "palm-flops": Form(_palm, "FLOPs/step", "(6·N + 12·L·H·Q·s)·D", PALM),
    "megatron-flops": Form(_megatron, "FLOPs/step", "{whole}·B·s·l·h²·(1 + s/(6h) + V/({head}·l·h))", MEGATRON),
    "data-traffic": Form(
        lambda job: ring_bytes(2.0 * count(job.arch), job.plan.data), "bytes a rank sends", "2·(N − 1)/N · 2·P", ZERO
    ),
    "checkpoint-interval": Form(
        lambda job: checkpoint_interval(SAVE_SECONDS, _failure_seconds(job)),
        "seconds",
        "√(2·δ·M)",
        "Young 1974, Daly 2006",
    ),
    "goodput": Form(_goodput, "of the time", "1 − δ/τ − (τ/2 + R)/M", "Young 1974, Daly 2006"),
}
