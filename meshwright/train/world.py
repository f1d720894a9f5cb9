"""The processes of a job, from before the first collective to after the last."""

import gc
import hashlib
import logging
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from meshwright import __version__
from meshwright.config.run import Run
from meshwright.parallel import mesh
from meshwright.parallel.mesh import Mesh
from meshwright.runtime.files import replace_file
from meshwright.runtime.meeting import named, resolved
from meshwright.runtime.place import Place
from meshwright.spec.problem import InputError, Problem

KEY = "agreement"
MOST_NAMED = 6  # differences between ranks
MEETING = timedelta(minutes=5)  # ranks import torch at different speeds on a crowded machine
LOOK_SECONDS = 0.02
READ_SECONDS = 20.0  # in which all ranks have read why they may not begin
SHOWN_SECONDS = 10.0  # after which a shared disk shows a new file to all
RESOLVE_SECONDS = 30.0
NEWEST = "meshwright/newest"
TOKEN = "meeting.key"
IsStopped = Callable[[], bool]


def facts(run: Run) -> dict[str, str]:
    """What must not differ between ranks, each key a sentence's subject."""
    return {
        **{key: str(value) for key, value in _flat(msgspec.to_builtins(run))},
        "meshwright": __version__,
        "code": code(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


class StoppedError(RuntimeError):
    """Somebody has asked this rank to end before the ranks stood ready."""


def wait(store: dist.Store, keys: list[str], is_stopped: IsStopped, seconds: float = MEETING.total_seconds()) -> bool:
    """Until all keys are there; looked for by us, because torch's own wait hears no signal. False: they are not."""
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if is_stopped():
            raise StoppedError("stopped while the ranks met")
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def require(store: dist.Store, keys: dict[int, str], is_stopped: IsStopped) -> None:
    """Until all ranks have left their key; who has not after a long time is named."""
    if not wait(store, list(keys.values()), is_stopped):
        late = [rank for rank, key in keys.items() if not store.check([key])]
        what = f"{named(late)} met the others and then said nothing for {MEETING.total_seconds():.0f} s"
        raise InputError([Problem(what, "see their words in the launcher's log")])


def agree(
    run: Run,
    store: dist.Store,
    rank: int,
    world: int,
    mine: dict[str, str] | None = None,
    is_stopped: IsStopped = lambda: False,
) -> None:
    """Refuse to begin unless all ranks say the same; whoever differs is named, with the key. Travels as JSON."""
    store.set(f"{KEY}/{rank}", msgspec.json.encode(mine or facts(run)).decode())
    if rank == 0:
        require(store, {each: f"{KEY}/{each}" for each in range(world)}, is_stopped)
        said = [msgspec.json.decode(store.get(f"{KEY}/{each}"), type=dict[str, str]) for each in range(world)]
        store.set(f"{KEY}/found", msgspec.json.encode(differences(said)).decode())
    require(store, {0: f"{KEY}/found"}, is_stopped)
    found = msgspec.json.decode(store.get(f"{KEY}/found"), type=list[str])
    if found:
        store.set(f"{KEY}/read/{rank}", "")
        if rank == 0:  # the store ends with this process: not before all have read
            wait(store, [f"{KEY}/read/{each}" for each in range(world)], is_stopped, READ_SECONDS)
        remedy = "start every rank with the same code, environment and run file"
        raise InputError([Problem(text, remedy) for text in found])


def differences(said: list[dict[str, str]]) -> list[str]:
    """Which ranks say something else than most, and about what."""
    found = []
    for key in sorted({key for one in said for key in one}):
        values = [one.get(key, "nothing") for one in said]
        usual = max(values, key=values.count)
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            found.append(f"rank {odd[0]} has {key} = {values[odd[0]]}, the others {usual}")
    return found[:MOST_NAMED]


@cache
def code() -> str:
    """A short name for the source of this package as it was when this process, or the one it is forked from, began.

    Whoever starts a rank asks at once: the files may change while data is prepared, and the modules in memory do not.
    """
    return code_digest(Path(__file__).parents[1])


def code_digest(package: Path) -> str:
    """A short name for the source of the package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _flat(values: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in values.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def device_of(place: Place) -> torch.device:
    """The accelerator of this rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def backend_of(place: Place, device: torch.device, store: dist.Store) -> str:
    """NCCL where each rank has a GPU of its own; it refuses to share one, so ranks that do speak Gloo."""
    if device.type != "cuda":
        return "gloo"
    if place.local_world <= torch.cuda.device_count():
        return "nccl"
    # A scheduler may show every rank one GPU, the same or each another: they tell each other which.
    mine = str(torch.cuda.get_device_properties(device).uuid)
    return "nccl" if apart(mine, place, store) else "gloo"


def apart(gpu: str, place: Place, store: dist.Store) -> bool:
    """Whether no two ranks of this machine have the same GPU."""
    store.set(f"gpu{place.rank}", gpu)
    first = place.rank - place.local_rank
    return len({store.get(f"gpu{rank}") for rank in range(first, first + place.local_world)}) == place.local_world


@contextmanager
def world(
    run: Run, place: Place, attempt: int = 1, folder: Path | None = None, is_stopped: IsStopped = lambda: False
) -> Iterator[Mesh]:
    """Meet the other ranks, and part from them however the work ends."""
    device = meet(run, place, attempt, folder, is_stopped)
    try:
        yield mesh.make(run.plan, device, run.compresses)
    finally:
        dist.destroy_process_group()


def lasting(run: Run, place: Place) -> Mesh:
    """Meet the other ranks for as long as this process lives: for one run after another, of any plans."""
    if dist.is_initialized():
        gc.collect()  # the model of the run before lies in cycles, and is not to lie beside the next
        device = device_of(place)
        _prepare(run, place, device, dist.get_backend())
    else:
        device = meet(run, place)
    return mesh.kept(run.plan, device, run.compresses)


def meet(
    run: Run, place: Place, attempt: int = 1, folder: Path | None = None, is_stopped: IsStopped = lambda: False
) -> torch.device:
    """Meet the other ranks; returns the device of this one."""
    device = device_of(place)
    meeting = open_store(place)
    name = fresh_name(meeting, place.rank, place.world, is_stopped) if place.is_agent else f"attempt{attempt}"
    store = dist.PrefixStore(name, meeting)
    backend = backend_of(place, device, store)
    _prepare(run, place, device, backend)
    # Torch advises, on every rank and for every shape, on gathering weights of two axes. We do it once, at the end.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mine = facts(run)
    if place.is_agent and folder is not None:  # other launchers' ranks have compared it before
        mine["run folder"] = _seen_folder(store, place.rank, folder, is_stopped)
    try:
        agree(run, store, place.rank, place.world, mine, is_stopped)
    finally:
        if place.is_agent and place.rank == 0 and folder is not None:
            (folder / TOKEN).unlink(missing_ok=True)  # all have looked
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=MEETING,
        device_id=device if backend == "nccl" else None,
    )
    return device


def open_store(place: Place) -> dist.Store:
    """Where ranks leave words for each other: a file of their machine, the launcher's store, or rank 0's own."""
    if place.store:
        return dist.FileStore(place.store, place.world)  # nothing listens
    resolved(place.address, place.port, RESOLVE_SECONDS)  # torch would try for five minutes, and not say what
    is_master = place.rank == 0 and not place.is_agent
    return dist.TCPStore(
        place.address,
        place.port,
        place.world,
        is_master,
        timeout=MEETING,
        wait_for_workers=False,  # who waits for them in there hears no signal, and names nobody who is missing
        master_listen_fd=place.listener if is_master and place.listener >= 0 else None,
    )


def fresh_name(store: dist.Store, rank: int, world: int, is_stopped: IsStopped) -> str:
    """A name that all ranks of this attempt have in common, and none of an earlier one that spoke in the same store.

    torchrun's store outlives attempts, and its count of them is each machine's own: one that comes back counts from 0.
    Rank 0 makes a name, and answers each rank's own word with it, which no store of the past can.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        store.set(NEWEST, own)
        require(store, {each: f"{own}/here/{each}" for each in range(1, world)}, is_stopped)
        heard = {str(each): store.get(f"{own}/here/{each}").decode() for each in range(1, world)}
        store.set(f"{own}/go", msgspec.json.encode(heard).decode())
        return own
    deadline, name = time.monotonic() + MEETING.total_seconds(), ""
    while time.monotonic() < deadline:
        wait(store, [NEWEST], is_stopped)
        if (newest := store.get(NEWEST).decode()) != name:
            name = newest
            store.set(f"{name}/here/{rank}", own)
        answer = store.get(f"{name}/go") if store.check([f"{name}/go"]) else b"{}"
        if msgspec.json.decode(answer, type=dict[str, str]).get(str(rank)) == own:
            return name
        time.sleep(LOOK_SECONDS)
    raise InputError([Problem(f"rank {rank} met no rank 0 of the same start", "see its words in the launcher's log")])


def _seen_folder(store: dist.Store, rank: int, folder: Path, is_stopped: IsStopped) -> str:
    """The run folder of rank 0, if it is this rank's too: known by a file that rank 0 puts there."""
    if rank == 0:
        token = secrets.token_hex(8)
        replace_file(folder / TOKEN, token.encode())
        store.set("folder", f"{token} {folder.absolute()}")
        return str(folder.absolute())
    require(store, {0: "folder"}, is_stopped)
    token, _, name = store.get("folder").decode().partition(" ")
    deadline = time.monotonic() + SHOWN_SECONDS
    while time.monotonic() < deadline and not is_stopped():
        with suppress(OSError):
            if (folder / TOKEN).read_bytes() == token.encode():
                return name
        time.sleep(LOOK_SECONDS)
    return f"{folder.absolute()}, which is another"


def _prepare(run: Run, place: Place, device: torch.device, backend: str) -> None:
    """Make this process ready for a run, or refuse it."""
    _check_device(run, device, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu" or run.plan.cpu_offload:  # the host computes: a step, or its update
        torch.set_num_threads(place.threads)


def world_group() -> dist.ProcessGroup:
    """All ranks of the job."""
    group = dist.group.WORLD
    assert group is not None, "the ranks have met"
    return group


def _check_device(run: Run, device: torch.device, backend: str) -> None:
    """What this device, or ranks that share it, cannot do."""
    if device.type != "cuda":
        return
    plan, name = run.plan, torch.cuda.get_device_name(device)
    if plan.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InputError([Problem(f"{name} has no bf16 arithmetic", "set plan.precision=fp16", "plan.precision")])
    if backend == "gloo" and (plan.shards > 1 or plan.tp > 1 or plan.pp > 1):
        what = "ranks that share a GPU speak Gloo, which there can add up and exchange but not gather, scatter or send"
        remedy = "start one rank for each GPU, use replicate or cp, or hide the GPU (CUDA_VISIBLE_DEVICES=)"
        raise InputError([Problem(what, remedy, "plan")])
