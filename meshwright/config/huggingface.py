"""What model folders say of their architecture: ours, and Hugging Face's config.json ↔ Arch.

What one side cannot say is refused by name; nothing is dropped in silence.
Ignored on purpose: token ids, caches and initial spreads, which are not the model, and dropout and router jitter, which
are noise of somebody's training.
"""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import check
from meshwright.config.config_words import ConfigKeys, Same, unsupported
from meshwright.config.families import FAMILIES, Family
from meshwright.config.rules.arch import ARCH_LIMIT, endless
from meshwright.config.run import Run
from meshwright.spec.arch import Arch
from meshwright.spec.params import params
from meshwright.spec.plan import Plan
from meshwright.spec.problem import UNDECODABLE, ContradictionError, InputError, Problem, mistake

ARCH = "arch.json"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")
CONFIG_BYTES = 10 * 10**6  # the largest public config.json is a few hundred kilobytes
# Fields of training, and not of the function that is trained.
OF_TRAINING = ("dropout", "attention_dropout", "balance_loss", "z_loss", "router_load_rate", "mtp_loss_weight")


def a_pickle(path: Path) -> Problem:
    """Why a file of another program is not read, and how its owner can have it read."""
    return Problem(
        f"{path} is a pickle: loading one runs its code, so that is never done here",
        "if you trust it, convert it elsewhere:\n"
        "    import torch, safetensors.torch\n"
        f"    safetensors.torch.save_file(torch.load({str(path)!r}, weights_only=True), 'model.safetensors')",
    )


def no_weights(folder: Path) -> Problem:
    """Why a folder's weights are not read: there are none, or only pickles."""
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
    if not pickles:
        return Problem(f"{folder} holds neither {SINGLE} nor {INDEX}", "give the folder of a model")
    return Problem(
        f"{folder} holds its weights only in {pickles[0]}, a pickle: loading one runs its code, so that is never done",
        "if you trust it, convert it once with transformers:\n"
        "    from transformers import AutoModelForCausalLM as Model\n"
        f"    Model.from_pretrained({str(folder)!r}).save_pretrained({str(folder) + '-safetensors'!r})\n"
        "and copy the tokenizer's files there",
    )


def weight_problems(folder: Path) -> list[Problem]:
    """What is wrong with the weights of a model folder, as far as names, sizes and headers tell; without torch."""
    index, files = folder / INDEX, [SINGLE]
    if not (folder / SINGLE).is_file():
        if not index.is_file():
            return [no_weights(folder)]
        files = sorted({str(file) for file in read_config(index).get("weight_map", {}).values()})
    found = []
    for path in (folder / file for file in files):
        if not path.is_file():
            found.append(
                Problem(f"{path} is missing, though {INDEX} names it", "copy the folder again, with all shards")
            )
        elif why := _damage(path):
            found.append(Problem(f"{path} cannot be used: {why}", "copy the file again from where it came"))
    return found


def _damage(path: Path) -> str:
    """Why a safetensors file is not whole, "" if it is: a length, a JSON header of that length, and the tensors."""
    try:
        with path.open("rb") as file:
            size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
            if length > size - 8:
                return "it does not begin with the header of a safetensors file"
            header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        return error.strerror or str(error)
    except (*UNDECODABLE, KeyError, IndexError, TypeError):
        return "it does not begin with the header of a safetensors file"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"it has {size} bytes, and its header says {expected}"


def shape_differences(there: Arch, here: Arch) -> list[str]:
    """Why the weights of one architecture do not fit another; empty when they do.

    Fields that no weight's shape depends on (rotary scaling, losses, the context of rotary positions) may differ.
    """
    here = msgspec.structs.replace(here, tuning=there.tuning)  # adapters are beside the weights
    if there.mtp_layers > here.mtp_layers:  # multi-token prediction may be left out
        there = msgspec.structs.replace(there, mtp_layers=here.mtp_layers)
    if [(p.name, p.shape) for p in params(there)] == [(p.name, p.shape) for p in params(here)]:
        return []
    old, new = msgspec.to_builtins(there), msgspec.to_builtins(here)
    return [f"arch.{name} is {old[name]} there and {new[name]} here" for name in old if old[name] != new[name]]


def read_arch(path: Path) -> Arch:
    """The architecture that a folder of ours describes."""
    try:
        arch = msgspec.convert(read_config(path), Arch)
    except msgspec.ValidationError as error:
        raise mistake(f"{path}: {error}", "convert or save the model again") from None
    if found := arch_problems(arch):
        raise InputError([msgspec.structs.replace(problem, where=str(path)) for problem in found])
    return arch


def read_config(path: Path) -> dict[str, Any]:
    """The object in a config.json, which may come from anyone."""
    remedy = "give the folder of a Hugging Face model, with its own config.json"
    try:
        size = path.stat().st_size
        if size > CONFIG_BYTES:
            raise mistake(f"{path} has {size} bytes, more than {CONFIG_BYTES}", remedy)
        config = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise mistake(f"{path} cannot be read: {error.strerror}", remedy) from None
    except (*UNDECODABLE, RecursionError) as error:
        raise mistake(f"{path} is not JSON: {error}", remedy) from None
    if not isinstance(config, dict):
        raise mistake(f"{path} is not a JSON object", remedy)
    return config


def arch_of(config: dict[str, Any]) -> Arch:
    """The architecture that a config.json describes, without multi-token prediction: who wants it says so."""
    kind, family = family_of(config)
    stated = config
    if kind == "gemma3":  # text and pictures: its text
        stated = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    keys = ConfigKeys(dict(family.absent) | {family.spelled.get(key, key): value for key, value in stated.items()})
    fields: dict[str, Any] = {}
    for word in family.words:
        fields |= word.read(keys, fields)
    if config.get("auto_map") is not None and not family.own_code:
        keys.refuse("auto_map", "…", "models of stock transformers; without the key if the model is one")
    if config.get("is_encoder_decoder") is True:
        keys.refuse("is_encoder_decoder", True, "decoders: false")
    quantized = config.get("quantization_config")
    if quantized is not None and not quantization(quantized):
        keys.refuse("quantization_config", quantized, "mxfp4, fp8 with blocks of 128 × 128, or weights without it")
    found = [] if keys.problems else list(_contradictions(stated, fields, family))
    if keys.problems or found:
        raise (ContradictionError if keys.wrong or found else InputError)([*dict.fromkeys(keys.problems), *found])
    fields["mtp_layers"] = 0
    arch = Arch(**fields | dict(family.says))
    if found := arch_problems(arch):
        raise ContradictionError([_in_file(problem, family) for problem in found])
    return arch


def _in_file(problem: Problem, family: Family) -> Problem:
    """A problem of a field, with the key of the config.json that says it."""
    keys = {f"arch.{getattr(word, 'field', '')}": getattr(word, "key", "") for word in family.words}
    key = keys.get(problem.key, "")
    return msgspec.structs.replace(problem, where=f"config.json, {key}" if key else "config.json")


def _contradictions(stated: dict[str, Any], fields: dict[str, Any], family: Family) -> Iterator[Problem]:
    """What two keys of a config.json say against each other, as far as an Arch would not show it."""
    layers, context, kinds = fields["layers"], fields["context"], stated.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        length = f"a list of {len(kinds)}" if isinstance(kinds, list) else "no list"
        what = f"config.json says layer_types, {length}, beside num_hidden_layers = {layers}"
        yield Problem(what, "give one word for each layer, or leave layer_types out", "layer_types")
    window = stated.get("sliding_window") if stated.get("use_sliding_window") is not False else None
    if isinstance(window, int) and window > context and not family.long_windows:
        what = f"config.json says sliding_window = {window}, longer than max_position_embeddings = {context}"
        yield Problem(what, f"use at most {context}, or null for no window", "sliding_window")
    first = max(fields.get("dense_layers", 0) + 1, fields.get("moe_every", 1))
    if fields.get("experts") and first > layers:
        keys = " and ".join(key for key in ("first_k_dense_replace", "decoder_sparse_step") if key in stated)
        what = f"config.json has experts in none of num_hidden_layers = {layers}, by {keys or 'mlp_only_layers'}"
        yield Problem(what, "use fewer dense layers", keys.split()[0] if keys else "mlp_only_layers")
    classes = {other.model for other in FAMILIES.values()} - {family.model}
    for name in stated.get("architectures") or () if isinstance(stated.get("architectures"), list) else ():
        if name in classes:
            what = f"config.json says architectures = {name} beside model_type = {stated.get('model_type')}"
            yield Problem(what, f"use the model_type of that class, or {family.model}", "architectures")


def family_of(config: dict[str, Any]) -> tuple[str, Family]:
    """The family of a config.json, with its model_type."""
    kind = config.get("model_type")
    if kind == "gemma3":
        return kind, FAMILIES["gemma3_text"]
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError([unsupported("model_type", kind, ", ".join((*FAMILIES, "gemma3")))])
    return kind, FAMILIES[kind]


def quantization(stated: Any) -> str:
    """How a folder's weights are quantized, of what is read: mxfp4 or fp8; "" if it is another way."""
    if not isinstance(stated, dict):
        return ""
    method = stated.get("quant_method")
    if method == "fp8":
        return "fp8" if stated.get("weight_block_size") == [128, 128] else ""
    return "mxfp4" if method == "mxfp4" else ""


# What decoders call the same number, the usual name first: models, and those of older code bases and vendors.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "multi_query_group_num", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "head_dim": ("head_dim", "kv_channels"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k"),
    "expert_ffn": ("moe_intermediate_size", "expert_intermediate_size"),
    "shared_experts": ("n_shared_experts", "moe_num_shared_experts"),
}
DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
ASSUMED_CONTEXT = 4096  # of a config.json that states none


def decoder_like(config: dict[str, Any]) -> Arch | None:
    """The nearest architecture to a decoder of a family that is not known, for predictions; None if it is no decoder.

    It has its numbers, and of Llama or, without RMSNorm, of GPT-2 the rest.
    """
    config = config | (config["text_config"] if isinstance(config.get("text_config"), dict) else {})
    found = {field: _first(config, names) for field, names in NAMES.items()}
    kinds = [each for each in config.get("architectures") or () if isinstance(each, str)]
    known = all(found[name] for name in ("layers", "hidden", "heads", "vocab"))
    if (
        not known
        or config.get("is_encoder_decoder") is True
        or (kinds and not any(k.endswith(DECODERS) for k in kinds))
    ):
        return None
    gated = any(key in config for key in ("rms_norm_eps", "layernorm_epsilon")) or config.get("hidden_act") == "silu"
    hidden, heads = found["hidden"], found["heads"]
    ffn = found["ffn"] or 4 * hidden
    style: dict[str, Any] = {} if gated else {"norm": "layer", "mlp": "gelu", "bias": True}
    if found["experts"] > 1:
        style |= {name: found[name] for name in ("experts", "shared_experts")}
        style |= {"top_k": found["top_k"] or 1, "expert_ffn": found["expert_ffn"] or ffn}
    return Arch(
        vocab=found["vocab"],
        layers=found["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=found["kv_heads"] or (1 if config.get("multi_query") is True else heads),
        head_dim=found["head_dim"] or hidden // heads,
        ffn=ffn,
        context=found["context"] or ASSUMED_CONTEXT,
        tied=config.get("tie_word_embeddings", True) is True,  # what transformers assumes of a family it does not ask
        **style,
    )


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int:
    """The first of some keys that holds a sensible number; 0 if none does."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and 0 < value <= ARCH_LIMIT), 0)


def arch_problems(arch: Arch) -> list[Problem]:
    """What is wrong with an architecture that came from a file rather than from a checked run."""
    run = Run(arch=arch, plan=Plan(microbatch=1))
    found = [problem for problem in check.problems(run) if problem.key.startswith("arch.")]
    found += endless(arch.layers, arch.experts)
    return found


@cache
def family(arch: Arch) -> str:
    """The model_type whose stock code comes nearest to an architecture."""
    return min(FAMILIES, key=lambda kind: len(_beyond(arch, kind)))


def is_exportable(arch: Arch) -> bool:
    """Whether stock transformers has a model that computes the same function, so that `convert` can write it."""
    return not _beyond(arch, family(arch))


def config_of(arch: Arch, dtype: str = "float32") -> dict[str, Any]:
    """A config.json with which stock transformers computes the same function."""
    kind = family(arch)
    if found := _beyond(arch, kind):
        raise InputError(list(found))
    return _written(arch, kind) | {
        "architectures": [FAMILIES[kind].model],
        "model_type": kind,
        "torch_dtype": dtype,
        "bos_token_id": None,  # left out, transformers would assume the ids of somebody else's vocabulary
        "eos_token_id": None,
        "pad_token_id": None,
        **({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if kind == "gpt2" else {}),
    }


def _written(arch: Arch, kind: str) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for word in FAMILIES[kind].words:
        config |= word.write(arch)
    if arch.experts and "expert_ffn" in {
        getattr(word, "field", "") for word in FAMILIES[kind].words if isinstance(word, Same)
    }:
        config["intermediate_size"] = arch.expert_ffn
    return config


@cache
def _beyond(arch: Arch, kind: str) -> tuple[Problem, ...]:
    """The fields that stock transformers has no word for: what reading a written config.json does not bring back."""
    family = FAMILIES[kind]
    keys, fields = ConfigKeys(dict(family.absent) | _written(arch, kind)), dict[str, Any]()
    for word in family.words:
        fields |= word.read(keys, fields)
    try:
        read = msgspec.convert(fields | dict(family.says), Arch)
    except msgspec.ValidationError:  # a choice that it has no word for at all
        fields = {name: value for name, value in fields.items() if value is not None}
        read = Arch(**fields | dict(family.says))
    whole = msgspec.structs.replace(arch, tuning=msgspec.UNSET)  # what is trained of it is not the folder's affair
    mine, back = (msgspec.to_builtins(each) | {"attention_scale": _plain_scale(each)} for each in (whole, read))
    idle = _idle(arch)
    found = [
        Problem(
            f"arch.{field} = {mine[field]} has no place in a Hugging Face {kind} model",
            f"it must be {back[field]} to be converted",
            f"arch.{field}",
        )
        for field in mine
        if field not in idle and not _alike(mine[field], back[field])
    ]
    if kind == "llama" and arch.hidden % arch.heads:  # transformers refuses this even where head_dim is given
        text = f"arch.heads = {arch.heads} does not divide arch.hidden = {arch.hidden}"
        found.append(Problem(text, "a Hugging Face llama model must divide evenly", "arch.heads"))
    return tuple(found)


def _alike(mine: Any, back: Any) -> bool:
    if isinstance(mine, float) and isinstance(back, float):
        return math.isclose(mine, back, rel_tol=1e-12)
    return mine == back


def _idle(arch: Arch) -> set[str]:
    """The fields that do not bear on the function."""
    rope = ("rope_factor", "rope_low", "rope_high", "rope_original")
    yarn = ("rope_beta_fast", "rope_beta_slow", "rope_truncate", "rope_attention")
    used = {"none": (), "linear": rope[:1], "llama3": rope, "yarn": ("rope_factor", "rope_original", *yarn)}
    used["longrope"] = ("rope_original", "rope_attention")
    idle = {*OF_TRAINING, *rope, *yarn} - set(used[arch.rope_scaling])
    idle |= set() if arch.window else {"full_every", "rope_local_theta"}
    return idle | ({"ffn"} if arch.experts and arch.moe_layers == arch.layers else set())


def _plain_scale(arch: Arch) -> float:
    """The scale of attention's scores; 0 where it is the usual one."""
    usual = math.isclose(arch.attention_scale or arch.head_dim**-0.5, arch.head_dim**-0.5, rel_tol=1e-12)
    return 0.0 if usual else arch.attention_scale
