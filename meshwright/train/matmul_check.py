"""Silent data corruption in matmuls: each step, one linear layer's matmuls are held against checksums of them.

Freivalds' check (1977) of C = A·B: with random signs r, C·r and A·(B·r) are the same but for rounding, and the second
is far cheaper than the product. Here r has 32 signs and every 32 neighbouring columns a sum of their own, so that what
a flipped bit must stand out from is the rounding of 32 elements and not of a whole row.

What is checked is what a rank itself multiplied, forward and backward: seen where operators are dispatched, below
autograd and DTensor, so shards of every kind are plain matrices here, and the graph is left as it is.
"""

import math
import platform
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.config.run import Run
from meshwright.kernels.fp8 import Fp8Linear
from meshwright.models.decoder import Decoder
from meshwright.models.layers import accum_dtype
from meshwright.parallel import fused_kernels
from meshwright.parallel.mesh import Mesh, join, local
from meshwright.parallel.model_spec import DECODER, present_blocks
from meshwright.runtime.failure import Exit, Failure, FailureError
from meshwright.train.state import State
from meshwright.train.step import moe_layers
from meshwright.train.world import world_group

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
COLUMNS, FEWEST = 32, 8  # that share a sum: at most, and at least where their number does not divide
CHUNK = 2**24  # elements that are cast to fp32 at a time: 64 MiB
AGAIN = 64  # rows that are multiplied a second time
# Deviations of rounding that are believed to be rounding. A sum of errors with random signs exceeds λ times their norm
# with a probability below 2·exp(−λ²/2) (Hoeffding), 3e-14 here, if every element is as wrong as rounding can make it;
# evenly spread, errors are 0.58 of that, which makes it 1e-41.
DEVIATIONS = 8.0
TF32 = 2.0**-10  # both operands are rounded to 11 bits
RECURS = 1000  # steps within which a second flip on one rank is no chance
FOUND, SUSPECTED = 50, 10  # steps for which all layers are checked after a flip, and after a spike
EVERY = 5  # steps between two exchanges of what ranks have found
OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input gradient", "weight gradient"


Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # where a tensor lies, its shape and its strides


class Product(NamedTuple):
    """One matmul as it was computed: A·B (+ bias) = C."""

    a: Tensor
    b: Tensor
    c: Tensor
    bias: Tensor | None
    multiply: Callable[..., Tensor]  # that computed it


class Residual(NamedTuple):
    """How far C·r is from A·(B·r), by row and group of columns, in tolerances."""

    scores: Tensor
    expected: Tensor  # the sums as they should be
    tolerance: Tensor


def product_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], c: Tensor) -> Product | None:
    """What an operator multiplied; None where it scales besides, or there is nothing."""
    if kwargs or not c.numel() or not c.is_floating_point():
        return None
    bias, a, b = args if len(args) == 3 else (None, *args)
    if not a.shape[1] or (bias is not None and bias.dim() != 1):
        return None
    return Product(a, b, c, bias, operator)


def residual(product: Product) -> Residual:
    """Hold a product against its checksum."""
    a, b, c, bias, _ = product
    accum = accum_dtype(c)
    signs = signs_of(group_of(c.shape[1]), accum, c.device)
    summed = folded(b, signs)
    expected = _by_rows(lambda rows: rows @ summed, a)
    if bias is not None:
        expected = expected + folded(bias[None], signs)
    of_columns = torch.linalg.vector_norm(b.unflatten(1, (-1, len(signs))), dim=(0, 2), dtype=accum)
    sizes = torch.linalg.vector_norm(a, dim=1, keepdim=True, dtype=accum) * of_columns
    tolerance = _rounding(product, sizes, len(signs))
    found, limit = folded(c, signs), torch.finfo(c.dtype).max / 2
    # No element exceeds the norms of its row and column. Where these are small, what is not finite is no overflow.
    impossible = torch.where(sizes < limit, torch.inf, 0.0).to(accum)
    scores = torch.where(found.isfinite(), (found - expected).abs() / tolerance, impossible)
    return Residual(scores.nan_to_num(nan=0.0, posinf=torch.inf), expected, tolerance)


def _rounding(product: Product, sizes: Tensor, group: int) -> Tensor:
    """What rounding may add to each sum, from the norms of rows and groups of columns that were multiplied.

    A sum of n terms is wrong by about √n·u·|a|·|b| (Higham and Mary 2019), here u of the accumulator. Output in bf16 or
    fp16 is rounded once more, by u of its own; so are partial sums where a GPU splits the inner dimension, of the size
    that uncorrelated terms have, |a|·|b| ÷ √n. TF32 rounds what is multiplied.
    """
    c, root = product.c, math.sqrt(product.a.shape[1] + group)  # the checksum adds up a group besides
    accum, unit = accum_dtype(c), _once_more(c)
    largest = sizes if product.bias is None else sizes + norms(product.bias[None], group)
    tolerance = root * _unit(accum) * largest
    if unit:
        # A flipped bit in C must not loosen what it is judged by: no row is larger than what was multiplied.
        tolerance = tolerance + unit * (torch.minimum(norms(c, group), largest) + sizes / root)
    # Below the smallest normal number steps are equal, not relative.
    least = torch.finfo(c.dtype).smallest_normal * _unit(c.dtype) * math.sqrt(group)
    return DEVIATIONS * (tolerance + max(least, torch.finfo(accum).smallest_normal))


def _once_more(c: Tensor) -> float:
    """The unit roundoff of what is rounded besides sums; 0: nothing is."""
    if c.dtype != accum_dtype(c):
        return _unit(c.dtype)
    is_tf32 = c.is_cuda and c.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return TF32 if is_tf32 else 0.0


def _unit(dtype: torch.dtype) -> float:
    """The unit roundoff: half the distance of 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def group_of(columns: int) -> int:
    """How many neighbouring columns share a sum: a divisor; where there is none of a fair size, all of them."""
    best = max(size for size in range(1, min(COLUMNS, columns) + 1) if columns % size == 0)
    return best if best >= min(FEWEST, columns) else columns


@lru_cache(maxsize=64)
def signs_of(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs, the same in every step: what they must not depend on are the products."""
    drawn = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(count))
    return (2 * drawn - 1).to(device, dtype)


def folded(x: Tensor, signs: Tensor) -> Tensor:
    """The sum of every group of columns, each times its sign, in fp32 at least."""
    if x.stride(0) == 1 and x.shape[0] > 1:  # a transposed view: groups of rows of what it is a view of
        return _by_rows(lambda rows: signs @ rows.unflatten(0, (-1, len(signs))), x.t(), len(signs)).t()
    return _by_rows(lambda rows: rows.unflatten(1, (-1, len(signs))) @ signs, x)


def norms(x: Tensor, group: int) -> Tensor:
    """The norm of every group of columns in each row."""
    return torch.linalg.vector_norm(x.unflatten(1, (-1, group)), dim=-1, dtype=accum_dtype(x))


def _by_rows(compute: Callable[[Tensor], Tensor], x: Tensor, multiple: int = 1) -> Tensor:
    """A function of rows in fp32 at least, of so many at a time that their copies stay small."""
    accum, rows = accum_dtype(x), max(CHUNK // max(x.shape[1], 1) // multiple, 1) * multiple
    parts = [compute(part.to(accum)) for part in x.split(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def multiply(product: Product, a: Tensor) -> Tensor:
    """Some rows of a product, by the operator that computed it; a rehearsal puts another function here."""
    return product.multiply(*(each for each in (product.bias, a, product.b) if each is not None))


def judged(product: Product) -> Tensor:
    """The worst of a product's sums, in tolerances, and the worst once the rows around it are multiplied again.

    A GPU is not asked whether that is needed, as it would be waited for; the host need not ask itself.
    """
    first = residual(product)
    worst, place = first.scores.flatten().max(0)
    if not worst.is_cuda and worst.item() <= 1:
        return torch.stack([worst, worst]).double()
    rows, groups = first.scores.shape
    near = place // groups // AGAIN * AGAIN + torch.arange(min(AGAIN, rows), device=worst.device)
    near = near.clamp(max=rows - 1)
    signs = signs_of(product.c.shape[1] // groups, first.expected.dtype, product.c.device)
    found = folded(multiply(product, product.a.index_select(0, near)), signs)
    scores = (found - first.expected[near]).abs() / first.tolerance[near]
    again = torch.where(found.isfinite(), scores, first.scores[near].clamp(min=0.0)).max()
    return torch.stack([worst, again]).double()


class Matmuls(TorchDispatchMode):
    """Shows the matmuls of plain tensors to whoever takes them."""

    def __init__(self, take: Callable[[Any, tuple[Any, ...], dict[str, Any], Tensor], None]) -> None:
        super().__init__()
        self.take = take

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, (DTensor, AsyncCollectiveTensor)) for each in types):  # their own parts come by next
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func in MATMULS and type(result) is Tensor and not result.is_meta:  # DTensor tries shapes without data
            self.take(func, args, kwargs or {}, result)
        return result


class LayerCall(NamedTuple):
    """Something with matmuls that a step calls, and which of its attributes is called."""

    name: str
    owner: nn.Module
    call: str


def layers_of(run: Run, chunks: list[nn.Module]) -> list[LayerCall]:
    """The linear layers of a rank whose matmuls can be seen.

    Not those in FP8, whose sums on a GPU have no stated bound, nor those inside compiled blocks, where a matmul may be
    one kernel with what follows it, nor experts, which one grouped matmul computes. The head is one where logits are
    computed whole.
    """
    found = list[LayerCall]()
    for chunk in chunks:
        hidden = present_blocks(chunk, DECODER) if run.plan.compile else []
        unseen = {id(module) for block in hidden for module in block.modules()}
        unseen |= {id(each) for layer in moe_layers(chunk) for each in (layer.router, layer.noise)}  # read, not called
        for name, module in chunk.named_modules():
            if isinstance(module, nn.Linear) and not isinstance(module, Fp8Linear) and id(module) not in unseen:
                found.append(LayerCall(name, module, "forward"))
        if isinstance(chunk, Decoder) and chunk.norm is not None and chunk.head is None:  # tied, and no module
            found += [] if fused_kernels.has_loss(chunk) else [LayerCall("embed as the head", chunk, "project")]
    return found


class Checked(NamedTuple):
    """What a step's check came to, on its way to the host."""

    step: int
    products: tuple[str, ...]
    scores: Tensor  # (products, 2): as computed, and computed again
    ready: torch.cuda.Event | None


class Flip(NamedTuple):
    """A product that disagreed with its checksum."""

    step: int
    product: str
    score: float
    persists: bool  # computed again, it still does

    def __str__(self) -> str:
        return f"the {self.product} is off by {self.score:.3g} tolerances of its checksum"


class Watched:
    """A layer while one of its calls in a step is checked, in the place of what is called."""

    def __init__(self, layer: LayerCall, chosen: int, found: list[tuple[str, Tensor]]) -> None:
        self.layer, self.chosen, self.found = layer, chosen, found
        self.calls = 0
        self.original = getattr(layer.owner, layer.call)
        self.gradients = list[Place]()
        setattr(layer.owner, layer.call, self)

    def undo(self) -> None:
        """Leave the layer as it was."""
        if getattr(self.original, "__self__", None) is self.layer.owner:
            delattr(self.layer.owner, self.layer.call)  # it is a method of the class again
        else:
            setattr(self.layer.owner, self.layer.call, self.original)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # a validation loss, or a reference
            return self.original(x, *args, **kwargs)
        self.calls += 1
        if self.calls - 1 != self.chosen:
            return self.original(x, *args, **kwargs)
        with Matmuls(partial(self._take, OUTPUT)):
            y = self.original(x, *args, **kwargs)
        for node in between(y, x):
            mode = Matmuls(self._take_backward)
            node.register_prehook(partial(self._enter, mode))
            node.register_hook(partial(_leave, mode))
        return y

    def _enter(self, mode: Matmuls, gradients: tuple[Tensor | None, ...]) -> None:
        # Inside, a checkpointed block may be recomputed: the matmuls meant are those with the gradient that came.
        self.gradients = [_place(each) for each in gradients if each is not None]
        mode.__enter__()

    def _take_backward(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], c: Tensor) -> None:
        places = [_place(each) for each in args[-2:]]
        if places[0] in self.gradients:
            self._take(INPUT_GRADIENT, operator, args, kwargs, c)
        elif {place[0] for place in places} & {place[0] for place in self.gradients}:
            self._take(WEIGHT_GRADIENT, operator, args, kwargs, c)

    def _take(self, kind: str, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], c: Tensor) -> None:
        product = product_of(operator, args, kwargs, c)
        if product is None:
            return
        # Whoever saves matmuls for the backward must not see those of the check.
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            self.found.append((f"{kind} of {self.layer.name}", judged(product)))


class MatmulCheck:
    """Checks one layer a step: all of a rank's in turn, in an order by seed, rank and round. Where there is reason to
    suspect a device, all of them in each of the next steps."""

    def __init__(self, run: Run, state: State, mesh: Mesh, rank: int) -> None:
        self.every = run.faults.check_matmuls_every
        self.seed, self.rank, self.mesh = run.seed, rank, mesh
        self.layers = layers_of(run, state.chunks) if self.every else []
        self.compiled = run.plan.compile
        self.usual = dict[str, int]()  # calls of each layer in a step
        self.watched = list[Watched]()
        self.found = list[tuple[str, Tensor]]()
        self.pending = deque[Checked]()
        self.clean = state.step  # the last step whose check found nothing, without a reason to suspect
        self.thorough_until = 0  # the last step of which all layers are checked
        self.flips = deque[Flip]()  # of the last steps
        self.untold = list[Flip]()
        self.arm(state.step + 1)

    def described(self) -> Iterator[str]:
        """What is not checked though it is asked for."""
        if self.every and self.compiled:
            yield f"matmul checks: {len(self.layers)} linear layers; those inside compiled blocks are not checked"

    def suspect(self, step: int, steps: int) -> None:
        """Check all layers for so many steps after one, and believe nothing until they are over."""
        self.thorough_until = max(self.thorough_until, step + steps)
        self.clean = min(self.clean, step - 1)
        self._watch(self.layers, step)

    def arm(self, step: int) -> None:
        """Choose the layers of a step, and the call of each that is checked."""
        if not self.layers or (step % self.every and step > self.thorough_until):
            return
        turn, place = divmod(step // self.every, len(self.layers))
        order = random.Random(f"{self.seed} {self.rank} {turn}").sample(self.layers, len(self.layers))
        self._watch(self.layers if step <= self.thorough_until else [order[place]], step)

    def _watch(self, layers: list[LayerCall], step: int) -> None:
        known, chance = [each.layer for each in self.watched], random.Random(f"{self.seed} {self.rank} {step}")
        for layer in layers:
            if layer not in known:
                self.watched.append(Watched(layer, chance.randrange(self.usual.get(layer.name, 1)), self.found))

    def disarm(self) -> None:
        """Leave the layers as they were; one that no step calls by itself is not chosen again."""
        for each in self.watched:
            each.undo()
            if each.calls:
                self.usual[each.layer.name] = each.calls
            else:
                self.layers.remove(each.layer)
        self.watched.clear()

    def passed(self, step: int) -> None:
        """A step is over: what was found begins its way to the host, and the next layers are chosen."""
        self.disarm()
        if self.found:
            products, scores = zip(*self.found, strict=True)
            self.pending.append(_fetched(step, products, torch.stack(scores)))
            self.found.clear()
        self.arm(step + 1)

    def read(self, step: int) -> list[Flip]:
        """Flips of steps up to one whose numbers are on the host. Raises when they are the device's."""
        new = list[Flip]()
        while self.pending and self.pending[0].step <= step:
            checked = self.pending.popleft()
            if checked.ready is not None:
                checked.ready.synchronize()
            rows = zip(checked.products, checked.scores.tolist(), strict=True)
            seen = [Flip(checked.step, product, once, again > 1) for product, (once, again) in rows if once > 1]
            new += self._judge(checked.step, seen)
        return new

    def _judge(self, step: int, seen: list[Flip]) -> list[Flip]:
        while self.flips and step - self.flips[0].step >= RECURS:
            self.flips.popleft()
        if not seen:
            if not self.flips and step > self.thorough_until:
                self.clean = step
            return []
        worst = max(seen, key=lambda flip: (flip.persists, flip.score))
        if worst.persists or self.flips or len(seen) > 1:
            raise FailureError(self._failure(worst, len(seen)))
        self.flips.append(worst)
        self.untold.append(worst)
        self.suspect(step, FOUND)
        return [worst]

    def _failure(self, flip: Flip, count: int) -> Failure:
        others = f"and one of step {self.flips[0].step} was before it" if self.flips else f"one of {count} in this step"
        how = "computed again it still is" if flip.persists else others
        return Failure(
            kind="matmul",
            code=Exit.HARDWARE,
            what=f"rank {self.rank} computes wrong matmuls: {flip}, {how}",
            where=f"{platform.node()}, {self.mesh.device}, in step {flip.step}",
            since=f"after step {self.clean}, the last before it without a reason to suspect",
            cause="a bit changed in arithmetic or memory: suspect the device of that rank",
            remedy="take the device out, and run the same command again; checkpoints in doubt are set aside",
            good_until=self.clean,
            rank=self.rank,
            step=flip.step,
        )

    def others(self, step: int) -> list[tuple[int, int]]:
        """Ranks that found a passing flip, and its step: who watches the screen hears of all. All must ask."""
        if not self.every or self.mesh.world == self.mesh.parts or step % EVERY:
            return []
        mine = self.untold[-1].step if self.untold else 0
        self.untold.clear()
        row = torch.tensor([[self.rank, mine]], dtype=torch.int64, device=self.mesh.device)
        rows = join(row, 0, self.mesh.peers or world_group()).tolist()
        return [(rank, at) for rank, at in rows if at and rank != self.rank]


def _fetched(step: int, products: tuple[str, ...], scores: Tensor) -> Checked:
    """Start the copy to the host, without waiting for it."""
    if not scores.is_cuda:
        return Checked(step, products, scores, None)
    host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
    host.copy_(scores, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return Checked(step, products, host, ready)


def between(y: Any, x: Any) -> list[Node]:
    """The nodes of autograd's graph from a layer's output down to its input, weights' own left out."""
    first, last = getattr(y, "grad_fn", None), getattr(x, "grad_fn", None)
    found, waiting = list[Node](), [first]
    while waiting:
        node = waiting.pop()
        if node is None or node is last or node in found or node.name().endswith("AccumulateGrad"):
            continue
        found.append(node)
        waiting += [after for after, _ in node.next_functions]
    return found


def _leave(mode: Matmuls, *gradients: Any) -> None:
    mode.__exit__(None, None, None)


def _place(x: Tensor) -> Place:
    """Where a rank's own part of a tensor lies, and how."""
    mine = local(x)
    mine = mine.elem if isinstance(mine, AsyncCollectiveTensor) else mine
    return mine.data_ptr(), tuple(mine.shape), mine.stride()
