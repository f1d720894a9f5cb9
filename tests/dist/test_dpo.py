"""Preferences: the loss of DPO and its gradients, the same under every plan that it may have, and what it refuses."""

import json
import math
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from chats import byte_level, turns, write_lines
from trials import Trial, alone, deviation, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.config import load
from meshwright.config.presets import preset
from meshwright.config.run import Run, digest, mathematics
from meshwright.cost.flops import step_flops
from meshwright.cost.memory import ledger
from meshwright.cost.step_time import price
from meshwright.cost.traffic import traffic
from meshwright.data.conversation import preference
from meshwright.data.prepare import Corpus
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.parallel.mesh import Mesh
from meshwright.search.question import Question
from meshwright.search.space import plans
from meshwright.spec.params import trained
from meshwright.spec.problem import InputError
from meshwright.train import dpo
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.verify.collectives import Calls, differences, implied, observing

# float64 sums in another order: a few hundred terms of relative error 1e-16 each, through four updates.
TOLERANCE = 1e-12
BETA = 0.3
WORDS = (
    "objective=dpo",
    f"dpo.beta={BETA}",
    "data.format=chat",
    "data.template=chatml",
    "arch.vocab=336",
    "adapter.kind=lora",
    "adapter.rank=3",
    "sequence=384",
    "batch=4",
    "steps=2",
    "data.eval_fraction=0.2",
)


def pairs(count: int) -> list[dict]:
    """Answers of very different lengths to questions that both have."""
    return [
        {
            "prompt": f"What is {number} and {number % 5}?",
            "chosen": "It is four. " * (1 + number % 4),
            "rejected": "Red, green. " * (1 + number * number % 5),
        }
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("dpo")
    byte_level().save(str(made / "tokenizer.json"))
    write_lines(made / "pairs.jsonl", pairs(48))
    make_corpus(a_run(made), made)  # before the ranks ask
    return made


def a_run(folder: Path, *words: str) -> Run:
    own = (f"data.source={folder}/pairs.jsonl", f"data.tokenizer={folder}/tokenizer.json")
    return make_run(folder, *WORDS, *own, *words)


def one_process(folder: Path) -> Trial:
    run = a_run(folder, "plan.replicate=1")
    return drive(run, make_corpus(run, folder), alone())


def answers_alone(run: Run, corpus: Corpus, model: torch.nn.Module) -> torch.Tensor:
    """The log-probability of every answer by itself, one forward each: (pairs, 2)."""
    (tokens,), found = corpus.sources, []
    assert tokens.mask is not None
    begin = 0
    for end in tokens.ends.tolist():
        ids = torch.tensor(tokens.read(begin, end - begin).astype("int64"))
        mask = torch.tensor(tokens.mask.read(begin, end - begin).astype("int64"))
        positions = torch.arange(len(ids) - 1)[None]
        logits = model(ids[None, :-1], positions)[0]
        each = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append((each * mask[1:]).sum())
        begin = end
    return torch.stack(found).view(-1, 2)


def test_loss_and_gradients_are_those_of_the_paper(folder):
    """As TRL has it (loss_type sigmoid), by one forward for each answer alone and none of our packing."""
    run = a_run(folder, "plan.replicate=1", "data.eval_fraction=0", "batch=1")
    corpus = make_corpus(run, folder)
    state = build(run, corpus, alone())
    rows = state.loader.train_counts[0]
    state.loader.close()
    run = a_run(folder, "plan.replicate=1", "data.eval_fraction=0", f"batch={rows}", "plan.grad_accum=1")
    state = build(run, corpus, alone())
    model = state.chunks[0]
    torch.manual_seed(1)
    with torch.no_grad():  # as if some steps were past: B is not zero
        for name, weight in model.named_parameters():
            if name.endswith("lora_b"):
                weight.copy_(0.05 * torch.randn(weight.shape, dtype=weight.dtype))
    step, batch = dpo.PreferenceStep(run, model, alone()), state.loader.take(0)
    total = step(batch, torch.ones((), dtype=torch.float64))
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    with torch.no_grad(), dpo.without_adapter(model):
        reference = answers_alone(run, corpus, model)
    more = answers_alone(run, corpus, model) - reference
    logits = more[:, 0] - more[:, 1]
    loss = -F.logsigmoid(BETA * logits)
    loss.mean().backward()
    assert batch.pairs == len(loss) == 48
    assert abs(total.item() / 48 - loss.mean().item()) < TOLERANCE
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None
            assert (ours[name] - weight.grad).norm() <= TOLERANCE * max(weight.grad.norm().item(), 1e-3), name
    margin, ahead = step.told(48).tolist()
    assert abs(margin - BETA * logits.mean().item()) < TOLERANCE
    assert ahead == (logits > 0).double().mean().item()
    state.loader.close()


PLANS = (
    ("plan.replicate=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=1", "plan.recompute=full"),
    ("plan.shard=2", "plan.zero=2", "plan.grad_accum=2"),
    ("plan.shard=2", "plan.zero=3", "plan.grad_accum=2"),
    ("plan.tp=2", "plan.grad_accum=2"),
)


@world(2)
def test_two_ranks_are_one_device(folder):
    one = one_process(folder) if dist.get_rank() == 0 else None
    for words in PLANS:
        run = a_run(folder, *words)
        mine = drive(run, make_corpus(run, folder), mesh_of(run.plan))
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, words
            assert abs(one.losses[0] - math.log(2)) < TOLERANCE, "an adapter begins as the reference"
            assert one.losses[-1] < one.losses[0] - 0.01
            assert one.held < math.log(2)
            names = {param.name for param in trained(run.arch)}
            first = build(run := a_run(folder, "plan.replicate=1"), make_corpus(run, folder), alone())
            held = dict(first.chunks[0].named_parameters())
            assert all(torch.equal(weight, held[name]) for name, weight in mine.weights.items() if name not in names)
            first.loader.close()


def second_step(run: Run, mesh: Mesh, folder: Path) -> Calls:
    state = build(run, make_corpus(run, folder), mesh)
    steps = train(run, state, mesh)
    next(steps)
    with observing() as seen:
        result = next(steps)
    assert isinstance(result, StepResult)
    assert result.preference is not None
    assert 0 <= result.preference[1] <= 1
    state.loader.close()
    return seen


@world(2)
def test_a_step_sends_what_the_plan_implies(folder):
    more = ("plan.tp=2", "plan.precision=bf16", "plan.recompute=full", "plan.microbatch=2")
    for words in (*PLANS, ("plan.shard=2", "plan.zero=3", "plan.precision=bf16", "plan.recompute=full"), more):
        run = a_run(folder, *words)
        mesh = mesh_of(run.plan)
        said = traffic(run.arch, run.plan, run.sequence, place=mesh.place)
        assert not list(differences(second_step(run, mesh, folder), implied(said, run.plan, mesh))), words


def test_the_planner_offers_what_may_be_run(folder):
    arch = msgspec.structs.replace(preset("llama3-8b"), tuning=a_run(folder).arch.tuning)
    question = Question(
        arch=arch,
        sequence=4096,
        batch=16,
        precision="bf16",
        cluster=cluster("8xh100"),
        stack=stack_of("meshwright"),
    )
    found = list(islice(plans(question), 200))
    assert found
    assert {(plan.cp, plan.pp, plan.compile) for plan in found} == {(1, 1, False)}
    assert any(plan.tp == 2 for plan in plans(question))
    job = question.job(found[0])
    plain = msgspec.structs.replace(arch, tuning=msgspec.structs.replace(arch.tuning, compared=False))
    other = msgspec.structs.replace(job, arch=plain)
    assert 1.2 < price(job).seconds / price(other).seconds < 1.6
    lines, before = ({line.name: line.bytes for line in ledger(each).lines} for each in (job, other))
    assert lines["logits"] > before["logits"], "all of a microbatch, not a chunk of rows"
    assert lines["weights"] == before["weights"], "and no second copy"


def test_the_reference_is_one_more_forward(folder):
    run, plain = a_run(folder), make_run(folder, "adapter.kind=lora", "adapter.rank=3", "arch.vocab=336")
    more = step_flops(run.arch, 64, 1) / step_flops(plain.arch, 64, 1)
    assert 1.3 < more < 1.6  # 4 forwards for 3, of which frozen weights spare one


ASKED = turns("What is two and two?")
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is four.", "It is five."))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED[0]["content"], "chosen": GOOD["content"], "rejected": BAD["content"]},
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"prompt": ASKED[0]["content"], "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    ],
)
def test_preferences_are_known_by_their_fields(record):
    chosen, rejected = preference("x", record, {})
    assert [each["content"] for each in chosen.messages] == [ASKED[0]["content"], GOOD["content"]]
    assert [each["content"] for each in rejected.messages] == [ASKED[0]["content"], BAD["content"]]
    assert chosen.prompt == rejected.prompt == 1


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"messages": [*ASKED, GOOD]}, "has no chosen and rejected answer"),
        ({"chosen": "a", "rejected": "b"}, "have no prompt in common"),
        ({"chosen": [*ASKED, GOOD], "rejected": [*turns("Who?"), BAD]}, "have no prompt in common"),
        ({"prompt": "Why?", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"prompt": "Why?", "chosen": " ", "rejected": "a"}, "is an empty answer"),
        ({"prompt": "Why?", "chosen": "a", "rejected": 5}, "the field 'rejected' holds int, not text"),
    ],
)
def test_preferences_that_cannot_be_used_are_named(record, told):
    with pytest.raises(InputError, match=told):
        preference("pairs.jsonl:3", record, {})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("adapter.kind=none", "adapter.rank=16"), "the reference of objective = dpo is the base without adapters"),
        (("plan.cp=2",), "plan.cp would cut them apart"),
        (("plan.pp=2",), "plan.pp would cut them apart"),
        (("data.pack=documents",), "pairs of answers, each in one row"),
        (("data.train_on=all",), "compares answers, not questions"),
        (("dpo.beta=0",), "dpo.beta = 0.0 is out of range"),
        (("objective=sft",), "is of DPO, and objective = sft"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(folder, words, told):
    own = (f"data.source={folder}/pairs.jsonl", f"data.tokenizer={folder}/tokenizer.json", "arch.preset=tiny")
    _, problems = load.examine(None, [*own, *WORDS, *words])
    assert any(told in problem.text for problem in problems), problems


def test_a_run_of_preferences_keeps_its_digest_apart(folder):
    first, other = a_run(folder), a_run(folder, "dpo.beta=0.2")
    assert digest(first) != digest(other)
    plain = make_run(folder)
    assert not {"objective", "dpo"} & mathematics(plain).keys()
    assert json.dumps(mathematics(first)["dpo"]) == '{"beta": 0.3}'
