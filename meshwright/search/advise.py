"""The decision chart of large-model training, executed: its questions answered by the ledger and the price.

The chart is FairScale's ("too slow? too big? tried DDP? does it scale?"). Each question is one function that returns
its step, and the next question or the advice.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.search.best_first import Candidate, priced, search
from meshwright.search.explain import nearest
from meshwright.search.question import Question
from meshwright.search.sizes import gpus_needed, with_gpus
from meshwright.search.space import ON_DEVICE, problems, refuse_empty, wants_pipeline
from meshwright.spec.optimizers import DESCRIPTIONS, OPTIMIZERS
from meshwright.spec.params import params
from meshwright.spec.plan import AXES, Precision
from meshwright.spec.units import gib

STATES = (
    "weights",
    "master",
    "reference",
    "gradients",
    "moments",
    "outer_states",
    "error_feedback",
    "all_gathered_params",
    "unreduced_grads",
)

TALK = (
    "tp",
    "cp",
    "ep",
    "pp",
    "bubble",
    "stragglers",
    "shard",
    "replicate",
    "outer",
    "tied",
)  # shares that one GPU has not

DAY = 86_400.0  # seconds

SCALES = 0.8  # of the GPUs' time that is not spent waiting for one another: less, and adding GPUs pays badly

BETTER = 0.95  # of the advised plan's seconds: what the whole search must reach to be preferred

PLAIN = {"tp": 1, "cp": 1, "pp": 1, "ep": 1}  # data parallelism alone

SHARED = (
    (1, "optimizer states"),
    (2, "optimizer states and gradients"),
    (3, "optimizer states, gradients and parameters"),
)

LOW_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16")

# Ways to send less between ranks that share or copy the weights, and what each does, the mildest first.
LESS_TALK: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("DDP with a low-precision hook", {"grad_reduce": "bf16"}, "gradients are rounded on their way"),
    ("gradients in eight bits", {"grad_reduce": "int8"}, "gradients are rounded on their way, their errors fed back"),
    ("ZeRO++", {"grad_reduce": "int8", "gather": "int8"}, "gradients and gathered weights are rounded on their way"),
    ("PowerSGD", {"powersgd": 4}, "gradients of matrices travel as two factors, their errors fed back"),
    (
        "DiLoCo",
        {"sync_every": 50, "outer": "diloco", "outer_quant": "int8"},
        "replicas train by themselves, and sync every 50 steps what they have learnt, rounded",
    ),
)

SEVERAL = {*AXES, "ep", "zero", "schedule", "chunks", "stages", "grad_accum"}  # fields that say how GPUs share the work


class ChartStep(msgspec.Struct, frozen=True, kw_only=True):
    """A question of the chart, its answer, and the numbers behind it."""

    question: str
    answer: str
    because: str


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do."""

    name: str
    text: str
    found: Candidate | None = None  # the plan that does it
    available: bool = True  # the trainer has it


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The way through the chart, and where it ends."""

    steps: tuple[ChartStep, ...]
    leaves: tuple[Leaf, ...]  # what to do, first things first
    found: Candidate | None  # the plan to use; None: nothing fits


def advise(question: Question) -> Advice:
    """Walk the chart; a question that no plan can be legal for is refused with the rule that empties it."""
    refuse_empty(question)
    walk = _Walk(question)
    node: _Node | None = walk.too_big
    while node is not None:
        node = node()
    return Advice(steps=tuple(walk.steps), leaves=tuple(walk.leaves), found=walk.found)


_Node = Callable[[], Any]  # a question; returns the next one, or None


class _Walk:
    """Where one is in the chart: what was asked so far, what was advised, and the plan that does it."""

    def __init__(self, question: Question) -> None:
        self.question = question.with_fixed(ON_DEVICE)
        self.asked = question
        self.one = _one_gpu(self.question)
        self.gpus = question.cluster.gpus
        self.memory = question.cluster.gpu.memory_bytes
        self.steps: list[ChartStep] = []
        self.leaves: list[Leaf] = []
        self.found: Candidate | None = None
        self.alone = _best(self.one, {"recompute": "none"})

    def ask(self, question: str, answer: str, because: str) -> None:
        self.steps.append(ChartStep(question=question, answer=answer, because=because))

    def do(self, name: str, text: str, found: Candidate | None = None, available: bool = True) -> None:
        self.leaves.append(Leaf(name=name, text=text, found=found, available=available))
        if found is not None:
            self.found = found

    def too_big(self) -> _Node:
        asked = "Is the model too big for one GPU?"
        if self.alone is not None:
            self.ask(asked, "no", headroom_phrase(self.alone))
            rest = self.alone.plan.grad_accum
            if rest > 1:
                size = self.alone.plan.microbatch
                text = f"on one GPU, gradients of {rest} microbatches of {size} are accumulated into the batch"
                self.do("gradient accumulation", text, self.alone)
            return self.several
        misses = nearest(self.one, top=1)
        if not misses:
            self.ask(asked, "taken as yes", "the fixed fields leave no plan for one GPU")
            return self.several
        least = misses[0]
        self.ask(asked, "yes", f"even with {plan_phrase(least)}: {headroom_phrase(least)}")
        states = sum(line.bytes for line in least.ledger.lines if line.name in STATES)
        named = "Are its weights, gradients and optimizer states alone too big?"
        taken = f"they take {gib(states)} of {gib(self.memory)} GiB"
        if states < self.memory:
            self.ask(named, "no", f"{taken}; activations are the rest")
            return self.recompute
        self.ask(named, "yes", taken)
        return self.several

    def recompute(self) -> _Node:
        """On one GPU: fewer activations are saved, and the others recomputed."""
        found = _best(self.one, {})
        asked = "Does it fit with activation checkpointing (recompute)?"
        if found is None:
            self.ask(asked, "no", "not even with all blocks recomputed")
            return self.several
        self.ask(asked, "yes", f"recompute={found.plan.recompute}: {headroom_phrase(found)}")
        self.alone = found
        self.do("recompute", "activation checkpointing: dropped in the forward, recomputed in the backward", found)
        return self.several

    def several(self) -> _Node | None:
        asked = "Is there more than one GPU?"
        if self.gpus > 1:
            self.ask(asked, "yes", f"{self.gpus} × {self.question.cluster.gpu.name}")
            return self.too_slow if self.alone is not None else self.shards
        self.ask(asked, "no", f"one {self.question.cluster.gpu.name}")
        return self.low_precision if self.alone is not None else self.offload

    def too_slow(self) -> _Node:
        assert self.alone is not None, "only what fits one GPU can be too slow there"
        day = DAY / self.alone.seconds_per_token
        because = f"it takes {time_phrase(self.alone)}, {day / 1e9:.3g} billion tokens per day, and there are more GPUs"
        self.ask("Is one GPU too slow?", "taken as yes", because)
        return self.copies

    def copies(self) -> _Node:
        """DDP: the model fits one GPU, so each may have a copy."""
        asked = "Does a replica of the model on every GPU (DDP) do?"
        fixed = {**PLAIN, "zero": 0}
        found = None if _against(self.question, fixed) else _best(self.question, fixed)
        if found is None:
            lack = f"batch {self.question.batch} over {self.gpus} GPUs has no such plan that fits"
            self.ask(asked, "it cannot", _against(self.question, fixed) or lack)
            return self.shards
        assert self.alone is not None, "only what fits one GPU is copied"
        gain = self.alone.seconds_per_token / found.seconds_per_token
        because = f"{time_phrase(found)}, {gain:.1f} × as fast as one GPU; {headroom_phrase(found)}"
        self.ask(asked, "yes" if gain > 1 else "no", because)
        self.found = found
        if gain > 1:
            self.do("DDP", "each GPU has a replica and its own samples; gradients are all-reduced", found)
        return self.scales

    def shards(self) -> _Node:
        """ZeRO 1 to 3, the least of them that fits, without recomputation and then with."""
        if against := _against(self.question, PLAIN):
            self.ask("Does it fit with states sharded over all GPUs (ZeRO)?", "no", against)
            return self.split
        for recompute in ("none", None):
            for zero, what in SHARED:
                fixed = {**PLAIN, "zero": zero} | ({} if recompute is None else {"recompute": recompute})
                against = _against(self.question, {"zero": zero})
                found = None if against else _best(self.question, fixed)
                more = "" if recompute else ", with activations recomputed"
                asked = f"Does it fit with {what} sharded (ZeRO-{zero}){more}?"
                if found is None:
                    self.ask(asked, "no", against or _lack(self.question, fixed))
                    continue
                self.ask(asked, "yes", f"{headroom_phrase(found)}; {time_phrase(found)}")
                recomputed = "" if found.plan.recompute == "none" else f", recompute={found.plan.recompute}"
                self.do(f"ZeRO-{zero}", f"{what} are sharded over the GPUs{recomputed}", found)
                return self.scales
        return self.split

    def split(self) -> _Node:
        """Pipeline, tensor and context parallelism."""
        found = _best(self.question, {})
        asked = "Does it fit with tensor, pipeline or context parallelism?"
        if found is None:
            self.ask(asked, "no", "no plan fits this cluster")
            return self.offload
        self.ask(asked, "yes", f"{headroom_phrase(found)}; {time_phrase(found)}")
        plan = found.plan
        cuts = {
            "tensor parallelism": plan.tp > 1,
            "pipeline": plan.pp > 1,
            "context parallelism": plan.cp > 1,
            "recompute": plan.recompute != "none",
        }
        self.do(
            " and ".join(name for name, used in cuts.items() if used) or "ZeRO",
            "each GPU holds a part of the model",
            found,
        )
        return self.scales

    def offload(self) -> _Node | None:
        """Nothing fits: states or activations are offloaded to host memory or a disk, or more GPUs are needed."""
        asked = "Does it fit with states or activations offloaded to host memory or disk?"
        found = _best(self.asked, {})
        if found is not None:
            offloaded, cluster, asks = found.ledger.offloaded, self.question.cluster, found.fit.host_question
            of = f" of {gib(cluster.host_bytes)}" if cluster.host_bytes else ""
            room = f"{gib(offloaded.host_bytes)}{of} GiB of host RAM per GPU"
            because = f"{headroom_phrase(found)}; {room}; {time_phrase(found)}"
            self.ask(asked, "if the host has room" if asks else "yes", f"{because}. {asks}" if asks else because)
            self.do("offload", "what does not fit on the device is offloaded to host memory or disk", found)
            self._smaller_optimizer()
            return self.low_precision
        self.ask(asked, "no", _lack(self.asked, {}))
        self._smaller_optimizer()
        needed = gpus_needed(self.asked)
        if needed is not None:
            gpus, answer = needed
            self.do("more GPUs", f"{gpus} of these are the smallest number that fits", answer.found[0])
        self.found = None  # neither those nor one GPU are the machines that were asked about
        return None

    def _smaller_optimizer(self) -> None:
        """The optimizer that keeps least, if something fits with it: another mathematics, so the user chooses."""
        asked = self.asked
        kept = {name: spec.total_bytes(params(asked.arch), 4) for name, spec in OPTIMIZERS.items()}
        least = min(kept, key=kept.__getitem__)
        if kept[least] >= DESCRIPTIONS[asked.optimizer].total_bytes(params(asked.arch), 4):
            return
        other = msgspec.structs.replace(asked, optimizer=least, master_weights="fp32", state_dtype="fp32")
        if (found := _best(other, {})) is not None:
            spec, now = OPTIMIZERS[least], DESCRIPTIONS[asked.optimizer]
            text = f"optim.name={least}: {spec.held} take the place of {now.held}; {headroom_phrase(found)}"
            learns = "it learns otherwise, by a learning rate of its own"
            self.leaves.append(Leaf(name="another optimizer", text=f"{text}; {learns}"))

    def scales(self) -> _Node:
        assert self.found is not None, "asked of a plan only"
        shares = self.found.price.waterfall
        talk = {share.name: share.seconds for share in shares if share.name in TALK and share.seconds > 0}
        total = sum(talk.values()) / self.found.price.seconds
        most = max(talk, key=lambda name: talk[name], default="")
        worst = f"; most of the rest is {most}" if most else ""
        asked = f"Does it scale (at least {SCALES:.0%} of the time not spent on communication and idling)?"
        because = f"{1 - total:.0%} of {time_phrase(self.found)}{worst}"
        if 1 - total >= SCALES:
            self.ask(asked, "yes", because)
            return self.low_precision
        self.ask(asked, "no", because)
        if most in ("replicate", "shard"):
            self._less_talk()
        return self.low_precision

    def _less_talk(self) -> None:
        """Gradients and weights take longer to communicate than to compute."""
        double = msgspec.structs.replace(self.question, batch=2 * self.question.batch)
        assert self.found is not None, "asked of a plan only"
        plan = self.found.plan
        fixed = {"replicate": plan.replicate, "shard": plan.shard, "zero": plan.zero, **PLAIN}
        found = _best(double, fixed)
        if found is not None and found.seconds_per_token < self.found.seconds_per_token:
            gain = self.found.seconds_per_token / found.seconds_per_token
            faster = f"makes a token {gain:.2f} × as fast; it changes the numerics"
            text = f"twice the batch by gradient accumulation {faster}"
            self.leaves.append(Leaf(name="gradient accumulation", text=text))
        for name, fields, said in LESS_TALK:
            self._rounded(name, fields, said)
            if name == "ZeRO++":  # whose gradients are summed in two levels where shards are in several nodes
                in_nodes = {**fields, "grad_reduce_node": self.question.cluster.domain}
                self._rounded(f"{name} in two levels", in_nodes, f"{said}, once more between nodes")
        self.do("AdaScale", "optim.adascale: the learning rate follows the larger batches of more GPUs")

    def _rounded(self, name: str, fields: dict[str, Any], said: str) -> None:
        """The same plan with less to send, if it may be and is faster: another mathematics, so the user chooses."""
        assert self.found is not None, "asked of a plan only"
        plan = msgspec.structs.replace(self.found.plan, **fields)
        if problems(self.question, plan):
            return
        other = priced(msgspec.structs.replace(self.found.job, plan=plan))
        if other.fit.headroom_bytes < 0 or other.price.seconds > BETTER * self.found.price.seconds:
            return
        stated = " ".join(f"plan.{key}={value}" for key, value in fields.items())
        times = f"{time_phrase(other)} instead of {time_phrase(self.found)}"
        text = f"{stated}: {times}; {said}. Another run than the exact one, whose loss is not predicted"
        self.leaves.append(Leaf(name=name, text=text))

    def low_precision(self) -> _Node | None:
        question = self.question
        asked = "Is the arithmetic in low precision?"
        if question.precision in (*LOW_PRECISIONS, "fp8"):
            self.ask(asked, "yes", question.precision)
            return self.search
        low = next((each for each in LOW_PRECISIONS if question.cluster.gpu.peak(each) > 0), None)
        if low is None:
            self.ask(asked, "no", f"{question.cluster.gpu.name} has none")
            return self.search
        found = search(msgspec.structs.replace(question, precision=low), top=1).found
        gain = self.found.price.seconds / found[0].price.seconds if found and self.found else math.nan
        faster = f"{low} would take {time_phrase(found[0])}, {gain:.1f} × as fast" if found else "none fits"
        self.ask(asked, "no", faster)
        if found:
            self.leaves.append(Leaf(name="low precision", text=f"plan.precision={low}", found=found[0]))
        return self.search

    def search(self) -> None:
        """The chart has a few plans, the search all of them."""
        best = _best(self.asked, {})
        here = self.found or self.alone
        if best is None or here is None:
            return
        asked = "Does a search over all plans find a clearly faster one?"
        if best.price.seconds > BETTER * here.price.seconds:
            self.ask(asked, "no", f"the best takes {time_phrase(best)}, this one {time_phrase(here)}")
            self.found = here
            return
        self.ask(asked, "yes", f"{plan_phrase(best)}: {time_phrase(best)} instead of {time_phrase(here)}")
        self.do("the search's plan", "the first of `meshwright plan`", best)


def _best(question: Question, fixed: dict[str, Any]) -> Candidate | None:
    """The fastest plan with some fields given beside the user's own, which come first."""
    return next(iter(search(question.with_fixed(fixed), top=1).found), None)


def _one_gpu(question: Question) -> Question:
    """The same model and batch on one GPU: what is stated of several is not asked of it."""
    if question.cluster.gpus == 1:
        return question
    kept = {name: value for name, value in question.fixed.items() if name not in SEVERAL}
    return msgspec.structs.replace(with_gpus(question, 1), fixed=kept)


def _against(question: Question, fixed: dict[str, Any]) -> str:
    """Fields that the user has fixed to other values than a question of the chart needs; empty: none."""
    other = [name for name, value in question.fixed.items() if fixed.get(name, value) != value]
    if fixed.get("pp") == 1 and wants_pipeline(question):
        other += [name for name in ("schedule", "stages", "chunks") if name in question.fixed]
    stated = [f"plan.{name} = {_value(question.fixed[name])}" for name in other]
    return f"{' and '.join(stated)} {'is' if len(stated) == 1 else 'are'} fixed" if stated else ""


def _value(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


def _lack(question: Question, fixed: dict[str, Any]) -> str:
    """Why nothing fits: of the device, or of the host."""
    misses = nearest(question.with_fixed(fixed), top=1)
    none = f"batch {question.batch} over {question.cluster.gpus} GPUs has no such plan"
    if not misses:
        return none
    return misses[0].fit.why if misses[0].fit.headroom_bytes >= 0 else headroom_phrase(misses[0])


def headroom_phrase(found: Candidate) -> str:
    gpu = found.job.cluster.gpu.memory_bytes
    return f"needs {gib(found.peak_bytes)} GiB of {gib(gpu)} at {found.ledger.moment}"


def time_phrase(found: Candidate) -> str:
    seconds = found.price.seconds
    return f"{seconds:.0f} s/step" if seconds >= 1000 else f"{seconds:.3g} s/step"


def plan_phrase(found: Candidate) -> str:
    plan = found.plan
    recompute = f", recompute={plan.recompute}" if plan.recompute != "none" else ""
    return f"{plan}" if plan.world > 1 else f"microbatch={plan.microbatch}{recompute}"
