"""Every collective that really happens, seen where torch dispatches it, in the words of the arithmetic."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.cost.traffic import Axis, Collective, Kind
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline import placement
from meshwright.spec.plan import Plan


class Call(NamedTuple):
    """A collective by what can be seen of it. Two axes over the same ranks are the same wires, and look alike."""

    kind: Kind
    ranks: tuple[int, ...]
    bytes: int  # as Collective defines them


Calls = Counter[Call]

RESULT = "result"  # stands for what an operator returns, among its arguments' names
# Operators by name, with the argument that holds the whole tensor. The first are torch.distributed's own, the others
# the functional ones that DTensor uses.
OPERATORS: Mapping[str, tuple[Kind, str]] = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_": ("all_gather", "output_tensors"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "alltoall_base_": ("all_to_all", "input"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "send": ("send", "tensors"),
    "all_reduce": ("all_reduce", "input"),
    "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs"),
    "all_gather_into_tensor": ("all_gather", RESULT),
    "all_gather_into_tensor_out": ("all_gather", RESULT),
    "all_gather_into_tensor_coalesced": ("all_gather", RESULT),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "all_to_all_single": ("all_to_all", "input"),
    "broadcast": ("broadcast", "input"),
}
# A receive is its sender's send, the others move nothing.
SILENT = {"recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}


@contextmanager
def observing() -> Iterator[Calls]:
    """While it lasts, every collective of this rank is counted; those among one rank only are none."""
    with _Observer() as observer:
        yield observer.calls


def implied(collectives: Iterable[Collective], plan: Plan, mesh: Mesh) -> Calls:
    """The calls that the arithmetic says, with the ranks of this rank's axes."""
    calls: Calls = Counter()
    for each in collectives:
        calls[Call(each.kind, ranks_of(each.axis, plan, mesh), each.bytes)] += each.count
    return calls


def ranks_of(axis: Axis, plan: Plan, mesh: Mesh) -> tuple[int, ...]:
    """The ranks among which this rank talks on an axis."""
    if axis == "world":
        return tuple(range(mesh.world))
    if axis == "tied":
        line, ranks = _ranks(mesh.group("pp")), placement(plan)
        return tuple(sorted((line[ranks[0]], line[ranks[-1]])))
    if axis == "peers":
        return _ranks(mesh.peers) if mesh.peers is not None else tuple(range(mesh.world))
    if axis in ("secondary", "node", "between_nodes"):
        line, node = _ranks(mesh.dense.get_group("shard")), plan.grad_reduce_node
        node = plan.secondary_shard if axis == "secondary" else node
        number, place = divmod(line.index(mesh.rank), node)
        return line[place::node] if axis == "between_nodes" else line[number * node :][:node]
    if axis == "outer":
        return _ranks(mesh.group("replicate"))
    if axis in ("shard_tp", "expert_shard_tp"):
        return _ranks(mesh.over_shard_and_tp("dense" if axis == "shard_tp" else "expert"))
    if axis == "replicate" and mesh.apart > 1:
        return _ranks(mesh.group("replicate"))
    if axis in ("replicate", "shard"):
        return _ranks(mesh.dense.get_group(axis))
    if axis in ("expert_replicate", "expert_shard"):
        return _ranks(mesh.expert.get_group(axis.removeprefix("expert_")))
    return _ranks(mesh.group(axis))


def differences(seen: Calls, said: Calls) -> list[str]:
    """Every call that was seen more or less often than it was said, a sentence each; none when the two agree."""
    calls = sorted(seen.keys() | said.keys())
    return [
        f"{call.kind} among ranks {call.ranks} of {call.bytes} bytes: seen {seen[call]}, said {said[call]}"
        for call in calls
        if seen[call] != said[call]
    ]


class _Observer(TorchDispatchMode):
    """Autograd hands a dispatch mode on to whatever thread its backward runs in, so that is seen too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch would run compiled blocks uncompiled beside a mode that does not say this."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let it become operators on this rank's parts first
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in SILENT:
            names = [argument.name for argument in func._schema.arguments]
            self._count(func._opname, {**dict(zip(names, args, strict=False)), **(kwargs or {}), RESULT: result})
        return result

    def _count(self, operator: str, values: dict[str, Any]) -> None:
        assert operator in OPERATORS, f"{operator} is a collective that nobody counts"
        kind, whole = OPERATORS[operator]
        group = values["process_group" if "process_group" in values else "group_name"]  # itself, in a box, or its name
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        elif not isinstance(group, dist.ProcessGroup):
            group = _resolve_process_group(group)
        ranks, tensors = _ranks(group), tree_leaves(values[whole])
        if len(ranks) > 1:
            size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
            self.calls[Call(kind, ranks, size)] += 1


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
