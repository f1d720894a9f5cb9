"""Which options each answer of `meshwright plan` reads: what would be ignored is refused."""

import argparse

from meshwright.spec.problem import InputError, Problem

ASKED = {"cluster", "profile", "sequence", "batch"}  # what the question is about
OFFERED = {"tokens", "dollars", "write", "force", "chart", "page"}  # what can be done with a plan
CHOSEN = {"vary"}  # how a plan is searched for: nothing to a plan that is stated
SHOWN = {"top"}  # of one plan all are shown, however many are wanted
READ = {  # by the option that asks for the answer; the first that is given wins
    "traffic": {"cluster", "sequence", "batch"},
    "price": {"out"},
    "trace": ASKED | CHOSEN | SHOWN | {"exact", "rank"},
    "largest": ASKED | CHOSEN | SHOWN,
    "gpus_needed": ASKED | CHOSEN | SHOWN,
    "layers": ASKED,
    "what_if": ASKED | CHOSEN | SHOWN,
    "network": ASKED | CHOSEN | SHOWN,
    "textbook": ASKED | CHOSEN | SHOWN | {"exact"},
    "exact": ASKED | OFFERED | SHOWN,
    "plan": ASKED | OFFERED | CHOSEN | SHOWN,
}
OPTIONS = set(READ) - {"plan"} | ASKED | OFFERED | CHOSEN | SHOWN | {"rank", "out"}
TOP = 5  # plans that are shown where nobody says how many


def asked_for(options: argparse.Namespace) -> str:
    """The option that says which answer is wanted; "plan" if none does."""
    return next((name for name in READ if _is_given(options, name)), "plan")


def refuse_unread(options: argparse.Namespace) -> None:
    """Every option is read by the answer that is asked for."""
    asked = asked_for(options)
    read = READ[asked] - (CHOSEN if options.exact else set())
    unread = [name for name in vars(options) if name in OPTIONS - read - {asked} and _is_given(options, name)]
    if unread:
        what = f"{_reader(options, asked)} does not read {' and '.join(map(_word, unread))}"
        them = "it" if len(unread) == 1 else "them"
        raise InputError([Problem(what, f"leave {them} out, or ask another time with {them}")])


def _reader(options: argparse.Namespace, asked: str) -> str:
    if asked == "plan":
        return "a search for plans"
    return _word(asked) + (" --exact" if options.exact and "exact" in READ[asked] else "")


def _is_given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name, None)
    return value is not None and value is not False and (name != "top" or value != TOP)  # a rank may be 0


def _word(name: str) -> str:
    return f"--{name.replace('_', '-')}"
