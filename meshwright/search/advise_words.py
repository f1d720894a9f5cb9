"""What the decision chart says of a plan: its room, its time, what it is cut by."""

from meshwright.search.found import Found

GIB = 2**30
STATES = ("weights", "master", "gradients", "moments", "gathered", "waiting")
TALK = ("tp", "cp", "ep", "pp", "bubble", "stragglers", "shard", "replicate", "tied")  # shares that one GPU has not


def states(found: Found) -> float:
    return sum(line.bytes for line in found.ledger.lines if line.name in STATES)


def talk(found: Found) -> dict[str, float]:
    """Seconds that GPUs spend on one another."""
    shares = found.price.waterfall
    return {share.name: share.seconds for share in shares if share.name in TALK and share.seconds > 0}


def cuts(found: Found) -> dict[str, bool]:
    plan = found.plan
    return {
        "tensor parallelism": plan.tp > 1,
        "pipeline": plan.pp > 1,
        "context parallelism": plan.cp > 1,
        "recompute": plan.recompute != "none",
    }


def per_token(found: Found) -> float:
    return found.seconds_per_token


def gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def room(found: Found) -> str:
    gpu = found.job.cluster.gpu.memory_bytes
    return f"{gib(found.peak_bytes)} of {gib(gpu)} GiB at {found.ledger.moment}"


def time(found: Found) -> str:
    return f"{found.price.seconds:.3g} s a step"


def words(found: Found) -> str:
    plan = found.plan
    anew = f", recompute={plan.recompute}" if plan.recompute != "none" else ""
    return f"{plan}" if plan.world > 1 else f"microbatch={plan.microbatch}{anew}"
