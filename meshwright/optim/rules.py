"""The rules by their names: one line an optimizer."""

from collections.abc import Callable

from meshwright.config.run import Optim
from meshwright.optim.adamw import AdamWRule
from meshwright.optim.interface import UpdateRule
from meshwright.optim.sgd import SGDRule

RULES: dict[str, Callable[[Optim], UpdateRule]] = {"adamw": AdamWRule, "sgd": SGDRule}


def rule_of(optim: Optim) -> UpdateRule:
    """The arithmetic of a run's optimizer."""
    return RULES[optim.name](optim)
