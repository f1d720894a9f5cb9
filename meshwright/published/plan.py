"""The plan of a published row: degrees, microbatches, schedule and what is computed anew."""

import math
import re
from typing import Literal

import msgspec

from meshwright.hardware.stacks import Stack
from meshwright.published.arch import sequence_of
from meshwright.published.cells import Cells, ImpossibleError, holds
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan, Precision
from meshwright.spec.schedule import Schedule, legal

# Words of a schedule's name, the more special first.
SCHEDULES: tuple[tuple[Schedule, tuple[str, ...]], ...] = (
    ("dualpipev", ("dualpipe",)),
    ("zbv", ("zb-v", "zbv", "zb v", "v-schedule", "v-half", "v-min")),
    ("zb1p", ("zb", "zero bubble", "zero-bubble")),
    ("looped", ("looped", "breadth")),
    ("gpipe", ("gpipe", "afab", "all-forward", "all forward")),
    ("interleaved", ("interleaved", "1f1b-i", "1f1bi", "vpp", "virtual")),
)
MOST_CHUNKS = 8  # of a rank, where an interleaved schedule does not say how many
TAIL = 2  # ranks without a layer that nanotron can fill: the output projection, then the loss


def schedule_of(cells: Cells, layers: int, pp: int, microbatches: int) -> tuple[Schedule, int]:
    """The schedule and the stages of each rank."""
    if pp == 1:
        return "1f1b", 1
    text, chunks = cells.text("schedule"), cells.whole("interleave") or 1
    schedule: Schedule = "1f1b"
    for name, words in SCHEDULES:
        if holds(text, words):
            schedule = name
            break
    if schedule == "zb1p" and holds(text, ("2p", "h2")):
        cells.note("schedule = zb1p (one that holds twice as much and idles less is not known here)")
    if schedule == "interleaved" and chunks == 1 and not cells.whole("interleave"):
        chunks = cells.assume("interleave", _usual_chunks(layers, pp), "stages as short as divides, at most 8 a rank")
    if schedule == "1f1b" and chunks > 1:
        schedule = "interleaved"
    chunks = {"1f1b": 1, "gpipe": 1, "zbv": 2, "dualpipev": 2}.get(schedule, chunks)
    if (chunks > 1 and pp * chunks > layers + 2) or legal(schedule, pp, chunks, microbatches):
        if schedule != "interleaved" or chunks > 1:
            cells.note(f"schedule = 1f1b ({schedule} with {chunks} stages a rank does not go with the other numbers)")
        return "1f1b", 1
    return schedule, chunks


def _usual_chunks(layers: int, pp: int) -> int:
    """Stages of a rank where nobody says; the embedding and the output projection may count as a layer each."""
    fitting = [n for n in range(2, MOST_CHUNKS + 1) if layers % (pp * n) == 0 or (layers + 2) % (pp * n) == 0]
    return max(fitting, default=1)


def stages_of(cells: Cells, arch: Arch, stack: Stack, pp: int, chunks: int) -> tuple[int, ...]:
    """Layers of each stage: as the source says, as the stack cuts, else as even as can be."""
    stages, layers = pp * chunks, arch.layers
    if pp == 1:
        return ()
    first, last = (cells.argument(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if first and last and chunks == 1 and pp > 2:
        return (int(first), *even(layers - int(first) - int(last), pp - 2), int(last))
    if stack.name == "nanotron" and chunks == 1:
        found = by_threshold(arch, pp)
        if found.count(0) > TAIL:
            cells.cannot_run(f"nanotron's cut leaves {found.count(0) - TAIL} of pp = {pp} ranks with nothing to hold")
        return found
    if layers % stages == 0:
        return even(layers, stages)
    if (layers + 2) % stages == 0:
        each = (layers + 2) // stages  # the embedding and the output projection each count as a layer
        return (each - 1, *([each] * (stages - 2)), each - 1)
    return even(layers, stages)


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers over stages; what is left over goes to the earlier ones."""
    each, over = divmod(layers, stages)
    return tuple(each + (stage < over) for stage in range(stages))


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


Zero = Literal[0, 1, 2, 3]

# Where zero_stage is blank.
SHARDING: dict[str, Zero] = {
    "nvidia-nemo": 1,
    "composer-fsdp": 3,
    "torchtitan": 3,
    "pytorch-fsdp": 3,
}
NODE = 8  # data ranks of a sharded run of which nothing else is known


class Degrees(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks are divided."""

    tp: int
    cp: int
    pp: int
    dp: int

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


def degrees_of(cells: Cells) -> Degrees:
    """Degrees whose product is the number of GPUs."""
    tp, cp, pp = (cells.degree(name) for name in ("tp", "cp", "pp"))
    inner = tp * cp * pp
    gpus, dp = cells.whole("n_gpus"), cells.whole("dp")
    if gpus is None:
        if dp is None:
            dp = cells.assume("dp", _least_data(cells, cp), "the least that goes with the row")
        cells.note(f"n_gpus = {dp * inner} (tp × cp × pp × dp)")
        return Degrees(tp=tp, cp=cp, pp=pp, dp=dp)
    if gpus % inner:
        raise ImpossibleError(f"n_gpus = {gpus} is not a multiple of tp × cp × pp = {inner}")
    if dp is not None and dp * inner != gpus:
        cells.note(f"dp = {gpus // inner} (n_gpus ÷ tp ÷ cp ÷ pp; the column gives {dp})")
    return Degrees(tp=tp, cp=cp, pp=pp, dp=gpus // inner)


def _least_data(cells: Cells, cp: int) -> int:
    """Data ranks when neither they nor the GPUs are counted: as many as experts or, without a batch, shards need."""
    sharded = NODE if cells.whole("zero_stage") and not cells.text("global_batch") else 1
    return max(-(-cells.degree("ep") // cp), sharded)


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
    """The arithmetic of the matrix products."""
    text = cells.text("precision")
    if "fp4" in text:
        cells.note("fp4 priced as fp8")
        return "fp8"
    if holds(text, ("fp8", "float8", "e4m3", "e5m2")):
        return "fp8"
    if holds(text, ("bf16", "bfloat16")):
        return "bf16"
    if holds(text, ("fp16", "float16", "half")):
        return "fp16"
    if holds(text, ("fp32", "float32", "tf32")):
        return "fp32"
    default: Precision = "fp16" if "v100" in cells.text("gpu") else "bf16"
    cells.note(f"precision = {default} (the usual)")
    return default


def _batches(cells: Cells, dp: int) -> tuple[int, int]:
    """Sequences of a microbatch, and microbatches of a step."""
    microbatch, grad_accum = cells.whole("micro_batch"), cells.whole("grad_accum")
    batch = _batch(cells)
    if microbatch is None:
        microbatch = 1
        if batch and grad_accum:
            microbatch = max(batch // (dp * grad_accum), 1)
        cells.assume("micro_batch", microbatch, "global_batch ÷ dp ÷ grad_accum, or 1")
    if batch is None:
        return microbatch, grad_accum or cells.assume("grad_accum", 1, "no batch is given")
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


def _batch(cells: Cells) -> int | None:
    """Sequences of a step, also where a source counts tokens."""
    found = cells.number("global_batch")
    if found and "tok" in cells.text("global_batch"):
        found /= sequence_of(cells)
    return round(found) if found else None


def _sharding(cells: Cells, stack: Stack, degrees: Degrees, domain: int) -> tuple[Zero, int]:
    """The ZeRO stage, and over how many data ranks it shards."""
    text = cells.text("zero_stage")
    zero = _zero(cells, stack)
    if zero == 0 or degrees.dp * degrees.cp == 1:
        return 0, 1
    instances = cells.argument("num-distributed-optimizer-instances")
    if instances and instances.isdigit() and degrees.dp % int(instances) == 0:
        return zero, degrees.dp // int(instances)
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
