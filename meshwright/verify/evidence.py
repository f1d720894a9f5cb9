"""Evidence: what a run did, kept as files, and a plan's beside one process's, compared number by number."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from meshwright.config.run import Run
from meshwright.data.prepare import prepare
from meshwright.optim.parameter_server import AsynchronousReplicas
from meshwright.parallel.apply import Transform
from meshwright.parallel.mesh import Mesh, join
from meshwright.runtime.place import Place
from meshwright.train.build import build
from meshwright.train.loop import StepResult, Stop, train
from meshwright.train.oom import explaining
from meshwright.train.saving import digest_of, restore, whole_states
from meshwright.train.state import gradients, weights
from meshwright.train.world import lasting, world
from meshwright.verify.prove import VERSIONS, ParityResult, Planned
from meshwright.verify.resume import DIGESTS

# A gradient this small beside the whole is rounding: a key's bias, say, which softmax ignores. AdamW would scale it up
# to a full step, so the weight says nothing; the gradient itself is still compared, on the scale of the whole.
NOTHING = 1e-13
STATES = "states"  # the file of optimizer states
SMALL = 1e-4  # below this share of the whole gradient, a parameter's deviation is measured against the whole


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did, step by step; its tensors are in files beside."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    names: tuple[str, ...]  # of its weights, in the order of the model


def record(place: Place, run: Run, cache: Path, folder: Path, in_fp8: Transform | None = None) -> None:
    """Run to the last step as one rank; the first writes the losses, norms, first gradients and last weights."""
    mesh = lasting(run, place)
    evidence, corpus = Evidence(folder, mesh), prepare(run, cache, lambda text: None)
    with explaining(run, mesh.device):
        state = build(run, corpus, mesh, in_fp8=in_fp8)
    with explaining(run, mesh.device, state):
        for result in train(run, state, mesh):
            assert isinstance(result, StepResult), "nothing is held out in a proof"
            loss, norm = over_replicas(torch.stack([result.loss, result.norm]), mesh)
            evidence.step(loss, norm, _summed(gradients(state.chunks, run, mesh), run, mesh))
        if isinstance(state.outer, AsynchronousReplicas):
            evidence.versions(state.outer.versions)
        # In other precisions a square has twice the deviation of what it is of. Codes are compared by tests of their
        # own, and replicas that sync rarely have states of their own.
        if run.plan.precision == "fp64" and run.optim.state_dtype == "fp32" and not run.plan.has_outer_loop:
            evidence.states(whole_states(state, run, mesh))
        evidence.end(weights(state.chunks, run, mesh))
    state.loader.close()


def over_replicas(numbers: Tensor, mesh: Mesh) -> Tensor:
    """The mean over replicas that sync rarely, each of which has numbers of its own."""
    if mesh.parts > 1:
        dist.all_reduce(numbers, group=mesh.group("replicate"))
    return numbers / mesh.parts


def _summed(tensors: Iterator[tuple[str, Tensor]], run: Run, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Of asynchronous workers, whose gradients are parts of a sum that only servers make, the sum."""
    for name, tensor in tensors:
        whole = tensor.to(mesh.device)
        if run.plan.is_served:
            dist.all_reduce(whole)
        yield name, whole.cpu()


class Evidence:
    """What a run did, step by step, and the files it is kept in: losses, norms, first gradients and last weights."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        self.folder, self.mesh = folder, mesh
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, loss: Tensor, norm: Tensor, gradients: Iterator[tuple[str, Tensor]]) -> None:
        """Keep a step; its gradients only if it is the first."""
        self.losses.append(loss.item())
        self.norms.append(norm.item())
        if len(self.losses) == 1:
            self._write("gradients", gradients)

    def versions(self, mine: list[int]) -> None:
        """Keep which weights every worker had in each step."""
        group = self.mesh.group("replicate")
        rows = join(torch.tensor([mine], dtype=torch.int64, device=self.mesh.device), 0, group).tolist()
        if self.mesh.rank == 0:
            (self.folder / VERSIONS).write_bytes(msgspec.json.encode(rows))

    def states(self, states: Iterator[tuple[str, Tensor]]) -> None:
        """Keep the optimizer's states."""
        self._write(STATES, states)

    def end(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Keep the weights, and write down the numbers."""
        names = self._write("weights", weights)
        if self.mesh.rank == 0:
            numbers = Numbers(losses=tuple(self.losses), norms=tuple(self.norms), names=names)
            (self.folder / "numbers.json").write_bytes(msgspec.json.encode(numbers))

    def _write(self, kind: str, tensors: Iterator[tuple[str, Tensor]]) -> tuple[str, ...]:
        whole = {name: tensor.contiguous() for name, tensor in tensors}  # every rank takes part in gathering
        if self.mesh.rank == 0:
            safetensors.torch.save_file(whole, self.folder / f"{kind}.safetensors")
        return tuple(whole)


def compare(run: Planned, reference: Path, folder: Path, tolerance: float, seconds: float) -> ParityResult:
    """A plan's records beside the reference's."""
    files = (reference / "numbers.json", folder / "numbers.json")
    theirs, ours = (msgspec.json.decode(file.read_bytes(), type=Numbers) for file in files)
    with safe_open(reference / "gradients.safetensors", "pt") as differentiated:
        learned = set(differentiated.keys())  # other weights are learned by other rules
    gradient = dict(_tensors([name for name in theirs.names if name in learned], reference, folder, "gradients"))
    whole = torch.stack([other.norm() for other, _ in gradient.values()]).norm()
    idle = {name for name, (other, _) in gradient.items() if other.norm() <= NOTHING * whole}
    by_gradient = {name: _far(*pair, floor=SMALL * whole) for name, pair in gradient.items()}
    by_weight = {
        name: _far(*pair, floor=torch.zeros(()))
        for name, pair in _tensors(theirs.names, reference, folder, "weights")
        if name not in idle
    }
    by_state = _state_deviations(reference, folder, idle)
    by_loss = [_relative(*pair) for pair in zip(ours.losses, theirs.losses, strict=True)]
    by_norm = [_relative(*pair) for pair in zip(ours.norms, theirs.norms, strict=True)]
    first = first_bad(by_loss, by_norm, by_gradient, by_weight, tolerance)
    last = f"step {len(by_loss)}: optimizer state"
    first = first or next(
        (f"{last} {name}, off by {far:.1e}" for name, far in by_state.items() if not far <= tolerance), None
    )
    return ParityResult(
        plan=str(run.plan),
        passed=first is None,
        loss_deviation=max(by_loss),
        norm_deviation=max(by_norm),
        gradient_deviation=max(by_gradient.values()),
        weight_deviation=max(by_weight.values()),
        state_deviation=max(by_state.values(), default=0.0),
        first_bad=first,
        worst=max(by_gradient, key=lambda name: by_gradient[name]),
        seconds=seconds,
    )


def _state_deviations(reference: Path, folder: Path, idle: Collection[str]) -> dict[str, float]:
    """How far each optimizer state is off, beside its own length or a share of its kind's; nothing if none was kept."""
    if not (reference / f"{STATES}.safetensors").is_file():
        return {}
    with safe_open(reference / f"{STATES}.safetensors", "pt") as theirs:
        pairs = dict(_tensors(theirs.keys(), reference, folder, STATES))
    squares = dict[str, Tensor]()
    for name, (other, _) in pairs.items():
        kind = name.partition("/")[0]
        squares[kind] = squares.get(kind, torch.zeros(())) + other.norm().square()
    return {
        name: _far(*pair, floor=SMALL * squares[name.partition("/")[0]].sqrt())
        for name, pair in pairs.items()
        if name.partition("/")[2] not in idle
    }


def first_bad(
    losses: list[float], norms: list[float], gradients: dict[str, float], weights: dict[str, float], tolerance: float
) -> str | None:
    """The first thing to leave the tolerance, in the order in which a step computes it."""
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        if not loss <= tolerance:  # a NaN lands here too
            return f"step {step}: loss, off by {loss:.1e}"
        if step == 1:
            for name, deviation in gradients.items():
                if not deviation <= tolerance:
                    return f"step 1: gradient of {name}, off by {deviation:.1e}"
        if not norm <= tolerance:
            return f"step {step}: gradient norm, off by {norm:.1e}"
    for name, deviation in weights.items():
        if not deviation <= tolerance:
            return f"step {len(losses)}: weight {name}, off by {deviation:.1e}"
    return None


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / max(abs(theirs), 1e-300)


def _far(theirs: Tensor, ours: Tensor, floor: Tensor) -> float:
    """The distance of two tensors beside the length of the reference."""
    return ((ours - theirs).norm() / torch.maximum(theirs.norm(), floor).clamp(min=1e-300)).item()


def _tensors(
    names: Sequence[str], reference: Path, folder: Path, kind: str
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Each parameter as the reference and as the plan had it, in float64."""
    file = f"{kind}.safetensors"
    with safe_open(reference / file, "pt") as theirs, safe_open(folder / file, "pt") as ours:
        for name in names:
            yield name, (theirs.get_tensor(name).double(), ours.get_tensor(name).double())


def judge(place: Place, run: Planned, reference: Path, folder: Path, tolerance: float, seconds: float) -> None:
    """Compare in a process that has torch, and leave the result in the folder."""
    result = compare(run, reference, folder, tolerance, seconds)
    (folder / "result.json").write_bytes(msgspec.json.encode(result))


def drive(place: Place, run: Run, cache: Path, folder: Path, until: int) -> None:
    """Go on from what a folder has, until a step; leave there the digest of the state after each step."""
    quiet, stop, digests = (lambda text: None), Stop(), dict[int, str]()
    with world(run, place) as mesh:
        with explaining(run, mesh.device):
            state = build(run, prepare(run, cache, quiet), mesh)
        restore(state, run, mesh, folder, quiet)
        stop.asked = state.step + 1 == until
        with explaining(run, mesh.device, state):
            for result in train(run, state, mesh, folder, stop):
                if isinstance(result, StepResult):
                    digests[result.step] = digest_of(state, run, mesh)
                    stop.asked = result.step + 1 == until
        state.loader.close()
        if mesh.rank == 0:
            (folder / DIGESTS).write_bytes(msgspec.json.encode(digests))
