"""A run that is to be trained: read and checked, its data and its tools looked at. All problems come at once."""

from meshwright.spec import compiler, load
from meshwright.spec.check import InputError
from meshwright.verbs import surroundings, words


def examined(given: list[str], ranks: int | None, looks: bool = True) -> load.Loaded:
    """The run of a verb's words. Of the ranks of one job, one looks at the data for all."""
    file, overrides = words.split(given)
    loaded, problems = load.examine(file, overrides, ranks=ranks, default_ranks=surroundings.default_ranks())
    if loaded is not None and looks:
        from meshwright.data import prepare

        found = [*prepare.problems(loaded.run), *compiler.missing(loaded.run.plan)]
        problems += [load.placed(problem, loaded.origins) for problem in found]
    if loaded is None or problems:
        raise InputError(problems)
    return loaded
