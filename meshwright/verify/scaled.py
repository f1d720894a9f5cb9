"""Proofs of FP8: one process with the scales of a plan's ranks, and reference arithmetic where experts are chosen.

**Scales.** A scale is of what a rank has of a microbatch. One process in microbatches of the same size has it too,
but under context parallelism, where a rank has a part of every sequence: here its linear layers take such parts one
after the other, each by scales of its own.

**Reference arithmetic**, for models that route. A sum of bf16 numbers in another order moves a few inputs to a
neighbouring FP8 code, and with them a token whose two best experts are nearly as good to the other one, with all of its
gradient: no tolerance tells that from a mistake. So their FP8 numbers are those of training, and their products, and
all else, are float64. Sums in another order then move nothing, and a scale that is not one process's is seen at once.
"""

from functools import partial
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor, nn

from meshwright.config.run import Run
from meshwright.kernels.fp8 import Fp8Linear
from meshwright.parallel import precision
from meshwright.parallel.context import join, take
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_spec import ModelSpec
from meshwright.runtime.place import Place
from meshwright.spec.plan import Plan
from meshwright.verify.evidence import record


def record_exactly(place: Place, run: Run, cache: Path, folder: Path) -> None:
    """Run a plan's rank in reference arithmetic."""
    record(place, exact(run), cache, folder, partial(with_scales_of, run.plan))


def record_alone(place: Place, run: Run, cache: Path, folder: Path) -> None:
    """Run one process with the scales of a plan's ranks."""
    one = replace(run, plan=replace(run.plan, cp=1, cp_kind=Plan(microbatch=1).cp_kind))
    record(place, exact(one) if run.arch.experts else one, cache, folder, partial(with_scales_of, run.plan))


def exact(run: Run) -> Run:
    """The run with all but its FP8 numbers in float64, which no form of master weights or states in bf16 goes with."""
    states = "fp32" if run.optim.state_dtype == "bf16" else run.optim.state_dtype
    optim = replace(run.optim, master_weights="fp32", stochastic_rounding=False, state_dtype=states)
    return replace(run, optim=optim, plan=replace(run.plan, precision="fp64", bf16_params=False))


def with_scales_of(scaled: Plan, model: nn.Module, plan: Plan, mesh: Mesh, model_spec: ModelSpec) -> nn.Module:
    """Linear layers in FP8 as a plan has them, whatever the precision of the rest."""
    model = precision.wrap(model, replace(plan, precision=scaled.precision), mesh, model_spec)
    if scaled.cp > plan.cp:
        for module in model.modules():
            if isinstance(module, Fp8Linear):
                module.forward = partial(by_parts, module, scaled.cp)
    return model


def by_parts(linear: Fp8Linear, cp: int, input: Tensor) -> Tensor:
    """A layer's output of each rank's part of the sequences (b, s, width), one after the other."""
    parts = [Fp8Linear.forward(linear, take(input, 1, cp, rank)) for rank in range(cp)]
    return join(parts, 1)
