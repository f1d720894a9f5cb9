"""What devices and the links between them do at best: matmuls, attention, memory, launches, disk, collectives."""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.bench.measure import seconds_of, synchronize
from meshwright.config.run import Run
from meshwright.cost.calibrate import fits
from meshwright.cost.traffic import Kind
from meshwright.hardware.profile import AttentionTime, CollectiveTime, ElementwiseTime, MatmulTime, Profile
from meshwright.parallel.mesh import Mesh, all_gather, reduce_scatter
from meshwright.runtime.files import replace_json
from meshwright.runtime.place import Place
from meshwright.spec.units import GIB
from meshwright.train.world import world

KIB, MIB = 2**10, 2**20
SIZES = tuple(KIB * 4**power for power in range(9))  # 1 KiB to 64 MiB
QUICK = (KIB, 32 * KIB, MIB, 8 * MIB)
WIDTH = 4  # bytes of an element
WARM_UP = 2  # calls before the first that counts; connections are made by the first
ROUNDS = 5  # whose median counts
MOST_SECONDS, QUICK_SECONDS = 0.05, 0.01  # of one round
MOST_CALLS = 200  # in one round
ONCE = 0.5  # seconds: a call that takes longer is measured fewer times
FEW_ROUNDS = 2
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
LARGE = GIB  # several times any cache
PIECE = 4 * MIB  # of one write
FILE, QUICK_FILE = 512 * MIB, 64 * MIB  # bytes written to the disk


def probe_ranks(place: Place, run: Run, quick: bool, target: Path) -> None:
    """Be one rank of a probe; the first leaves the profile in `target`.

    Devices are measured by all ranks at once, because that is how they work in training.
    """
    with world(run, place) as mesh:
        say = partial(print, file=sys.stderr, flush=True) if mesh.rank == 0 else lambda text: None
        dist.barrier()
        profile = probe(mesh.device, say, quick=quick or mesh.device.type == "cpu")
        if mesh.world == 1:
            say("collectives are left out: one rank has nobody to send to")
        elif mesh.device.type == "cuda" and dist.get_backend() != "nccl":
            say("collectives are left out: ranks share a GPU, and NCCL wants one for each")
        else:
            say(f"collectives of {mesh.world} ranks by {dist.get_backend()}")
            times = tuple(collective_times(mesh, place, quick))
            profile = msgspec.structs.replace(profile, collectives=times, fits=fits(times))
        if mesh.rank == 0:
            say("the disk")
            write, read = disk_bandwidths(target.parent, QUICK_FILE if quick else FILE)
            found = {"disk_write_bandwidth": write, "disk_read_bandwidth": read, "ranks": mesh.world}
            write_profile(msgspec.structs.replace(profile, **found), target)
        dist.barrier()


def write_profile(profile: Profile, path: Path) -> None:
    """Keep a profile as JSON that a person can read; nothing half-written is ever under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_json(path, profile)


def probe(device: torch.device, say: Callable[[str], None], *, quick: bool = False) -> Profile:
    """Measure one device. `quick` takes few and small shapes, for a look or a CPU."""
    say("matmuls")
    matmuls = tuple(_matmuls(device, quick))
    say("attention")
    attention = tuple(_attention(device, quick))
    say("memory traffic, launches and the host link")
    elementwise = tuple(_elementwise(device, quick))
    copy = next(each for each in elementwise if each.kind == "copy")
    cuda = device.type == "cuda"
    to_host, to_device = _host_bandwidths(device) if cuda else (0.0, 0.0)
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else host_memory
    return Profile(
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        torch=str(torch.__version__),
        matmuls=matmuls,
        attention=attention,
        elementwise=elementwise,
        copy_bandwidth=copy.bytes / copy.seconds,
        launch_seconds=_launch(device),
        host_bandwidth=to_host,
        to_device_bandwidth=to_device,
        memory_bytes=float(memory),
        threads=0 if cuda else torch.get_num_threads(),
    )


def _matmuls(device: torch.device, quick: bool) -> Iterator[MatmulTime]:
    """Rows × columns × depth as models have them: tokens of a microbatch, widths, and widths cut by tp."""
    cuda, few = device.type == "cuda", (64, 256, 1024)
    shapes = [*product(few, few, few)] if quick else [
        *product((512, 2048, 8192, 16384), (512, 1024, 2048, 4096, 8192, 14336), (512, 2048, 4096, 8192)),
        *product((1024, 4096, 16384, 65536), (768, 1536, 2304, 3072), (768, 3072)),
        *product((2048, 8192, 16384), (32064, 50304, 128256), (2048, 4096)),
    ]  # fmt: skip
    usual, other = ("bf16", "fp32") if cuda and not quick else ("fp32", "bf16")
    for dtype, measured in ((usual, shapes), (other, [(512,) * 3 if quick else (2048,) * 3])):
        for m, n, k in measured:
            a = torch.randn(m, k, device=device, dtype=TYPES[dtype])
            b = torch.randn(n, k, device=device, dtype=TYPES[dtype])
            yield MatmulTime(m=m, n=n, k=k, dtype=dtype, seconds=seconds_of(lambda a=a, b=b: a @ b.t(), device, quick))
            if not quick and m == 8192 and dtype == "bf16":
                g = torch.randn(m, n, device=device, dtype=TYPES[dtype])
                to_x = seconds_of(lambda g=g, b=b: g @ b, device)
                yield MatmulTime(m=m, n=n, k=k, dtype=dtype, seconds=to_x, kind="input")
                to_weight = seconds_of(lambda g=g, a=a: g.t() @ a, device)
                yield MatmulTime(m=m, n=n, k=k, dtype=dtype, seconds=to_weight, kind="weight")
    if cuda and torch.cuda.get_device_capability(device) >= (8, 9) and not quick:
        yield from _fp8_matmuls(device)


def _fp8_matmuls(device: torch.device) -> Iterator[MatmulTime]:
    one = torch.ones((), device=device)
    wide = ((8192, 14336, 4096), (8192, 4096, 14336), (16384, 8192, 8192))
    for m, n, k in ((2048, 4096, 4096), (8192, 4096, 4096), *wide):
        a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)

        def times(a: Tensor = a, b: Tensor = b) -> Tensor:
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        yield MatmulTime(m=m, n=n, k=k, dtype="fp8", seconds=seconds_of(times, device))


def _attention(device: torch.device, quick: bool) -> Iterator[AttentionTime]:
    shapes = [(4, 4, 2, 64, 32), (1, 4, 2, 256, 64), (1, 8, 8, 1024, 64)] if quick else [
        (64, 12, 12, 1024, 64), (16, 12, 12, 1024, 64), (8, 32, 32, 2048, 128), (2, 32, 8, 4096, 128),
        (2, 32, 8, 8192, 64), (1, 32, 8, 8192, 128), (1, 8, 2, 8192, 128), (1, 32, 8, 32768, 128),
    ]  # fmt: skip
    dtype = torch.float32 if quick else torch.bfloat16
    backends = ("math", "flash") if device.type == "cpu" else ("cudnn", "flash", "math")
    for (batch, heads, kv_heads, sequence, head_dim), backend in product(shapes, backends):
        if backend == "math" and not quick and sequence > 2048:
            continue
        q = torch.randn(batch, heads, sequence, head_dim, device=device, dtype=dtype, requires_grad=True)
        k = torch.randn(batch, kv_heads, sequence, head_dim, device=device, dtype=dtype, requires_grad=True)
        v = torch.randn_like(k, requires_grad=True)

        def attend(q: Tensor = q, k: Tensor = k, v: Tensor = v, backend: str = backend) -> Tensor:
            with sdpa_kernel(BACKENDS[backend]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

        try:
            out = attend()
            gradient = torch.randn_like(out)
            backward = seconds_of(
                lambda out=out, q=q, k=k, v=v, gradient=gradient: torch.autograd.grad(
                    out, (q, k, v), gradient, retain_graph=True
                ),
                device,
                quick,
            )
            with torch.no_grad():
                forward = seconds_of(attend, device, quick)
        except RuntimeError:  # the backend does not take this shape
            continue
        yield AttentionTime(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            sequence=sequence,
            head_dim=head_dim,
            forward_seconds=forward,
            backward_seconds=backward,
            backend=backend,
            dtype="fp32" if quick else "bf16",
        )


def _elementwise(device: torch.device, quick: bool) -> Iterator[ElementwiseTime]:
    size = LARGE // 64 if quick else LARGE
    a = torch.randn(size // 4, device=device)
    b = torch.empty_like(a)
    yield ElementwiseTime(kind="copy", bytes=2 * size, seconds=seconds_of(lambda: b.copy_(a), device, quick))
    yield ElementwiseTime(kind="add", bytes=3 * size, seconds=seconds_of(lambda: torch.add(a, b, out=b), device, quick))
    narrow = torch.empty(size // 4, device=device, dtype=torch.bfloat16)
    yield ElementwiseTime(kind="cast", bytes=1.5 * size, seconds=seconds_of(lambda: narrow.copy_(a), device, quick))
    x = torch.randn(size // 8192, 4096, device=device, dtype=torch.float32 if quick else torch.bfloat16)
    weight = torch.ones(4096, device=device, dtype=x.dtype)
    moved = 2 * x.numel() * x.element_size()
    work = {
        "norm": lambda: F.rms_norm(x, (4096,), weight),
        "softmax": lambda: F.softmax(x, dim=-1),
        "silu": lambda: F.silu(x),
    }
    for kind, call in work.items():
        yield ElementwiseTime(kind=kind, bytes=moved, seconds=seconds_of(call, device, quick))
    # Torch's own fused update: weight, gradient and two moments read, three of them written.
    updated = torch.nn.Parameter(torch.randn(size // 4, device=device))
    updated.grad = torch.randn_like(updated)
    optimizer = torch.optim.AdamW([updated], fused=True)
    yield ElementwiseTime(kind="adamw", bytes=7 * 4 * (size // 4), seconds=seconds_of(optimizer.step, device, quick))


def _launch(device: torch.device) -> float:
    """What the host spends to start one small kernel."""
    x = torch.zeros(64, device=device)
    times = 2000
    for _ in range(100):
        x.add_(1)
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        x.add_(1)
    spent = time.perf_counter() - began
    synchronize(device)
    return spent / times


def _host_bandwidths(device: torch.device) -> tuple[float, float]:
    """Bytes a second from the device to pinned memory, and back."""
    there = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(LARGE, dtype=torch.uint8, device=device)
    to_host = seconds_of(lambda: there.copy_(here, non_blocking=True), device)
    return LARGE / to_host, LARGE / seconds_of(lambda: here.copy_(there, non_blocking=True), device)


def disk_bandwidths(folder: Path, size: int) -> tuple[float, float]:
    """Bytes a second of writing until the disk has it, and of reading it back where the system lets go of it first."""
    piece = os.urandom(PIECE)  # a disk that compresses gains nothing
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(size // PIECE):
            file.write(piece)
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        room = memoryview(bytearray(PIECE))
        began = time.perf_counter()
        while file.readinto(room):
            pass
        return size / written, size / (time.perf_counter() - began)


def collective_times(mesh: Mesh, place: Place, quick: bool) -> Iterator[CollectiveTime]:
    """Every collective at every size, as the slowest rank saw it. All ranks must ask at once."""
    domains = max(place.world // max(place.local_world, 1), 1)
    far = place.local_world if domains > 1 else 1  # the rank that messages go to: across nodes, where there are several
    for size in QUICK if quick else SIZES:
        elements = -(-size // WIDTH // mesh.world) * mesh.world  # a whole part for every rank
        for kind, work in _calls(mesh, elements, far).items():
            seconds, ranks, between = _seconds(work, mesh, quick), mesh.world, domains
            if kind == "send":  # there and back, between two
                seconds, ranks, between = seconds / 2, 2, min(domains, 2)
            yield CollectiveTime(kind=kind, ranks=ranks, bytes=elements * WIDTH, seconds=seconds, domains=between)


def _calls(mesh: Mesh, elements: int, far: int) -> dict[Kind, Callable[[], object]]:
    whole = torch.zeros(elements, device=mesh.device)
    other, part = torch.zeros_like(whole), torch.zeros(elements // mesh.world, device=mesh.device)

    def there_and_back() -> None:
        if mesh.rank == 0:
            dist.send(whole, far)
            dist.recv(whole, far)
        elif mesh.rank == far:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": there_and_back,
    }


def _seconds(work: Callable[[], object], mesh: Mesh, quick: bool) -> float:
    """The median over rounds of calls one after another, ÷ the calls of a round."""
    for _ in range(WARM_UP):
        work()
    once = _round(work, 1, mesh)
    calls = max(1, min(MOST_CALLS, int((QUICK_SECONDS if quick else MOST_SECONDS) / once)))
    rounds = FEW_ROUNDS if once > ONCE else ROUNDS
    return statistics.median([_round(work, calls, mesh) for _ in range(rounds)])


def _round(work: Callable[[], object], calls: int, mesh: Mesh) -> float:
    """Seconds of one call on the slowest rank: the same number on all of them, who decide by it."""
    dist.barrier()
    synchronize(mesh.device)
    began = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(mesh.device)
    spent = torch.tensor([(time.perf_counter() - began) / calls], dtype=torch.float64, device=mesh.device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()
