"""The well-known closed forms for a job, named, cited and selectable, beside the exact ledger.

They leave out what the ledger does not (stages that differ, moments that do not coincide, kernels that keep less), and
are what papers, talks and notes quote. Each entry says where it comes from and what to mind.
"""

from collections.abc import Callable

import msgspec

from meshwright.cost import textbook_forms as forms
from meshwright.cost.job import Job
from meshwright.cost.textbook_notes import KORTHIKANTI, MEGATRON, NOTES, NOTICES, PALM, ZERO
from meshwright.spec.params import active, count


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One closed form with a job's numbers in it."""

    name: str
    value: float
    unit: str
    formula: str
    source: str
    note: str = ""


Form = Callable[[Job], Entry]
HOUR = 3600.0


def table(job: Job) -> list[Entry]:
    """Every closed form that says something about a job."""
    return [form(job) for name, form in FORMS.items() if name not in _silent(job)]


def entry(name: str, job: Job) -> Entry:
    """One closed form by its name."""
    return FORMS[name](job)


def _silent(job: Job) -> set[str]:
    """Forms that would say nothing: of pipelines without stages, of sharding without ranks to share."""
    plan = job.plan
    names = set()
    if plan.pp == 1:
        names |= {"bubble", "bubble-over-ideal"}
    if plan.data == 1:
        names |= {"zero-1", "zero-2", "zero-3", "data-traffic"}
    return names


def _entry(name: str, value: float, unit: str, formula: str, source: str) -> Entry:
    return Entry(name=name, value=value, unit=unit, formula=formula, source=source, note=NOTICES.get(name, ""))


def _parameters(job: Job) -> Entry:
    arch = job.arch
    value = forms.gpt_parameters(arch.layers, arch.hidden, arch.vocab, arch.context)
    return _entry("gpt-parameters", value, "parameters", "12·L·h²·(1 + 13/(12h) + (V + s)/(12·L·h))", MEGATRON)


def _notes_parameters(job: Job) -> Entry:
    arch = job.arch
    value = forms.notes_parameters(arch.layers, arch.hidden, arch.vocab)
    return _entry("notes-parameters", value, "parameters", "V·E + E + L·(8.5·E² + 2·E)", f"{NOTES} 004")


def _states(name: str, counting: forms.States, formula: str, source: str) -> Form:
    return lambda job: _entry(name, forms.states_bytes(count(job.arch), counting), "bytes", formula, source)


def _zero(stage: int, formula: str) -> Form:
    def filled(job: Job) -> Entry:
        value = forms.zero_bytes(count(job.arch), job.plan.data, stage)  # pyright: ignore[reportArgumentType]
        return _entry(f"zero-{stage}", value, "bytes a rank", formula, ZERO)

    return filled


def _activations(name: str, kind: str, formula: str, source: str = KORTHIKANTI) -> Form:
    def filled(job: Job) -> Entry:
        arch, plan = job.arch, job.plan
        shape = (job.sequence, plan.microbatch, arch.hidden, arch.heads)
        value = arch.layers * forms.activation_bytes(shape, plan.tp, kind)
        return _entry(name, value, "bytes", f"L · {formula}", source)

    return filled


def _feed_forward(job: Job) -> Entry:
    tokens = job.sequence * job.plan.microbatch
    value = forms.feed_forward_bytes(job.arch.layers, 4 * job.arch.hidden, tokens)
    return _entry("feed-forward", value, "bytes", "2·L·(4·h)·tokens", f"{NOTES} 003")


def _notes_memory(job: Job) -> Entry:
    arch = job.arch
    shape = (job.sequence, arch.hidden, arch.heads, arch.layers)
    value = forms.notes_memory(count(arch), job.plan.microbatch, shape, arch.vocab)
    return _entry("notes-memory", value, "bytes", "(4·P + 2·B·C·(2·V + l·(6e + h·C)))·2", f"{NOTES} 004")


def _notes_model(job: Job) -> Entry:
    return _entry("notes-model-only", 8.0 * count(job.arch), "bytes", "4·P·2", f"{NOTES} 004")


def _notes_total(job: Job) -> Entry:
    """Model, optimizer, gradients and activations, and a fifth more."""
    states = forms.states_bytes(count(job.arch), "notes")
    value = (states + _activations("", "tensor", "")(job).value) * 1.2
    return _entry("notes-total", value, "bytes", "(20·P + s·b·h·L·(10 + 24/t + 5as/(ht))) · 1.2", f"{NOTES} 002")


def _bubble(job: Job) -> Entry:
    plan = job.plan
    value = forms.bubble(plan.pp, plan.accumulate, plan.chunks)
    return _entry("bubble", value, "of the step", "(p − 1)/(v·m + p − 1)", MEGATRON)


def _bubble_over_ideal(job: Job) -> Entry:
    plan = job.plan
    value = forms.bubble_over_ideal(plan.pp, plan.accumulate, plan.chunks)
    return _entry("bubble-over-ideal", value, "of the useful time", "(p − 1)/(v·m)", MEGATRON)


def _sqrt(job: Job) -> Entry:
    segments = forms.sqrt_segments(job.arch.layers)
    value = forms.segment_memory(job.arch.layers, segments)
    return _entry("sqrt-recompute", value, "layers' activations", "C + ⌈L/C⌉ with C = √L", "Chen et al. 2016")


def _recompute(name: str, keeps: bool, formula: str, source: str) -> Form:
    def filled(job: Job) -> Entry:
        layers = job.arch.layers
        value = forms.recompute_layers(layers, forms.sqrt_segments(layers), keeps)
        return _entry(name, value, "layers computed anew", formula, source)

    return filled


def _tokens(job: Job) -> float:
    return float(job.plan.batch * job.sequence)


def _six(job: Job) -> Entry:
    value = forms.training_flops(active(job.arch), _tokens(job))
    return _entry("6nd", value, "FLOPs a step", "6·N·D", "Kaplan et al. 2020")


def _palm(job: Job) -> Entry:
    arch = job.arch
    value = forms.palm_flops_per_token(active(arch), arch.layers, arch.q_width, job.sequence) * _tokens(job)
    return _entry("palm-flops", value, "FLOPs a step", "(6·N + 12·L·H·Q·s)·D", PALM)


def _megatron(job: Job) -> Entry:
    arch = job.arch
    recompute = job.plan.recompute == "full"
    shape = (job.plan.batch, job.sequence, arch.layers, arch.hidden, arch.vocab)
    formula = "96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h))" if recompute else "72·B·s·l·h²·(1 + s/(6h) + V/(12·l·h))"
    return _entry("megatron-flops", forms.megatron_flops(shape, recompute), "FLOPs a step", formula, MEGATRON)


def _traffic(job: Job) -> Entry:
    value = forms.ring_bytes(2.0 * count(job.arch), job.plan.data)
    return _entry("data-traffic", value, "bytes a rank sends", "2·(N − 1)/N · 2·P", ZERO)


def _batch(job: Job) -> Entry:
    return _entry("batch", job.plan.batch, "sequences a step", "microbatch · accumulate · data ranks", f"{NOTES} 002")


def _interval(job: Job) -> Entry:
    """For a job whose node fails once in 50,000 hours of one GPU, saving in a minute."""
    value = forms.checkpoint_interval(60.0, 50_000 * HOUR / job.cluster.gpus)
    return _entry("checkpoint-interval", value, "seconds", "√(2·δ·M)", "Young 1974, Daly 2006")


def _goodput(job: Job) -> Entry:
    failures = 50_000 * HOUR / job.cluster.gpus
    value = forms.goodput(forms.checkpoint_interval(60.0, failures), 60.0, 600.0, failures)
    return _entry("goodput", value, "of the time", "1 − δ/τ − (τ/2 + R)/M", "Young 1974, Daly 2006")


FORMS: dict[str, Form] = {
    "gpt-parameters": _parameters,
    "notes-parameters": _notes_parameters,
    "states-exact": _states("states-exact", "exact", "(2 + 2 + 4 + 8)·P", ZERO),
    "states-megatron": _states("states-megatron", "megatron", "(2 + 4 + 4 + 8)·P", "Megatron-LM"),
    "states-notes": _states("states-notes", "notes", "(2 + 4 + 12 + 2)·P", f"{NOTES} 002"),
    "states-bf16": _states("states-bf16", "bf16", "(2 + 2 + 4)·P", f"{NOTES} 003"),
    "zero-1": _zero(1, "(4 + 12/N)·P"),
    "zero-2": _zero(2, "(2 + 14/N)·P"),
    "zero-3": _zero(3, "16/N·P"),
    "activations": _activations("activations", "tensor", "s·b·h·(10 + 24/t + 5as/(ht))"),
    "activations-sequence": _activations("activations-sequence", "sequence", "s·b·h/t·(34 + 5as/h)"),
    "activations-flash": _activations("activations-flash", "flash", "s·b·h·(10 + 24/t)"),
    "activations-selective": _activations("activations-selective", "selective", "s·b·h·34/t"),
    "activations-full": _activations("activations-full", "full", "2·s·b·h"),
    "feed-forward": _feed_forward,
    "notes-memory": _notes_memory,
    "notes-model-only": _notes_model,
    "notes-total": _notes_total,
    "sqrt-recompute": _sqrt,
    "recompute-once": _recompute("recompute-once", True, "L", f"{NOTES} 002"),
    "recompute-each": _recompute("recompute-each", False, "L²/(2·C) with C = √L", f"{NOTES} 003"),
    "bubble": _bubble,
    "bubble-over-ideal": _bubble_over_ideal,
    "batch": _batch,
    "6nd": _six,
    "palm-flops": _palm,
    "megatron-flops": _megatron,
    "data-traffic": _traffic,
    "checkpoint-interval": _interval,
    "goodput": _goodput,
}
