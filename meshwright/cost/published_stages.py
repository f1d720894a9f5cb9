"""The pipeline of a published row: its schedule, and how its stack cuts the layers into stages."""

from meshwright.cost.published_cells import Cells, holds
from meshwright.spec.arch import Arch
from meshwright.spec.schedule import Schedule, legal
from meshwright.spec.stack import Stack

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
