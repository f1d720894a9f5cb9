"""One rank of a proof of going on: the real loop, stopped the way SIGTERM stops it."""

from pathlib import Path

import msgspec

from meshwright.data.prepare import prepare
from meshwright.spec.place import Place
from meshwright.spec.run import Run
from meshwright.train.build import build, restore
from meshwright.train.loop import StepResult, train
from meshwright.train.saving import digest_of
from meshwright.train.signals import Stop
from meshwright.train.world import world
from meshwright.verify.resume import DIGESTS


def drive(place: Place, run: Run, cache: Path, folder: Path, until: int) -> None:
    """Go on from what a folder has, until a step; leave there the digest of the state after each step."""
    quiet, stop, digests = (lambda text: None), Stop(), dict[int, str]()
    with world(run, place) as mesh:
        state = build(run, prepare(run, cache, quiet), mesh)
        restore(state, run, mesh, folder, quiet)
        stop.asked = state.step + 1 == until
        for result in train(run, state, mesh, folder, stop):
            if isinstance(result, StepResult):
                digests[result.step] = digest_of(state, run, mesh)
                stop.asked = result.step + 1 == until
        state.loader.close()
        if mesh.rank == 0:
            (folder / DIGESTS).write_bytes(msgspec.json.encode(digests))
