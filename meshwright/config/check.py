"""Every rule between fields of a run, asked at once: all problems are found, each with its remedy.

The rules are in `config/rules/`, a file for each subject.
"""

from collections.abc import Callable, Iterator

from meshwright.config import evaluation
from meshwright.config.rules import communication
from meshwright.config.rules.arch import ARCH_RULES
from meshwright.config.rules.communication import COMMUNICATION_RULES
from meshwright.config.rules.optimizer import OPTIMIZER_PLAN_RULES, OPTIMIZER_RULES, nobody_to_tell
from meshwright.config.rules.plan import SPLIT_RULES
from meshwright.config.rules.plan import compiles_doubles as compiles_doubles
from meshwright.config.rules.plan import how_blocks_run as how_blocks_run
from meshwright.config.rules.plan import missing as missing
from meshwright.config.rules.run import COUNT_RULES, DATA_RULES, FAULT_RULES, compared
from meshwright.config.rules.run import divide_replicas as divide_replicas
from meshwright.config.rules.run import need_own_starter as need_own_starter
from meshwright.config.rules.tuning import TUNED_MODEL_RULES, TUNING_RULES
from meshwright.config.run import Run
from meshwright.spec.problem import InputError as InputError
from meshwright.spec.problem import Problem

PLAN_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    *SPLIT_RULES, *OPTIMIZER_PLAN_RULES, *COMMUNICATION_RULES, *FAULT_RULES,
)  # fmt: skip
# Whether a model can be tuned as a run says, whatever its plan.
MODEL_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (compared, *TUNED_MODEL_RULES)
RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    *COUNT_RULES, *ARCH_RULES, *OPTIMIZER_RULES, *DATA_RULES, evaluation.rules, *TUNING_RULES, *PLAN_RULES,
)  # fmt: skip


def problems(run: Run, *, decided: bool = True) -> list[Problem]:
    """Everything that is wrong with a run, in the order of the rules; `decided`: its plan is the one to run."""
    rules = [rule for rule in RULES if decided or rule is not nobody_to_tell]
    return [problem for rule in rules for problem in rule(run)]


def warnings(run: Run) -> list[str]:
    """What is allowed but should be known before it is believed."""
    notes = []
    if run.arch.experts and run.arch.router == "expert_choice":
        notes.append(
            "arch.router = expert_choice: an expert picks its tokens among the whole sequence, so a token's output "
            "depends on later tokens. The training loss is optimistic and generation will not match it."
        )
    if run.arch.experts and run.arch.router == "gshard":
        notes.append(
            "arch.router = gshard: first choices are served before any second one, so a later token can take the slot "
            "of an earlier one's second expert. Generation may differ slightly from training; more capacity lessens it."
        )
    if run.plan.sync_every == 1 and run.plan.uses("outer"):
        notes.append(
            f"plan.outer = {run.plan.outer} is not used: with plan.sync_every = 1 replicas never part, and training "
            "is plain. Set plan.sync_every to the steps between two syncs."
        )
    return [*notes, *communication.warnings(run)]
