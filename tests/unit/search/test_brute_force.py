"""The search against trying everything: 200 random jobs, every combination of field values that the trainer lets pass.

The combinations are not the search's own: each field has its values, the rules of config/check.py say which go
together, and the ledger and the price are asked of every one. Stages are balanced, as the search and the trainer have
them unless they are given.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import msgspec
import pytest

from meshwright.config import check
from meshwright.config.rules.tuning import TUNED_PLAN_RULES
from meshwright.config.run import Optim, Run
from meshwright.cost.memory import Fit, fits
from meshwright.cost.step_time import price
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.search.best_first import ALIKE, search
from meshwright.search.question import Question
from meshwright.search.space import SCHEDULES
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan, balanced_stages
from meshwright.spec.tuning import Adapter, Tuning

JOBS, AT_ONCE = 200, 20  # so many of one test, so that several workers share them
MOST = 600  # plans of a job: of one that has more another is drawn


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def everything(asked: Question) -> Iterator[Plan]:
    """Every plan that the rules let pass."""
    world, layers, fixed = asked.cluster.gpus, asked.arch.layers, asked.fixed
    counted = [f"{word}-{count}" for word in ("every", "first", "selective") for count in range(1, layers)]
    values: dict[str, list[Any]] = {
        **{axis: divisors(world) for axis in ("pp", "replicate", "shard", "cp", "tp")},
        "zero": [0, 1, 2, 3],
        "cp_kind": ["ring", "ulysses"],
        "microbatch": divisors(asked.batch),
        "schedule": list(SCHEDULES),
        "chunks": list(range(1, layers + 1)),
        "recompute": ["none", "selective", "sqrt", "full", *counted],
        "activation_offload": [False, True],
        "optimizer_offload": ["none", "host", "disk"],
        "optimizer_offload_update": ["host", "device"],
        "cpu_offload": [False, True],
        "bf16_params": [True, False] if world == 1 else [False],
    }
    values |= {name: [value] for name, value in fixed.items() if name in values}
    passes = passing(asked)
    axes = [values[axis] for axis in ("pp", "replicate", "shard", "cp", "tp")]
    for pp, replicate, shard, cp, tp in product(*axes):
        if pp * replicate * shard * cp * tp != world or (pp == 1 and "schedule" in fixed and "pp" not in fixed):
            continue  # a schedule that is asked for is used
        for microbatch, schedule, chunks in product(values["microbatch"], values["schedule"], values["chunks"]):
            share, rest = divmod(asked.batch, replicate * shard * microbatch)
            if rest or pp * chunks > layers or (pp == 1 and (schedule, chunks) != ("1f1b", 1)):
                continue
            plan = Plan(
                pp=pp, replicate=replicate, shard=shard, cp=cp, tp=tp, microbatch=microbatch, grad_accum=share,
                schedule=schedule, chunks=chunks, stages=balanced_stages(asked.arch, pp * chunks) if pp > 1 else (),
                precision=asked.precision, compile=True,
            )  # fmt: skip
            yield from ways(passes, plan, values)


def ways(passes: Callable[[Plan], bool], plan: Plan, values: dict[str, list[Any]]) -> Iterator[Plan]:
    """The same split with all that may be sharded, recomputed and offloaded; spelled once."""
    names = (
        "zero", "cp_kind", "recompute", "activation_offload", "optimizer_offload", "optimizer_offload_update",
        "cpu_offload", "bf16_params",
    )  # fmt: skip
    for chosen in product(*(values[name] for name in names)):
        one = dict(zip(names, chosen, strict=True))
        if plan.cp == 1 and one["cp_kind"] == "ulysses":
            continue
        if one["optimizer_offload"] == "none" and one["optimizer_offload_update"] == "device":
            continue
        found = msgspec.structs.replace(plan, **one, compile=False)
        if passes(found):  # what is refused as it stands is refused compiled too
            compiled = msgspec.structs.replace(found, compile=True)
            yield compiled if passes(compiled) else found


def passing(asked: Question) -> Callable[[Plan], bool]:
    """Whether the rules let a plan pass: who refused the last one is asked first, as plans in a row are alike."""
    tuning = Tuning() if asked.arch.tuning is msgspec.UNSET else asked.arch.tuning
    tuned = {"adapter": tuning.adapter, "optim": Optim(freeze=tuning.freeze)}
    run = Run(arch=asked.arch, plan=Plan(microbatch=1), batch=asked.batch, sequence=asked.sequence, **tuned)
    rules = [*check.PLAN_RULES, *TUNED_PLAN_RULES]

    def passes(plan: Plan) -> bool:
        found = msgspec.structs.replace(run, plan=plan)
        for rule in rules:
            for _ in rule(found):
                rules.remove(rule)
                rules.insert(0, rule)
                return False
        return True

    return passes


def drawn(draw: random.Random) -> Question:
    """A job of at most sixteen GPUs; the more of them, the more of the plan is fixed, as people do."""
    gpus = draw.choice([1, 1, 1, 2, 2, 3, 4, 4, 6, 8, 12, 16])
    heads = draw.choice([2, 4, 8])
    arch = Arch(
        vocab=draw.choice([256, 4096]),
        layers=draw.choice([2, 3, 4, 6] if gpus > 2 else [2, 4, 9, 16]),
        hidden=(hidden := draw.choice([128, 512, 1024])),
        heads=heads,
        kv_heads=draw.choice([heads, heads // 2]),
        head_dim=hidden // heads,
        ffn=hidden * draw.choice([2, 4]),
        context=8192,
    )
    usual = cluster(f"{gpus}xa100-80g")
    machines = msgspec.structs.replace(
        usual,
        host_bytes=draw.choice([0.0, 0.0, 2.0**26, 2.0**29, 2.0**36]),
        disk_bytes=draw.choice([0.0, 2.0**27, 2.0**36]),
    )
    free: dict[str, list[Any]] = {
        "recompute": ["none", "full", "selective"], "zero": [1, 3] if gpus > 1 else [0], "tp": [1, 2], "cp": [1, 2],
        "pp": [1, 2], "schedule": ["1f1b", "gpipe"], "microbatch": [1], "chunks": [1], "cpu_offload": [False, True],
    }  # fmt: skip
    names = draw.sample(
        sorted(free), k=min(gpus.bit_length() + draw.randrange(2), 6) if gpus > 1 else draw.randrange(2)
    )
    return Question(
        arch=arch,
        sequence=draw.choice([256, 1024, 4096]),
        batch=draw.choice([1, 2, 4, 6, 8, 16]),
        precision=draw.choice(["bf16", "bf16", "fp32"]),
        cluster=machines,
        stack=stack_of("meshwright"),
        fixed={name: draw.choice(free[name]) for name in names},
    )


@pytest.mark.parametrize("seed", range(JOBS // AT_ONCE))
def test_the_search_says_of_random_jobs_what_trying_everything_says(seed):
    assert len(judged(random.Random(seed), AT_ONCE)) > 1, "there are jobs that fit, that may, and that do not"


TUNED = {
    "lora": Tuning(adapter=Adapter(kind="lora", rank=4)),
    "qlora": Tuning(adapter=Adapter(kind="qlora", rank=4)),
    "frozen": Tuning(freeze=("embed", "blocks.0")),
}


@pytest.mark.parametrize("tuning", TUNED.values(), ids=TUNED)
def test_and_of_jobs_that_train_some_weights_alone(tuning):
    judged(random.Random(4), AT_ONCE // 4, tuning)


def judged(draw: random.Random, jobs: int, tuning: Tuning | msgspec.UnsetType = msgspec.UNSET) -> set[bool | None]:
    """So many random jobs; whether there is something that fits in each."""
    done, verdicts = 0, set[bool | None]()
    while done < jobs:
        asked = drawn(draw)
        asked = msgspec.structs.replace(asked, arch=msgspec.structs.replace(asked.arch, tuning=tuning))
        tried = list(islice(everything(asked), MOST + 1))
        if 0 < len(tried) <= MOST:
            verdicts.add(assert_alike(asked, {plan: fits(asked.job(plan)) for plan in tried}, draw))
            done += 1
    return verdicts


def assert_alike(asked: Question, tried: dict[Plan, Fit], draw: random.Random) -> bool | None:
    """On cards that hold few of the plans, one, or by a byte none of them; returns whether something fits."""
    peaks = sorted(fit.ledger.shown for fit in tried.values())
    share = draw.choice([None, 0.0, 0.0, 0.002, 0.01, 0.1, 0.5])
    memory = peaks[0] - 1 if share is None else peaks[int(share * (len(peaks) - 1))]
    gpu = msgspec.structs.replace(asked.cluster.gpu, memory_bytes=float(memory))
    asked = msgspec.structs.replace(asked, cluster=msgspec.structs.replace(asked.cluster, gpu=gpu))
    held = {plan: fit for plan, fit in tried.items() if fit.fits is not False and fit.ledger.shown <= memory}
    sure = [plan for plan, fit in held.items() if fit.fits]
    there_is = True if sure else None if held else False
    answer = search(asked)
    assert (answer.found[0].fits if answer.found else False) is there_is, (asked, next(iter(held), None))
    assert (answer.host_question is not None) == (there_is is None)
    if sure:  # a plan that fits for all errors of the ledger is preferred to a faster one
        safe = [plan for plan in sure if held[plan].ledger.shown * held[plan].ledger.high <= memory]
        fastest = min(price(asked.job(plan)).seconds for plan in safe or sure)
        assert answer.found[0].price.seconds <= fastest * (1 + ALIKE) * (1 + 1e-9), asked
    return there_is
