"""`meshwright plan --trace`: the plan held to the trainer, on tensors without memory."""

import argparse

import msgspec

from meshwright.spec.problem import InputError, Problem
from meshwright.verbs import plan_write, words
from meshwright.verbs.plan_answers import any_plan, show
from meshwright.verbs.plan_question import put


def traced(options: argparse.Namespace) -> int:
    """A dry run of the plan that is stated, or of the best; exit 1 when the trainer does something else."""
    words.require_training()
    asked = put(options)
    found = any_plan(options, asked)
    world = found.plan.world
    if options.rank is not None and options.rank >= world:
        raise InputError([Problem(f"--rank {options.rank} is not one of {world} ranks", f"use 0 to {world - 1}")])
    from meshwright.verify.trace import lines, trace

    told = trace(plan_write.run_of(asked, found), found.job, options.rank)
    show(options, {"agrees": told.agrees, **msgspec.to_builtins(told)}, lines(told))
    return 0 if told.agrees else 1
