"""What a model says about itself so that it can be split: its blocks, its split table and its cut points.

Copies, shards and precision need none of it. Whoever brings a model of their own brings an `ModelSpec` for the rest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.spec.plan import Plan
from meshwright.spec.problem import Problem

Blocks = Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class Stage:
    """Which of a model's blocks one pipeline stage has, and whether it begins or ends the model."""

    blocks: range
    first: bool
    last: bool


def stage_of(plan: Plan, number: int) -> Stage:
    """A stage of a plan."""
    end = list(accumulate(plan.stages))[number]
    return Stage(range(end - plan.stages[number], end), number == 0, number == len(plan.stages) - 1)


def longest_list(model: nn.Module) -> Blocks:
    """The modules of the longest `nn.ModuleList`, which most models keep their layers in; none if there is no list."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return {}
    name, longest = max(lists, key=lambda pair: len(pair[1]))
    return {".".join(filter(None, (name, key))): block for key, block in longest.named_children()}


def one_unit(model: nn.Module) -> Blocks:
    """No blocks: the weights of the whole model are gathered together."""
    return {}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The three answers. What is left out is refused by the plans that would need it."""

    # The units, in the order they run, that gather their weights by themselves; names are those of `named_modules`.
    blocks: Callable[[nn.Module], Blocks] = longest_list
    # How tensor parallelism cuts each module: torch's own styles by name, where * stands for one word of a name.
    splits: Callable[[nn.Module], Mapping[str, ParallelStyle]] | None = None
    # The model without what other pipeline stages have. It is given a copy to take apart; weights keep their names.
    part: Callable[[nn.Module, Stage], nn.Module] | None = None
    # Whether the data decides which parameters a rank uses. Finding out costs one number a parameter in the all-reduce
    # of the gradient's norm, and blocks must be called in their order, each at most once a forward.
    find_unused_parameters: bool = True


class Absent(nn.Module):
    """Stands where a module was that another stage has; its first argument passes through."""

    def forward(self, x: Any, *others: Any, **words: Any) -> Any:
        return x


def sequential_stage(model: nn.Module, stage: Stage, before: Sequence[str], after: Sequence[str]) -> nn.Module:
    """The part of a model whose own forward runs the modules `before`, then its longest list, then those `after`.

    Bind the names with `functools.partial` for `ModelSpec.part`.
    """
    absent = [name for number, name in enumerate(longest_list(model)) if number not in stage.blocks]
    absent += () if stage.first else before
    absent += () if stage.last else after
    for name in absent:
        model.set_submodule(name, Absent())
    return model


def with_weights(blocks: Blocks) -> Iterator[nn.Module]:
    """The blocks that hold any; of a part, those that are there."""
    return (block for block in blocks.values() if any(True for _ in block.parameters()))


def resolved(table: Mapping[str, ParallelStyle], model: nn.Module) -> dict[str, ParallelStyle]:
    """The split table with every * written out, for the modules that a (part of a) model has."""
    names = [name for name, _ in model.named_modules()]
    return {name: style for pattern, style in table.items() for name in names if _fits(name, pattern)}


def unmatched(table: Mapping[str, ParallelStyle], model: nn.Module) -> list[str]:
    """The lines of a split table that cut nothing of the whole model."""
    names = [name for name, _ in model.named_modules()]
    return [pattern for pattern in table if not any(_fits(name, pattern) for name in names)]


def _fits(name: str, pattern: str) -> bool:
    words, patterns = name.split("."), pattern.split(".")
    return len(words) == len(patterns) and all(map(fnmatchcase, words, patterns))


def unanswered(anatomy: ModelSpec, plan: Plan) -> Iterator[Problem]:
    """What a plan asks of a model that its anatomy does not say."""
    without = "or spread its weights with plan.shard or plan.replicate, which need no answer"
    if plan.tp > 1 and anatomy.splits is None:
        what = f"plan.tp = {plan.tp} needs the model's split table, and its anatomy has no `splits`"
        yield Problem(what, f"give ModelSpec(splits=…), {without}", "plan.tp")
    if plan.pp > 1 and anatomy.part is None:
        what = f"plan.pp = {plan.pp} needs the model's cut points, and its anatomy has no `part`"
        yield Problem(what, f"give ModelSpec(part=…), {without}", "plan.pp")
