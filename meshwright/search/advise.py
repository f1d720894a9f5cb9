"""The decision chart of large-model training, executed: its questions answered by the ledger and the price.

The chart is FairScale's ("too slow? too big? tried DDP? does it scale?"). Each question is one function that returns
its step, and the next question or the advice.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.search.found import Found
from meshwright.search.misses import nearest
from meshwright.search.order import search
from meshwright.search.question import Question
from meshwright.search.questions import gpus_needed, with_gpus
from meshwright.spec.plan import Precision

GIB = 2**30
DAY = 86_400.0  # seconds
SCALES = 0.8  # of the GPUs' time that is not spent waiting for one another: less, and adding GPUs pays badly
BETTER = 0.95  # of the advised plan's seconds: what the whole search must reach to be preferred
STATES = ("weights", "master", "gradients", "moments", "gathered", "waiting")
TALK = ("tp", "cp", "ep", "pp", "bubble", "stragglers", "shard", "replicate", "tied")  # shares that one GPU has not
HERE = {"offload": "none", "activations": "device"}  # nothing waits elsewhere, until the chart asks for it
PLAIN = {"tp": 1, "cp": 1, "pp": 1, "ep": 1}  # every GPU computes whole layers on samples of its own
SHARED = ((1, "optimizer states"), (2, "optimizer states and gradients"), (3, "states, gradients and weights"))
NARROW: tuple[Precision, ...] = ("bf16", "fp16")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A question of the chart, its answer, and the numbers behind it."""

    question: str
    answer: str
    because: str


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do."""

    name: str
    text: str
    found: Found | None = None  # the plan that does it
    available: bool = True  # the trainer has it


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The way through the chart, and where it ends."""

    steps: tuple[Step, ...]
    leaves: tuple[Leaf, ...]  # what to do, first things first
    found: Found | None  # the plan to use; None: nothing fits


def advise(question: Question) -> Advice:
    """Walk the chart."""
    walk = _Walk(question)
    node: _Node | None = walk.too_big
    while node is not None:
        node = node()
    return Advice(steps=tuple(walk.steps), leaves=tuple(walk.leaves), found=walk.found)


_Node = Callable[[], Any]  # a question; returns the next one, or None


class _Walk:
    """Where one is in the chart: what was asked so far, what was advised, and the plan that does it."""

    def __init__(self, question: Question) -> None:
        self.question = msgspec.structs.replace(question, fixed=HERE | question.fixed)
        self.asked = question
        self.gpus = question.cluster.gpus
        self.memory = question.cluster.gpu.memory_bytes
        self.steps: list[Step] = []
        self.leaves: list[Leaf] = []
        self.found: Found | None = None
        self.alone = _best(with_gpus(self.question, 1), {"recompute": "none"})

    def ask(self, question: str, answer: str, because: str) -> None:
        self.steps.append(Step(question=question, answer=answer, because=because))

    def do(self, name: str, text: str, found: Found | None = None, available: bool = True) -> None:
        self.leaves.append(Leaf(name=name, text=text, found=found, available=available))
        if found is not None:
            self.found = found

    def too_big(self) -> _Node:
        asked = "Is the model too big for one GPU?"
        if self.alone is not None:
            self.ask(asked, "no", _room(self.alone))
            rest = self.alone.plan.accumulate
            if rest > 1:
                text = f"{rest} microbatches of {self.alone.plan.microbatch} add up to the batch, one after another"
                self.do("accumulation", text, self.alone)
            return self.several
        (least,) = nearest(with_gpus(self.question, 1), top=1)
        self.ask(asked, "yes", f"even with {_words(least)}: {_room(least)}")
        states = _states(least)
        named = "Are its weights, gradients and optimizer states alone too big?"
        if states < self.memory:
            self.ask(named, "no", f"they take {_gib(states)} of {_gib(self.memory)} GiB, so activations are the rest")
            return self.recompute
        self.ask(named, "yes", f"they take {_gib(states)} of {_gib(self.memory)} GiB")
        return self.several

    def recompute(self) -> _Node:
        """On one GPU: less is kept, and computed anew."""
        found = _best(with_gpus(self.question, 1), {})
        asked = "Does it fit when the backward computes activations anew?"
        if found is None:
            self.ask(asked, "no", "not even with all blocks computed anew")
            return self.several
        self.ask(asked, "yes", f"recompute={found.plan.recompute}: {_room(found)}")
        self.alone = found
        self.do("recompute", "activations are dropped in the forward and computed anew in the backward", found)
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
        day = DAY / _per_token(self.alone)
        because = f"it takes {_time(self.alone)}, {day / 1e9:.3g} billion tokens a day, and more GPUs are there"
        self.ask("Is one GPU too slow?", "taken as yes", because)
        return self.copies

    def copies(self) -> _Node:
        """DDP: the model fits one GPU, so each may have a copy."""
        asked = "Does a copy of the model on every GPU (DDP) do?"
        found = _best(self.question, {**PLAIN, "zero": 0})
        if found is None:
            self.ask(
                asked, "it cannot", f"batch {self.question.batch} over {self.gpus} GPUs has no such plan that fits"
            )
            return self.shards
        assert self.alone is not None, "only what fits one GPU is copied"
        gain = _per_token(self.alone) / _per_token(found)
        because = f"{_time(found)}, {gain:.1f} × as fast as one GPU; {_room(found)}"
        self.ask(asked, "yes" if gain > 1 else "no", because)
        self.found = found
        if gain > 1:
            self.do("DDP", "each GPU has a copy and its own samples, and gradients are summed", found)
        return self.scales

    def shards(self) -> _Node:
        """ZeRO 1 to 3, the least of them that fits, without recomputation and then with."""
        for recompute in ("none", None):
            for zero, what in SHARED:
                fixed = {**PLAIN, "zero": zero} | ({} if recompute is None else {"recompute": recompute})
                found = _best(self.question, fixed)
                more = "" if recompute else ", with activations computed anew"
                asked = f"Does it fit with {what} shared out (ZeRO-{zero}){more}?"
                if found is None:
                    self.ask(asked, "no", _lack(self.question, fixed))
                    continue
                self.ask(asked, "yes", f"{_room(found)}; {_time(found)}")
                anew = "" if found.plan.recompute == "none" else f", recompute={found.plan.recompute}"
                self.do(f"ZeRO-{zero}", f"{what} lie in shards over the GPUs{anew}", found)
                return self.scales
        return self.split

    def split(self) -> _Node:
        """Layers, matrices and sequences cut over GPUs."""
        found = _best(self.question, {})
        asked = "Does it fit when layers or matrices are cut over GPUs?"
        if found is None:
            self.ask(asked, "no", "no plan on these machines fits")
            return self.offload
        self.ask(asked, "yes", f"{_room(found)}; {_time(found)}")
        cuts = [word for word, used in _cuts(found).items() if used]
        self.do(" and ".join(cuts) or "ZeRO", "each GPU holds a part of the model", found)
        return self.scales

    def offload(self) -> _Node | None:
        """Nothing fits: states or activations go to the host's memory or to a disk, or the model to more machines."""
        cluster = self.question.cluster
        asked = "Does it fit when states or activations wait in the host's memory or on its disk?"
        found = _best(self.asked, {})
        if found is not None:
            away = found.ledger.away
            room = f"{_gib(away.host_bytes)} of {_gib(cluster.host_bytes)} GiB of host memory for each GPU"
            self.ask(asked, "yes", f"{_room(found)}; {room}; {_time(found)}")
            self.do("offload", "what the device has no room for waits in the host's memory or on its disk", found)
            return self.low_precision
        known = "not even then" if cluster.host_bytes else "nobody says how much memory its host has"
        self.ask(asked, "no", known)
        needed = gpus_needed(self.asked)
        if needed is not None:
            gpus, answer = needed
            self.do("more GPUs", f"{gpus} of these are the least on which a plan fits", answer.found[0])
            self.found = None  # those are not the machines that were asked about
        return None

    def scales(self) -> _Node:
        assert self.found is not None, "asked of a plan only"
        talk = _talk(self.found)
        total = sum(talk.values()) / self.found.price.seconds
        most = max(talk, key=lambda name: talk[name], default="")
        worst = f"; most of the rest is {most}" if most else ""
        asked = f"Does it scale (at least {SCALES:.0%} of the time not spent on one another)?"
        because = f"{1 - total:.0%} of {_time(self.found)}{worst}"
        if 1 - total >= SCALES:
            self.ask(asked, "yes", because)
            return self.low_precision
        self.ask(asked, "no", because)
        if most in ("replicate", "shard"):
            self._less_talk()
        return self.low_precision

    def _less_talk(self) -> None:
        """Gradients and weights take longer to send than to compute."""
        double = msgspec.structs.replace(self.question, batch=2 * self.question.batch)
        assert self.found is not None, "asked of a plan only"
        plan = self.found.plan
        fixed = {"replicate": plan.replicate, "shard": plan.shard, "zero": plan.zero, **PLAIN}
        found = _best(double, fixed)
        if found is not None and _per_token(found) < _per_token(self.found):
            gain = _per_token(self.found) / _per_token(found)
            text = f"twice the batch by accumulation makes a token {gain:.2f} × as fast; it changes the mathematics"
            self.leaves.append(Leaf(name="accumulation", text=text))
        text = "gradients sent in low precision: half the bytes of what is summed over copies"
        self.do("DDP with a low-precision hook", text, available=False)
        self.do("AdaScale", "the learning rate scaled for the larger batches of more GPUs", available=False)

    def low_precision(self) -> _Node | None:
        question = self.question
        asked = "Is the arithmetic in low precision?"
        if question.precision in (*NARROW, "fp8"):
            self.ask(asked, "yes", question.precision)
            return self.search
        narrow = next((each for each in NARROW if question.cluster.gpu.peak(each) > 0), None)
        if narrow is None:
            self.ask(asked, "no", f"{question.cluster.gpu.name} has none")
            return self.search
        found = search(msgspec.structs.replace(question, precision=narrow), top=1).found
        gain = self.found.price.seconds / found[0].price.seconds if found and self.found else math.nan
        self.ask(asked, "no", f"{narrow} would take {_time(found[0])}, {gain:.1f} × as fast" if found else "none fits")
        if found:
            self.leaves.append(Leaf(name="low precision", text=f"plan.precision={narrow}", found=found[0]))
        return self.search

    def search(self) -> None:
        """The chart knows a few plans, the search all of them."""
        best = _best(self.asked, {})
        here = self.found or self.alone
        if best is None or here is None:
            return
        asked = "Does the search over all plans know a clearly faster one?"
        if best.price.seconds > BETTER * here.price.seconds:
            self.ask(asked, "no", f"the best takes {_time(best)}, this one {_time(here)}")
            self.found = here
            return
        self.ask(asked, "yes", f"{_words(best)}: {_time(best)} instead of {_time(here)}")
        self.do("the search's plan", "what `meshwright plan` puts first", best)


def _best(question: Question, fixed: dict[str, Any]) -> Found | None:
    """The fastest plan with some fields given beside the user's own, which come first."""
    asked = msgspec.structs.replace(question, fixed=fixed | question.fixed)
    return next(iter(search(asked, top=1).found), None)


def _lack(question: Question, fixed: dict[str, Any]) -> str:
    """Why nothing fits."""
    misses = nearest(msgspec.structs.replace(question, fixed=fixed | question.fixed), top=1)
    return _room(misses[0]) if misses else f"batch {question.batch} over {question.cluster.gpus} GPUs has no such plan"


def _states(found: Found) -> float:
    return sum(line.bytes for line in found.ledger.lines if line.name in STATES)


def _talk(found: Found) -> dict[str, float]:
    """Seconds that GPUs spend on one another."""
    shares = found.price.waterfall
    return {share.name: share.seconds for share in shares if share.name in TALK and share.seconds > 0}


def _cuts(found: Found) -> dict[str, bool]:
    plan = found.plan
    return {
        "tensor parallelism": plan.tp > 1,
        "pipeline": plan.pp > 1,
        "context parallelism": plan.cp > 1,
        "recompute": plan.recompute != "none",
    }


def _per_token(found: Found) -> float:
    return found.seconds_per_token


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _room(found: Found) -> str:
    gpu = found.job.cluster.gpu.memory_bytes
    return f"{_gib(found.peak_bytes)} of {_gib(gpu)} GiB at {found.ledger.moment}"


def _time(found: Found) -> str:
    return f"{found.price.seconds:.3g} s a step"


def _words(found: Found) -> str:
    plan = found.plan
    anew = f", recompute={plan.recompute}" if plan.recompute != "none" else ""
    return f"{plan}" if plan.world > 1 else f"microbatch={plan.microbatch}{anew}"
