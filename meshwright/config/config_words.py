"""The words of a config.json: each reads a key into fields of an Arch, and writes the fields as the key again.

A family of config/families.py is a list of them. Whatever a word cannot say is refused by the name of its key.
"""

import math
from typing import Any, NamedTuple, Protocol

import msgspec

from meshwright.config.rules.arch import ARCH_LIMIT
from meshwright.spec.arch import Arch
from meshwright.spec.problem import Problem

REQUIRED = object()
LIMITED = "group_limited_greedy"  # as DeepSeek calls a choice among the experts of a few groups
Fields = dict[str, Any]
NO_WINDOW: Fields = {"rope_local_theta": 0.0}  # which is of layers with one


class ConfigKeys:
    """Reads keys of an untrusted config, collecting what is wrong; a value that is wrong reads as a harmless one."""

    def __init__(self, config: dict[str, Any], prefix: str = "") -> None:
        self.config = config
        self.prefix = prefix
        self.problems: list[Problem] = []
        self.wrong = False  # something is said that no model can be; else it is merely not supported

    def get(self, key: str) -> Any:
        """What a key says, REQUIRED if it is not there."""
        return self.config.get(key, REQUIRED)

    def count(self, key: str, absent: Any = REQUIRED, *, low: int = 1, high: int = ARCH_LIMIT) -> int:
        """A whole number."""
        value = self.config.get(key, absent)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.refuse(key, value, f"a whole number from {low} to {high}", wrong=True)
        return 1

    def number(self, key: str, absent: Any = REQUIRED, *, low: float = 1e-12, high: float = 1e12) -> float:
        """Any number."""
        value = self.config.get(key, absent)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        self.refuse(key, value, f"a number from {low:g} to {high:g}", wrong=True)
        return 1.0

    def flag(self, key: str, absent: Any = REQUIRED) -> bool:
        """True or false."""
        value = self.config.get(key, absent)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false", wrong=True)
        return value is True

    def choice(self, key: str, choices: dict[str, str], absent: Any = REQUIRED) -> str:
        """What one of some words means."""
        value = self.config.get(key, absent)
        if isinstance(value, str) and value in choices:
            return choices[value]
        self.refuse(key, value, ", ".join(choices), wrong=not isinstance(value, str))
        return next(iter(choices.values()))

    def refuse(self, key: str, value: Any, supported: str, wrong: bool = False) -> None:
        """Note that a key says what is not supported; what is missing altogether may be guessed at."""
        self.problems.append(unsupported(self.prefix + key, value, supported))
        self.wrong |= wrong and value is not REQUIRED

    def adopt(self, within: "ConfigKeys") -> None:
        """Note what was found in an object of its own."""
        self.problems += within.problems
        self.wrong |= within.wrong


def unsupported(key: str, value: Any, supported: str) -> Problem:
    remedy = f"supported: {supported}"
    if value is REQUIRED:
        return Problem(f"config.json lacks {key}", remedy, key)
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = f"({type(value).__name__})"
    text = text if len(text) <= 60 else f"{text[:60]}…"
    return Problem(f"config.json says {key} = {text}, which is not supported", remedy, key)


class Word(Protocol):
    """Some keys and some fields that say the same."""

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        """The fields that the keys say; `found` are those of the words before."""
        ...

    def write(self, arch: Arch) -> dict[str, Any]:
        """The keys that say an architecture's fields."""
        ...


class Count(NamedTuple):
    """A whole number."""

    key: str
    field: str
    low: int = 1
    high: int = ARCH_LIMIT

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        return {self.field: keys.count(self.key, low=self.low, high=self.high)}

    def write(self, arch: Arch) -> dict[str, Any]:
        return {self.key: getattr(arch, self.field)}


class CountOr(NamedTuple):
    """A whole number that may be null, or left out: another then."""

    key: str
    field: str
    other: str  # a field's name, or one of a few expressions; "": 0

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        if keys.config.get(self.key) is not None:
            return {self.field: keys.count(self.key)}
        others = {"": 0, "hidden / heads": found.get("hidden", 1) // found.get("heads", 1) or 1}
        others["4 * hidden"] = 4 * found.get("hidden", 1)
        return {self.field: others[self.other] if self.other in others else found[self.other]}

    def write(self, arch: Arch) -> dict[str, Any]:
        return {self.key: getattr(arch, self.field) or None} if self.key else {}


class Number(NamedTuple):
    """A number, of which a field may be the inverse, or the root of that."""

    key: str
    field: str
    low: float = 1e-12
    power: float = 1.0  # of the key's number, that is the field's

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        value = keys.number(self.key, low=self.low)
        return {self.field: value if self.power == 1 else value**self.power}

    def write(self, arch: Arch) -> dict[str, Any]:
        value = getattr(arch, self.field)
        if self.power == 1:
            return {self.key: value}
        value = value ** (1 / self.power) if value else arch.head_dim  # a scale of 0 is that of the head
        near = round(value)
        return {self.key: near if math.isclose(near, value, rel_tol=1e-12) else value}


class NumberOrNone(NamedTuple):
    """A number that may be null, or left out: 0 then."""

    key: str
    field: str

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        return {self.field: 0.0 if keys.config.get(self.key) is None else keys.number(self.key)}

    def write(self, arch: Arch) -> dict[str, Any]:
        return {self.key: getattr(arch, self.field) or None}


class Flag(NamedTuple):
    """True or false, or what a field has for them."""

    key: str
    field: str
    values: tuple[Any, Any] = (False, True)

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        return {self.field: self.values[keys.flag(self.key)]}

    def write(self, arch: Arch) -> dict[str, Any]:
        return {self.key: getattr(arch, self.field) == self.values[1]}


class Choice(NamedTuple):
    """One of some words."""

    key: str
    field: str
    choices: tuple[tuple[str, str], ...]  # theirs and ours, the first of several the one that is written

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        return {self.field: keys.choice(self.key, dict(self.choices))}

    def write(self, arch: Arch) -> dict[str, Any]:
        return {self.key: next((their for their, our in self.choices if our == getattr(arch, self.field)), None)}


class Same(NamedTuple):
    """A field that is always another one, or a number of it."""

    field: str
    other: str
    power: float = 1.0

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        value = found[self.other]
        return {self.field: value if self.power == 1 else value**self.power}

    def write(self, arch: Arch) -> dict[str, Any]:
        return {}


class Windows(NamedTuple):
    """Sliding windows, of all layers or by a pattern."""

    full_every: int = 0  # where no list of layers says otherwise
    pattern: str = ""  # the key of it in older files
    switch: bool = False  # another key says whether the window is used
    first: str = ""  # in older files of these, the key of the first layer that has it
    listed: bool = True  # a list says which layers have it; else transformers computes it in all, whatever a list says

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        window = keys.config.get("sliding_window") if keys.config.get("use_sliding_window") is not False else None
        if isinstance(window, int) and window < 1:
            keys.refuse("sliding_window", window, "a whole number above 0, or null for no window", wrong=True)
            return NO_WINDOW
        # Layers with a window that hides nothing may still have a RoPE of their own.
        idle = (
            window is not None
            and not found.get("rope_local_theta")
            and keys.count("sliding_window") >= found["context"]
        )
        if window is None or idle:
            return self._unless_listed(keys)
        every = keys.count(self.pattern) if self.pattern and self.pattern in keys.config else self.full_every
        kinds = keys.config.get("layer_types")
        if not self.listed and any(kind != "sliding_attention" for kind in _listed(kinds)):
            keys.refuse("layer_types", kinds, "sliding_attention in every layer, which has a window in transformers")
        kinds = kinds if self.listed else None
        if kinds is None and self.listed and keys.config.get("use_sliding_window"):
            kinds = self._unlisted(keys, found["layers"])
        if kinds is not None:
            found_every = _pattern(kinds, found["layers"])
            if found_every is None:
                _refuse_list(keys, "layer_types", found, "sliding_attention, with full_attention in every n-th layer")
            every = found_every or 0
            if every == 1:
                return NO_WINDOW
        return {"window": keys.count("sliding_window"), "full_every": every}

    def _unlisted(self, keys: ConfigKeys, layers: int) -> list[str]:
        """The kinds of all layers, of an older file that says in which they begin to have a window."""
        first = keys.count(self.first, low=0) if self.first else layers
        if not self.first:
            keys.refuse("use_sliding_window", True, "layer_types beside it, or false")
        elif 0 < first < layers:
            keys.refuse(self.first, first, f"0, for windows in all layers, or {layers}, for none")
        return ["sliding_attention" if first == 0 else "full_attention"] * layers

    def _unless_listed(self, keys: ConfigKeys) -> Fields:
        kinds = keys.config.get("layer_types")
        beside = isinstance(keys.config.get("sliding_window"), int)
        known = ("full_attention", "sliding_attention") if beside else ("full_attention",)
        if kinds is not None and not all(kind in known for kind in _listed(kinds)):
            keys.refuse("layer_types", kinds, "full_attention in every layer, or a sliding_window beside it")
        return NO_WINDOW

    def write(self, arch: Arch) -> dict[str, Any]:
        # Models with both kinds of layers make both masks, whether a layer has a window or none.
        none = arch.context if self.full_every else None
        config: dict[str, Any] = {"sliding_window": arch.window or none}
        config |= {"use_sliding_window": arch.window > 0} if self.switch else {}
        if self.full_every or self.pattern or (self.switch and self.listed and arch.window):
            windows = [arch.window_of(layer) for layer in range(arch.layers)]
            config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
        return config


def _pattern(kinds: Any, layers: int) -> int | None:
    """Every how many layers one sees all, of a list of layers; 0: none does, None: there is no such number."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        return None
    full = [kind == "full_attention" for kind in kinds]
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        return None
    every = full.index(True) + 1 if any(full) else 0
    fits = all(is_full == (every > 0 and (layer + 1) % every == 0) for layer, is_full in enumerate(full))
    return every if fits else None


class NoRope(NamedTuple):
    """Layers that rotate nothing: a list of 1 and 0, or every so many."""

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        listed, every = keys.config.get("no_rope_layers"), keys.count("no_rope_layer_interval")
        if listed is None:
            return {"no_rope_every": every if every <= found["layers"] else 0}
        kinds = ["full_attention" if rotated == 0 else "sliding_attention" for rotated in _listed(listed)]
        every = _pattern(kinds, found["layers"])
        if every is None:
            _refuse_list(keys, "no_rope_layers", found, "0 in every n-th layer, and 1 in the others")
        return {"no_rope_every": every or 0}

    def write(self, arch: Arch) -> dict[str, Any]:
        rotated = [int(arch.is_rotated(layer)) for layer in range(arch.layers)]
        return {"no_rope_layers": rotated, "no_rope_layer_interval": arch.no_rope_every or arch.layers + 1}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse_list(keys: ConfigKeys, key: str, found: Fields, supported: str) -> None:
    """Refuse a list of layers: it has another length than the model, or a pattern that is not supported."""
    length = len(_listed(keys.get(key)))
    if length != found["layers"]:
        supported = f"one entry for each of num_hidden_layers = {found['layers']}; it has {length}"
    keys.refuse(key, keys.get(key), supported, wrong=length != found["layers"])


class DenseLayers(NamedTuple):
    """Layers that are dense though others have experts: the first ones of a list."""

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        listed = keys.config.get("mlp_only_layers") or []
        if listed != list(range(len(_listed(listed)))):
            keys.refuse("mlp_only_layers", listed, "the first so many layers: 0, 1, …")
        return {"dense_layers": len(_listed(listed))}

    def write(self, arch: Arch) -> dict[str, Any]:
        return {"mlp_only_layers": list(range(arch.dense_layers))}


PARTIAL = "partial_rotary_factor"


class Rope(NamedTuple):
    """Rotary fields from rope_theta and rope_scaling (transformers 4) or rope_parameters (5)."""

    theta: str = "rope_theta"
    share: str = ""  # the key of the share that RoPE rotates; elsewhere transformers rotates all, whatever is stated
    local: str = ""  # the key of the base for layers with a window, which are not scaled
    kinds: tuple[str, ...] = ("linear", "llama3", "yarn")
    older: tuple[tuple[str, str], ...] = ()  # other names of kinds, and the ones that they have now
    aloud: bool = False  # no scaling is written as a kind of its own: transformers assumes one where none is stated

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        name = "rope_scaling" if keys.config.get("rope_scaling") else "rope_parameters"
        stated = keys.config.get(name) or {}
        fields: Fields = {}
        if self.local:
            fields["rope_local_theta"] = keys.number(self.local)
            if isinstance(stated, dict) and not stated.keys().isdisjoint(("sliding_attention", "full_attention")):
                of_windows = stated.get("sliding_attention") or {}
                fields["rope_local_theta"] = _unscaled_theta(keys, f"{name}.sliding_attention", of_windows, fields)
                stated = stated.get("full_attention") or {}
        if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
            keys.refuse(name, stated, "one flat object for all layers")
            return {}
        # transformers looks beside the object for what is not inside it
        beside = {"rope_theta": keys.get(self.theta), PARTIAL: keys.get(self.share or PARTIAL)}
        rope = ConfigKeys(
            {key: value for key, value in beside.items() if value is not REQUIRED} | stated, prefix=f"{name}."
        )
        choices = {"default": "none"} | {kind: kind for kind in self.kinds} | dict(self.older)
        kind = rope.choice("rope_type" if "rope_type" in stated else "type", choices, "default")
        fields |= {"rope_theta": rope.number("rope_theta"), "rope_scaling": kind}
        if kind == "none" and fields.get("rope_local_theta") == fields["rope_theta"]:
            fields["rope_local_theta"] = 0.0  # as all others
        if (share := rope.config.get(PARTIAL)) not in (None, 1):
            fields["rope_share"] = rope.number(PARTIAL, high=1.0) if self.share else 1.0
            if not self.share:
                rope.refuse(PARTIAL, share, "1.0")
            # Of an odd number transformers rotates one more, by the frequencies of the odd number.
            elif int(found["head_dim"] * fields["rope_share"]) % 2:
                rope.refuse(PARTIAL, share, f"a share of which head_dim = {found['head_dim']} has an even number")
        if kind == "longrope":
            fields |= _long(rope, keys)
        elif kind != "none":
            fields |= _scaling(rope, kind, found["context"])
        keys.adopt(rope)
        return fields

    def write(self, arch: Arch) -> dict[str, Any]:
        scaling: dict[str, Any] = {"rope_type": arch.rope_scaling, "factor": arch.rope_factor}
        if arch.rope_scaling == "llama3":
            scaling["low_freq_factor"] = arch.rope_low
            scaling["high_freq_factor"] = arch.rope_high
            scaling["original_max_position_embeddings"] = arch.rope_original
        if arch.rope_scaling == "yarn":
            scaling |= {"beta_fast": arch.rope_beta_fast, "beta_slow": arch.rope_beta_slow}
            scaling |= {"truncate": arch.rope_truncate, "original_max_position_embeddings": arch.rope_original}
            scaling |= {"attention_factor": arch.rope_attention} if arch.rope_attention else {}
        if arch.rope_scaling == "longrope":  # in the three keys that transformers 4 demands
            scaling = {"type": "longrope", "short_factor": [*arch.rope_short], "long_factor": [*arch.rope_long]}
            scaling |= {"attention_factor": arch.rope_attention} if arch.rope_attention else {}
        # transformers 5 reads this form of 4 too; 4 does not read that of 5
        unscaled = {"rope_type": "default"} if self.aloud else None
        config = {self.theta: arch.rope_theta, "rope_scaling": unscaled if arch.rope_scaling == "none" else scaling}
        if self.share:  # always: families differ in what they assume
            is_even = int(arch.head_dim * arch.rope_share) == arch.rotated
            config[self.share] = arch.rope_share if is_even else arch.rotated / arch.head_dim
        if "longrope" in self.kinds:
            is_long = arch.rope_scaling == "longrope"
            config["original_max_position_embeddings"] = arch.rope_original if is_long else arch.context
        local = arch.rope_local_theta or arch.rope_theta
        if self.local == self.theta:  # transformers 5 takes flat keys for layers without a window alone
            full = {"rope_type": "default"} | (config["rope_scaling"] or {}) | {"rope_theta": arch.rope_theta}
            of_layers = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
            return config | {"rope_parameters": of_layers}
        return config | ({self.local: local} if self.local else {})


def _unscaled_theta(keys: ConfigKeys, name: str, stated: Any, found: Fields) -> float:
    """The base that an object of layers with a window states, which may not scale it."""
    if not isinstance(stated, dict):
        keys.refuse(name, stated, "an object with rope_theta")
        return 1.0
    within = ConfigKeys({"rope_theta": found["rope_local_theta"]} | stated, prefix=f"{name}.")
    within.choice("rope_type" if "rope_type" in stated else "type", {"default": "none"}, "default")
    theta = within.number("rope_theta")
    keys.adopt(within)
    return theta


def _scaling(rope: ConfigKeys, kind: str, context: int) -> Fields:
    fields: Fields = {"rope_factor": rope.number("factor")}
    if kind == "llama3":
        fields["rope_low"] = rope.number("low_freq_factor")
        fields["rope_high"] = rope.number("high_freq_factor")
        fields["rope_original"] = rope.count("original_max_position_embeddings", context)
    if kind != "yarn":
        return fields
    fields["rope_original"] = rope.count("original_max_position_embeddings", context)
    fields["rope_beta_fast"] = rope.number("beta_fast", 32.0)
    fields["rope_beta_slow"] = rope.number("beta_slow", 1.0)
    fields["rope_truncate"] = rope.flag("truncate", True)
    if rope.config.get("attention_factor") is not None:
        fields["rope_attention"] = rope.number("attention_factor")
    elif rope.config.get("mscale") and rope.config.get("mscale_all_dim"):
        scales = [_mscale(fields["rope_factor"], rope.number(key)) for key in ("mscale", "mscale_all_dim")]
        fields["rope_attention"] = scales[0] / scales[1]
    return fields


def _long(rope: ConfigKeys, keys: ConfigKeys) -> Fields:
    """LongRoPE; its original context is beside the object."""
    original, name = "original_max_position_embeddings", "factor"
    before = keys.count(original)  # which transformers prefers to what the object says
    fields: Fields = {"rope_original": before}
    for key, field in (("short_factor", "rope_short"), ("long_factor", "rope_long")):
        listed = _listed(rope.config.get(key))
        if not listed or not all(type(each) in (int, float) and 0 < each < 1e6 for each in listed):
            rope.refuse(key, rope.get(key), "a list of numbers above 0, one for each pair of a head")
        fields[field] = tuple(float(each) for each in listed if isinstance(each, int | float))
    if rope.config.get("attention_factor") is not None:
        fields["rope_attention"] = rope.number("attention_factor")
    elif rope.config.get(name) is not None and before > 1:
        fields["rope_attention"] = math.sqrt(1 + max(math.log(rope.number(name)), 0.0) / math.log(before))
    return fields


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


class Latent(NamedTuple):
    """Multi-head latent attention; YaRN also scales its scores."""

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        rotated, plain = keys.count("qk_rope_head_dim"), keys.count("qk_nope_head_dim")
        v, head = keys.count("v_head_dim"), rotated + plain
        fields = {"rope_dim": rotated, "head_dim": head, "v_dim": 0 if v == head else v}
        fields |= {"kv_rank": keys.count("kv_lora_rank")}
        fields |= {"q_rank": keys.count("q_lora_rank") if keys.get("q_lora_rank") is not None else 0}
        scaling = keys.config.get("rope_scaling") or keys.config.get("rope_parameters") or {}
        weight = scaling.get("mscale_all_dim") if isinstance(scaling, dict) else None
        if weight and found.get("rope_scaling", "none") != "none":
            within = ConfigKeys(scaling, prefix="rope_scaling.")
            scale = _mscale(found["rope_factor"], within.number("mscale_all_dim"))
            fields["attention_scale"] = head**-0.5 * scale * scale
            keys.adopt(within)
        return fields

    def write(self, arch: Arch) -> dict[str, Any]:
        config: dict[str, Any] = {
            "qk_rope_head_dim": arch.rope_dim,
            "qk_nope_head_dim": arch.head_dim - arch.rope_dim,
            "v_head_dim": arch.v_head,
            "head_dim": arch.rope_dim,  # what transformers rotates
            "kv_lora_rank": arch.kv_rank,
            "q_lora_rank": arch.q_rank or None,
        }
        if not arch.attention_scale or arch.rope_scaling == "none":
            return config
        scaling = Rope().write(arch)["rope_scaling"]
        scale = math.sqrt(arch.attention_scale * math.sqrt(arch.head_dim))
        weight = (scale - 1) / (0.1 * math.log(arch.rope_factor)) if arch.rope_factor > 1 else 0.0
        return config | {"rope_scaling": scaling | {"mscale_all_dim": float(f"{weight:.12g}")}}


class ExpertGroups(NamedTuple):
    """Groups of experts that a token chooses among first: another method has none, whatever their keys say."""

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        if keys.choice("topk_method", {"greedy": "all", LIMITED: "groups"}, "greedy") == "all":
            return {"router_groups": 1, "router_top_groups": 1}
        return {"router_groups": keys.count("n_group"), "router_top_groups": keys.count("topk_group")}

    def write(self, arch: Arch) -> dict[str, Any]:
        method = LIMITED if arch.router_groups > 1 else "greedy"
        return {"topk_method": method, "n_group": arch.router_groups, "topk_group": arch.router_top_groups}


class Plain(NamedTuple):
    """A key that changes the mathematics beyond an Arch, and the one value that does not."""

    key: str
    value: Any

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        value = keys.config.get(self.key, self.value)
        if value != self.value and (value or self.value):  # null is false
            keys.refuse(self.key, value, "null" if self.value is None else str(self.value).lower())
        return {}

    def write(self, arch: Arch) -> dict[str, Any]:
        return {self.key: self.value}
