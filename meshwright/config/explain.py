"""Every key of a run file explained: what it takes, its default, what it means and affects, and the page about it."""

import ast
import inspect
import io
import re
import tokenize
from functools import cache
from typing import Any

import msgspec

from meshwright.config import schema
from meshwright.config.run import NOT_MATHEMATICS, OUTER_KEYS, OUTER_OPTIM, Run, Source
from meshwright.spec.plan import FIELDS, Plan
from meshwright.spec.problem import InputError

# What a field is that has no comment beside it, because to a reader of the code its name says it.
SAID = {
    "extends": "another run file, whose keys these come on top of",
    "name": "the name of the run, and of its folder",
    "steps": "optimizer updates",
    "sequence": "tokens of a sample",
    "seed": "the seed of the initial weights, the order of samples and every draw: dropout, router noise, rounding",
    "arch.preset": "a model of `meshwright models`, whose fields the other keys change",
    "arch.vocab": "entries of the vocabulary",
    "arch.layers": "blocks",
    "arch.hidden": "width of the residual stream",
    "arch.heads": "attention heads",
    "arch.head_dim": "elements of a head",
    "arch.norm": "root mean square, or layer norm",
    "arch.norm_eps": "added to the mean square, or to the variance",
    "arch.positions": "rotary, a learned table, or none",
    "arch.mlp": "the feed-forward layer: gated, or plain with GELU",
    "arch.rope_theta": "base of the rotary wavelengths",
    "arch.rope_scaling": "how rotary wavelengths are scaled, for longer sequences",
    "arch.rope_factor": "what rotary wavelengths are scaled by",
    "arch.top_k": "experts that a token is sent to",
    "arch.router": "how tokens and experts find each other",
    "data.source": "a file, a folder or a glob; `stdlib`: the Python standard library's own source",
    "data.format": "the format of the files; `auto`: by their ending, and how a `.bin` begins",
    "data.field": "of JSON lines and Parquet: where the text is",
    "data.columns": "of chat: fields under other names, such as `prompt=question`",
    "data.mix.weight": "share of the samples, beside the other weights",
    "data.mix.format": "as `data.format`",
    "optim.name": "the optimizer",
    "optim.schedule": "how the learning rate falls after the warm-up",
    "optim.beta1": "decay of the first moment; of adafactor 0 if not stated, which keeps none",
    "optim.beta2": "decay of the second moment; of lion that of its momentum, 0.99 if not stated; of lamb 0.999",
    "optim.eps": "added to the root of the second moment; of lamb 1e-6 if not stated",
    "eval.temperature": "sampling temperature of the generated text",
    "log.writers": "trackers",
    "goal.cluster": "the machines to plan for, such as `64xh100`",
}
DERIVED = {  # keys that have no default, or another one than their type's, and where the value comes from
    "arch.kv_heads": "heads",
    "arch.head_dim": "hidden ÷ heads",
    "plan.replicate": "ranks ÷ the other axes",
    "plan.microbatch": "batch ÷ data ranks ÷ grad_accum",
    "plan.grad_accum": "1, or batch ÷ data ranks ÷ a stated microbatch",
    "plan.chunks": "1, or 2 where the schedule gains by it",
    "plan.stages": "balanced",
    "data.pack": "stream, or best_fit for chat",
    "plan.bf16_params": "true for one rank in low precision",
}
# The page that says more, by the longest beginning of a key.
PAGES = {
    "": "docs/run-file.md",
    **{f"data.{name}": "docs/chat.md" for name in ("columns", "template", "train_on", "truncation_side", "pack")},
    "arch.attention_dropout": "docs/dropout.md",
    "arch.dropout": "docs/dropout.md",
    **{
        f"arch.{name}": "docs/axes/expert.md"
        for name in (
            "experts",
            "moe_every",
            "expert_ffn",
            "shared_experts",
            "top_k",
            "router",
            "capacity",
            "balance_loss",
            "z_loss",
        )
    },
    "data": "docs/run-file.md#data",
    "init": "docs/fine-tune.md",
    "optim": "docs/optimizers.md",
    "optim.master_weights": "docs/precision.md",
    "optim.stochastic_rounding": "docs/precision.md",
    "optim.freeze": "docs/lora.md",
    "adapter": "docs/lora.md",
    "objective": "docs/dpo.md",
    "dpo": "docs/dpo.md",
    "optim.state_dtype": "docs/precision.md",
    **{f"optim.{name}": "docs/local-sgd.md" for name in OUTER_OPTIM},
    "eval": "docs/run-file.md#data",
    **{f"eval.{name}": "docs/generate.md#while-training" for name in ("prompts", "prompts_every")},
    **{f"eval.{name}": "docs/generate.md#while-training" for name in ("command", "command_every", "command_seconds")},
    "log": "docs/run-file.md#trackers",
    "checkpoint": "docs/checkpoints.md",
    "faults": "docs/faults.md",
    "goal": "docs/plan.md",
    "goal.cluster": "docs/clusters.md",
    "goal.network": "docs/clusters.md",
    "goal.memory_gib": "docs/budget.md",
    **{
        f"plan.{name}": "docs/communication.md"
        for name in ("grad_reduce", "powersgd", "error_feedback", "grad_reduce_node", "gather", "secondary_shard")
    },
    "plan.tf32": "docs/precision.md",
    "optim.adascale": "docs/batch-size.md",
    "optim.adascale_batch": "docs/batch-size.md",
    "log.noise_scale": "docs/batch-size.md",
    "plan": "docs/axes/nd.md",
    "plan.replicate": "docs/axes/replicate.md",
    "plan.staleness": "docs/async.md",
    "plan.shard": "docs/axes/shard.md",
    "plan.zero": "docs/axes/shard.md",
    "plan.tp": "docs/axes/tensor.md",
    "plan.cp": "docs/axes/context.md",
    "plan.cp_kind": "docs/axes/context.md",
    "plan.ep": "docs/axes/expert.md",
    **{f"plan.{name}": "docs/axes/pipeline.md" for name in ("pp", "schedule", "chunks", "stages")},
    "plan.microbatch": "docs/run-file.md#data",
    "plan.grad_accum": "docs/run-file.md#data",
    "plan.precision": "docs/precision.md",
    **{f"plan.fp8_{rest}": "docs/precision.md" for rest in ("scaling", "accumulate", "grad")},
    "plan.bf16_params": "docs/decisions/0009-bf16-params.md",
    "plan.recompute": "docs/axes/recompute.md",
    "plan.activation_quant": "docs/compress.md",
    "plan.activation_offload": "docs/compress.md",
    **{f"plan.optimizer_offload{rest}": "docs/offload.md" for rest in ("", "_update", "_host_bytes", "_folder")},
    "plan.cpu_offload": "docs/offload.md",
    **{f"plan.{name}": "docs/local-sgd.md" for name in OUTER_KEYS if name != "replicate"},
    "plan.kernels": "docs/kernels.md",
    "plan.compile": "docs/axes/compile.md",
    "plan.deterministic": "docs/deterministic.md",
}
# What a key decides beside the mathematics, by its beginning; a field of a plan says it itself.
AFFECTS = {
    "arch": ("memory", "time"),
    "sequence": ("memory", "time"),
    "batch": ("memory", "time"),
    "optim.name": ("memory",),
    "optim.freeze": ("memory", "time"),
    "adapter": ("memory", "time"),
    "objective": ("memory", "time"),
    "optim.master_weights": ("memory", "time"),
    "optim.state_dtype": ("memory", "time"),
}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is to be known of one key."""

    key: str
    value: str  # what it takes, in words
    choices: tuple[Any, ...]  # where it takes one of few; else empty
    default: str  # as a run file would have it, or "derived: " and from what; empty: it has none
    meaning: str
    affects: tuple[str, ...]  # mathematics, numerics, memory, time; empty: nothing of what is computed
    page: str


def explain(key: str) -> Explanation:
    """One key, or an InputError with those that may have been meant."""
    known = keys()
    if key not in known:
        siblings = [other for other in known if other.rpartition(".")[0] == key.rpartition(".")[0]]
        raise InputError([schema.unknown(key, siblings)])
    return known[key]


@cache
def keys() -> dict[str, Explanation]:
    """Every key that is no table, in the order of the schema; those of an entry of a list follow the list."""
    found = {}
    for struct, prefix in ((Run, ""), *tables()):
        extra = {"": "extends", "arch.": "preset"}.get(prefix)
        if extra:
            found[prefix + extra] = _explanation(prefix + extra, str, "", SAID[prefix + extra])
        comments = {field.name: field.help for field in FIELDS} if struct is Plan else commented(struct)
        for field in schema.stated_fields(struct):
            if not schema.is_struct(field.type):
                key = prefix + field.encode_name
                meaning = comments.get(field.name) or SAID[key]
                found[key] = _explanation(key, field.type, _default(field, key), plainly(meaning))
    return found


def tables() -> list[tuple[type[msgspec.Struct], str]]:
    """The sections of a run file, each with what its keys begin with."""
    found: list[tuple[type[msgspec.Struct], str]] = []
    for field in msgspec.structs.fields(Run):
        if schema.is_struct(field.type):
            found.append((field.type, f"{field.encode_name}."))
        if field.encode_name == "data":
            found.append((Source, "data.mix."))
    return found


def _explanation(key: str, kind: Any, default: str, meaning: str) -> Explanation:
    starts = [".".join(key.split(".")[:parts]) for parts in range(key.count(".") + 1, -1, -1)]
    return Explanation(
        key=key,
        value=schema.described(kind),
        choices=schema.choices(kind),
        default=default,
        meaning=meaning,
        affects=_affects(key, starts),
        page=next(PAGES[start] for start in starts if start in PAGES),
    )


def _affects(key: str, starts: list[str]) -> tuple[str, ...]:
    table, _, name = key.partition(".")
    if table == "plan":
        return next(field.affects for field in FIELDS if field.name == name)
    others = next((AFFECTS[start] for start in starts if start in AFFECTS), ())
    return () if table in (*NOT_MATHEMATICS, "extends") else ("mathematics", *others)


def _default(field: Any, key: str) -> str:
    if key in DERIVED:
        return f"derived: {DERIVED[key]}"
    return "" if field.required or field.default is None else schema.shown(field.default)


def plainly(comment: str) -> str:
    """Words about code as words about a file, which has no None: a key is left out."""
    return re.sub(r"\. None:", ". Left out:", comment).replace("None:", "left out:")


def commented(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The comment of each field: behind it, or on the lines just above."""
    text = inspect.getsource(struct)
    behind, alone = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.strip().startswith("#")
            (alone if is_alone else behind)[token.start[0]] = token.string.lstrip("# ")
    (body,) = ast.parse(text).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = [behind[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in behind]
            found[node.target.id] = " ".join(lines or _above(alone, node.lineno))
    return found


def _above(alone: dict[int, str], line: int) -> list[str]:
    """The lines of comment that end just above a line."""
    first = line
    while first - 1 in alone:
        first -= 1
    return [alone[number] for number in range(first, line)]
