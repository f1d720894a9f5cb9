"""Save under one plan, go on under another: the state is the same, and so is what follows."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from trials import GPT, alone, corpus_file, make_corpus, make_run, mesh_of
from worlds import start, world

from meshwright.checkpoint import format as manifests
from meshwright.checkpoint.read import StepWeights
from meshwright.config.run import Run
from meshwright.parallel.mesh import whole_of
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.saving import digest_of, restore, saving
from meshwright.verify import integrity

STEPS = ("steps=4", "checkpoint.every=2", "checkpoint.keep_last=9", "data.eval_fraction=0.0")
ALONE = "replicate=1"
# Every axis, and products that cut one dim twice or two dims.
DENSE = {
    2: (
        "replicate=2", "shard=2,zero=1", "shard=2,zero=3", "tp=2", "cp=2", "cp=2,zero=3", "pp=2,grad_accum=2",
        "pp=2,schedule=zbv,grad_accum=4",
    ),
    4: (
        "replicate=2,shard=2,zero=3", "shard=4,zero=2", "tp=4", "shard=2,zero=3,tp=2", "pp=2,tp=2,grad_accum=2",
        "pp=2,shard=2,zero=3,grad_accum=2", "cp=2,tp=2", "cp=2,shard=2,zero=3",
    ),
}  # fmt: skip
MIXTURE = {
    2: ("shard=2,zero=1,ep=2", "tp=2", "shard=2,zero=3", "replicate=2,ep=2"),
    4: ("shard=4,zero=3,ep=2", "shard=2,zero=3,tp=2,ep=2", "replicate=2,shard=2,zero=3,ep=2", "shard=4,zero=3"),
}


@pytest.fixture
def folder(tmp_path):
    corpus_file(tmp_path)
    make_corpus(make_run(tmp_path), tmp_path)
    return tmp_path


def planned(folder: Path, plan: str, words: tuple[str, ...], arch: str) -> Run:
    return make_run(folder, *STEPS, *words, *(f"plan.{word}" for word in plan.split(",")), arch=arch)


def state_of(folder: Path, run: Run):
    mesh = mesh_of(run.plan) if dist.get_world_size() > 1 else alone()
    return build(run, make_corpus(run, folder), mesh), mesh


def silent(text: str) -> None:
    assert "warning" not in text, text


@world(1)
def begin(folder, words, arch):
    """Train to the end, saving in the middle."""
    run = planned(folder, ALONE, words, arch)
    state, mesh = state_of(folder, run)
    losses = [result.loss.item() for result in train(run, state, mesh, folder / "begun")]
    (folder / "losses.json").write_text(json.dumps(losses))
    state.loader.close()


@world(1)
def hand_over(folder, jobs, words, arch):
    """Each job takes a save up under a plan, and saves it again under that plan."""
    for plan, source, target in jobs:
        run = planned(folder, plan, words, arch)
        state, mesh = state_of(folder, run)
        restored = restore(state, run, mesh, source, silent)
        assert restored is not None
        assert restored.step == state.step == 2
        assert digest_of(state, run, mesh) == restored.state
        with saving(run, state, mesh, target) as save:
            save(state)
        state.loader.close()


@world(1)
def go_on(folder, jobs, words, arch):
    """Each job resumes from a save under a plan, and finds the losses of the run that never stopped."""
    expected = json.loads((folder / "losses.json").read_text())[2:]
    for plan, home in jobs:
        run = planned(folder, plan, words, arch)
        state, mesh = state_of(folder, run)
        assert restore(state, run, mesh, home, silent) is not None
        losses = [result.loss.item() for result in train(run, state, mesh, home)]
        state.loader.close()
        assert losses == pytest.approx(expected, rel=1e-9), plan  # the same fp64 sums in another order


def ranks(count: int, name: str, **arguments) -> None:
    start(count, Path(__file__), name, arguments)


def only_middle(home: Path) -> Path:
    """A run folder as it was when the step in the middle had been saved."""
    place = home / "checkpoints"
    shutil.rmtree(place / "step-4")
    (place / "latest").write_text(f"step-2\n{manifests.read(place / 'step-2').sha256}\n")
    return home


def reshard(folder: Path, plans: dict[int, tuple[str, ...]], taken: int, words=(), arch="tiny") -> None:
    """Hand one state from plan to plan, by chance but seeded; then go on from saves of the last plans."""
    chance, common = random.Random(1), {"folder": folder, "words": words, "arch": arch}
    ranks(1, "begin", **common)
    homes = [only_middle(folder / "begun")]
    for count in (2, 4, 1):
        chosen = chance.sample(plans[count], taken) if count > 1 else [ALONE]
        jobs = [(plan, chance.choice(homes), folder / f"{count}-{plan}") for plan in chosen]
        ranks(count, "hand_over", jobs=jobs, **common)
        homes += [target for _, _, target in jobs]
    found = [manifests.read(home / "checkpoints" / "step-2") for home in homes]
    assert len({manifest.state for manifest in found}) == 1
    assert len({tuple(manifest.tensors) for manifest in found}) == 1  # tied weights once, under any plan
    assert all(integrity.verify(home, lambda text: None).sound for home in homes)
    first, *others = (StepWeights(home / "checkpoints" / "step-2") for home in homes)
    for name in first.names:  # whole, in a process that knows of no plan
        assert all(other.load(name).equal(first.load(name)) for other in others)
    ranks(2, "go_on", jobs=[(chance.choice(plans[2]), homes[-2])], **common)


def test_any_plan_takes_up_what_any_other_has_saved(folder):
    reshard(folder, DENSE, 4, ("arch.layers=4",))


def test_tied_weights_and_an_odd_vocabulary_too(folder):
    reshard(folder, DENSE, 3, (*GPT, "arch.vocab=301"))


def test_experts_too(folder):
    reshard(folder, MIXTURE, taken=2, arch="tiny-moe")


@world(2)
def test_equal_holders_share_the_writing(folder):
    run = planned(folder, "replicate=2", (), "tiny")
    state, mesh = state_of(folder, run)
    with saving(run, state, mesh, folder / "run") as save:
        state.step = 2
        save(state)
    state.loader.close()
    if mesh.rank == 0:
        manifest = manifests.read(folder / "run" / "checkpoints" / "step-2")
        sizes = [chunk.bytes for chunk in manifest.chunks]
        assert len(sizes) == 2
        largest = max(each.end - each.begin for each in manifest.slices)
        assert max(sizes) - min(sizes) < 2 * largest


@world(2)
def test_what_one_rank_finds_damaged_no_rank_loads(folder):
    run = planned(folder, "shard=2,zero=3", (), "tiny")
    home = folder / "run"
    state, mesh = state_of(folder, run)
    list(train(run, state, mesh, home))
    state.loader.close()
    target = home / "checkpoints"
    if mesh.rank == 0:
        shutil.rmtree(target / "step-4")
        shutil.copytree(target / "step-2", target / "step-1")
        (target / "step-2" / "chunk.rank1.safetensors").write_bytes(b"")
    dist.barrier()
    said = []
    state, mesh = state_of(folder, run)
    with pytest.raises(manifests.CorruptError, match="no step in it can be used"):
        restore(state, run, mesh, home, said.append)
    assert any("step-2 cannot be used: rank " in text and "chunk.rank1.safetensors" in text for text in said)
    assert any("step-1 cannot be used" in text and "is the manifest of step 2" in text for text in said)
    state.loader.close()


@world(4)
def test_parts_are_put_together_as_they_were_cut(folder):
    shapes = ("arch.vocab=259", "arch.hidden=72", "arch.ffn=90", "arch.heads=4", "arch.kv_heads=2")  # padded, or empty
    for plan, arch in (("shard=2,zero=3,tp=2", "tiny"), ("shard=4,zero=3", "tiny"), (MIXTURE[4][1], "tiny-moe")):
        state, _ = state_of(folder, planned(folder, plan, shapes if arch == "tiny" else (), arch))
        cut = [weight for weight in state.chunks[0].parameters() if isinstance(weight, DTensor)]
        assert cut
        assert all(whole_of(weight).equal(weight.full_tensor()) for weight in cut)
        state.loader.close()
