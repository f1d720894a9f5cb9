"""Optimizers whose states are beside the weights: on the device, the usual form, or both in host memory.

For CPU offload FSDP copies a block's weights to the device before use and its reduced gradient back; see
`parallel/fsdp.py`. Here are their memory and the update, which runs on the host.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.config.run import Optim, Run
from meshwright.kernels.dispatch import settle
from meshwright.models.layers import accum_dtype
from meshwright.optim import host_memory, master_weights
from meshwright.optim.adafactor import AdafactorRule
from meshwright.optim.adamw import AdamWRule
from meshwright.optim.clip import GradStats
from meshwright.optim.host_memory import PinnedMemory
from meshwright.optim.interface import (
    Optimizer,
    SavedPart,
    Update,
    UpdateRule,
    UpdateTerms,
    WeightShard,
    WholeTensorRule,
)
from meshwright.optim.lamb import LambRule
from meshwright.optim.lion import LionRule
from meshwright.optim.master_weights import beside, given, rounded, state_dtype
from meshwright.optim.muon import MuonUpdate
from meshwright.optim.onebit import CompressingRule, OneBitAdamRule, OneBitLambRule, ZeroOneAdamRule
from meshwright.optim.quantized import empty_states, quantized_parts, saved_parts, update_quantized
from meshwright.optim.sgd import SGDRule
from meshwright.optim.sm3 import SM3Rule
from meshwright.parallel import precision
from meshwright.parallel.mesh import Mesh, cuts, local, region_of
from meshwright.parallel.model_spec import note
from meshwright.spec.communication import SERVER_ERROR, part_shape
from meshwright.spec.optimizers import BESIDE, OPTIMIZERS
from meshwright.spec.plan import Plan
from meshwright.spec.problem import mistake

RULES: dict[str, Callable[[Optim], UpdateRule]] = {"adamw": AdamWRule, "sgd": SGDRule, "lion": LionRule}
WHOLE_RULES: dict[str, Callable[[Optim], WholeTensorRule]] = {
    "adafactor": AdafactorRule, "sm3": SM3Rule, "lamb": LambRule, "onebit_adam": OneBitAdamRule,
    "zero_one_adam": ZeroOneAdamRule, "onebit_lamb": OneBitLambRule,
}  # fmt: skip
# Those that gather whole matrices, and write weights themselves.
MATRIX_UPDATES: dict[str, Callable[..., Update]] = {"muon": MuonUpdate}


def rule_of(optim: Optim, name: str = "") -> UpdateRule:
    """The arithmetic of a run's optimizer, or of a named one with its keys, by elements."""
    return RULES[name or optim.name](optim)


class ResidentOptimizer(Optimizer):
    """By torch's fused kernel, by one of ours, or by plain operations, as the plan says.

    torch.optim reaches the same kernels, but its construction imports torch's compiler: two seconds on a small machine
    before the first step.
    """

    def __init__(
        self,
        optim: Optim,
        weights: Iterable[nn.Parameter],
        plan: Plan,
        names: Sequence[str] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """`names`: those of the weights in the model; only optimizers that do not take all of them ask for these.

        `mesh`: the ranks, of which those ask that share out whole matrices; None: there is one.
        """
        super().__init__(optim)
        self.mesh = mesh
        self.compressing: CompressingRule | None = None  # of replicas that exchange momenta in one bit
        self.weights = list(weights)
        self.names = list(names or [""] * len(self.weights))
        self.masters = [precision.master(weight) for weight in self.weights]
        # Those that update a weight, by their names, and each weight's states.
        self.updaters = [self.spec.of(*pair).name for pair in self._named()]
        self.quantized = quantized_parts(self.weights, optim.state_dtype)
        self._quantized_of = {id(self.weights[i]): part for i, part in self.quantized.items()}
        self._states = [self._new_states(i, *pair) for i, pair in enumerate(self._named())]
        self._count = torch.zeros((), dtype=torch.float32, device=self.masters[0].device)
        self.missed = [0] * len(self.weights)  # updates for which each weight had no gradient
        self.updates = {name: self._choose(plan, name) for name in dict.fromkeys(self.updaters)}

    def _named(self) -> Iterator[tuple[str, int]]:
        return ((name, weight.dim()) for name, weight in zip(self.names, self.weights, strict=True))

    def _new_states(self, i: int, name: str, dims: int) -> dict[str, Tensor]:
        master, states = self.masters[i], self.spec.states_of(name, dims)
        if i in self.quantized:
            return empty_states([state.name for state in states], master, self.quantized[i])
        found = {state.name: _zeros(state.shape_beside(tuple(master.shape)), master, self.optim) for state in states}
        if self.spec.compresses:
            servers = self.mesh.apart if self.mesh is not None else 1
            found[SERVER_ERROR] = _zeros(part_shape(tuple(master.shape), servers), master, self.optim)
        return found

    def _choose(self, plan: Plan, name: str) -> Update:
        """The update of the weights of one optimizer."""
        if name in WHOLE_RULES:
            rule = WHOLE_RULES[name](self.optim)
            self.compressing = rule if isinstance(rule, CompressingRule) else None
            return self._whole(rule)
        if name in MATRIX_UPDATES:
            return MATRIX_UPDATES[name](self, plan, alone=plan.deterministic)
        rule = rule_of(self.optim, name)
        usual = self._choose_by_elements(plan, rule)
        if not self.quantized:
            return usual
        one_pass = rule.one_pass_quantized(self) if self.is_one_pass else None
        quantized = one_pass or update_quantized(self, rule)

        def update(indices: list[int], terms: UpdateTerms) -> None:
            for run, wanted in ((usual, False), (quantized, True)):
                if chosen := [i for i in indices if (i in self.quantized) is wanted]:
                    run(chosen, terms)

        return update

    def _choose_by_elements(self, plan: Plan, rule: UpdateRule) -> Update:
        masters = self.optim.master_weights == "fp32"
        if plan.deterministic:
            return partial(self._plain, rule) if masters else rounded(self, rule)
        if settle(plan.kernels, self.masters[0].device, self.masters[0].dtype).kind == "fused":
            one_pass = rule.one_pass(self)
            if one_pass is not None:
                self.is_one_pass = True
                return one_pass
        return partial(self._fused, rule) if masters else rounded(self, rule)

    @property
    def count(self) -> Tensor:
        return self._count

    def states(self) -> Mapping[str, list[Tensor]]:
        return {name: [held[name] for held in self._states if name in held] for name in self.spec.state_names}

    def states_of(self, index: int) -> list[Tensor]:
        """The state tensors of one weight, in the order of the rule."""
        return list(self._states[index].values())

    def held(self) -> dict[int, dict[str, Tensor]]:
        found = {}
        for index, (weight, master) in enumerate(zip(self.weights, self.masters, strict=True)):
            found[id(weight)] = {"weight": master, **beside(weight), **self._states[index]}
        return found

    def saved_parts(self, weight: Tensor, kind: str, tensor: Tensor) -> Iterable[SavedPart]:
        part = self._quantized_of.get(id(weight)) if kind not in BESIDE else None
        return () if part is None else saved_parts(part, kind, tensor)

    @torch.no_grad()
    def step(self, rate: float, stats: GradStats) -> None:
        """Update every weight that has a gradient, or none when the statistics say the gradient is not finite.

        One without is as if this step had not been: it does not decay, nor do its states.
        """
        self._count += stats.finite
        for (name, decay, missed), indices in self._groups().items():
            count = self._count - missed if missed else self._count
            self.updates[name](indices, UpdateTerms(rate, decay, count, stats.factor, stats.finite))
        idle = [i for i, weight in enumerate(self.weights) if weight.grad is None and weight.requires_grad]
        if idle and stats.finite:  # the host waits, but not for models that use all of their parameters
            for i in idle:
                self.missed[i] += 1

    def _fused(self, rule: UpdateRule, indices: list[int], terms: UpdateTerms) -> None:
        weights, masters = ([held[i] for i in indices] for held in (self.weights, self.masters))
        gradients = [local(given(weight)) for weight in weights]
        states = list(zip(*(self.states_of(i) for i in indices), strict=True))
        widened = gradients
        if any(each.dtype != accum_dtype(held) for each, held in zip(gradients, masters, strict=True)):
            # Together: a few launches, however many weights there are.
            widened = [torch.empty_like(each, dtype=accum_dtype(each)) for each in masters]
            torch._foreach_copy_(widened, gradients)
        rule.fused(masters, widened, states, terms)
        if precision.has_master(weights[0]):  # all weights have a bf16 copy, or none has
            torch._foreach_copy_(weights, masters)
            if widened is not gradients:  # the kernel leaves its gradients clipped
                torch._foreach_copy_(gradients, widened)

    def _plain(self, rule: UpdateRule, indices: list[int], terms: UpdateTerms) -> None:
        finite = terms.finite > 0
        rules = {dtype: rule.arithmetic(terms, dtype) for dtype in {self.masters[i].dtype for i in indices}}
        for i in indices:
            weight, states = self.masters[i], self.states_of(i)
            gradient = local(given(self.weights[i])).to(accum_dtype(weight))
            moved, updated = rules[weight.dtype](weight, gradient, states)
            for held, new in ((weight, moved), *zip(states, updated, strict=True)):
                held.copy_(torch.where(finite, new, held))

    def _whole(self, rule: WholeTensorRule) -> Update:
        """The update of whole tensors, of which this rank has parts: all together, so that few collectives do."""
        store = master_weights.STORES[self.optim.master_weights]
        regions = [tuple((part.start, part.stop) for part in region_of(weight)) for weight in self.weights]
        parts = [(tuple(weight.shape), regions[i], cuts(weight)) for i, weight in enumerate(self.weights)]

        def shard(i: int, terms: UpdateTerms) -> WeightShard:
            weight, master, finite = self.weights[i], self.masters[i], (terms.finite > 0) | rule.writes_always

            def gradient() -> Tensor:
                return local(given(weight)).to(accum_dtype(master)) * terms.factor.to(accum_dtype(master))

            def value() -> Tensor:
                return master_weights.widened(weight, master)

            def write(updated: Tensor) -> None:
                store(weight, master, torch.where(finite, updated, value()), terms.count)

            states, decay = self._states[i], self.decay_of(weight)
            return WeightShard(self.names[i], *parts[i], decay, states, gradient, value, write)

        def update(indices: list[int], terms: UpdateTerms) -> None:
            rule.update([shard(i, terms) for i in indices], terms)
            if precision.has_master(self.weights[0]):  # all weights have a bf16 copy, or none has
                torch._foreach_copy_([self.weights[i] for i in indices], [self.masters[i] for i in indices])

        return update

    def _groups(self) -> dict[tuple[str, float, int], list[int]]:
        """Weights with a gradient, by who updates them, their decay and the updates they missed.

        Whole tensors each have their own decay, and are updated together.
        """
        groups: dict[tuple[str, float, int], list[int]] = {}
        for index, weight in enumerate(self.weights):
            if weight.grad is not None:
                name = self.updaters[index]
                decay = 0.0 if name in WHOLE_RULES else self.decay_of(weight)
                groups.setdefault((name, decay, self.missed[index]), []).append(index)
        return groups


def _zeros(shape: tuple[int, ...], master: Tensor, optim: Optim) -> Tensor:
    """A state tensor beside a weight; one of its shape lies as it does."""
    dtype = state_dtype(optim, master)
    if shape == tuple(master.shape):
        return torch.zeros_like(master, dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=master.device)


REMEDY = "use more ranks, whose hosts share the weights out by plan.shard, or leave plan.cpu_offload out"


class CpuOffloadOptimizer(ResidentOptimizer):
    """The update by torch's CPU kernel, with all of this rank's threads."""

    def __init__(self, run: Run, weights: Iterable[nn.Parameter], memory: PinnedMemory) -> None:
        super().__init__(run.optim, weights, msgspec.structs.replace(run.plan, kernels="plain"))
        self.memory = memory  # pinned for as long as this lives

    def step(self, rate: float, stats: GradStats) -> None:
        """Update every weight, or none when the gradient is not finite.

        The host waits once a step: no weight is updated before the norm over all ranks' gradients is known.
        """
        factor, finite = torch.stack([stats.factor, stats.finite]).cpu().unbind()
        super().step(rate, replace(stats, factor=factor, finite=finite))


def materialise(chunks: Sequence[nn.Module], run: Run, mesh: Mesh) -> PinnedMemory:
    """Give every weight of a rank memory on its host, if there is enough, and every buffer memory on its device."""
    need, have = bytes_needed(chunks, run), host_memory.free_host_bytes()
    if have is not None and need > have:
        what = f"plan.cpu_offload needs {need:,} bytes of host memory for this rank, and {have:,} are free"
        raise mistake(what, REMEDY, "plan.cpu_offload")
    memory = PinnedMemory(mesh.device.type == "cuda", remedy=REMEDY, key="plan.cpu_offload")
    for chunk in chunks:
        chunk._apply(partial(_allocated, memory, mesh.device))
        chunk.train()
        note(chunk, "weights, gradients and optimizer states offloaded to host")
    return memory


def _allocated(memory: PinnedMemory, device: torch.device, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device=device)
    empty = torch.empty_like(tensor, device="cpu")
    if memory.pinned and isinstance(empty, DTensor):
        axes, part = zip(empty.device_mesh.shape, empty.placements, strict=True), empty.to_local()
        sharers = math.prod(size for size, placement in axes if not isinstance(placement, Replicate))
        if part.numel() * sharers == empty.numel():  # torch pads uneven parts, and copies them for that
            # Torch would pin a copy, in powers of two; memory that is pinned already it takes as it is.
            empty._local_tensor = memory.take([part.numel()], [part.dtype])[0].view(part.shape)
    return empty


def bytes_needed(chunks: Iterable[nn.Module], run: Run) -> int:
    """Host memory of a rank's weights, and of what is trained gradients, states and the low bits of split masters."""
    low, states, need = 2 if run.optim.master_weights == "split" else 0, OPTIMIZERS[run.optim.name].state_bytes, 0
    for weight in (each for chunk in chunks for each in chunk.parameters()):
        mine = local(weight.detach())
        beside = mine.itemsize + states(state_dtype(run.optim, mine).itemsize) + low if weight.requires_grad else 0
        need += mine.numel() * (mine.itemsize + beside)
    return need
