"""`meshwright plan`: will it fit, which split is best, how fast, and why."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.spec.problem import InputError, Problem
from meshwright.verbs import words
from meshwright.verbs.plan_options import TOP, asked_for, refuse_unread

TEXT = "will it fit, which split is best, how fast, and why: answered by arithmetic, without a GPU"


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    verb = words.verb(verbs, "plan", plan, TEXT)
    target = "RUN.toml | MODEL | config.json | FOLDER | key=value"
    verb.add_argument("words", nargs="*", metavar=target, help="plan.tp=8 and the like fix a field of the plan")
    verb.add_argument("--cluster", metavar="64xh100", help="the machines; a file of your own works too")
    verb.add_argument("--profile", metavar="FILE.json", help="as `meshwright bench --probe` measured them")
    verb.add_argument("--sequence", type=words.count, help="tokens of one sample")
    verb.add_argument("--batch", type=words.count, help="samples in one optimizer step, over the whole job")
    verb.add_argument("--vary", action="append", choices=("precision", "optimizer", "batch"), help="may be chosen too")
    verb.add_argument("--top", type=words.count, default=TOP, help=f"how many plans to show (default {TOP})")
    verb.add_argument("--write", metavar="RUN.toml", help="put the best plan into a run file")
    verb.add_argument("--force", action="store_true", help="let --write and --page replace a file")
    verb.add_argument("--tokens", type=_amount, help="also: how long for so many tokens, for example 1.5e12")
    verb.add_argument("--dollars", type=_amount, help="a GPU-hour's price, for --tokens")
    questions = verb.add_argument_group("other questions").add_mutually_exclusive_group()
    questions.add_argument("--gpus-needed", action="store_true", help="the least number of these GPUs")
    questions.add_argument("--largest", choices=("model", "microbatch", "sequence"), help="that fits")
    questions.add_argument(
        "--what-if", action="append", metavar="KEY=VALUE", help="network, cluster, sequence or batch"
    )
    questions.add_argument("--network", metavar="10gbe", help="what if the network between nodes were this one")
    questions.add_argument("--layers", action="store_true", help="parameters, FLOPs and bytes of each layer")
    questions.add_argument("--traffic", action="store_true", help="list the collectives that one rank issues")
    questions.add_argument("--price", metavar="IN.csv", help="price a table of runs")
    verb.add_argument("--exact", action="store_true", help="price the plan that is stated, and search for none")
    verb.add_argument("--textbook", action="store_true", help="the closed forms of the literature beside it")
    verb.add_argument("--chart", action="store_true", help="also draw memory, time, plans and pipeline here")
    verb.add_argument("--page", metavar="FILE.html", help="also draw them on a page that works offline")
    questions.add_argument("--trace", action="store_true", help="dry run: one rank takes a real step without memory")
    verb.add_argument("--rank", type=_place, help="the rank that --trace follows (default: the fullest)")
    verb.add_argument("--out", metavar="OUT.csv", help="where --price writes")


def plan(options: argparse.Namespace) -> int:
    """The answer to whichever question was asked."""
    refuse_unread(options)
    if options.dollars is not None and options.tokens is None:
        raise InputError([Problem("--dollars prices what --tokens takes", "add --tokens, for example 1.5e12")])
    return _answer(options)(options)


def _answer(options: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    asked = asked_for(options)
    if asked == "price":
        return price_table
    if asked == "traffic":
        from meshwright.verbs.plan_traffic import collectives

        return collectives
    if asked == "trace":
        from meshwright.verbs.plan_trace import traced

        return traced
    if options.chart or options.page:
        from meshwright.verbs.plan_pictures import drawn

        return drawn
    from meshwright.verbs import plan_answers as answers
    from meshwright.verbs import plan_sizes as sizes
    from meshwright.verbs.plan_what_if import what_if

    return {
        "largest": sizes.largest,
        "gpus_needed": sizes.gpus_needed,
        "layers": sizes.layer_by_layer,
        "what_if": what_if,
        "network": what_if,
        "textbook": answers.textbook,
        "exact": answers.exact,
        "plan": answers.best,
    }[asked]


def price_table(options: argparse.Namespace) -> int:
    """A table of runs with what they should take."""
    from meshwright.cost.price_table import price_file

    if not options.out:
        raise InputError([Problem("--price needs to know where to write", "add --out OUT.csv")])
    priced = price_file(Path(options.price), Path(options.out), words.say_to(options.json))
    if options.json:
        print(msgspec.json.encode({"out": options.out, **msgspec.to_builtins(priced)}).decode())
    return 0


def _place(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of at least 0")
    return int(text)


def _amount(text: str) -> float:
    with suppress(ValueError):
        number = float(text.replace("_", "").replace(",", ""))
        if 0 < number < 1e30:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0, such as 1.5e12")
