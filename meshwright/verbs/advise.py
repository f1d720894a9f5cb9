"""`meshwright advise`: the decision chart of large-model training, its questions answered by arithmetic."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.search import explain
from meshwright.search.advise import Advice, Leaf, advise
from meshwright.spec.exits import Exit
from meshwright.spec.plan import Plan
from meshwright.verbs import words
from meshwright.verbs.plan_question import Put, put
from meshwright.verbs.plan_tables import heading
from meshwright.verbs.plan_words import as_record

TEXT = "what to do with a model and machines: too big, too slow, does it scale; answered by arithmetic"
NOT_YET = "not in the trainer yet"


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    verb = words.verb(verbs, "advise", advice, TEXT)
    target = "RUN.toml | MODEL | config.json | FOLDER | key=value"
    verb.add_argument("words", nargs="*", metavar=target, help="plan.precision=fp32 and the like state what is decided")
    verb.add_argument("--cluster", metavar="8xh100", help="the machines; a file of your own works too")
    verb.add_argument("--sequence", type=words.count, help="tokens of one sample")
    verb.add_argument("--batch", type=words.count, help="samples in one optimizer step, over the whole job")
    verb.set_defaults(vary=None)


def advice(options: argparse.Namespace) -> int:
    """Exit 3 when nothing fits."""
    asked = put(options)
    found = advise(asked.question)
    if options.json:
        print(msgspec.json.encode(record(asked, found)).decode())
    else:
        print("\n".join(words.wrapped(told(asked, found), words.room(sys.stdout))))
    return Exit.DONE if found.found is not None else Exit.DOES_NOT_FIT


def told(asked: Put, found: Advice) -> Iterator[str]:
    """The way through the chart, as people read it."""
    yield from heading(asked, asked.question)
    yield ""
    for number, step in enumerate(found.steps, 1):
        yield f"{number:>2}. {step.question}"
        yield f"    {step.answer}: {step.because}"
    yield ""
    yield "Advice:" if found.leaves else "Advice: nothing to change"
    for leaf in found.leaves:
        yield f"  {leaf.name}: {leaf.text}" + ("" if leaf.available else f" ({NOT_YET})")
    yield ""
    if found.found is None:
        yield "No plan fits these machines."
        return
    yield f"The plan: {' '.join(overrides(found.found.plan))}"
    yield explain.why(found.found)


def overrides(plan: Plan) -> list[str]:
    """The words that state a plan, for `meshwright plan --exact` and `meshwright train`."""
    plain = Plan(microbatch=0)
    fields = {
        name: getattr(plan, name) for name in Plan.__struct_fields__ if getattr(plan, name) != getattr(plain, name)
    }
    return [f"plan.{name}={_toml(value)}" for name, value in fields.items()]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)


def record(asked: Put, found: Advice) -> dict[str, Any]:
    """The same, as scripts read it."""
    return {
        "model": asked.model,
        "cluster": asked.question.cluster.name,
        "sequence": asked.question.sequence,
        "batch": asked.question.batch,
        "assumed": asked.assumed,
        "steps": msgspec.to_builtins(found.steps),
        "leaves": [_leaf(leaf) for leaf in found.leaves],
        "plan": as_record(found.found, explain.why(found.found)) if found.found else None,
        "words": overrides(found.found.plan) if found.found else [],
    }


def _leaf(leaf: Leaf) -> dict[str, Any]:
    seconds = leaf.found.price.seconds if leaf.found else None
    return {"name": leaf.name, "text": leaf.text, "available": leaf.available, "seconds": seconds}
