"""Initial weights by a counter-based random generator: pure functions of (seed, name, element index).

Every plan must begin with the same bits, whatever slice a rank holds, on whatever device, in whatever blocks. So an
element is made by integer arithmetic from its own index alone, and rounded once.

A normal draw is the sum of eight 16-bit uniform ones, centred and scaled to unit variance: excess kurtosis −0.15,
never beyond ±4.9. Box-Muller would be exactly normal, but log and cos differ in their last bit between vector and
scalar code, so a slice of a tensor would not equal the slice made alone.
"""

import hashlib
import math
from itertools import product

import torch
from torch import Tensor, nn

from meshwright.spec.arch import Arch
from meshwright.spec.params import Param, params

Region = tuple[slice, ...]

# splitmix64 (Steele, Lea and Flood 2014): a counter stepped by GOLDEN, then mixed.
GOLDEN = 0x9E3779B97F4A7C15
Mix = tuple[tuple[int, int], ...]  # shifts, and the odd factors that follow them
MIX: Mix = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
PAIRS = 0x0000FFFF0000FFFF  # every second 16-bit lane
LOW = 0x00000000FFFFFFFF
CENTRE = 8 * 65535 // 2
SPREAD = math.sqrt(8 * (65536**2 - 1) / 12)  # standard deviation of the sum of eight
CPU_BLOCK = 1 << 15  # the two or three int64 words at work per element stay in a core's second-level cache
DEVICE_BLOCK = 1 << 24  # an accelerator wants few launches; 0.4 GB while it works


def key(seed: int, name: str) -> int:
    """The 64-bit key of a named sequence of draws."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def hashed(key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits for every int64 index."""
    return mixed(index * signed(GOLDEN) + _stepped(key, 1))


def uniform(key: int | Tensor, index: Tensor) -> Tensor:
    """A float32 in [0, 1) for every int64 index; 24 bits, so the same value in every wider type."""
    return logical_shift(hashed(key, index), 40).to(torch.float32) * 2.0**-24


def normal(key: int | Tensor, index: Tensor) -> Tensor:
    """A float32 of zero mean and unit variance for every int64 index."""
    return _sum_of_eight(index * signed(2 * GOLDEN), key).to(torch.float32) * (1 / SPREAD)


def initial(
    param: Param,
    seed: int,
    *,
    region: Region | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The initial values of a parameter, or of one region of it (a slice of step 1 for every dim)."""
    tensor = torch.empty(_shape(_bounds(param, region)), dtype=dtype, device=device)
    fill(tensor, param, seed, region)
    return tensor


@torch.no_grad()
def fill(tensor: Tensor, param: Param, seed: int, region: Region | None = None) -> None:
    """Write the initial values of a parameter's region into a tensor of the region's shape.

    Values are those of float32 in every type: float64 holds them exactly, so a proof begins where the run begins.
    """
    bounds = _bounds(param, region)
    assert tensor.shape == _shape(bounds), f"{param.name}: {tensor.shape} does not hold {bounds}"
    assert param.init != "norms", f"{param.name} begins as norms of what is beside it"
    if param.init != "normal":
        tensor.fill_(1.0 if param.init == "ones" else 0.0)
    elif tensor.is_contiguous():
        _fill_normal(tensor, param, key(seed, param.name), bounds)
    else:
        tensor.copy_(initial(param, seed, region=region, dtype=tensor.dtype, device=tensor.device))


def row_norms(rows: Tensor) -> Tensor:
    """The norms of the rows of a matrix, in float64, of the same bits whatever the number of rows.

    Each row's squares are folded, half onto half: a library's sum chooses its order by the shape.
    """
    squares = rows.double().square()
    while (length := squares.shape[-1]) > 1:
        half = (length + 1) // 2
        squares[..., : length - half] += squares[..., half:]
        squares = squares[..., :half]
    return squares[..., 0].sqrt()


def fill_model(model: nn.Module, arch: Arch, seed: int) -> None:
    """Write the initial values of every parameter that a model, or a part of one, holds whole."""
    table = {param.name: param for param in params(arch)}
    for name, tensor in model.named_parameters():
        fill(tensor, table[name], seed)


def _fill_normal(tensor: Tensor, param: Param, key: int, bounds: list[tuple[int, int]]) -> None:
    starts, length = _runs(param.shape, bounds, tensor.device)
    rows = tensor.view(len(starts), length)
    block = CPU_BLOCK if tensor.device.type == "cpu" else DEVICE_BLOCK
    width = max(1, min(length, block))
    height = block // width
    step = signed(2 * GOLDEN)
    columns = torch.arange(width, device=tensor.device) * step
    for row, column in product(range(0, len(starts), height), range(0, length, width)):
        target = rows[row : row + height, column : column + width]
        counter = (starts[row : row + height, None] + column) * step + columns[: target.shape[1]]
        target.copy_(_sum_of_eight(counter, key).to(torch.float32).mul_(param.std / SPREAD))


def _bounds(param: Param, region: Region | None) -> list[tuple[int, int]]:
    """Where a region begins and ends in every dim."""
    region = region or tuple(slice(None) for _ in param.shape)
    assert len(region) == len(param.shape), f"{param.name} has {len(param.shape)} dims, not {len(region)}"
    cut = [part.indices(size) for part, size in zip(region, param.shape, strict=True)]
    assert all(step == 1 for _, _, step in cut), f"{param.name}: a region has no gaps"
    return [(start, max(start, stop)) for start, stop, _ in cut]


def _shape(bounds: list[tuple[int, int]]) -> torch.Size:
    return torch.Size(stop - start for start, stop in bounds)


def _runs(shape: tuple[int, ...], bounds: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, int]:
    """A region as equally long runs of neighbouring elements: the global index where each begins, and their length."""
    last = max((dim for dim, cut in enumerate(bounds) if cut != (0, shape[dim])), default=0)  # dims after it are whole
    tail = math.prod(shape[last + 1 :])
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    for size, (start, stop) in zip(shape[:last], bounds[:last], strict=True):
        starts = (starts[:, None] * size + torch.arange(start, stop, device=device)).flatten()
    start, stop = bounds[last]
    return (starts * shape[last] + start) * tail, (stop - start) * tail


def _sum_of_eight(counter: Tensor, key: int | Tensor) -> Tensor:
    """The eight 16-bit lanes of two hashes added up, centred. `counter` advances by 2 · GOLDEN per element."""
    lanes = _pair_sums(mixed(counter + _stepped(key, 1)))
    lanes.add_(_pair_sums(mixed(counter + _stepped(key, 2))))
    return (lanes >> 32).add_(lanes.bitwise_and_(LOW)).sub_(CENTRE)


def _stepped(key: int | Tensor, steps: int) -> int | Tensor:
    """A key some steps of GOLDEN further, modulo 2⁶⁴; a key may be an int64 tensor, which wraps by itself."""
    return signed(key + steps * GOLDEN) if isinstance(key, int) else key + signed(steps * GOLDEN)


def _pair_sums(lanes: Tensor) -> Tensor:
    """Four 16-bit lanes added in pairs: two sums in the halves of a word. Overwrites its argument."""
    odd = (lanes >> 16).bitwise_and_(PAIRS)
    return lanes.bitwise_and_(PAIRS).add_(odd)


def mixed(state: Tensor, mix: Mix = MIX, last_shift: int = LAST_SHIFT) -> Tensor:
    """The hash of every state, an int64 by splitmix64 unless another mix is given. Overwrites its argument."""
    for shift, factor in mix:
        state.bitwise_xor_(logical_shift(state, shift)).mul_(signed(factor, 8 * state.itemsize))
    return state.bitwise_xor_(logical_shift(state, last_shift))


def logical_shift(word: Tensor, bits: int) -> Tensor:
    """Shift right without the sign: torch's shift repeats it."""
    return (word >> bits).bitwise_and_((1 << (8 * word.itemsize - bits)) - 1)


def signed(word: int, bits: int = 64) -> int:
    """An integer modulo 2⁶⁴, or another power, as torch's int64, or another type, holds it."""
    half = 1 << (bits - 1)
    return (word + half) % (2 * half) - half
