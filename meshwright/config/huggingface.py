"""What model folders say of their architecture: ours, and Hugging Face's config.json ↔ Arch.

What one side cannot say is refused by name; nothing is dropped in silence.
Ignored on purpose: token ids, caches and initial spreads, which are not the model, and dropout and router jitter, which
are noise of somebody's training.
"""

from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import check
from meshwright.config.check import ARCH_LIMIT, LAYER_LIMIT
from meshwright.config.run import Run
from meshwright.spec.arch import Arch
from meshwright.spec.params import params
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem, mistake

ARCH = "arch.json"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")
CONFIG_BYTES = 10 * 10**6  # the largest public config.json is a few hundred kilobytes
REQUIRED = object()

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}
# What transformers assumes where a config.json says nothing. Old files on the hub leave these out.
ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "sliding_window": None},
    "mistral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
}
# Keys that change the mathematics beyond an Arch, and the one value that does not.
PLAIN: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"attention_bias": False, "mlp_bias": False},
    "mixtral": {"attention_bias": False, "mlp_bias": False},
}
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}


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
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError):
        return "it does not begin with the header of a safetensors file"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"it has {size} bytes, and its header says {expected}"


def shape_differences(there: Arch, here: Arch) -> list[str]:
    """Why the weights of one architecture do not fit another; empty when they do.

    Fields that no weight's shape depends on (rotary scaling, losses, the context of rotary positions) may differ.
    """
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise mistake(f"{path} is not JSON: {error}", remedy) from None
    if not isinstance(config, dict):
        raise mistake(f"{path} is not a JSON object", remedy)
    return config


def arch_of(config: dict[str, Any]) -> Arch:
    """The architecture that a config.json describes."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in PLAIN:
        raise InputError([_unsupported("model_type", kind, ", ".join(PLAIN))])
    keys = _Keys(config)
    arch = _gpt2(keys) if kind == "gpt2" else _llama(keys, kind)
    keys.refuse_unless_plain(PLAIN[kind])
    if keys.problems:
        raise InputError(keys.problems)
    if found := arch_problems(arch):
        raise InputError([msgspec.structs.replace(problem, where="config.json") for problem in found])
    return arch


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
    found += check.endless(arch.layers, arch.experts)
    return found


def family(arch: Arch) -> str:
    """The model_type whose stock code comes nearest to an architecture."""
    if arch.experts:
        return "mixtral"
    return "gpt2" if arch.norm == "layer" else "llama"


def is_exportable(arch: Arch) -> bool:
    """Whether stock transformers has a model that computes the same function, so that `convert` can write it."""
    return not _beyond(arch, family(arch))


def config_of(arch: Arch, dtype: str = "float32") -> dict[str, Any]:
    """A config.json with which stock transformers computes the same function."""
    kind = family(arch)
    if found := _beyond(arch, kind):
        raise InputError(found)
    shared = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": arch.vocab,
        "tie_word_embeddings": arch.tied,
        "bos_token_id": None,  # left out, transformers would assume the ids of somebody else's vocabulary
        "eos_token_id": None,
    }
    return shared | (_gpt2_config(arch) if kind == "gpt2" else _llama_config(arch))


class _Keys:
    """Reads keys of an untrusted config, collecting what is wrong; a value that is wrong reads as a harmless one."""

    def __init__(self, config: dict[str, Any], prefix: str = "") -> None:
        self.config = config
        self.prefix = prefix
        self.problems: list[Problem] = []

    def count(self, key: str, absent: Any = REQUIRED, *, low: int = 1, high: int = ARCH_LIMIT) -> int:
        value = self.config.get(key, absent)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.refuse(key, value, f"a whole number from {low} to {high}")
        return 1

    def number(self, key: str, absent: Any = REQUIRED, *, low: float = 1e-12, high: float = 1e12) -> float:
        value = self.config.get(key, absent)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        self.refuse(key, value, f"a number from {low:g} to {high:g}")
        return 1.0

    def flag(self, key: str, absent: bool) -> bool:
        value = self.config.get(key, absent)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value is True

    def choice(self, key: str, choices: dict[str, str], absent: str) -> str:
        value = self.config.get(key, absent)
        if isinstance(value, str) and value in choices:
            return choices[value]
        self.refuse(key, value, ", ".join(choices))
        return next(iter(choices.values()))

    def refuse(self, key: str, value: Any, supported: str) -> None:
        self.problems.append(_unsupported(self.prefix + key, value, supported))

    def refuse_unless_plain(self, plain: dict[str, Any]) -> None:
        for key, wanted in plain.items():
            if (value := self.config.get(key, wanted)) != wanted:
                self.refuse(key, value, str(wanted).lower())
        if self.config.get("quantization_config") is not None:
            self.refuse("quantization_config", "…", "weights in float64, float32, bfloat16 or float16")
        if self.config.get("auto_map") is not None:
            self.refuse("auto_map", "…", "models of stock transformers; without the key if the model is one")


def _unsupported(key: str, value: Any, supported: str) -> Problem:
    remedy = f"supported: {supported}"
    if value is REQUIRED:
        return Problem(f"config.json lacks {key}", remedy, key)
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = f"({type(value).__name__})"
    text = text if len(text) <= 60 else f"{text[:60]}…"
    return Problem(f"config.json says {key} = {text}, which is not supported", remedy, key)


def _gpt2(keys: _Keys) -> Arch:
    hidden, heads = keys.count("n_embd"), keys.count("n_head")
    return Arch(
        vocab=keys.count("vocab_size"),
        layers=keys.count("n_layer", high=LAYER_LIMIT),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads or 1,
        ffn=keys.count("n_inner") if keys.config.get("n_inner") is not None else 4 * hidden,
        context=keys.count("n_positions"),
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        mlp=keys.choice("activation_function", ACTIVATIONS, "gelu_new"),  # pyright: ignore[reportArgumentType]
        bias=True,
        tied=keys.flag("tie_word_embeddings", True),
    )


def _llama(keys: _Keys, kind: str) -> Arch:
    absent = ABSENT[kind]
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    kv_null = keys.config.get("num_key_value_heads", absent["num_key_value_heads"]) is None
    ffn, context = keys.count("intermediate_size"), keys.count("max_position_embeddings")
    keys.choice("hidden_act", {"silu": "silu", "swish": "silu"}, "silu")
    window = keys.config.get("sliding_window", absent["sliding_window"])
    if window is not None and keys.count("sliding_window", window) < context:
        keys.refuse("sliding_window", window, f"null, or at least max_position_embeddings = {context}")
    kinds = keys.config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
        keys.refuse("layer_types", kinds, "full_attention in every layer")
    return Arch(
        vocab=keys.count("vocab_size"),
        layers=keys.count("num_hidden_layers", high=LAYER_LIMIT),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if kv_null else keys.count("num_key_value_heads", absent["num_key_value_heads"]),
        head_dim=keys.count("head_dim") if keys.config.get("head_dim") is not None else hidden // heads or 1,
        ffn=ffn,
        context=context,
        norm_eps=keys.number("rms_norm_eps", absent["rms_norm_eps"]),
        tied=keys.flag("tie_word_embeddings", False),
        **_rope(keys, absent, context),
        **(_moe(keys, ffn) if kind == "mixtral" else {}),
    )


def _moe(keys: _Keys, ffn: int) -> dict[str, Any]:
    return {
        "experts": keys.count("num_local_experts", 8, high=LAYER_LIMIT),
        "expert_ffn": ffn,
        "top_k": keys.count("num_experts_per_tok", 2),
        "balance_loss": keys.number("router_aux_loss_coef", 0.001, low=0.0),
        "z_loss": keys.number("router_z_loss_coef", 0.0, low=0.0),  # ours: transformers keeps it and ignores it
    }


def _rope(keys: _Keys, absent: dict[str, Any], context: int) -> dict[str, Any]:
    """Rotary fields from rope_theta and rope_scaling (transformers 4) or rope_parameters (5)."""
    name = "rope_scaling" if keys.config.get("rope_scaling") else "rope_parameters"
    stated = keys.config.get(name) or {}
    if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
        keys.refuse(name, stated, "one flat object for all layers")
        return {}
    # transformers looks beside the object for what is not inside it
    beside = {key: keys.config[key] for key in ("rope_theta", "partial_rotary_factor") if key in keys.config}
    rope = _Keys(beside | stated, prefix=f"{name}.")
    kinds = {"default": "none", "linear": "linear", "llama3": "llama3"}
    kind = rope.choice("rope_type" if "rope_type" in stated else "type", kinds, "default")
    fields: dict[str, Any] = {"rope_theta": rope.number("rope_theta", absent["rope_theta"]), "rope_scaling": kind}
    if (share := rope.config.get("partial_rotary_factor")) not in (None, 1):
        rope.refuse("partial_rotary_factor", share, "1.0")
    if kind != "none":
        fields["rope_factor"] = rope.number("factor")
    if kind == "llama3":
        fields["rope_low"] = rope.number("low_freq_factor")
        fields["rope_high"] = rope.number("high_freq_factor")
        fields["rope_original"] = rope.count("original_max_position_embeddings", context)
    keys.problems += rope.problems
    return fields


def _gpt2_config(arch: Arch) -> dict[str, Any]:
    return {
        "n_layer": arch.layers,
        "n_embd": arch.hidden,
        "n_head": arch.heads,
        "n_inner": arch.ffn,
        "n_positions": arch.context,
        "layer_norm_epsilon": arch.norm_eps,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[arch.mlp],
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }


def _llama_config(arch: Arch) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": arch.rope_scaling, "factor": arch.rope_factor}
    if arch.rope_scaling == "llama3":
        scaling["low_freq_factor"] = arch.rope_low
        scaling["high_freq_factor"] = arch.rope_high
        scaling["original_max_position_embeddings"] = arch.rope_original
    config = {
        "num_hidden_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.expert_ffn if arch.experts else arch.ffn,
        "max_position_embeddings": arch.context,
        "rms_norm_eps": arch.norm_eps,
        "hidden_act": "silu",
        "rope_theta": arch.rope_theta,
        # transformers 5 reads this form of 4 too; 4 does not read that of 5
        "rope_scaling": None if arch.rope_scaling == "none" else scaling,
    }
    if arch.experts == 0:
        return config | {"attention_bias": False, "mlp_bias": False}
    return config | {
        "num_local_experts": arch.experts,
        "num_experts_per_tok": arch.top_k,
        "sliding_window": None,
        # The published weight under its published name. transformers counts top_k times as much and averages over
        # layers where Meshwright sums, so training there is balanced differently; the function is the same.
        "router_aux_loss_coef": arch.balance_loss,
        "router_z_loss_coef": arch.z_loss,
    }


def _beyond(arch: Arch, kind: str) -> list[Problem]:
    """The fields that stock transformers has no word for."""
    if kind == "gpt2":
        heads = {"kv_heads": (arch.heads,), "head_dim": (arch.hidden / arch.heads,)}
        needs = {"positions": ("learned",), "mlp": ("gelu", "gelu_tanh"), "bias": (True,), **heads}
    else:
        needs = {"norm": ("rms",), "positions": ("rope",), "mlp": ("swiglu",), "bias": (False,)}
    needs["norm_position"] = ("pre",)
    if kind == "mixtral":
        needs |= {"moe_every": (1,), "shared_experts": (0,), "router": ("topk",), "capacity": (0.0,)}
    found = [
        Problem(
            f"arch.{field} = {getattr(arch, field)} has no place in a Hugging Face {kind} model",
            f"it must be {' or '.join(map(str, wanted))} to be converted",
            f"arch.{field}",
        )
        for field, wanted in needs.items()
        if getattr(arch, field) not in wanted
    ]
    if kind == "llama" and arch.hidden % arch.heads:  # transformers refuses this even where head_dim is given
        text = f"arch.heads = {arch.heads} does not divide arch.hidden = {arch.hidden}"
        found.append(Problem(text, "a Hugging Face llama model must divide evenly", "arch.heads"))
    return found
