"""Walks the types of a run file: finds every unknown key and wrong value at once, and says what was meant."""

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeGuard

import msgspec

from meshwright.config.renamed import new_words
from meshwright.config.run import Run
from meshwright.spec import plan
from meshwright.spec.problem import Problem

# What other tools call it. A key that is none of ours is looked up here before the nearest spelling is offered.
ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_lr": "optim.lr",
    "min_lr": "optim.min_lr_ratio",
    "max_norm": "optim.grad_clip",
    "max_grad_norm": "optim.grad_clip",
    "warmup_steps": "optim.warmup",
    "warmup_iters": "optim.warmup",
    "optimizer": "optim.name",
    "lr_scheduler_type": "optim.schedule",
    "max_steps": "steps",
    "epoch": "epochs",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "n_epochs": "epochs",
    "chat_template": "data.template",
    "prompt_template": "data.template",
    "max_iters": "steps",
    "train_steps": "steps",
    "train_iters": "steps",
    "seq_len": "sequence",
    "seq_length": "sequence",
    "max_seq_length": "sequence",
    "max_seq_len": "sequence",
    "max_length": "sequence",
    "context_length": "sequence",
    "block_size": "sequence",
    "batch_size": "batch",
    "global_batch_size": "batch",
    "micro_batch_size": "plan.microbatch",
    "local_batch_size": "plan.microbatch",
    "per_device_train_batch_size": "plan.microbatch",
    "train_batch_size": "batch",
    "gradient_accumulation_steps": "plan.grad_accum",
    "grad_acc_steps": "plan.grad_accum",
    "dtype": "plan.precision",
    "activation_checkpointing": "plan.recompute",
    "gradient_checkpointing": "plan.recompute",
    "torch_compile": "plan.compile",
    "dp": "plan.replicate",
    "ddp": "plan.replicate",
    "data_parallel": "plan.replicate",
    "data_parallel_replicate_degree": "plan.replicate",
    "dp_replicate": "plan.replicate",
    "fsdp": "plan.shard",
    "dp_shard": "plan.shard",
    "data_parallel_shard_degree": "plan.shard",
    "zero_stage": "plan.zero",
    "tensor_parallel": "plan.tp",
    "tensor_parallel_size": "plan.tp",
    "tensor_parallel_degree": "plan.tp",
    "tensor_model_parallel_size": "plan.tp",
    "pipeline_parallel": "plan.pp",
    "pipeline_parallel_size": "plan.pp",
    "pipeline_parallel_degree": "plan.pp",
    "pipeline_model_parallel_size": "plan.pp",
    "context_parallel": "plan.cp",
    "context_parallel_size": "plan.cp",
    "context_parallel_degree": "plan.cp",
    "sequence_parallel": "plan.tp",
    "expert_parallel": "plan.ep",
    "expert_parallel_size": "plan.ep",
    "expert_parallel_degree": "plan.ep",
    "expert_model_parallel_size": "plan.ep",
    "mixed_precision": "plan.precision",
    "mbs": "plan.microbatch",
    "gas": "plan.grad_accum",
    "dataset": "data.source",
    "vocab_size": "arch.vocab",
    "n_layer": "arch.layers",
    "num_layers": "arch.layers",
    "n_head": "arch.heads",
    "n_embd": "arch.hidden",
    "num_hidden_layers": "arch.layers",
    "num_attention_heads": "arch.heads",
    "num_key_value_heads": "arch.kv_heads",
    "n_kv_heads": "arch.kv_heads",
    "hidden_size": "arch.hidden",
    "d_model": "arch.hidden",
    "dim": "arch.hidden",
    "feed_forward": "arch.ffn",
    "intermediate_size": "arch.ffn",
    "ffn_hidden_size": "arch.ffn",
    "n_inner": "arch.ffn",
    "d_ff": "arch.ffn",
    "max_position_embeddings": "arch.context",
    "n_positions": "arch.context",
    "num_experts": "arch.experts",
    "num_local_experts": "arch.experts",
    "num_experts_per_tok": "arch.top_k",
    "post_norm": "arch.norm_position",
    "pre_norm": "arch.norm_position",
    "model": "arch.preset",
    "dataset_path": "data.source",
    "train_file": "data.source",
    "data_path": "data.source",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "logging_steps": "log.every",
    "eval_interval": "eval.every",
    "log_interval": "log.every",
    "lora_rank": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "lora_target_modules": "adapter.targets",
    "use_rslora": "adapter.rslora",
    "load_in_4bit": "adapter.base",
    "load_in_8bit": "adapter.base",
    "train_on_inputs": "data.train_on",
    "assistant_only_loss": "data.train_on",
    "completion_only_loss": "data.train_on",
    "sample_packing": "data.pack",
    "packing": "data.pack",
}
# What other tools have a key for and we have none: how it is done here, with the page that says more.
ADVICE = {
    "messages": 'set data.format = "chat", which reads conversations: docs/chat.md',
    "lora": 'adapters are of [adapter], as in adapter.kind = "lora", adapter.rank = 16: docs/lora.md',
    "dora": 'magnitudes are of adapter.kind = "dora": docs/lora.md',
    "peft": (
        "an adapter is A and B of one rank beside the linear layers that adapter.targets names, in every layer; "
        "other weights are trained by optim.freeze, which names those that are not, without [adapter]: docs/lora.md"
    ),
}
TOPICS = {
    "messages": ("messages", "conversations", "instruction"),
    "lora": ("lora", "qlora", "peft"),
    "dora": ("use_dora", "dora"),
    "peft": (
        *("modules_to_save", "layers_to_transform", "layers_pattern", "exclude_modules", "init_lora_weights"),
        *("rank_pattern", "alpha_pattern", "target_parameters", "loftq_config", "trainable_token_indices"),
        *("lora_bias", "adapter.bias"),
    ),
}
EXTRA = {"extends": str, "arch.preset": str}  # understood by the loader, gone from the run it makes
DERIVED = ("tuning",)  # fields of a run's values that follow from its keys, and are none


def every_key(struct: type[msgspec.Struct] = Run, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a run file and its type."""
    found = dict(EXTRA) if not prefix else {}
    for field in stated_fields(struct):
        name = prefix + field.encode_name
        found[name] = field.type
        if is_struct(field.type):
            found |= every_key(field.type, f"{name}.")
    return found


def stated_fields(struct: type[msgspec.Struct]) -> list[msgspec.structs.FieldInfo]:
    """The fields that a file may state."""
    return [field for field in msgspec.structs.fields(struct) if field.name not in DERIVED]


def misfits(table: Mapping[str, Any], struct: type[msgspec.Struct] = Run, prefix: str = "") -> Iterator[Problem]:
    """Every key of a table that the struct does not have, and every value it cannot take."""
    fields = {field.encode_name: field.type for field in stated_fields(struct)}
    for name, value in table.items():
        key = prefix + name
        if name not in fields:
            yield unknown(key, [prefix + field for field in fields], value)
        elif not is_struct(fields[name]):
            yield from _misfit(key, value, fields[name])
        elif isinstance(value, Mapping):
            yield from misfits(value, fields[name], f"{key}.")
        else:
            is_model = key == "arch" and isinstance(value, str)
            remedy = f"write arch.preset={value}" if is_model else f"write {key}.NAME = VALUE for each of its keys"
            yield Problem(f"{key} = {shown(value)} should be a table", remedy, key)


def _misfit(key: str, value: Any, kind: Any) -> Iterator[Problem]:
    item = next(iter(typing.get_args(kind)), None)
    if is_struct(item) and isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        for number, entry in enumerate(value):
            yield from misfits(entry, item, f"{key}.{number}.")
            yield from missing(entry, item, f"{key}.{number}.")
        return
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        yield Problem(f"{key} = {shown(value)} should be {described(kind)}", _correction(key, value, kind), key)


def _correction(key: str, value: Any, kind: Any) -> str:
    """What to write instead of a value that its key cannot take."""
    kinds = (kind, *(typing.get_args(kind) if typing.get_origin(kind) is not Literal else ()))
    is_list = typing.get_origin(kind) is tuple
    if is_list and isinstance(value, str) and value in choices(kind):
        return f'write {key} = ["{value}"]'
    words = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    named = [choice for choice in choices(kind) if isinstance(choice, str)]
    for word in words:
        if word not in named and (near := difflib.get_close_matches(word.lower(), named, n=1, cutoff=0.4)):
            return f"did you mean {near[0]!r}?"
    if bool in kinds:
        return f"write {key} = true or {key} = false"
    if is_list and named and isinstance(value, list):
        return "use some of them"
    if is_list:
        entry = '{source = "…"}' if is_struct(kinds[1]) else "…"
        return f"write a list, as in {key} = [{entry}]"
    if int in kinds and isinstance(value, float) and value.is_integer():
        return f"write {key} = {int(value)}"
    if int in kinds or float in kinds:
        return "write it in digits, without a unit" if isinstance(value, str) else "write one number"
    return f'write a string, as in {key} = "…"' if str in kinds else "use one of them"


def missing(table: Mapping[str, Any], struct: type[msgspec.Struct], prefix: str) -> Iterator[Problem]:
    """Every key that has no default and was not given."""
    for field in stated_fields(struct):
        if field.required and field.encode_name not in table:
            key = prefix + field.encode_name
            yield Problem(f"{key} is missing", f"give it {described(field.type)}", key)


def unknown(key: str, siblings: list[str], value: Any = None) -> Problem:
    """The problem of a key that does not exist, with the key that was meant."""
    everything = list(every_key())
    last = key.rsplit(".", 1)[-1]
    if new := new_words(key, value):
        return Problem(f"{key} has a new name", f"write {new}", key)
    if last in ELSEWHERE:
        return Problem(f"{key} is not a key", f"here it is called {ELSEWHERE[last]}", key)
    if about := topic(key) or topic(last):
        return Problem(f"{key} is not a key", ADVICE[about], key)
    names = {sibling.rsplit(".", 1)[-1]: sibling for sibling in siblings}  # their table's name would make all alike
    near = [names[name] for name in difflib.get_close_matches(last, names, n=1, cutoff=0.6)]
    near = near or [other for other in everything if other.rsplit(".", 1)[-1] == last]
    near = near or difflib.get_close_matches(key, everything, n=1, cutoff=0.6)
    remedy = f"did you mean {' or '.join(near)}?" if near else "`meshwright config schema` lists every key"
    return Problem(f"{key} is not a key", remedy, key)


def topic(word: str) -> str:
    """Which ADVICE a word of another tool asks for, "" if none."""
    return next((topic for topic, words in TOPICS.items() if word in words), "")


def meant(word: str) -> str:
    """The key that a word stands for: itself, what it is called here, or the only one that ends so; else ""."""
    keys = every_key()
    ends = [key for key in keys if key.rsplit(".", 1)[-1] == word]
    found = word if word in keys else ELSEWHERE.get(word) or new_words(word, None)
    return found or (ends[0] if len(ends) == 1 else "")


def described(kind: Any) -> str:
    """A type in the user's words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(shown(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        lists_last = sorted(arguments, key=lambda part: typing.get_origin(part) is tuple)  # "each" is of what follows
        return " or ".join(described(part) for part in lists_last if part is not type(None))
    if origin is tuple:
        return f"a list, each {described(arguments[0])}"
    if is_struct(kind):
        return "a table of " + ", ".join(field.encode_name for field in stated_fields(kind))
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind]


def shown(value: Any) -> str:
    """A value as the user would write it, cut short and with nothing a terminal would obey."""
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def json_schema() -> dict[str, Any]:
    """The run file as JSON Schema: what the user may write, the loader's own keys included."""
    schema = msgspec.json.schema(Run)
    definitions = schema["$defs"]
    definitions["Run"]["properties"]["extends"] = {"type": "string"}
    definitions["Arch"]["properties"]["preset"] = {"type": "string"}
    for name in DERIVED:
        del definitions["Arch"]["properties"][name]
    definitions.pop("Tuning", None)
    definitions["Plan"]["properties"]["recompute"]["pattern"] = plan.PATTERN
    for name in ("Run", "Arch", "Plan"):  # the loader completes what a file leaves out
        definitions[name].pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Meshwright run file", **schema}


def is_struct(kind: Any) -> TypeGuard[type[msgspec.Struct]]:
    """Whether a type is that of a table."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def choices(kind: Any) -> tuple[Any, ...]:
    """The values of a type that has few; empty for others."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return tuple(choice for part in typing.get_args(kind) for choice in choices(part))
