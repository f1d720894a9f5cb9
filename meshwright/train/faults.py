"""What a rank watches for in its own numbers while it trains.

Gradients that are not finite, traced to a microbatch; spikes of loss and norm; stragglers; and silent corruption: ranks
that hold the same weights compare them, bit by bit, as sums.
"""

import math
import platform
import time
from collections import deque
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config.run import Run
from meshwright.data.loader import Batch
from meshwright.models.lora import trained
from meshwright.parallel.deterministic import bit_sum, odd_ones
from meshwright.parallel.mesh import Mesh, join, local
from meshwright.runtime.failure import Exit, Failure, FailureError
from meshwright.runtime.files import replace_file, replace_json
from meshwright.runtime.heartbeat import PHASES
from meshwright.runtime.records import EventRecord, StepRecord
from meshwright.spec.communication import OWN_ERRORS
from meshwright.spec.plan import Plan
from meshwright.spec.problem import UNDECODABLE
from meshwright.train.heartbeat import SECONDS, Heartbeat
from meshwright.train.log import Recorder
from meshwright.train.matmul_check import SUSPECTED, MatmulCheck
from meshwright.train.state import State
from meshwright.train.step import losses
from meshwright.train.world import world_group

NONE = -1
# Spikes. The scale is that of the median absolute deviation to the standard deviation, for a normal distribution.
SCALE = 1.4826
WINDOW, ENOUGH = 64, 16  # steps that are looked back on; fewer than enough say nothing
# The least spread that is believed. A loss on a plateau deviates by less than it may jump for no reason; norms, as
# logarithms, jump more.
LEAST_LOSS_SHARE, LEAST_LOG_NORM = 0.02, 0.35
ODD = 4.0  # deviations that are no spike yet, but reason to look more closely at the matmuls
# Stragglers.
EVERY = 5  # steps between two looks
IN_A_ROW = 3  # looks that must agree: a burst of five steps is over before the third
LEAST_SECONDS = 0.5  # a look over less would see only chance
NOISE = 2.5  # deviations of sampled time that are chance
STEP_PHASES = ("data", "forward", "backward", "optimizer")
# Replicas.
PAIR = 2
CLEARLY = 4.0  # times as far from the truth as the other: nearer ones may be where the disturbance has led them


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """Where numbers stopped being finite."""

    step: int
    rank: int | None  # None: the loss is finite on all of them, computed again
    microbatch: int
    samples: tuple[int, ...]  # global sample indices of the microbatch
    parameter: str  # the first, in the model's order, whose gradient is not finite; empty where that is gone
    batch: str = ""  # a file with the token ids

    def __str__(self) -> str:
        weight = f", first in the gradient of {self.parameter}" if self.parameter else ""
        if self.rank is None:
            return f"the gradient is not finite{weight}; computed again, the loss is: an overflow, or a passing fault"
        samples = f"samples {self.samples[0]} to {self.samples[-1]}" if self.samples else "no samples"
        saved = f"; saved in {self.batch}" if self.batch else ""
        return (
            f"the gradient is not finite: rank {self.rank}, microbatch {self.microbatch}, {samples}{weight}. "
            f"No rank has moved its weights{saved}"
        )


@torch.no_grad()
def culprit(run: Run, state: State, mesh: Mesh, step: int, folder: Path) -> Culprit:
    """Compute the step's losses again, one microbatch at a time. All ranks must ask; healthy steps never do."""
    parameter = first_parameter(state)
    microbatches = state.loader.take(step - 1).microbatches
    bad = NONE
    if run.plan.pp == 1:  # under a pipeline a microbatch has no rank of its own
        loss_of = partial(losses, state.chunks[0], run.plan, mesh, torch.ones((), device=mesh.device))
        found = [number for number, batch in enumerate(microbatches) if not loss_of(batch)[1].isfinite().item()]
        bad = found[0] if found else NONE
    samples = tuple((microbatches[bad].index[:, 0] // run.sequence).tolist()) if bad != NONE else ()
    first, last = (samples[0], samples[-1]) if samples else (NONE, NONE)
    row = torch.tensor([[bad, first, last]], dtype=torch.int64, device=mesh.device)
    together = mesh.peers or world_group()  # replicas that sync rarely have gradients of their own
    rows = join(row, 0, together).tolist() if mesh.world > mesh.parts else row.tolist()
    place = next((place for place, (number, *_) in enumerate(rows) if number != NONE), None)
    guilty = dist.get_global_rank(together, place) if place is not None else None
    mine = Culprit(step=step, rank=mesh.rank, microbatch=bad, samples=samples, parameter=parameter)
    if bad != NONE:
        save(mine, microbatches[bad], folder)
    if place is None or guilty is None:
        return Culprit(step=step, rank=None, microbatch=NONE, samples=(), parameter=parameter)
    number, first, last = rows[place]
    return Culprit(
        step=step,
        rank=guilty,
        microbatch=number,
        samples=(first, last),
        parameter=parameter,
        batch=str(_file(folder, step, guilty)),
    )


def save(culprit: Culprit, batch: Batch, folder: Path) -> None:
    """The token ids beside what is known of them."""
    file = _file(folder, culprit.step, culprit.rank or 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"tokens": batch.tokens.cpu().contiguous(), "targets": batch.targets.cpu().contiguous()}
    replace_file(file, safetensors.torch.save(tensors))
    replace_json(file.with_suffix(".json"), culprit)


def first_parameter(state: State) -> str:
    """The first weight whose gradient, if it is still there, is not finite."""
    for chunk in state.chunks:
        for name, weight in chunk.named_parameters():
            if weight.grad is not None and not local(weight.grad).isfinite().all().item():
                return name
    return ""


def _file(folder: Path, step: int, rank: int) -> Path:
    return folder / "faults" / f"not-finite-step{step}-rank{rank}.safetensors"


class Spikes:
    """Remembers the last steps and says how far off the newest one is."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)  # as logarithms
        self.is_odd = False  # the newest one deviates, by more than chance and less than a spike

    def add(self, loss: float, norm: float) -> str:
        """What is remarkable about a step, or nothing."""
        self.is_odd = not (math.isfinite(loss) and math.isfinite(norm))
        if self.is_odd or norm <= 0:
            return ""
        least = LEAST_LOSS_SHARE * abs(median(self.losses or [loss]))
        found = [
            self._words("loss", self.losses, loss, least),
            self._words("logarithm of the gradient norm", self.norms, math.log(norm), LEAST_LOG_NORM),
        ]
        self.losses.append(loss)
        self.norms.append(math.log(norm))
        return "; ".join(words for words in found if words)

    def _words(self, name: str, values: deque[float], new: float, least: float) -> str:
        z = robust_z(list(values), new, least) if len(values) >= ENOUGH else 0.0
        self.is_odd |= z > ODD
        if not self.limit or z <= self.limit:
            return ""
        return f"{name} {new:.4g} is {z:.0f} deviations above the median {median(values):.4g} of {len(values)} steps"


def robust_z(values: list[float], new: float, least: float) -> float:
    """How many deviations `new` lies above the median of `values`."""
    middle = median(values)
    spread = SCALE * median([abs(value - middle) for value in values])
    return (new - middle) / max(spread, least)


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that holds up the others."""

    rank: int
    phase: str
    ratio: float  # of its own work to the others'
    cost: float  # share of the step time that the others wait for it

    def __str__(self) -> str:
        return (
            f"rank {self.rank} works {self.ratio:.1f} times as long as the others, most of it in {self.phase}: "
            f"it costs {self.cost:.0%} of the step time"
        )


class Stragglers:
    """Gathers the ranks' own working times now and then; several looks in a row must agree."""

    def __init__(self, limit: float, mesh: Mesh, heartbeat: Heartbeat) -> None:
        self.limit = limit
        self.mesh = mesh
        self.heartbeat = heartbeat
        self.before = heartbeat.spent()
        self.suspects: deque[int | None] = deque(maxlen=IN_A_ROW)
        self.named: int | None = None

    def look(self, step: int) -> Straggler | None:
        """All ranks must ask at the same steps."""
        if not self.limit or self.mesh.world == self.mesh.parts or step % EVERY:
            return None
        spent = self.heartbeat.spent()
        mine = [[new - old for new, old in zip(*pair, strict=True)] for pair in zip(spent, self.before, strict=True)]
        row = torch.tensor([*mine[0], sum(map(sum, mine))], dtype=torch.float64, device=self.mesh.device)
        together = self.mesh.peers or world_group()  # of replicas that sync rarely, each looks for its own
        rows = join(row[None], 0, together).tolist()
        elapsed = min(one[-1] for one in rows)
        if elapsed < LEAST_SECONDS:
            return None  # look again when there is more to see
        self.before = spent
        found = straggler([one[:-1] for one in rows], elapsed, self.limit)
        if found is not None:
            found = msgspec.structs.replace(found, rank=dist.get_global_rank(together, found.rank))
        self.suspects.append(found.rank if found is not None else None)
        if found is None or self.suspects.count(found.rank) < IN_A_ROW:
            self.named = self.named if found is not None else None
            return None
        is_known, self.named = self.named == found.rank, found.rank
        return None if is_known else found  # once, until it has caught up


def straggler(work: list[list[float]], elapsed: float, limit: float) -> Straggler | None:
    """The rank whose own work is so many times the others', from seconds by rank and phase; None if there is none."""
    columns = [PHASES.index(phase) for phase in STEP_PHASES]
    totals = [sum(row[column] for column in columns) for row in work]
    rank = max(range(len(totals)), key=totals.__getitem__)
    others = [row for number, row in enumerate(work) if number != rank]
    usual = median([total for number, total in enumerate(totals) if number != rank])
    chance = NOISE * math.sqrt(SECONDS * elapsed)  # of time that is seen by looking at it every so often
    excess = totals[rank] - usual
    if totals[rank] < limit * usual or excess < chance:
        return None
    worst = max(columns, key=lambda column: work[rank][column] - median([row[column] for row in others]))
    return Straggler(
        rank=rank, phase=PHASES[worst], ratio=totals[rank] / max(usual, SECONDS), cost=min(excess / elapsed, 1.0)
    )


class Replicas:
    """Compares the weights and optimizer states of the replicas every so many steps."""

    def __init__(self, every: int, state: State, mesh: Mesh) -> None:
        self.every = every
        self.state = state
        self.mesh = mesh
        self.group = mesh.group("replicate") if mesh.apart > 1 else mesh.dense.get_group("replicate")
        self.equal_at = state.step

    def look(self, step: int) -> None:
        """Raise when they differ. All ranks must ask at the same steps."""
        if not self.every or step % self.every or self.group.size() == 1:
            return
        if not self.state.outer.calendar.meets(self.state.step):  # between two syncs of 0/1 Adam
            return
        sums = torch.stack([bit_sum(tensor) for tensor in compared(self.state)])
        rows = join(sums[None].to(self.mesh.device), 0, self.group).tolist()
        if all(row == rows[0] for row in rows):
            self.equal_at = step
            return
        ranks = [dist.get_global_rank(self.group, number) for number in range(self.group.size())]
        raise FailureError(self._failure(rows, ranks, step))

    def _failure(self, rows: list[list[int]], ranks: list[int], step: int) -> Failure:
        odd = odd_ones(rows)
        which = [ranks[number] for number in odd]
        part, name = whose(self.state)[first_odd(rows)]
        who = (
            f"rank {which[0]} differs from its replicas"
            if len(which) == 1
            else f"ranks {' and '.join(map(str, which))} differ"
        )
        return Failure(
            kind="replicas",
            code=Exit.HARDWARE,
            what=f"{who}: the {part} of {name} is not the same number",
            where=f"{platform.node()}, seen after step {step}",
            since=f"after step {self.equal_at}, when all were equal",
            cause="a bit changed in memory or arithmetic: suspect the device of that rank",
            remedy="take the device out, and run the same command again; checkpoints in doubt are set aside",
            good_until=self.equal_at,
            rank=which[0],
            step=step,
        )


def compared(state: State) -> list[Tensor]:
    """What replicas hold alike: the weights, then each optimizer state of all of them."""
    weights = [local(weight.detach()) for weight in state.optimizer.weights]
    states = state.optimizer.states()
    return [*weights, *chain.from_iterable(states[kind] for kind in states if kind not in OWN_ERRORS)]


def whose(state: State) -> list[tuple[str, str]]:
    """What each of those is, and of which weight."""
    names = [name for chunk in state.chunks for name, _ in trained(chunk)]
    found, held, spec = [("weight", name) for name in names], state.optimizer.held(), state.optimizer.spec
    for kind in (each for each in spec.state_names if each not in OWN_ERRORS):
        kept = zip(names, state.optimizer.weights, strict=True)
        found += [(spec.label_of(kind), name) for name, weight in kept if kind in held[id(weight)]]
    return found


def first_odd(rows: list[list[int]]) -> int:
    """The first column of several rows whose numbers are not all the same."""
    return next(number for number, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1)


class ReplicaEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The first number in which two replicas differed, as one of them had it."""

    plan: Plan  # under another plan a rank holds other parts
    tensor: int  # of the weights, then of each optimizer state
    element: int
    value: float | None  # None: not finite


class ReplicaCheck:
    """Remembers, over a restart, who held what."""

    def __init__(self, run: Run, state: State, mesh: Mesh, folder: Path) -> None:
        self.plan = run.plan
        self.state = state
        self.rank = mesh.rank
        self.device = mesh.device
        self.folder = folder / "faults"

    def look(self, replicas: Replicas, step: int) -> tuple[int | None, str] | None:
        """Compare the replicas: leave what this rank has if they differ; tell who erred if they once differed here."""
        pair = replicas.group.size() == PAIR
        try:
            replicas.look(step)
        except FailureError:
            if pair:
                self._leave_evidence(replicas.group)
            raise
        if not pair or not replicas.every or step % replicas.every:
            return None
        return self._recall(dist.get_process_group_ranks(replicas.group))

    def _leave_evidence(self, group: dist.ProcessGroup) -> None:
        held = compared(self.state)
        sums = torch.stack([bit_sum(tensor) for tensor in held]).to(self.device)
        rows = join(sums[None], 0, group).tolist()
        number = first_odd(rows)
        element = first_difference(held[number].flatten().to(self.device), group)
        value = held[number].flatten()[element].item()
        told = ReplicaEvidence(
            plan=self.plan, tensor=number, element=element, value=value if math.isfinite(value) else None
        )
        self.folder.mkdir(exist_ok=True)
        replace_file(self._file(self.rank), msgspec.json.encode(told))

    def _recall(self, ranks: list[int]) -> tuple[int | None, str] | None:
        told = [self._left(rank) for rank in ranks]
        if any(one is None or one.plan != self.plan for one in told):
            return None
        left = [one for one in told if one is not None]
        truth = compared(self.state)[left[0].tensor].flatten()[left[0].element].item()
        odd = wrong([one.value for one in left], truth)
        if odd is None:
            return None, "made again, this step does not tell which of the replicas that differed was wrong"
        return ranks[odd], (
            f"made again, this step shows that rank {ranks[odd]} was wrong: it had {_shown(left[odd])} where "
            f"rank {ranks[1 - odd]} had {_shown(left[1 - odd])} and both have {truth:.9g} now"
        )

    def _left(self, rank: int) -> ReplicaEvidence | None:
        """What a rank left at this very step."""
        try:
            return msgspec.json.decode(self._file(rank).read_bytes(), type=ReplicaEvidence)
        except (OSError, *UNDECODABLE):
            return None

    def _file(self, rank: int) -> Path:
        return self.folder / f"replicas-step{self.state.step}-rank{rank}.json"


def wrong(values: list[float | None], truth: float) -> int | None:
    """Which of two is clearly further from the truth; None if neither is."""
    one, other = (math.inf if value is None else abs(value - truth) for value in values)
    if one > CLEARLY * other:
        return 0
    return 1 if other > CLEARLY * one else None


def first_difference(flat: Tensor, group: dist.ProcessGroup) -> int:
    """The first element that is not the same on all ranks, found by halves: sums travel, not the tensor."""
    begin, end = 0, len(flat)
    while end - begin > 1:
        middle = (begin + end) // 2
        sums = join(bit_sum(flat[begin:middle])[None], 0, group).tolist()
        begin, end = (middle, end) if len(set(sums)) == 1 else (begin, middle)
    return begin


def _shown(one: ReplicaEvidence) -> str:
    return "no number" if one.value is None else f"{one.value:.9g}"


class FaultWatch:
    """Looks at each step once its numbers are on the host: on every rank at the same step, so that ranks may confer."""

    def __init__(self, run: Run, state: State, mesh: Mesh, recorder: Recorder, heartbeat: Heartbeat) -> None:
        self.run = run
        self.state = state
        self.mesh = mesh
        self.recorder = recorder
        self.spikes = Spikes(run.faults.spike)
        self.stragglers = Stragglers(run.faults.straggler, mesh, heartbeat)
        self.replicas = Replicas(run.faults.compare_every, state, mesh)
        self.replica_check = ReplicaCheck(run, state, mesh, recorder.folder)
        self.matmuls = MatmulCheck(run, state, mesh, recorder.mesh.rank)
        self.made = self.looked = state.step
        self.streak = 0  # steps in a row whose gradient was not finite

    def look(self) -> None:
        """One look after each result."""
        if self.state.step > self.made:
            self.made = self.state.step
            self.matmuls.passed(self.made)
        record = self.recorder.settled()
        if record is None or record.step <= self.looked:
            return
        self.looked = record.step
        self._matmuls(record.step)
        remarkable = self.spikes.add(record.loss, record.norm)
        if self.spikes.is_odd:
            self.matmuls.suspect(record.step, SUSPECTED)
        # Under fp16 a loss scale that is too high comes down first, by itself.
        if record.skipped and not (self.run.plan.precision == "fp16" and record.loss_scale > 1.0):
            self._not_finite(record)
            return
        self.streak = 0
        if remarkable:
            self._tell("spike", record.step, remarkable)
        if found := self.stragglers.look(record.step):
            self._tell("straggler", record.step, str(found), found.rank)
        if seen := self.replica_check.look(self.replicas, record.step):
            self._tell("replicas", record.step, seen[1], seen[0])

    def _matmuls(self, step: int) -> None:
        """Flips that passed; those that stay, or come again, end the run."""
        for flip in self.matmuls.read(step):
            passing = "computed again it is right: a passing flip, and the device's fault should another come"
            self._tell("matmul", flip.step, f"rank {self.matmuls.rank}: {flip}; {passing}", self.matmuls.rank)
        for rank, at in self.matmuls.others(step):
            self._tell("matmul", at, f"rank {rank}: a matmul was off by its checksum, and right computed again", rank)

    def _not_finite(self, record: StepRecord) -> None:
        """The first of a row is looked into; too long a row ends the run."""
        self.streak += 1
        step, limit, folder = record.step, self.run.faults.not_finite, self.recorder.folder
        text, rank = "the gradient is not finite again", None
        if self.streak == 1:
            found = culprit(self.run, self.state, self.mesh, step, folder)
            text, rank = str(found), found.rank
        self._tell("not-finite", step, text, rank)
        if self.streak <= limit:
            return
        raise FailureError(
            Failure(
                kind="not-finite",
                code=Exit.NOT_FINITE,
                what=f"{self.streak} gradients in a row were not finite (faults.not_finite = {limit})",
                where=text,
                since=f"step {step - self.streak + 1}",
                cause="a learning rate too high, a damaged weight, or data that the model cannot take",
                remedy="resume with a lower learning rate or other data, by --extend: "
                f"optim.lr={self.run.optim.lr / 2:g} --extend --folder {folder}",
                details=str(folder / "faults"),
                rank=rank,
                step=step,
            )
        )

    def _tell(self, what: str, step: int, text: str, rank: int | None = None) -> None:
        self.recorder.tell(EventRecord(what=what, step=step, text=text, rank=rank, at=time.monotonic()))  # type: ignore
