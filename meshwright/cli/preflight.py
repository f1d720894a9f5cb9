"""What is looked at before ranks start: the machines, the weights, the trackers, the disk and the memory."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from meshwright.checkpoint.storage import Disk
from meshwright.cli.query import plan_overrides
from meshwright.config import evaluation
from meshwright.config.huggingface import weight_problems
from meshwright.config.run import Run, digests
from meshwright.config.weights import describe
from meshwright.cost.calibrate import trainer
from meshwright.cost.memory import fits, ledger
from meshwright.hardware.cluster import Cluster, catalogue, cluster, cluster_of_device, recognised
from meshwright.runtime import run_folder
from meshwright.runtime.devices import free_host_bytes
from meshwright.runtime.failure import Exit
from meshwright.runtime.object_store import require_writable, telling
from meshwright.runtime.run_folder import ROOM, lack_of_room
from meshwright.search import budget
from meshwright.search.best_first import search
from meshwright.search.question import Question
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem, mistake
from meshwright.spec.units import gib, plural


class ShortageError(InputError):
    """A run needs more memory than there is."""

    exit_code = Exit.DOES_NOT_FIT


def problems(run: Run, gpus: list[str], is_asked: bool) -> Iterator[Problem]:
    """What is wrong with a run on this machine, whose GPUs the driver names so; the user may ask for its ranks here."""
    if not is_asked:
        yield from device_problems(run, gpus)
    # A saved step is verified as it is read.
    if run.init.folder and (start := describe(run.init.folder)).kind != "checkpoint":
        yield from (msgspec.structs.replace(each, key="init.from") for each in weight_problems(start.path))
    yield from evaluation.problems_here(run)
    for name in run.log.writers:
        if find_spec(name) is None:
            what = f"log.writers names {name}, which is not installed"
            yield Problem(what, f"run: pip install {name}, or leave it out of log.writers", "log.writers")


def spare_problems(run: Run, gpus: int) -> Iterator[Problem]:
    """On one machine spares need GPUs of their own, where it has any: one that shares a replica's is lost with it."""
    plan, spares = run.plan, run.faults.spares
    needed = plan.world + spares * (plan.world // plan.replicate)
    if spares and needed > gpus > 0:
        what = f"{plan.world} ranks and faults.spares = {spares} need {needed} GPUs, and this machine has {gpus}"
        yield Problem(what, "set a smaller plan.replicate, or leave faults.spares out", "faults.spares")


def device_problems(run: Run, gpus: list[str]) -> Iterator[Problem]:
    """Where goal.cluster names other machines, a plan made for them is not started on this one by mistake."""
    if not run.goal.cluster:
        return
    wanted, ranks = cluster(run.goal.cluster).gpu.name, run.plan.world
    cards = {recognised(name, catalogue().cards) for name in gpus}
    if len(gpus) >= ranks and cards <= {wanted, None}:  # a card that nobody knows may be the right one
        return
    here = f"{len(gpus)} × {gpus[0]}" if gpus else "no GPU"
    yield Problem(
        f"the plan is for {ranks} × {wanted} (goal.cluster = {run.goal.cluster}), and this machine has {here}",
        f"start it there (docs/many-machines.md), or add --ranks {ranks} to start its ranks here all the same",
        "goal.cluster",
    )


def require_room(run: Run, folder: Path, gpus: list[str]) -> None:
    """Refuse a run that needs more memory than there is, or whose checkpoints the disk cannot take."""
    free = free_host_bytes()
    if gpus:
        _require_devices(run, gpus[0], free)
    elif free is not None:
        _require_host(run, free)
    if lack := lack_of_room(run, folder, Disk().free_bytes(folder)):
        raise mistake(lack, ROOM, "checkpoint")
    if run.faults.memory_every and run_folder.HOST_MEMORY.is_dir():
        require_host_memory(run, run_folder.HOST_MEMORY)


def require_host_memory(run: Run, folder: Path, nodes: int = 1) -> None:
    """Refuse in-memory checkpoints that their file system cannot take: in a container it is small by default.

    One replaces the other, so there are two; of several machines each has a part, and a copy of another's.
    """
    run_folder.sweep(folder)  # what launchers have left that were killed
    saves = 2 if nodes == 1 else 4
    needed, free = saves * -(-run_folder.state_bytes(run) // nodes), Disk().free_bytes(folder)
    if needed > free:
        what = f"in-memory checkpoints need {needed:,} bytes in {folder}, and {free:,} are free"
        remedy = "make it larger (docker run --shm-size), or leave faults.memory_every out"
        raise mistake(what, remedy, "faults.memory_every")


def require_remote(run: Run, folder: Path, fresh: bool) -> None:
    """Refuse an address that takes no checkpoints, or that has those of another run, before ranks start."""
    if not run.checkpoint.remote:
        return
    remote, key = require_writable(run.checkpoint.remote), "checkpoint.remote"
    with telling(remote.address):
        steps = remote.saved_steps()
        whose = next(filter(None, map(remote.owner, reversed(steps))), "")  # who fetches says what is damaged
    if steps and fresh:
        what = f"{remote.address} has saved steps, which --fresh would resume from"
        raise mistake(what, "name another address, or remove them there", key)
    if whose and whose not in (*digests(run), *run_folder.now_and_earlier(folder)):
        what = f"{remote.address} has the steps of another run ({whose}, not {digests(run)[0]})"
        raise mistake(what, "name another address: each run has its own", key)


def require_cards(run: Run, machines: Cluster) -> None:
    """Refuse a plan whose most loaded rank needs more memory than a card of these machines has."""
    question = budget.question_of(run, machines)
    found, room = fits(question.job(run.plan)).ledger, machines.gpu.memory_bytes
    if found.allocated * found.low > room:
        needs = f"{gib(found.allocated)} GiB, and {machines.gpu.name} has {gib(room)}"
        raise _shortage(run, needs, question)


def _require_devices(run: Run, device: str, free: int | None) -> None:
    """Hold the most loaded rank against its GPU, and what it offloads against its share of the host's memory."""
    if recognised(device, catalogue().cards) is None:
        return
    world = run.plan.world
    machines = msgspec.structs.replace(cluster_of_device(device, world), host_bytes=(free or 0) / world)
    question = budget.question_of(run, machines)
    found = fits(question.job(run.plan)).ledger
    room, offloaded = machines.gpu.memory_bytes, found.offloaded.host_bytes * world
    if found.allocated * found.low > room:
        raise _shortage(run, f"{gib(found.allocated)} GiB, and {device} has {gib(room)}", question)
    if free is not None and offloaded > free:
        raise _shortage(run, f"{gib(offloaded)} GiB of host RAM, and {gib(free)} are free", question)


def _require_host(run: Run, free: int) -> None:
    """Without a GPU all ranks share the host's memory; tensors alone are counted."""
    world, pp = run.plan.world, run.plan.pp
    machines = cluster(budget.ANY_CARD, gpus=world)  # bytes are the same on all
    share = msgspec.structs.replace(machines.gpu, memory_bytes=free / world)
    machines = msgspec.structs.replace(machines, gpu=share, host_bytes=1.0, disk_bytes=1.0)  # nothing to offload to
    stack = trainer("cpu")
    tensors = msgspec.structs.replace(stack.holds, context_bytes=0.0, slack=0.0)
    question = budget.question_of(run, machines)
    question = msgspec.structs.replace(question, stack=msgspec.structs.replace(stack, holds=tensors))
    stages = [ledger(question.job(run.plan), {"pp": rank}) for rank in range(pp)]
    needed = sum(stage.allocated + stage.offloaded.host_bytes for stage in stages) * world // pp
    if needed * stages[0].low > free:
        raise _shortage(run, f"{gib(needed)} GiB for {plural(world, 'rank')}, and {gib(free)} are free here", question)


def _shortage(run: Run, needs: str, question: Question) -> ShortageError:
    """What lacks, and the best plan of as many ranks that fits."""
    kept = {name: getattr(run.plan, name) for name in ("compile", "deterministic")}  # neither needs less memory
    found = search(msgspec.structs.replace(question, fixed=kept), 1).found
    remedy = "no plan of as many ranks fits: use a smaller model, a shorter sequence, or more machines"
    if found:
        names = [name for name in Plan.__struct_fields__ if getattr(found[0].plan, name) != getattr(run.plan, name)]
        remedy = f"this plan fits: {' '.join(plan_overrides(found[0].plan, names))}"
    return ShortageError([Problem(f"the run does not fit: it needs {needs}", remedy, "plan")])
