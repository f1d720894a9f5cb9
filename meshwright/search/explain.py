"""Why a plan is what it is: its waterfall in words, what each neighbour would cost, what could not be told apart."""

import msgspec

from meshwright.search.found import Answer, Found, fit_of, priced
from meshwright.search.neighbours import neighbours
from meshwright.search.question import Question
from meshwright.search.room import largest
from meshwright.spec.plan import Plan

GIB = 2**30
LOSSES = 3  # of the waterfall that are named
SMALL = 0.01  # of a step; smaller losses are not worth a word


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """What one changed choice would cost, or why it cannot be."""

    change: str
    plan: Plan | None = None
    seconds: float = 0.0
    peak_bytes: float = 0.0
    fits: bool = False
    problem: str = ""  # why it is not legal, or does not fit


def why(found: Found) -> str:
    """The waterfall and the ledger, in words."""
    price = found.price
    ideal = next((share.seconds for share in price.waterfall if share.name == "ideal"), 0.0)
    losses = sorted((share for share in price.waterfall if share.name != "ideal"), key=lambda share: -share.seconds)
    named = [share for share in losses[:LOSSES] if share.seconds >= SMALL * price.seconds]
    text = f"{ideal / price.seconds:.0%} of the step is the model's arithmetic at the data sheet's peak"
    for word, share in zip(("most is lost to", "then", "then"), named, strict=False):
        text += f"; {word} {share.name} ({share.seconds / price.seconds:.0%}): {share.why}"
    return f"{text}. {room(found)}{elsewhere(found)}{unchanged(found.plan)}"


def elsewhere(found: Found) -> str:
    """What waits outside the device, how much of its place that takes, and what would be without."""
    plan, away, cluster = found.plan, found.ledger.away, found.job.cluster
    if not (away.host or away.disk):
        return ""
    kept = {"host": "wide weights and moments live in host memory", "disk": "wide weights and moments live on a disk"}
    said = [kept[plan.offload]] if plan.offload != "none" else []
    said += ["weights, gradients and moments live in host memory"] if plan.offload_weights else []
    said += ["what blocks keep for the backward waits in host memory"] if plan.activations == "host" else []
    plain = msgspec.structs.replace(plan, offload="none", offload_weights=False, activations="device")
    without = fit_of(msgspec.structs.replace(found.job, plan=plain, states="fp32"))
    need = (cluster.gpu.memory_bytes - without.headroom_bytes) / GIB
    text = f" The mathematics is the same, and {' and '.join(said)}: "
    text += _share("host memory", away.host_bytes, cluster.host_bytes)
    text += _share(", the disk", away.disk_bytes, cluster.disk_bytes) if away.disk else ""
    return f"{text}. With all of it on the device this plan would need {need:.1f} GiB there."


def _share(place: str, size: float, room: float) -> str:
    """How much of a place a rank takes."""
    return f"{place} {size / GIB:.1f} of {f'{room / GIB:.0f}' if room else 'an unknown number of'} GiB for a GPU"


def unchanged(plan: Plan) -> str:
    """What was chosen beside the split and leaves the mathematics as it is, and how to have it otherwise."""
    said = {
        "compile": "blocks are compiled (plan.compile=false leaves them as they are)",
        "shadow": "a narrow copy of the weights is kept beside the wide ones (plan.shadow=false casts them instead)",
    }
    apart = plan.offload == "none"  # offloaded states leave no wide weights to be beside
    chosen = [text for name, text in said.items() if getattr(plan, name) and (apart or name != "shadow")]
    return f" Without a change of the mathematics, {' and '.join(chosen)}." if chosen else ""


def room(found: Found) -> str:
    """The ledger in a sentence."""
    ledger, fit = found.ledger, found.fit
    memory = found.job.cluster.gpu.memory_bytes / GIB
    verdict = f"{abs(fit.headroom_bytes) / GIB:.1f} GiB {'to spare' if fit.headroom_bytes >= 0 else 'too many'}"
    beyond = f" It does not fit: {fit.why}." if fit.headroom_bytes >= 0 and not fit.fits else ""
    return (
        f"The fullest rank needs {memory - fit.headroom_bytes / GIB:.1f} of {memory:.1f} GiB, {verdict}; "
        f"most of it is {largest(ledger)}, at {ledger.moment}.{beyond}"
    )


def _lacking(found: Found) -> str:
    if found.fit.headroom_bytes >= 0:
        return f"does not fit: {found.fit.why}"
    memory = found.job.cluster.gpu.memory_bytes / GIB
    return f"does not fit: {found.peak_bytes / GIB:.1f} of {memory:.1f} GiB, most of it {largest(found.ledger)}"


def beside(question: Question, plan: Plan) -> list[Beside]:
    """What each neighbour of a plan would cost."""
    found = []
    for neighbour in neighbours(question, plan):
        if neighbour.plan is None:
            found.append(Beside(change=neighbour.change, problem=neighbour.problem))
            continue
        other = priced(question.job(neighbour.plan))
        found.append(
            Beside(
                change=neighbour.change,
                plan=neighbour.plan,
                seconds=other.price.seconds,
                peak_bytes=other.peak_bytes,
                fits=other.fit.fits,
                problem="" if other.fit.fits else _lacking(other),
            )
        )
    return found


def ties(answer: Answer) -> int:
    """How many of the best plans lie within the interval of the first: arithmetic alone cannot tell them apart."""
    if not answer.found:
        return 0
    first = answer.found[0].price
    return sum(found.price.seconds <= first.high_seconds for found in answer.found)
