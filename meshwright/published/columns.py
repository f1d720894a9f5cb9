"""What a published row describes: its cells read tolerantly, its model, and its plan; blanks are filled and named."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from meshwright.config.presets import preset, preset_names
from meshwright.hardware.stacks import Stack
from meshwright.spec.arch import Arch
from meshwright.spec.params import count
from meshwright.spec.plan import Plan, Precision, even_stages
from meshwright.spec.schedule import Schedule, legal

Zero = Literal[0, 1, 2, 3]
NUMBER = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+")
NEGATIVE = re.compile(r"-[\d.]")
MOST = 1e9  # no count of any run
LARGEST = 1e18  # no number of any run: of its parameters, or of its tokens
SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
GATED = ("llama", "mistral", "mixtral", "qwen", "deepseek", "gemma", "yi-", "olmo", "phi-3", "grok", "kimi", "gpt-oss")
PLAIN = ("gpt", "mpt", "bloom", "opt", "turing", "mt-nlg", "megatron", "nemotron", "neox")
# Vocabularies of models whose rows leave it out, the more special names first; the rest is GPT-2's.
VOCABULARIES = {
    "llama 3": 128_256, "llama3": 128_256, "llama-3": 128_256, "llama 4": 202_048, "llama4": 202_048,
    "llama": 32_000, "mixtral": 32_000, "mistral": 32_000, "qwen": 151_936, "deepseek": 129_280,
    "nemotron": 256_000, "gemma": 256_000, "bloom": 250_880, "mpt": 50_368, "gpt-oss": 201_088,
}  # fmt: skip
GPT2_VOCABULARY = 50_257
HEADS = {"qwen3": 128, "qwen 3": 128, "deepseek": 128, "kimi": 128, "gpt-oss": 64, "gpt oss": 64}  # not hidden ÷ heads
ASPECT = 128  # hidden ÷ layers where only a parameter count is given, as in the GPT-3 family
NEAR = 0.15  # a parameter count that far from the cell's means that a width was the other kind of width
# Words of a schedule's name, the more special first.
SCHEDULES: dict[Schedule, tuple[str, ...]] = {
    "dualpipev": ("dualpipe",),
    "zbv": ("zb-v", "zbv", "zb v", "v-schedule", "v-half", "v-min"),
    "zb1p": ("zb", "zero bubble", "zero-bubble"),
    "looped": ("looped", "breadth"),
    "gpipe": ("gpipe", "afab", "all-forward", "all forward"),
    "interleaved": ("interleaved", "1f1b-i", "1f1bi", "vpp", "virtual"),
}
MOST_CHUNKS = 8  # of a rank, where an interleaved schedule does not say how many
TAIL = 2  # ranks without a layer that nanotron can fill: the output projection, then the loss
# ZeRO stages of stacks whose rows leave zero_stage blank.
SHARDING: dict[str, Zero] = {"nvidia-nemo": 1, "composer-fsdp": 3, "torchtitan": 3, "pytorch-fsdp": 3}
NODE = 8  # data ranks of a sharded run of which nothing else is known
PRECISIONS: dict[Precision, tuple[str, ...]] = {
    "fp8": ("fp8", "float8", "e4m3", "e5m2"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
    "fp32": ("fp32", "float32", "tf32"),
}


class RefusalError(ValueError):
    """A row that cannot be priced, with the reason as a sentence."""


class ImpossibleError(RefusalError):
    """A row whose plan could not have run: that is an answer too."""


class Cells:
    """One row by column; remembers what had to be assumed."""

    def __init__(self, row: Mapping[str, str | None]) -> None:
        self.row = {key.strip().lower(): (value or "").strip() for key, value in row.items() if key}
        self.assumed: list[str] = []
        self.impossible = False  # priced, and such a plan cannot run

    def text(self, column: str) -> str:
        """A cell in lower case; empty where the source says nothing."""
        return self.row.get(column, "").lower()

    def number(self, column: str) -> float | None:
        """The first number of a cell: 8, 1.0, 50,257, 405e9, 52B, 8×; None where there is none."""
        text = self.row.get(column, "")
        found = number(text)
        if found is not None and (found > LARGEST or NEGATIVE.match(text)):
            raise RefusalError(f"{column} = {text} is {'too large' if found > LARGEST else 'negative'}")
        return found

    def whole(self, column: str) -> int | None:
        """The first number of a cell as a whole one; None where there is none, or it is 0."""
        found = self.number(column)
        if found is not None and found > MOST:
            raise RefusalError(f"{column} = {self.row.get(column, '')} is too large")
        return round(found) if found else None

    def needed(self, column: str, what: str) -> int:
        """A count that nothing can stand in for."""
        found = self.whole(column)
        if found is None or found < 1:
            raise RefusalError(f"{what} is not given (column {column})")
        return found

    def whole_or(self, column: str, default: int, why: str) -> int:
        """A count, or its documented default, which is then listed."""
        found = self.whole(column)
        if found is not None and found >= 1:
            return found
        return self.assume(column, default, why)

    def degree(self, column: str) -> int:
        """A degree of parallelism; a blank is 1, as sources leave out the axes they do not use."""
        return self.whole(column) or 1

    def flag(self, column: str) -> bool | None:
        """Yes, no, or None where the source says neither."""
        text = self.text(column)
        if text.startswith(("y", "true", "on", "1")):
            return True
        return False if text.startswith(("n", "false", "off", "0")) and text not in ("n/a", "na") else None

    def assume(self, column: str, value: int, why: str) -> int:
        """Take a default, and remember it."""
        self.assumed.append(f"{column} = {value} ({why})")
        return value

    def note(self, sentence: str) -> None:
        """Remember something that was taken as something else."""
        self.assumed.append(sentence)

    def cannot_run(self, sentence: str) -> None:
        """Remember why this plan would not run, whatever it would cost."""
        self.impossible = True
        self.assumed.append(sentence)

    def argument(self, name: str) -> str | None:
        """The value of a launcher's argument that the notes list, "" for a bare switch, None where it is not there."""
        found = re.search(rf"(?<![\w-]){re.escape(name)}(?:=([^,;]*))?(?=[,;\s]|$)", self.text("notes"))
        return (found[1] or "").strip() if found else None

    def whole_argument(self, name: str) -> int | None:
        """The same of an argument that is a whole number."""
        found = self.argument(name)
        return int(found) if found and found.isdigit() else None


class Degrees(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks are divided."""

    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


def number(text: str) -> float | None:
    """The first number in a text, with the scale of a letter right behind it (52B is 52 billion)."""
    found = NUMBER.search(text)
    if found is None:
        return None
    value = float(found[0].replace(",", ""))
    scale = re.match(r"\s?([kKmMbBtT])(?![a-zA-Z])", text[found.end() :])
    return value * SCALES[scale[1].lower()] if scale else value


def holds(text: str, words: Iterable[str]) -> bool:
    """Whether one of some words is part of a text."""
    return any(word in text for word in words)


def arch_of(cells: Cells, stack: Stack, tp: int) -> Arch:
    """The architecture that a row describes, its vocabulary filled up as the stack does."""
    multiple = cells.whole_argument("make-vocab-size-divisible-by")
    vocab = padded(_vocabulary(cells), stack.vocab_multiple if multiple is None else multiple, tp)
    if known := _known_moe(cells):
        return msgspec.structs.replace(known, vocab=vocab, context=sequence_of(cells))
    gated = is_gated(cells)
    layers, hidden = _shape(cells)
    heads = cells.whole_or("heads", max(hidden // 128, 1), "hidden ÷ 128")
    if cells.argument("multi-latent-attention") is not None or "deepseek" in cells.text("model_name"):
        cells.note("latent attention priced as grouped-query attention with one pair of keys and values")
        kv_heads = 1
    else:
        kv_heads = cells.whole_or("kv_heads", heads, "heads")
    sequence = sequence_of(cells)
    ffn = cells.whole("ffn_hidden") or cells.assume(
        "ffn_hidden", llama_width(hidden) if gated else 4 * hidden, "Llama's rule" if gated else "4 × hidden"
    )
    arch = Arch(
        vocab=vocab,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(cells, hidden, heads),
        ffn=ffn,
        context=sequence,
        mlp="swiglu" if gated else "gelu",
        **_style(cells, gated),
    )
    return _with_count(cells, _with_experts(cells, arch))


def _known_moe(cells: Cells) -> Arch | None:
    """The MoE model of the zoo that a row names, with as many layers as the row has.

    No column says how wide an expert is beside a dense layer, how many experts are shared, or how long a latent of keys
    and values is. Names are compared by letters and digits; the row's own width and number of experts must agree.
    """
    name = _plain(cells.text("model_name"))
    named = [each for each in preset_names() if _plain(each) in name]
    for found in map(preset, sorted(named, key=len, reverse=True)):
        if found.experts and (found.hidden, found.experts) == (cells.whole("hidden"), cells.whole("experts")):
            layers = cells.whole("layers") or found.layers
            return msgspec.structs.replace(found, layers=layers, dense_layers=min(found.dense_layers, layers - 1))
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name)


def is_gated(cells: Cells) -> bool:
    """Whether the feed-forward has a gate (Llama) or not (GPT): by argument, name, framework, then its width."""
    if _has_arguments(cells):
        return cells.argument("swiglu") is not None
    name = cells.text("model_name")
    if holds(name, GATED):
        return True
    if holds(name, PLAIN):
        return False
    if holds(cells.text("framework"), ("nanotron", "torchtitan", "torchtune", "kempner")):
        return True
    hidden, ffn = cells.whole("hidden"), cells.whole("ffn_hidden")
    return bool(hidden and ffn and ffn != 4 * hidden)


def sequence_of(cells: Cells) -> int:
    """Tokens of a sequence; 8k is 8,192."""
    found = cells.needed("seq_len", "the sequence length")
    return found * 1024 // 1000 if re.search(r"\d\s?k", cells.text("seq_len")) else found


def llama_width(hidden: int) -> int:
    """Two thirds of 4 × hidden, up to a multiple of 256."""
    return -(-8 * hidden // (3 * 256)) * 256


def padded(vocab: int, multiple: int, tp: int) -> int:
    """A vocabulary filled up so that every rank's part is a multiple."""
    step = multiple * tp
    return -(-vocab // step) * step


def _has_arguments(cells: Cells) -> bool:
    """Whether the notes list a launcher's arguments, whose absence then says something too."""
    return "args:" in cells.text("notes")


def _shape(cells: Cells) -> tuple[int, int]:
    layers, hidden = cells.whole("layers"), cells.whole("hidden")
    if layers and hidden:
        return layers, hidden
    parameters = cells.number("params") or cells.number("model_name")
    if not parameters or parameters < 1e6:
        raise RefusalError("neither layers and hidden nor a parameter count is given")
    layers = layers or max(round((parameters / (12 * ASPECT**2)) ** (1 / 3) / 2) * 2, 1)
    hidden = max(round(math.sqrt(parameters / (12 * layers)) / 128), 1) * 128
    cells.note(f"layers = {layers}, hidden = {hidden} (a GPT of that many parameters, hidden = {ASPECT} × layers)")
    return layers, hidden


def _head_dim(cells: Cells, hidden: int, heads: int) -> int:
    stated = cells.whole_argument("kv-channels")
    if stated is not None:
        return stated
    for word, width in HEADS.items():
        if word in cells.text("model_name"):
            cells.note(f"heads of {width} (as models named {word} have)")
            return width
    return max(hidden // heads, 1)


def _vocabulary(cells: Cells) -> int:
    if found := cells.whole("vocab"):
        return found
    name = cells.text("model_name")
    for word, vocab in VOCABULARIES.items():
        if word in name:
            return cells.assume("vocab", vocab, f"as models named {word} have")
    return cells.assume("vocab", GPT2_VOCABULARY, "GPT-2's")


def _style(cells: Cells, gated: bool) -> dict[str, Any]:
    """Norm, positions, bias and tied embeddings: by the launcher's arguments where notes list them, else by name."""
    if _has_arguments(cells):
        positions = cells.argument("position-embedding-type")
        return {
            "norm": "rms" if cells.argument("normalization") == "rmsnorm" else "layer",
            "positions": positions if positions in ("rope", "none") else "learned",
            "bias": cells.argument("disable-bias-linear") is None,
            "tied": cells.argument("untie-embeddings-and-output-weights") is None,
        }
    name, notes = cells.text("model_name"), cells.text("notes")
    plain = not gated and "nemotron" not in name
    return {
        "norm": "rms" if gated else "layer",
        # BLOOM has a bias on the scores, which has no weights.
        "positions": "none" if "bloom" in name else "learned" if plain else "rope",
        "bias": plain,
        "tied": "untied" not in notes and ("tied embedding" in notes or "gemma" in name or plain),
    }


def _with_experts(cells: Cells, arch: Arch) -> Arch:
    experts = cells.whole("experts") or 0
    if experts < 2:
        return arch
    stated = cells.whole_argument("moe-ffn-hidden-size")
    width = arch.ffn if stated is None else stated
    shared = cells.whole_argument("moe-shared-expert-intermediate-size")
    dense_first = re.match(r"\(\[0\]\*(\d+)", cells.argument("moe-layer-freq") or "")
    if dense_first:
        cells.note(f"the first {dense_first[1]} layers, dense in the source, priced as MoE layers too")
    if cells.argument("mtp-num-layers") is not None:
        cells.note("the layer that predicts further tokens left out")
    return msgspec.structs.replace(
        arch,
        experts=experts,
        top_k=min(cells.whole_or("top_k", 2, "the usual number"), experts),
        expert_ffn=width,
        shared_experts=0 if shared is None else round(shared / width),
        balance_loss=0.01,
    )


def _with_count(cells: Cells, arch: Arch) -> Arch:
    """The same architecture, made to agree with the stated parameter count where a choice was open."""
    stated = cells.number("params")
    if not stated or stated < 1e6:
        return arch
    off = abs(count(arch) / stated - 1)
    if arch.experts and off > NEAR:
        return _with_expert_width(cells, arch, stated)
    if not _has_arguments(cells) and "tied" not in cells.text("notes"):
        other = msgspec.structs.replace(arch, tied=not arch.tied)
        if abs(count(other) / stated - 1) < min(off, 0.02) and off > 0.01:
            cells.note(f"{'tied' if other.tied else 'untied'} output projection (agrees with the parameter count)")
            return other
    return arch


def _with_expert_width(cells: Cells, arch: Arch, stated: float) -> Arch:
    """The width of an expert, where the column holds the dense layers' width."""
    matrices = 3 if arch.gated else 2
    per_width = matrices * arch.hidden * (arch.experts + arch.shared_experts) * arch.moe_layers
    rest = count(arch) - per_width * arch.expert_ffn
    width = round((stated - rest) / per_width / 64) * 64
    if width < 64 or width > arch.ffn:
        return arch
    cells.note(f"expert width {width} (from the parameter count; the column gives {arch.ffn})")
    return msgspec.structs.replace(arch, expert_ffn=width)


def schedule_of(cells: Cells, layers: int, pp: int, microbatches: int) -> tuple[Schedule, int]:
    """The schedule and the stages of each rank."""
    if pp == 1:
        return "1f1b", 1
    text, chunks = cells.text("schedule"), cells.whole("interleave") or 1
    named: list[Schedule] = [name for name, words in SCHEDULES.items() if holds(text, words)]
    # Megatron overlaps the messages of a pipeline in its interleaved schedule alone.
    schedule = named[0] if named else "interleaved" if not text and overlaps(cells) else "1f1b"
    if schedule == "zb1p" and holds(text, ("2p", "h2")):
        cells.note("schedule = zb1p (one that holds twice as much and idles less is not known here)")
    if schedule == "interleaved" and chunks == 1 and not cells.whole("interleave"):
        # The embedding and the output projection may count as a layer each.
        fitting = [n for n in range(2, MOST_CHUNKS + 1) if layers % (pp * n) == 0 or (layers + 2) % (pp * n) == 0]
        chunks = cells.assume("interleave", max(fitting, default=1), "stages as short as divides, at most 8 a rank")
    if schedule == "1f1b" and chunks > 1:
        schedule = "interleaved"
    chunks = {"1f1b": 1, "gpipe": 1, "zbv": 2, "dualpipev": 2}.get(schedule, chunks)
    if (chunks > 1 and pp * chunks > layers + 2) or legal(schedule, pp, chunks, microbatches):
        if schedule != "interleaved" or chunks > 1:
            cells.note(f"schedule = 1f1b ({schedule} with {chunks} stages a rank does not go with the other numbers)")
        return "1f1b", 1
    return schedule, chunks


def stages_of(cells: Cells, arch: Arch, stack: Stack, pp: int, chunks: int) -> tuple[int, ...]:
    """Layers of each stage: as the source says, as the stack cuts, else as even as can be."""
    stages, layers = pp * chunks, arch.layers
    if pp == 1:
        return ()
    first, last = (cells.argument(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if first and last and chunks == 1 and pp > 2:
        return (int(first), *even_stages(layers - int(first) - int(last), pp - 2), int(last))
    if stack.name == "nanotron" and chunks == 1:
        found = by_threshold(arch, pp)
        if found.count(0) > TAIL:
            cells.cannot_run(f"nanotron's cut leaves {found.count(0) - TAIL} of pp = {pp} ranks with nothing to hold")
        return found
    if layers % stages == 0:
        return even_stages(layers, stages)
    if (layers + 2) % stages == 0:
        each = (layers + 2) // stages  # the embedding and the output projection each count as a layer
        return (each - 1, *([each] * (stages - 2)), each - 1)
    return even_stages(layers, stages)


def by_threshold(arch: Arch, pp: int) -> tuple[int, ...]:
    """nanotron's cut: a rank takes blocks until the cost so far reaches its share of the whole.

    The block that reaches it stays, so early ranks are the longer ones. The output projection counts as vocab · hidden,
    so the last ranks may hold it and no layer. Published memory and times of uneven cuts agree with this reading.
    """
    layer = arch.hidden * (2 * arch.q_width + 2 * arch.kv_width) + 3 * arch.ffn * arch.hidden
    total = layer * arch.layers + arch.vocab * arch.hidden
    rank, found = 0, [0] * pp
    for taken in range(1, arch.layers + 1):
        found[rank] += 1
        if rank < pp - 1 and taken * layer * pp >= total * (rank + 1):
            rank += 1
    return tuple(found)


def degrees_of(cells: Cells) -> Degrees:
    """Degrees whose product is the number of GPUs."""
    tp, cp, pp = (cells.degree(name) for name in ("tp", "cp", "pp"))
    inner = tp * cp * pp
    gpus, dp = cells.whole("n_gpus"), cells.whole("dp")
    if gpus is None:
        if dp is None:  # as many as experts or, without a batch, shards need
            sharded = NODE if cells.whole("zero_stage") and not cells.text("global_batch") else 1
            least = max(-(-cells.degree("ep") // cp), sharded)
            dp = cells.assume("dp", least, "the least that goes with the row")
        cells.note(f"n_gpus = {dp * inner} (tp × cp × pp × dp)")
        return Degrees(tp=tp, cp=cp, pp=pp, dp=dp)
    if gpus % inner:
        raise ImpossibleError(f"n_gpus = {gpus} is not a multiple of tp × cp × pp = {inner}")
    if dp is not None and dp * inner != gpus:
        cells.note(f"dp = {gpus // inner} (n_gpus ÷ tp ÷ cp ÷ pp; the column gives {dp})")
    return Degrees(tp=tp, cp=cp, pp=pp, dp=gpus // inner)


def plan_of(cells: Cells, arch: Arch, stack: Stack, degrees: Degrees, domain: int) -> Plan:
    """The plan that a row describes."""
    microbatch, grad_accum = _batches(cells, degrees.dp)
    if degrees.pp > arch.layers and stack.name != "nanotron":
        raise ImpossibleError(f"pp = {degrees.pp} is more stages than layers = {arch.layers}")
    schedule, chunks = schedule_of(cells, arch.layers, degrees.pp, grad_accum)
    zero, shard = _sharding(cells, stack, degrees, domain)
    lenders = (shard if zero else degrees.dp) * degrees.cp
    return Plan(
        replicate=degrees.dp // shard,
        shard=shard,
        zero=zero,
        tp=degrees.tp,
        cp=degrees.cp,
        cp_kind="ulysses" if cells.argument("cp-comm-type") == "a2a" else "ring",
        ep=_experts(cells, arch, stack, degrees, lenders),
        pp=degrees.pp,
        schedule=schedule,
        chunks=chunks,
        stages=stages_of(cells, arch, stack, degrees.pp, chunks),
        microbatch=microbatch,
        grad_accum=grad_accum,
        precision=precision_of(cells),
        recompute=_recompute(cells, arch.layers),
        compile=cells.flag("compile") or False,
    )


def precision_of(cells: Cells) -> Precision:
    """The arithmetic of the matmuls."""
    text = cells.text("precision")
    if "fp4" in text:
        cells.note("fp4 priced as fp8")
        return "fp8"
    named: list[Precision] = [name for name, words in PRECISIONS.items() if holds(text, words)]
    if named:
        return named[0]
    default: Precision = "fp16" if "v100" in cells.text("gpu") else "bf16"
    cells.note(f"precision = {default} (the usual)")
    return default


def _batches(cells: Cells, dp: int) -> tuple[int, int]:
    """Sequences of a microbatch, and microbatches of a step."""
    microbatch, grad_accum = cells.whole("micro_batch"), cells.whole("grad_accum")
    given = cells.number("global_batch")
    if given and "tok" in cells.text("global_batch"):  # a source that counts tokens
        given /= sequence_of(cells)
    batch = round(given) if given else None
    if microbatch is None:
        microbatch = 1
        if batch and grad_accum:
            microbatch = max(batch // (dp * grad_accum), 1)
        cells.assume("micro_batch", microbatch, "global_batch ÷ dp ÷ grad_accum, or 1")
    if batch is None:
        return microbatch, grad_accum or cells.assume("grad_accum", _fills(cells.degree("pp")), "no batch is given")
    if grad_accum and microbatch * grad_accum * dp == batch:
        return microbatch, grad_accum
    if batch < dp:
        raise ImpossibleError(f"global_batch = {batch} is less than one sequence for each of dp = {dp}")
    found = max(-(-batch // (dp * microbatch)), 1)
    if grad_accum and grad_accum != found:
        cells.note(f"grad_accum = {found} (global_batch ÷ dp ÷ micro_batch; the column gives {grad_accum})")
    if found * microbatch * dp != batch:
        cells.note(f"global_batch = {found * microbatch * dp} (whole microbatches; the column gives {batch})")
    return microbatch, found


def _fills(pp: int) -> int:
    """Microbatches of a step that nothing is known of: one, but in a pipeline so many that its bubble is a ninth."""
    return 8 * pp if pp > 1 else 1


def _sharding(cells: Cells, stack: Stack, degrees: Degrees, domain: int) -> tuple[Zero, int]:
    """The ZeRO stage, and over how many data ranks it shards."""
    text = cells.text("zero_stage")
    zero = _zero(cells, stack)
    if zero == 0 or degrees.dp * degrees.cp == 1:
        return 0, 1
    instances = cells.whole_argument("num-distributed-optimizer-instances")
    if instances is not None and degrees.dp % instances == 0:
        return zero, degrees.dp // instances
    if "hsdp" in text or "hybrid" in text:
        shard = math.gcd(degrees.dp, max(domain // (degrees.tp * degrees.cp), 1))
        cells.note(f"shard = {shard} (hybrid sharding inside a node)")
        return zero, shard
    return zero, degrees.dp


def _zero(cells: Cells, stack: Stack) -> Zero:
    text = cells.text("zero_stage")
    stages: dict[str, Zero] = {"0": 0, "1": 1, "2": 2, "3": 3}
    if digit := re.search(r"[0-3]", text):
        return stages[digit[0]]
    if holds(text, ("full", "fsdp", "hsdp")):
        return 3
    if holds(text, ("dist", "yes")):
        return 1
    usual = SHARDING.get(stack.name, 0)
    cells.note(f"zero_stage = {usual} (what {stack.name} usually does)")
    return usual


def _experts(cells: Cells, arch: Arch, stack: Stack, degrees: Degrees, lenders: int) -> int:
    """Ranks that share the experts. Here tp cuts each expert too, so where a source's experts are whole, fewer do."""
    if not arch.experts:
        return 1
    stated = cells.degree("ep")
    whole = cells.argument("expert-tensor-parallel-size") == "1" or stack.name == "nvidia-nemo"
    ep = max(stated // degrees.tp, 1) if whole else stated
    works = math.gcd(math.gcd(ep, lenders), arch.experts)
    if works != stated:
        cells.note(f"ep = {works} (with tp cutting experts, as many bytes a rank as the column's {stated})")
    return works


def overlaps(cells: Cells) -> bool:
    """Whether a row's notes say that communication runs beside arithmetic."""
    return "comm overlap on" in cells.text("notes")


def is_early(cells: Cells, stack: Stack) -> bool:
    """Whether a Megatron run dates from before flash attention and sequence parallelism, when fp16 was the rule."""
    return stack.name.startswith("megatron") and "fp16" in cells.text("precision")


def _recompute(cells: Cells, layers: int) -> str:
    text = cells.text("activation_ckpt")
    if text in ("", "n/a", "?"):
        cells.note("activation_ckpt = none (not stated)")
        return "none"
    if text.startswith(("none", "no", "off", "false", "0")):
        return "none"
    if every := re.match(r"selective\D{0,12}([2-9])\b", text):
        return f"first-{max(layers // int(every[1]), 1)}"  # every so-manieth layer: as many, not the same ones
    if text.startswith(("selective", "core", "attn", "attention", "op")):
        return "selective"
    runs = re.search(r"(uniform|block)\D*(\d+)", text)
    if runs and runs[1] == "uniform":
        return "full" if int(runs[2]) <= 1 else f"every-{int(runs[2])}"
    if runs:
        return f"first-{int(runs[2])}" if int(runs[2]) else "none"
    return "full"
