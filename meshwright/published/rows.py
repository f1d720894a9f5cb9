"""A table of published runs → jobs, priced: the columns of docs/accuracy.md, blanks filled by documented defaults."""

import csv
import io
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory import Ledger, fits, ledger
from meshwright.cost.step_time import Price, price
from meshwright.hardware.cluster import MOST_GPUS, Cluster, ClusterFile, assembled, catalogue, recognised, unknown
from meshwright.hardware.stacks import Stack, stack_of
from meshwright.published.columns import (
    Cells,
    ImpossibleError,
    RefusalError,
    arch_of,
    degrees_of,
    holds,
    is_early,
    overlaps,
    plan_of,
)
from meshwright.runtime.files import replace_file
from meshwright.spec.problem import mistake
from meshwright.spec.units import GIB, plural

NIC_WORDS = ("hdr", "ndr", "xdr", "edr", "per gpu", "per-gpu", "/gpu", "a gpu", "connectx", "cx-7", "cx7")
GENERATIONS = {"hdr": 200.0, "ndr": 400.0, "xdr": 800.0}  # Gb/s of a link; EDR and Omni-Path have 100
MARGIN = 0.1  # of the device: nobody fills the last tenth on purpose
ADAPTERS = ("lora", "qlora", "dora", "peft")
NEEDED = ("layers", "hidden", "seq_len", "gpu", "n_gpus")
ADDED: tuple[str, ...] = (
    "pred_iter_time_s", "pred_low_s", "pred_high_s", "pred_tokens_per_s_per_gpu",
    "pred_peak_mem_gib", "pred_low_mem_gib", "pred_high_mem_gib", "pred_fits", "refused", "assumed",
)  # fmt: skip
SAY_EVERY = 200  # rows
OUR_FAULTS = (ValueError, ArithmeticError, LookupError, AssertionError)

Row = dict[str, str]
_cached_price = lru_cache(maxsize=4096)(price)


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """A row as a job, with what was assumed; or the reason why it cannot be one."""

    job: Job | None = None
    assumed: tuple[str, ...] = ()
    refused: str = ""
    impossible: bool = False  # such a plan cannot run, whether it was refused for that or priced all the same


class RowPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What we say of one row. No figure where it is refused."""

    price: Price | None = None
    memory_bytes: float = 0.0
    low_bytes: float = 0.0
    high_bytes: float = 0.0
    fits: bool | None = None
    refused: str = ""
    assumed: tuple[str, ...] = ()

    def cells(self) -> Row:
        """The columns that are added to the row."""
        found: Row = dict.fromkeys(ADDED, "")
        found["pred_fits"] = {None: "", True: "yes", False: "no"}[self.fits]
        found["refused"], found["assumed"] = self.refused, "; ".join(self.assumed)
        if self.price is None:
            return found
        figures = (
            self.price.seconds, self.price.low_seconds, self.price.high_seconds, self.price.tokens_per_second_per_gpu,
            self.memory_bytes / GIB, self.low_bytes / GIB, self.high_bytes / GIB,
        )  # fmt: skip
        return found | {column: f"{figure:.6g}" for column, figure in zip(ADDED[:7], figures, strict=True)}


class PriceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rows of a table."""

    priced: int
    refused: int


def job_of(row: Mapping[str, str | None]) -> Priced:
    """The job that a published row describes."""
    cells = Cells(row)
    try:
        job = _job(cells)
    except RefusalError as reason:
        return Priced(assumed=tuple(cells.assumed), refused=str(reason), impossible=isinstance(reason, ImpossibleError))
    return Priced(job=job, assumed=tuple(cells.assumed), impossible=cells.impossible)


def _job(cells: Cells) -> Job:
    if holds(cells.text("model_name"), ADAPTERS) or holds(cells.text("notes").split("(")[0], ADAPTERS):
        raise RefusalError("adapters (LoRA): no column has their rank and targets, so what is trained is not known")
    degrees = degrees_of(cells)
    stack = _stack(cells, degrees.tp)
    arch = arch_of(cells, stack, degrees.tp)
    cluster = cluster_of(cells, degrees.world)
    plan = plan_of(cells, arch, stack, degrees, cluster.domain)
    job = Job(arch=arch, plan=plan, sequence=arch.context, cluster=cluster, stack=stack)
    spare = MARGIN * cluster.gpu.memory_bytes
    # An early run that does not say so recomputed everything where it would hardly have fitted otherwise.
    if is_early(cells, stack) and not cells.text("activation_ckpt") and fits(job).headroom_bytes < spare:
        cells.note("activation_ckpt = full after all (it would hardly fit otherwise)")
        job = msgspec.structs.replace(job, plan=msgspec.structs.replace(plan, recompute="full"))
    if cells.text("offload") not in ("", "no", "none", "0", "false"):
        cells.note(f"offload of {cells.text('offload')} not priced")
    if cells.argument("optimizer") == "muon":
        cells.note("Muon priced as AdamW")
    if "(pure)" in cells.text("precision") and plan.zero == 0:
        pure = msgspec.structs.replace(
            stack.holds, states="buffers", weight_bytes=2.0, gradient_bytes=2.0, optimizer_bytes=4.0
        )  # weights, gradients and moments all in bf16, no master copy
        job = msgspec.structs.replace(job, stack=msgspec.structs.replace(stack, holds=pure))
    return job


def _stack(cells: Cells, tp: int) -> Stack:
    """The framework's stack, with what this row says of it."""
    stack = stack_of(cells.text("framework"))
    if stack.name == "megatron" and overlaps(cells):
        cells.note("communication overlapped: priced as nvidia-nemo")
        stack = stack_of("nemo")
    if is_early(cells, stack):
        stack = msgspec.structs.replace(stack, attention="math", sequence_parallel=False)
    if stack.name == "generic":
        cells.note("an unknown framework: priced as the generic stack")
    sequence_parallel, attention = cells.flag("sp"), _attention(cells)
    if sequence_parallel is None and tp > 1:
        cells.note(f"sp = {'yes' if stack.sequence_parallel else 'no'} (what {stack.name} usually does)")
    if attention is None:
        cells.note(f"flash = {'yes' if stack.attention == 'flash' else 'no'} (what {stack.name} usually does)")
    return msgspec.structs.replace(
        stack,
        sequence_parallel=stack.sequence_parallel if sequence_parallel is None else sequence_parallel,
        attention=attention or stack.attention,
    )


def _attention(cells: Cells) -> Literal["flash", "math"] | None:
    text = cells.text("flash")
    if text.startswith(("unfused", "no", "math", "false", "0", "local")):
        return "math"
    if text and text not in ("n/a", "?", "auto"):
        return "flash"
    return "math" if cells.argument("transformer-impl") == "local" else None  # Megatron's own modules are unfused


def cluster_of(cells: Cells, gpus: int) -> Cluster:
    """The machines of a row: the card by its name and memory, the network by the words of its interconnect."""
    text = re.sub(r"^\d+\s*[x×]\s*", "", cells.text("gpu"))
    if not text:
        raise RefusalError("no GPU is named (column gpu)")
    memory = cells.number("gpu_mem_gb")
    asked = f"{text} {memory:.0f}g" if memory else text
    known = catalogue()
    name = recognised(asked, known.cards) or recognised(text, known.cards)
    if name is None:
        raise RefusalError(str(unknown("card", text, known.cards)))
    if name not in (text, asked.replace(" ", "-")):
        cells.note(f"gpu = {name} (recognised in {asked!r})")
    if gpus > MOST_GPUS:
        raise RefusalError(f"n_gpus = {gpus} is more than any cluster has")
    card, links = known.cards[name], cells.row.get("interconnect", "")
    node = cells.whole("gpus_per_node") or min(card.domain, 8)
    rack = re.search(r"nvl\s?(\d+)", f"{cells.text('gpu')} {links.lower()}")
    # GPUs behind one switch: a rack stays a rack, however many of its GPUs share a tray.
    domain = int(rack[1]) if rack else card.domain if card.domain > 8 else node
    network = recognised(links, known.networks) or card.network
    gbit = _gbit(links, node) or card.network_gbit
    if gpus > domain and not links:
        cells.note(f"interconnect = {network}, {gbit:g} Gb/s a GPU (the card's usual)")
    plain_pcie = "pcie" in links.lower() and "nvlink" not in links.lower()
    scale_up = card.host if plain_pcie and card.host.startswith("pcie") else card.scale_up
    machines = ClusterFile(gpu=name, gpus=gpus, domain=domain, network=network, network_gbit=gbit, scale_up=scale_up)
    return assembled(machines, known)


def _gbit(text: str, node: int) -> float | None:
    """Gb/s of the network for one GPU. Gb, not GB: a small b is bits, and links inside a node are given in bytes."""
    several = re.search(r"(\d+)\s*[x×]\s*(?:[A-Za-z-]+\s+)*(\d+(?:\.\d+)?)\s*(?:Gb(?![a-z]*yte)|G\b|gbps|gbit)", text)
    if several:
        return float(several[1]) * float(several[2]) / node
    if single := re.search(r"(\d+(?:\.\d+)?)\s*([GT])b(?:ps|/s|it)?", text):
        rate = float(single[1]) * (1000 if single[2] == "T" else 1)
        return rate if holds(text.lower(), NIC_WORDS) else rate / node
    # Only the generation of the network is named, and perhaps how many links a node has.
    found = re.search(r"(?:(\d+)\s*[x×]?\s*)?\b(omni-?\s?path|opa|edr|hdr|ndr|xdr)\b", text.lower())
    if found is None:
        return None
    rate = GENERATIONS.get(found[2], 100.0)
    return rate * int(found[1]) / node if found[1] else rate


def price_file(source: Path, target: Path, say: Callable[[str], None]) -> PriceCounts:
    """Read a table of runs, write it back with the columns of `ADDED`."""
    rows, columns = read(source)
    answers: list[Row] = []
    refused = 0
    for number, row in enumerate(rows, start=1):
        answer = answered(row)
        refused += bool(answer.refused)
        answers.append(row | answer.cells())
        if number % SAY_EVERY == 0:
            say(f"priced {number:,} of {len(rows):,} rows")
    write(target, [*(column for column in columns if column not in ADDED), *ADDED], answers)
    say(f"{plural(len(rows) - refused, 'row')} priced, {refused:,} refused with the reason, in {target}")
    return PriceCounts(priced=len(rows) - refused, refused=refused)


def answered(row: Mapping[str, str]) -> RowPrice:
    """Our figures for one row."""
    assumed: tuple[str, ...] = ()
    try:
        found = job_of(row)
        job, assumed = found.job, found.assumed
        if job is None:
            return RowPrice(refused=found.refused, assumed=assumed, fits=False if found.impossible else None)
        kind = row.get("peak_mem_kind", "").lower()
        held, room = _memory(job, measured_rank(kind, job))
        memory = as_measured(held, kind)
        return RowPrice(
            price=_cached_price(job),
            memory_bytes=memory,
            low_bytes=memory * held.low,
            high_bytes=memory * held.high,
            fits=room and not found.impossible,
            assumed=assumed,
        )
    except OUR_FAULTS as error:  # one row that we get wrong should not cost the user the others
        return RowPrice(refused=f"a fault of ours: {type(error).__name__}: {error}", assumed=assumed)


@lru_cache(maxsize=4096)
def _memory(job: Job, rank: int | None) -> tuple[Ledger, bool]:
    """The ledger of a pipeline rank (None: the most loaded), and whether the job fits."""
    fit = fits(job)
    return (fit.ledger if rank is None or fit.ledger.rank == rank else ledger(job, {"pp": rank})), fit.fits is not False


def measured_rank(kind: str, job: Job) -> int | None:
    """The pipeline rank that a source measured: the first, the last, or None where it is not said: the most loaded."""
    if "rank-0" in kind or "rank 0" in kind or (not kind and job.stack.name == "nanotron"):
        return 0
    return job.plan.pp - 1 if "last rank" in kind or "last pp" in kind else None


def as_measured(held: Ledger, kind: str) -> float:
    """The kind of number that a source gives; where its words do not settle it, what its stack's reports print."""
    words = {
        "allocated": ("alloc", "active"),
        "reserved": ("reserved",),
        "shown": ("nvidia-smi", "nvidia smi", "nvml", "driver"),
    }
    kinds = [name for name, found in words.items() if any(word in kind for word in found)]
    return float(getattr(held, kinds[0]) if len(kinds) == 1 else held.reported)


def read(source: Path) -> tuple[list[Row], list[str]]:
    """The rows and columns of a table."""
    try:
        with source.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            columns = list(reader.fieldnames or [])
            if missing := [column for column in NEEDED if column not in columns]:
                what = f"{source} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
                raise mistake(what, "docs/accuracy.md lists the columns that rows are read from")
            rows = []
            for row in reader:
                if None in row:
                    what = f"{source}, line {reader.line_num}: more cells than the header has columns"
                    raise mistake(what, "quote cells that hold commas")
                rows.append({column: value or "" for column, value in row.items()})
            return rows, columns
    except OSError as error:
        raise mistake(f"{source}: {error.strerror}", "name a CSV file that can be read") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise mistake(f"{source} is not a CSV table: {error}", "save it as UTF-8 CSV") from None


def write(target: Path, columns: list[str], rows: list[Row]) -> None:
    """A table on disk, whole or not at all."""
    lines = io.StringIO()
    writer = csv.DictWriter(lines, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    try:
        replace_file(target, lines.getvalue().encode())
    except OSError as error:
        raise mistake(f"{target}: {error.strerror}", "name a file that can be written") from None
