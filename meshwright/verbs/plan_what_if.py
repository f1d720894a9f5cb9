"""`meshwright plan --what-if`: the best plan as things are, and what a change would do to it."""

import argparse
from typing import Any

import msgspec

from meshwright.search import explain
from meshwright.search.found import priced
from meshwright.search.space import problems
from meshwright.spec.cluster import cluster
from meshwright.spec.problem import InputError, Problem
from meshwright.verbs import plan_tables as tables
from meshwright.verbs.plan_answers import DOES_NOT_FIT, announce, nothing_fits, searched, show
from meshwright.verbs.plan_question import Put, put
from meshwright.verbs.plan_words import as_record

CHANGEABLE = ("network", "cluster", "sequence", "batch")


def what_if(options: argparse.Namespace) -> int:
    """The best plan as things are, the same plan after a change, and the best plan then."""
    asked = put(options)
    announce(options, asked)
    question = asked.question
    changed = msgspec.structs.replace(question, **_changes(options, asked))
    base = searched(question, 1)
    if not base.found:
        return nothing_fits(options, asked, base)
    then = searched(changed, options.top)
    kept = base.found[0].plan
    same = priced(changed.job(kept)) if not problems(changed, kept) and kept.world == changed.cluster.gpus else None
    record = {
        "base": as_record(base.found[0], explain.why(base.found[0])),
        "same_plan": as_record(same, explain.why(same)) if same else None,
        "plans": [as_record(found, explain.why(found)) for found in then.found],
        "counts": msgspec.to_builtins(then.counts),
    }
    show(options, record, tables.difference(base.found[0], same, then))
    return 0 if then.found else DOES_NOT_FIT


def _changes(options: argparse.Namespace, asked: Put) -> dict[str, Any]:
    """The fields of the question that the what-ifs change."""
    words = [*([f"network={options.network}"] if options.network else []), *(options.what_if or ())]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    changes: dict[str, Any] = {}
    remedy = "use network=, cluster=, sequence= or batch="
    found = [Problem(f"--what-if {key} is not known", remedy) for key in given if key not in CHANGEABLE]
    for key in ("sequence", "batch"):
        if key in given and not (given[key].isdecimal() and int(given[key])):
            found.append(Problem(f"--what-if {key}={given[key]} is not a count", "use a whole number of at least 1"))
        elif key in given:
            changes[key] = int(given[key])
    if found or len(given) < len(words):
        raise InputError(found or [Problem("--what-if takes key=value", "for example --what-if sequence=131072")])
    if "cluster" in given:
        changes["cluster"] = cluster(given["cluster"], network=given.get("network", ""))
    elif "network" in given:  # all else stays as it is, or as it was measured
        other = cluster(asked.machines, network=given["network"]).network
        changes["cluster"] = msgspec.structs.replace(asked.question.cluster, network=other)
    return changes
