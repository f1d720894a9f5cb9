"""Numbers and plans as people read them."""

import msgspec

from meshwright.search.found import Found
from meshwright.search.question import Question
from meshwright.spec.plan import AXES, Plan

GIB = 2**30
UNITS = ((365 * 86400.0, "years"), (86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def plan_words(plan: Plan) -> str:
    """A plan without what is the same for all plans of a table."""
    used = [f"{name}={value}" for name in (*AXES, "ep") if (value := getattr(plan, name)) > 1]
    if plan.shards > 1:
        used.append(f"zero={plan.zero}")
    if plan.cp > 1:
        used.append(plan.cp_kind)
    if plan.pp > 1:
        used.append(plan.schedule + (f"×{plan.chunks}" if plan.chunks > 1 else ""))
    used.append(f"microbatch={plan.microbatch}×{plan.accumulate}")
    used += [f"recompute={plan.recompute}"] * (plan.recompute != "none")
    used += [f"compress={plan.compress}"] * (plan.compress != "none")
    used += [f"activations={plan.activations}"] * (plan.activations != "device")
    used += [f"offload={plan.offload}/{plan.offload_update}"] * (plan.offload != "none")
    used += [name for name in ("offload_weights", "shadow", "compile", "deterministic") if getattr(plan, name)]
    return " ".join(used)


def chosen(found: Found) -> dict[str, object]:
    """What a plan says of the mathematics, by the names of a question."""
    job = found.job
    return {
        "batch": found.plan.batch,
        "precision": found.plan.precision,
        "rounding": job.rounding,
        "states": job.states,
    }


def found_words(found: Found, asked: Question) -> str:
    """A plan, and what of the mathematics is not as it was asked."""
    other = [f"{name}={value}" for name, value in chosen(found).items() if value != getattr(asked, name)]
    return " ".join([plan_words(found.plan), *other])


def gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def number(value: float) -> str:
    """Three digits, and a letter for the thousands."""
    for scale, letter in ((1e15, " P"), (1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def time(seconds: float) -> str:
    """In the unit in which the number is at least one."""
    for scale, unit in UNITS:
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e3:.3g} milliseconds"


def short(seconds: float) -> str:
    """Seconds to three digits, never as a power of ten."""
    return f"{seconds:.3g}" if abs(seconds) < 1000 else f"{seconds:.0f}"


def as_record(found: Found, why: str) -> dict[str, object]:
    """A plan as scripts read it."""
    price, ledger, fit = found.price, found.ledger, found.fit
    return {
        "plan": msgspec.to_builtins(found.plan),
        "words": plan_words(found.plan),
        "batch": found.plan.batch,
        "seconds": price.seconds,
        "low_seconds": price.low_seconds,
        "high_seconds": price.high_seconds,
        "tokens_per_second_per_gpu": price.tokens_per_second_per_gpu,
        "mfu": price.mfu,
        "hfu": price.hfu,
        "peak_bytes": found.peak_bytes,
        "allocated_bytes": ledger.allocated,
        "reserved_bytes": ledger.reserved,
        "ledger": msgspec.to_builtins(ledger.lines),
        "host_bytes": ledger.away.host_bytes,
        "disk_bytes": ledger.away.disk_bytes,
        "host": msgspec.to_builtins(ledger.away.host),
        "disk": msgspec.to_builtins(ledger.away.disk),
        "rounding": found.job.rounding,
        "states": found.job.states,
        "moment": ledger.moment,
        "role": ledger.role,
        "waterfall": msgspec.to_builtins(price.waterfall),
        "fits": fit.fits,
        "headroom_bytes": fit.headroom_bytes,
        "low_peak_bytes": round(found.peak_bytes * ledger.low),
        "high_peak_bytes": round(found.peak_bytes * ledger.high),
        "why": why,
    }
