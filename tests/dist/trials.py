"""Short runs inside tests: the real loop over a small corpus, driven to its end."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.config import load
from meshwright.config.run import Run
from meshwright.data.prepare import Corpus, prepare
from meshwright.parallel import mesh as meshes
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan
from meshwright.train.build import build
from meshwright.train.loop import EvalResult, StepResult, train
from meshwright.train.saving import digest_of, restore
from meshwright.train.state import State, weights
from meshwright.verify.collectives import Calls, observing

CPU = torch.device("cpu")
# A first block and a last one; three steps show the moments at work. Who needs more says so.
WORDS = (
    "arch.layers=2",
    "steps=3",
    "sequence=32",
    "batch=8",
    "eval.every=0",
    "eval.batches=1",
    "plan.precision=fp64",
    "optim.warmup=0",
    "optim.lr=1e-2",
)


# What makes a GPT of a Llama-shaped preset.
GPT = (
    "arch.norm=layer",
    "arch.positions=learned",
    "arch.mlp=gelu_tanh",
    "arch.bias=true",
    "arch.tied=true",
    "arch.kv_heads=8",
)


@dataclass
class Trial:
    """What a run did."""

    losses: list[float]
    norms: list[float]
    finite: list[float]
    held: float
    weights: dict[str, Tensor]
    state: State
    sent: Calls  # in the step that was observed


def corpus_file(folder: Path) -> Path:
    """Documents of very different lengths, so that microbatches and ranks hold different numbers of tokens."""
    file = folder / "text.jsonl"
    lengths = [3, 400, 17, 60, 5, 250, 31, 8, 120, 33] * 6
    words = [f"word{number % 37} and {number * number % 101}" for number in range(sum(lengths))]
    with file.open("w") as lines:
        for length in lengths:
            taken, words = words[:length], words[length:]
            lines.write('{"text": "' + " ".join(taken) + '"}\n')
    return file


def make_run(folder: Path, *words: str, arch: str = "tiny") -> Run:
    """A run over the ragged corpus."""
    base = (f"arch.preset={arch}", f"data.source={folder}/text.jsonl", *WORDS)
    return load.load(None, [*base, *words]).run


def make_corpus(run: Run, folder: Path) -> Corpus:
    return prepare(run, folder / "cache", lambda text: None)


def made(run: Run, folder: Path, device: torch.device) -> tuple[Run, Mesh, State]:
    """A run that has not begun, with its ranks and its state."""
    mesh = meshes.kept(run.plan, device, run.compresses)
    return run, mesh, build(run, make_corpus(run, folder), mesh)


def mesh_of(plan: Plan, device: torch.device = CPU) -> Mesh:
    """The device meshes of a plan, among the ranks of a test file."""
    return meshes.kept(plan, device)


def losses_of(run: Run, mesh: Mesh, state: State) -> list[float]:
    """Of every step to the last."""
    found = [result.loss.item() for result in train(run, state, mesh) if isinstance(result, StepResult)]
    state.loader.close()
    return found


def digest_before_the_cut(run: Run, mesh: Mesh, state: State, folder: Path) -> str:
    """A run that saves every fourth step is cut short after its fifth; what the state was after the fourth."""
    assert run.checkpoint.every == 4, "a save still being written would postpone another"
    digest = ""
    for result in train(run, state, mesh, folder):
        if result.step == 4:
            digest = digest_of(state, run, mesh)
        if result.step == 5:
            break
    state.loader.close()
    return digest


def assert_it_goes_on(digest: str, run: Run, mesh: Mesh, state: State, folder: Path) -> None:
    """From the fourth step, as it was, to the sixth."""
    restored = restore(state, run, mesh, folder, lambda text: None)
    assert restored is not None
    assert restored.step == 4
    assert digest_of(state, run, mesh) == digest == restored.state
    assert [result.step for result in train(run, state, mesh)] == [5, 6]
    state.loader.close()


def alone() -> Mesh:
    """A mesh of this rank only: the reference runs beside the ranks without a word to them."""
    place = dict.fromkeys(meshes.AXES, 0)
    nobody: Any = None  # one rank has no axes
    return Mesh(dense=nobody, expert=nobody, fine=nobody, device=CPU, rank=0, world=1, data_rank=0, place=place)


def drive(run: Run, corpus: Corpus, mesh: Mesh, observed: int = 0) -> Trial:
    """The whole run, its numbers kept; of one step also what it sends, if asked."""
    state = build(run, corpus, mesh)
    steps = train(run, state, mesh)
    results = [next(steps) for _ in range(observed - 1)]
    sent: Calls = Counter()
    if observed:
        with observing() as sent:
            results.append(next(steps))
    results += steps
    state.loader.close()
    steps = [result for result in results if isinstance(result, StepResult)]
    held = [result for result in results if isinstance(result, EvalResult)]
    return Trial(
        losses=[result.loss.item() for result in steps],
        norms=[result.norm.item() for result in steps],
        finite=[result.finite.item() for result in steps],
        held=held[-1].loss.item() if held else float("nan"),
        weights=dict(weights(state.chunks, run, mesh)),
        state=state,
        sent=sent,
    )


def deviation(one: Trial, other: Trial) -> float:
    """The largest relative difference between two runs: losses, norms, held-out loss, every weight."""
    pairs = [*zip(one.losses, other.losses, strict=True), *zip(one.norms, other.norms, strict=True)]
    numbers = [abs(left - right) / abs(right) for left, right in [*pairs, (one.held, other.held)]]
    weights = [
        ((one.weights[name].double() - weight.double()).norm() / weight.double().norm()).item()
        for name, weight in other.weights.items()
        # A constant added to every key leaves softmax as it is: the gradient is rounding alone, which AdamW scales up.
        if not name.endswith("attn.k.bias")
    ]
    return max(numbers + weights)


def assert_offload_changes_no_bit(folder: Path, words: tuple[str, ...], place: str, update: str) -> None:
    """A run whose optimizer states are elsewhere beside the same with its states on the device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a kernel shared by threads takes the ends of their shares through other instructions
    offload = (f"plan.optimizer_offload={place}", f"plan.optimizer_offload_update={update}")
    runs = [make_run(folder, *words), make_run(folder, *words, *offload, f"plan.optimizer_offload_folder={folder}")]
    plain, moved = (drive(run, make_corpus(run, folder), alone()) for run in runs)
    torch.set_num_threads(threads)
    moved.state.optimizer.close()
    assert (moved.losses, moved.norms) == (plain.losses, plain.norms)
    assert all(torch.equal(moved.weights[name], weight) for name, weight in plain.weights.items())


FORMS = (  # of the weights and states of an optimizer by elements
    ("plan.precision=bf16", "optim.master_weights=split"),
    ("plan.precision=bf16", "optim.master_weights=none", "optim.stochastic_rounding=true"),
    ("plan.precision=bf16", "optim.master_weights=split", "optim.state_dtype=bf16"),
    ("plan.precision=bf16", "plan.optimizer_offload=host", "optim.state_dtype=bf16"),
    ("plan.precision=fp16",),
)


def assert_all_forms_learn(folder: Path, base: tuple[str, ...]) -> None:
    """A run in every form beside fp32."""
    run = make_run(folder, *base, "plan.precision=fp32")
    wide = drive(run, make_corpus(run, folder), alone())
    fallen = wide.losses[0] - wide.losses[-1]
    assert fallen > 0.1
    for words in FORMS:
        run = make_run(folder, *base, *words)
        low = drive(run, make_corpus(run, folder), alone())
        low.state.optimizer.close()
        # Weights or states of bf16 are off by 2⁻⁸ of themselves at random: the loss must follow by a tenth of its fall.
        assert abs(low.losses[-1] - wide.losses[-1]) <= 0.1 * fallen, words
