"""The device meshes of a plan have torch's own groups, each made once."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.spec.plan import Plan
from meshwright.verify.trace import fake_world

# With the groups that are made besides the world's own: one for each axis of several ranks, and that of one rank.
PLANS = [
    ({"replicate": 8}, 1),
    ({"pp": 2, "shard": 2, "zero": 3, "tp": 2}, 4),
    ({"replicate": 2, "shard": 2, "zero": 3, "tp": 2}, 4),
    ({"shard": 2, "zero": 3, "cp": 4}, 3),  # shard of the plan and cp; both together are the world
    ({"replicate": 2, "shard": 4, "zero": 3, "ep": 2}, 5),  # shard before and after ep is taken out of it
]


def groups(mesh: DeviceMesh) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]


@pytest.mark.parametrize(("fields", "made"), PLANS, ids=[str(fields) for fields, _ in PLANS])
@pytest.mark.parametrize("rank", [0, 5])
def test_every_axis_has_the_ranks_that_torch_gives_it_and_no_group_is_made_twice(fields, made, rank):
    with fake_world(Plan(microbatch=1, **fields), rank) as mesh:
        ours = (mesh.dense, mesh.expert, mesh.fine)
        assert len({group for each in ours for group in each.get_all_groups()} - {dist.group.WORLD}) == made
        for each in ours:
            theirs = init_device_mesh("cpu", tuple(each.shape), mesh_dim_names=each.mesh_dim_names)
            assert each == theirs
            assert groups(each) == groups(theirs)
            assert each.get_coordinate() == theirs.get_coordinate()


def test_axes_over_the_same_ranks_do_not_wait_for_each_other():
    with fake_world(Plan(microbatch=1, replicate=2, cp=2, zero=3), 0) as mesh:
        assert groups(mesh.dense["shard"]) == [dist.get_process_group_ranks(mesh.group("cp"))]
        assert mesh.dense["shard"].get_group() != mesh.group("cp")
