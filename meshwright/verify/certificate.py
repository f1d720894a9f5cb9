"""What a comparison found, as a value: a table for people, JSON for programs. No torch."""

import msgspec

from meshwright.spec.plan import Precision
from meshwright.spec.run import Run

# precision -> largest relative deviation that rounding explains, and why.
TOLERANCES: dict[Precision, tuple[float, str]] = {
    "fp64": (1e-11, "float64 sums in another order: 1e-16 a term, some thousands of terms, a few AdamW steps"),
    "fp32": (2e-3, "fp32 sums in another order: 1e-7 a term, and AdamW divides small gradients by their own size"),
    "bf16": (1e-1, "bf16 keeps 8 bits: 4e-3 a product"),
    "fp16": (3e-2, "fp16 keeps 11 bits: 5e-4 a product"),
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One plan beside one process."""

    plan: str
    passed: bool
    loss_deviation: float  # largest relative difference of a step's loss
    norm_deviation: float  # of a step's gradient norm
    gradient_deviation: float  # of a parameter's gradient at the first step
    weight_deviation: float  # of a parameter's weight after the last step
    first_bad: str | None  # the first step and quantity that left the tolerance
    worst: str  # the parameter with the largest deviation
    seconds: float
    error: str = ""  # the plan did not run to its end


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """Several plans beside one process, over the same mathematics."""

    run: Run  # the reference
    steps: int
    tolerance: float
    reason: str
    torch: str
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)


COLUMNS = ("loss", "norm", "gradient", "weight")


def header(width: int) -> str:
    """The names of the columns: largest relative deviations."""
    return f"{'plan':<{width}}  {'  '.join(f'{name:>8}' for name in COLUMNS)}"


def line(verdict: Verdict, width: int) -> str:
    """One plan."""
    numbers = (
        verdict.loss_deviation,
        verdict.norm_deviation,
        verdict.gradient_deviation,
        verdict.weight_deviation,
    )
    words = "equal" if verdict.passed else f"DIFFERS: {verdict.first_bad or verdict.error.splitlines()[-1]}"
    return f"{verdict.plan:<{width}}  {'  '.join(f'{number:8.1e}' for number in numbers)}   {words}"
