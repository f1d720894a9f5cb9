"""A published run → a job that can be priced: the columns of docs/accuracy.md, blanks filled by documented defaults."""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from meshwright.cost.job import Job
from meshwright.cost.memory import fits
from meshwright.cost.published_arch import arch_of
from meshwright.cost.published_cells import Cells, ImpossibleError, RefusalError, holds
from meshwright.cost.published_plan import degrees_of, is_early, plan_of
from meshwright.spec.catalogue import catalogue, recognised, unknown
from meshwright.spec.cluster import MOST_GPUS, Cluster, Machines, assembled
from meshwright.spec.plan import Plan
from meshwright.spec.stack import Stack, stack_of

NIC_WORDS = ("hdr", "ndr", "xdr", "edr", "per gpu", "per-gpu", "/gpu", "a gpu", "connectx", "cx-7", "cx7")
GENERATIONS = {"hdr": 200.0, "ndr": 400.0, "xdr": 800.0}  # Gb/s of a link; EDR and Omni-Path have 100
MARGIN = 0.1  # of the device: nobody fills the last tenth on purpose
ADAPTERS = ("lora", "qlora", "dora", "peft")


class Priced(msgspec.Struct, frozen=True, kw_only=True):
    """A row as a job, with what was assumed; or the reason why it cannot be one."""

    job: Job | None = None
    assumed: tuple[str, ...] = ()
    refused: str = ""
    impossible: bool = False  # such a plan cannot run, whether it was refused for that or priced all the same


def job_of(row: Mapping[str, str | None]) -> Priced:
    """The job that a published row describes."""
    cells = Cells(row)
    try:
        job = _job(cells)
    except RefusalError as reason:
        return Priced(assumed=tuple(cells.assumed), refused=str(reason), impossible=isinstance(reason, ImpossibleError))
    return Priced(job=job, assumed=tuple(cells.assumed), impossible=cells.impossible)


def _job(cells: Cells) -> Job:
    if holds(cells.text("model_name"), ADAPTERS):
        raise RefusalError("adapters (LoRA) leave most weights without gradients, which no plan here expresses")
    degrees = degrees_of(cells)
    stack = _stack(cells, degrees.tp)
    arch = arch_of(cells, stack, degrees.tp)
    cluster = cluster_of(cells, degrees.world)
    plan = plan_of(cells, arch, stack, degrees, cluster.domain)
    if is_early(cells, stack) and not cells.text("activation_ckpt"):
        plan = _recomputed(cells, Job(arch=arch, plan=plan, sequence=arch.context, cluster=cluster, stack=stack))
    if cells.text("offload") not in ("", "no", "none", "0", "false"):
        cells.note(f"offload of {cells.text('offload')} not priced")
    if cells.argument("optimizer") == "muon":
        cells.note("Muon priced as AdamW")
    if "(pure)" in cells.text("precision") and plan.zero == 0:
        narrow = msgspec.structs.replace(
            stack.holds, states="buffers", weight_bytes=2.0, gradient_bytes=2.0, optimizer_bytes=4.0
        )  # weights, gradients and moments all in bf16, no master copy
        stack = msgspec.structs.replace(stack, holds=narrow)
    return Job(arch=arch, plan=plan, sequence=arch.context, cluster=cluster, stack=stack)


def _recomputed(cells: Cells, job: Job) -> Plan:
    """An early run that does not say so computed everything anew where it would hardly have fitted otherwise."""
    if fits(job).headroom_bytes >= MARGIN * job.cluster.gpu.memory_bytes:
        return job.plan
    cells.note("activation_ckpt = full after all (it would hardly fit otherwise)")
    return msgspec.structs.replace(job.plan, recompute="full")


def _stack(cells: Cells, tp: int) -> Stack:
    """The framework's stack, with what this row says of it."""
    stack = stack_of(cells.text("framework"))
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
    return assembled(_machines(cells, name, gpus), known)


def _machines(cells: Cells, name: str, gpus: int) -> Machines:
    known = catalogue()
    card = known.cards[name]
    links = cells.row.get("interconnect", "")
    node = cells.whole("gpus_per_node") or min(card.domain, 8)
    domain = _domain(f"{cells.text('gpu')} {links.lower()}", node, card.domain)
    network = recognised(links, known.networks) or card.network
    gbit = _gbit(links, node) or card.network_gbit
    if gpus > domain and not links:
        cells.note(f"interconnect = {network}, {gbit:g} Gb/s a GPU (the card's usual)")
    plain_pcie = "pcie" in links.lower() and "nvlink" not in links.lower()
    return Machines(
        gpu=name,
        gpus=gpus,
        domain=domain,
        network=network,
        network_gbit=gbit,
        scale_up=card.host if plain_pcie and card.host.startswith("pcie") else card.scale_up,
    )


def _domain(text: str, node: int, usual: int) -> int:
    """GPUs behind one switch: a rack stays a rack, however many of its GPUs share a tray."""
    rack = re.search(r"nvl\s?(\d+)", text)
    if rack:
        return int(rack[1])
    return usual if usual > 8 else node


def _gbit(text: str, node: int) -> float | None:
    """Gb/s of the network for one GPU. Gb, not GB: a small b is bits, and links inside a node are given in bytes."""
    several = re.search(r"(\d+)\s*[x×]\s*(?:[A-Za-z-]+\s+)*(\d+(?:\.\d+)?)\s*(?:Gb(?![a-z]*yte)|G\b|gbps|gbit)", text)
    if several:
        return float(several[1]) * float(several[2]) / node
    single = re.search(r"(\d+(?:\.\d+)?)\s*([GT])b(?:ps|/s|it)?", text)
    if single is None:
        return _generation(text.lower(), node)
    rate = float(single[1]) * (1000 if single[2] == "T" else 1)
    return rate if holds(text.lower(), NIC_WORDS) else rate / node


def _generation(text: str, node: int) -> float | None:
    """The same where only the generation of the network is named, and perhaps how many links a node has."""
    found = re.search(r"(?:(\d+)\s*[x×]?\s*)?\b(omni-?\s?path|opa|edr|hdr|ndr|xdr)\b", text)
    if found is None:
        return None
    rate = GENERATIONS.get(found[2], 100.0)
    return rate * int(found[1]) / node if found[1] else rate
