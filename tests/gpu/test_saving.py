"""Saving from a real GPU: the copy is of the step it was taken after, a stop is heard, and nothing else waits."""

import pytest
import torch
from trials import made, make_run

from meshwright.checkpoint.copies import Copies
from meshwright.checkpoint.state import SLICE_BYTES, TensorShard
from meshwright.train.loop import Stop, train
from meshwright.train.saving import digest_of, restore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_state(folder, *words):
    run = make_run(folder, "steps=8", "data.eval_fraction=0.0", "checkpoint.every=3", *words)
    return made(run, folder, torch.device("cuda", 0))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stopped_and_gone_on_with_it_is_the_same_run(folder, precision):
    words = (f"plan.precision={precision}", "plan.deterministic=true", "plan.microbatch=4")
    run, mesh, state = make_state(folder, *words)
    list(train(run, state, mesh))
    state.loader.close()
    whole = digest_of(state, run, mesh)
    run, mesh, state = make_state(folder, *words)
    stop, seen = Stop(), []
    for result in train(run, state, mesh, folder / "run", stop):
        seen.append(result.step)
        stop.asked = result.step >= 3
    assert seen == [1, 2, 3, 4, 5]  # asked in step 4, heard one step later
    assert state.stopped
    assert state.saved
    state.loader.close()
    run, mesh, state = make_state(folder, *words)
    restored = restore(state, run, mesh, folder / "run", lambda text: None)
    assert restored is not None
    assert restored.step == 5
    list(train(run, state, mesh, folder / "run"))
    state.loader.close()
    assert digest_of(state, run, mesh) == whole


def test_listening_for_a_stop_makes_the_host_wait_for_nothing(folder):
    run, mesh, state = make_state(folder, "plan.precision=bf16")
    for result in train(run, state, mesh, folder / "run", Stop()):
        if result.step in (3, 5):  # between two saves any hidden synchronisation raises
            torch.cuda.set_sync_debug_mode("error" if result.step == 3 else "default")
    state.loader.close()


def test_a_save_makes_the_host_wait_for_nothing_either(folder):
    """From before the first save, at step 3, until after the second, at step 6, a hidden synchronisation raises."""
    run, mesh, state = make_state(folder, "plan.precision=bf16")
    records = []
    state.note = records.append
    for result in train(run, state, mesh, folder / "run", Stop()):
        if result.step in (2, 7):
            torch.cuda.set_sync_debug_mode("error" if result.step == 2 else "default")
    state.loader.close()
    assert records[-1].saved == 8
    assert records[0].saved == 3


def large(count: int = 6) -> list[TensorShard]:
    """Tensors of several slices each, and one whose slices are not contiguous."""
    shapes = [(5 * SLICE_BYTES // 8, 4)] * count
    made = [torch.randn(shape, device="cuda") for shape in shapes] + [torch.randn(3000, 5000, device="cuda").t()]
    regions = [tuple((0, length) for length in each.shape) for each in made]
    named = enumerate(zip(made, regions, strict=True))
    return [TensorShard(f"weight/{number}", tuple(x.shape), region, x, True) for number, (x, region) in named]


@pytest.mark.parametrize("snapshot", [0, 3 * SLICE_BYTES, 2**40], ids=["none", "of some", "of all"])
def test_an_update_launched_at_once_changes_no_copy(snapshot):
    held = large()
    copies = Copies(held)
    copies.prepare()
    for _ in range(2):  # the second uses the memory of the first again
        before = [shard.tensor.clone() for shard in held]
        torch.cuda.synchronize()
        assert copies.link is not None
        copies.link.snapshot_bytes = snapshot
        copies.take()
        stall = copies.hold_update()
        for shard in held:
            shard.tensor.add_(1.0)  # the next update
        assert stall is not None
        assert stall.seconds() >= 0
        assert copies.hold_update() is None  # only the first update waits
        found = list(copies.pieces())
        assert len(found) > len(held)
        for piece in found:
            piece.bits  # noqa: B018 - waits until it has arrived
            number = int(piece.name.removeprefix("weight/"))
            region = tuple(slice(begin, end) for begin, end in piece.region)
            assert torch.equal(piece.tensor, before[number][region].cpu())
    assert all(host.is_pinned() for host in copies.hosts)
    assert bool(copies.link.snapshotted) == bool(snapshot)


def test_with_a_snapshot_the_update_waits_for_the_device_only():
    held = large(24)  # 8 GB
    copies = Copies(held)
    copies.prepare()
    waits = []
    for snapshot in (0, 0, 2**40, 2**40):
        assert copies.link is not None
        copies.link.snapshot_bytes = snapshot
        copies.take()
        stall = copies.hold_update()
        assert stall is not None
        waits.append(stall.seconds())
        copies.wait()
    assert waits[3] < waits[1] / 3  # a copy on the device is quicker than the link


def test_copies_go_at_the_links_rate():
    held = large(24)
    copies = Copies(held)
    copies.prepare()
    copies.take()
    copies.wait()
    copies.take()
    copies.wait()
    assert copies.link is not None
    seconds = copies.link.begun.elapsed_time(copies.link.done) / 1000
    assert copies.state_bytes / seconds > 10e9  # pageable memory has 3 to 6


def test_many_slices_make_the_host_wait_for_nothing():
    shapes = [(64, 64)] * 3000  # more operations than a stream takes
    made = [
        TensorShard(f"weight/{number}", x, ((0, 64), (0, 64)), torch.randn(x, device="cuda"), True)
        for number, x in enumerate(shapes)
    ]
    copies = Copies(made)
    copies.prepare()
    copies.take()
    copies.wait()
    torch.cuda._sleep(2_000_000_000)  # about a second
    copies.take()
    assert copies.link is not None
    assert not copies.link.ready[0].copied.query() or not copies.link.ready[0].launched.is_set()
    stall = copies.hold_update()
    assert stall is not None
    copies.wait()
    for piece, shard in zip(copies.pieces(), made, strict=True):
        assert torch.equal(torch.from_numpy(piece.bits.copy()).view(torch.float32), shard.tensor.cpu())
