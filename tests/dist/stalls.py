"""A stall of known length in one place of a run, and where the account of its records finds it."""

import io
import time
from contextlib import contextmanager

from trials import make_corpus, make_run

from meshwright.cost.goodput import Account, account
from meshwright.parallel import mesh as meshes
from meshwright.runtime.records import AttemptRecord
from meshwright.train import loop
from meshwright.train.build import build
from meshwright.train.inject import Injection, when
from meshwright.train.log import PlainLines, Recorder
from meshwright.train.saving import restore

# Where a stall is put, and the class of badput that it belongs to.
CLASSES = {
    "data": "data",
    "save": "checkpoint",
    "eval": "eval",
    "forward": "stall",
    "optimizer": "stall",
    "first": "compile",
    "start": "start-up",
    "restart": "recovery",
}
STEPS = 12
NOISE = 1.5  # seconds that a busy machine may take for anything: shorter than any stall here
WORDS = (f"steps={STEPS}", "plan.precision=fp32", "eval.every=4", "checkpoint.every=4")


def stalled_run(folder, device, place, seconds, monkeypatch) -> Account:
    """The account of a run of two attempts that stands still once, for so many seconds."""
    run = make_run(folder, *WORDS)
    mesh, corpus = meshes.make(run.plan, device), make_corpus(run, folder)
    if place == "save":
        monkeypatch.setattr(loop, "saving", slow_saving(loop.saving, seconds))
    began = time.monotonic()
    attempt(run, mesh, corpus, folder, place, seconds, began, number=1, until=7)  # behind the save of step 4
    if place == "restart":
        time.sleep(seconds)
    attempt(run, mesh, corpus, folder, place, seconds, began, number=2, until=STEPS)
    return account(Recorder(run, mesh, folder, PlainLines(io.StringIO(), every=100)).past)


def attempt(run, mesh, corpus, folder, place, seconds, began, *, number, until):
    """Train until a step, as a rank does; the first attempt is cut off there, its newest records with it."""
    state = build(run, corpus, mesh, folder)
    restore(state, run, mesh, folder, lambda text: None)
    if number == 1 and place == "start":
        time.sleep(seconds)
    once = (number == 1 and place == "first") or (number == 2 and place in ("data", "forward", "optimizer", "eval"))
    if once:
        where = "forward" if place == "first" else place
        step = 1 if place == "first" else 8
        when(Injection(kind="sleep", rank=0, step=step, phase=where), state, lambda: time.sleep(seconds))
    recorder = Recorder(run, mesh, folder, PlainLines(io.StringIO(), every=100))
    recorder.begin(AttemptRecord(step=state.step, session="one", number=number, began=began, at=time.monotonic()))
    for result in loop.train(run, state, mesh, folder):
        recorder.add(result)
        if result.step == until and until < run.steps:
            break
    if until == run.steps:
        recorder.end(state.step)
    recorder.close()
    state.loader.close()
    state.optimizer.close()


def slow_saving(real, seconds):
    """Saves of which one pauses training for longer."""

    @contextmanager
    def saving(run, state, mesh, folder):
        with real(run, state, mesh, folder) as save:
            yield SlowSave(save, seconds)

    return saving


class SlowSave:
    """A save that pauses training for longer behind step 8."""

    def __init__(self, save, seconds):
        self.save, self.seconds = save, seconds

    def __getattr__(self, name):
        return getattr(self.save, name)

    def __call__(self, state):
        took = self.save(state)
        if state.step != 8:
            return took
        time.sleep(self.seconds)
        return took + self.seconds


def check(found: Account, place: str, seconds: float, quiet: Account) -> None:
    """The stall is in its class, as long as it was, and in no other."""
    more = {name: found.bad[name] - quiet.bad[name] for name in found.bad} | {"good": found.good - quiet.good}
    inside = more.pop(CLASSES[place])
    assert abs(inside - seconds) < NOISE, (place, inside, more)
    assert max(more.values()) < NOISE, (place, inside, more)
