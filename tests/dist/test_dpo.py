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
from live import Live
from test_traffic import level
from trials import Trial, alone, deviation, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.cli.main import main
from meshwright.config import load
from meshwright.config.presets import preset
from meshwright.config.run import Run, digest, mathematics
from meshwright.cost.flops import step_flops
from meshwright.cost.memory import ledger
from meshwright.cost.resident import states
from meshwright.cost.step_time import lower_bound, price, relay_seconds
from meshwright.cost.traffic import traffic
from meshwright.data.conversation import preference
from meshwright.data.prepare import Corpus
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.parallel.expert import learned_buffers
from meshwright.parallel.mesh import Mesh, local
from meshwright.search.question import Question
from meshwright.search.space import plans
from meshwright.spec.params import count, trained
from meshwright.spec.problem import InputError
from meshwright.train import dpo
from meshwright.train.build import build
from meshwright.train.loop import StepResult, train
from meshwright.train.saving import restore
from meshwright.train.state import State
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

DORA = ("adapter.kind=dora",)
MOE = ("arch.preset=tiny-moe", "arch.layers=2", "arch.vocab=336")
# A router's losses are of rows as they are packed, which an answer alone has not.
ROUTED = (*MOE, "arch.balance_loss=0", "arch.z_loss=0")
COPY = ("adapter.kind=none", "adapter.rank=16", "optim.lr=1e-3")  # the reference is a frozen copy
BIASED = (
    "arch.preset=tiny-deepseek-v3",
    "arch.layers=2",
    "arch.vocab=336",
    *COPY,
)  # a load bias, which each step moves


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


def one_process(folder: Path, *words: str) -> Trial:
    run = a_run(folder, *words, "plan.replicate=1")
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


def whole_batch(path: Path, *words: str) -> tuple[Run, Corpus, State]:
    """All pairs in one microbatch, as if some steps were past: what is trained is not what it was at first."""
    words = ("plan.replicate=1", "data.eval_fraction=0", *words)
    run = a_run(path, *words, "batch=1")
    corpus = make_corpus(run, path)
    state = build(run, corpus, alone())
    rows = state.loader.train_counts[0]
    state.loader.close()
    run = a_run(path, *words, f"batch={rows}", "plan.grad_accum=1")
    state = build(run, corpus, alone())
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in state.chunks[0].named_parameters():
            if name.endswith(("lora_b", "magnitude")) or (state.reference and len(weight.shape) == 2):
                weight.add_((0.01 if state.reference else 0.05) * torch.randn(weight.shape, dtype=weight.dtype))
    return run, corpus, state


@pytest.mark.parametrize("words", [(), DORA, COPY, ROUTED, (*ROUTED, *DORA), (*ROUTED, *COPY)])
def test_loss_and_gradients_are_those_of_the_paper(folder, words):
    """As TRL has it (loss_type sigmoid), by one forward for each answer alone and none of our packing."""
    run, corpus, state = whole_batch(folder, *words)
    model = state.chunks[0]
    step, batch = dpo.PreferenceStep(run, state, alone()), state.loader.take(0)
    total = step(batch, torch.ones((), dtype=torch.float64))
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    with step.referring():
        reference = answers_alone(run, corpus, step.reference[0])
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
    ("plan.shard=2", "plan.zero=3", "plan.cpu_offload=true"),
    ("plan.tp=2", "plan.grad_accum=2"),
    ("plan.cp=2", "plan.cp_kind=ring", "plan.grad_accum=2", "plan.zero=3"),
    ("plan.cp=2", "plan.cp_kind=ulysses", "plan.recompute=full"),
    ("plan.pp=2", "plan.grad_accum=2", "plan.schedule=gpipe"),
)
COPY_PLANS = (
    ("plan.shard=2", "plan.zero=1", "plan.recompute=full"),
    ("plan.tp=2",),
    ("plan.cp=2", "plan.cp_kind=ring", "plan.grad_accum=2", "plan.zero=3"),
    ("plan.pp=2", "plan.grad_accum=4"),
)


def assert_it_learns(one: Trial, why: str) -> None:
    assert abs(one.losses[0] - math.log(2)) < TOLERANCE, why
    assert one.losses[-1] < one.losses[0] - 0.01
    assert one.held < math.log(2)


@world(2)
def test_two_ranks_with_magnitudes_are_one_device(folder):
    one = one_process(folder, *DORA) if dist.get_rank() == 0 else None
    for words in (PLANS[3], PLANS[4], PLANS[-1]):
        run = a_run(folder, *DORA, *words)
        mine = drive(run, make_corpus(run, folder), mesh_of(run.plan))
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, words
            assert_it_learns(one, "a magnitude begins as the norm of its row")


EXPERT_PLANS = (
    ("plan.shard=2", "plan.zero=3", "plan.ep=2", "plan.grad_accum=2"),
    ("plan.tp=2", "plan.recompute=full"),
    ("plan.cp=2", "plan.ep=2", "plan.zero=1"),
    ("plan.pp=2", "plan.grad_accum=2"),
)


@world(2)
def test_two_ranks_with_experts_are_one_device_and_send_what_the_plan_implies(folder):
    for form, planned in (((), EXPERT_PLANS), (COPY, EXPERT_PLANS[:2])):
        one = one_process(folder, *MOE, *form) if dist.get_rank() == 0 else None
        for words in planned:
            run = a_run(folder, *MOE, *form, *words)
            mesh = mesh_of(run.plan)
            mine = drive(run, make_corpus(run, folder), mesh)
            if one is not None:
                assert deviation(mine, one) < TOLERANCE, words
                assert_it_learns(one, "the model begins as the reference")
            said = traffic(run.arch, run.plan, run.sequence, place=mesh.place)
            seen = level(second_step(run, mesh, folder), run, mesh)
            told = list(differences(seen, implied(said, run.plan, mesh)))
            assert not told, (words, told)
            held = [local(weight) for chunk in mine.state.reference for weight in chunk.parameters()]
            lines = {line.name: line.bytes for line in states(run.arch, run.plan, mesh.place)}
            assert sum(weight.untyped_storage().nbytes() for weight in held) == lines.get("reference", 0), words


def surprises(folder: Path, *words: str) -> list[str]:
    run = a_run(folder, *words)
    mesh = mesh_of(run.plan)
    said = traffic(run.arch, run.plan, run.sequence, place=mesh.place)
    return list(differences(level(second_step(run, mesh, folder), run, mesh), implied(said, run.plan, mesh)))


@world(2)
def test_a_reference_draws_no_second_experts(folder):
    assert not surprises(folder, *MOE, "arch.router=gshard", "arch.capacity=1.0", "plan.cp=2")


@world(4)
def test_a_frozen_copy_s_experts_are_gathered_among_the_ranks_that_share_them(folder):
    for zero in (1, 3):
        assert not surprises(folder, *MOE, *COPY, "plan.shard=4", f"plan.zero={zero}", "plan.ep=2")


@world(2)
def test_two_ranks_are_one_device(folder):
    one = one_process(folder) if dist.get_rank() == 0 else None
    for words in PLANS:
        run = a_run(folder, *words)
        mine = drive(run, make_corpus(run, folder), mesh_of(run.plan))
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, words
            assert_it_learns(one, "an adapter begins as the reference")
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
def test_two_ranks_with_a_frozen_copy_are_one_device(folder):
    one = one_process(folder, *COPY) if dist.get_rank() == 0 else None
    for words in COPY_PLANS:
        run = a_run(folder, *COPY, *words)
        mine = drive(run, make_corpus(run, folder), mesh_of(run.plan))
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, words
            assert_it_learns(one, "the copy is of the first weights")
        held = [local(weight) for chunk in mine.state.reference for weight in chunk.parameters()]
        said = {line.name: line.bytes for line in states(run.arch, run.plan, mesh_of(run.plan).place)}
        # As torch stores a shard: as long as the longest.
        assert sum(weight.untyped_storage().nbytes() for weight in held) == said["reference"], words
        assert not any(weight.requires_grad for chunk in mine.state.reference for weight in chunk.parameters())


def test_the_reference_is_never_the_peak(folder):
    """The ledger has its weights, and leaves out what its forward makes: a step that goes back has more."""
    run = a_run(folder, *COPY, "plan.replicate=1", "plan.grad_accum=2")
    state = build(run, make_corpus(run, folder), alone())
    step, batch = dpo.PreferenceStep(run, state, alone()), state.loader.take(0)
    step(batch, torch.ones(()))
    known = [weight for chunk in (*state.chunks, *state.reference) for weight in chunk.parameters()]
    with Live(known) as reference, step.referring():
        step.preferences(state.reference, batch.microbatches[0])
    with Live(known) as whole:
        step(batch, torch.ones(()))
    state.loader.close()
    assert 0 < reference.peak < whole.peak


@world(2)
def test_a_step_sends_what_the_plan_implies(folder):
    more = ("plan.tp=2", "plan.precision=bf16", "plan.recompute=full", "plan.microbatch=2")
    magnitudes = (*DORA, "plan.tp=2", "plan.recompute=full")
    low = ("plan.shard=2", "plan.zero=3", "plan.precision=bf16", "plan.recompute=full")
    for words in (*PLANS, low, more, magnitudes):
        run = a_run(folder, *words)
        mesh = mesh_of(run.plan)
        said = traffic(run.arch, run.plan, run.sequence, place=mesh.place)
        assert not list(differences(second_step(run, mesh, folder), implied(said, run.plan, mesh))), words
    for words in COPY_PLANS:
        run = a_run(folder, *COPY, *words)
        mesh = mesh_of(run.plan)
        said = traffic(run.arch, run.plan, run.sequence, place=mesh.place)
        assert not list(differences(second_step(run, mesh, folder), implied(said, run.plan, mesh))), words


def question_of(folder: Path, *words: str) -> Question:
    arch = msgspec.structs.replace(preset("llama3-8b"), tuning=a_run(folder, *words).arch.tuning)
    return Question(
        arch=arch,
        sequence=4096,
        batch=16,
        precision="bf16",
        cluster=cluster("8xh100"),
        stack=stack_of("meshwright"),
    )


@pytest.mark.parametrize("words", [(), COPY])
def test_the_planner_offers_what_may_be_run(folder, words):
    question = question_of(folder, *words)
    found = list(islice(plans(question), 0, 40000, 200))
    assert {plan.compile for plan in found} == {False}
    for axis in ("tp", "cp", "pp"):
        assert any(getattr(plan, axis) > 1 for plan in found), axis
    for plan in found:
        job = question.job(plan)
        assert lower_bound(job) <= price(job).seconds * (1 + 1e-9), plan


@pytest.mark.parametrize("words", [(), COPY])
def test_the_planner_prices_the_reference(folder, words):
    question = question_of(folder, *words)
    plan = next(plans(question))
    job = question.job(plan)
    tuning = msgspec.structs.replace(question.arch.tuning, compared=False)
    other = msgspec.structs.replace(job, arch=msgspec.structs.replace(question.arch, tuning=tuning))
    assert 1.2 < price(job).seconds / price(other).seconds < 1.6
    lines, before = ({line.name: line.bytes for line in ledger(each).lines} for each in (job, other))
    assert lines["logits"] > before["logits"], "all of a microbatch, not a chunk of rows"
    assert lines["weights"] == before["weights"], "and no second copy of what is trained"
    shards = plan.pp * plan.tp * plan.shards
    assert lines.get("reference", 0) == (2 * count(question.arch) // shards if words else 0)


def test_a_pipeline_takes_the_reference_through_its_stages_first():
    assert relay_seconds([1, 1], [0, 1], 5) == 6  # the last stage begins a second late
    assert relay_seconds([1, 3], [0, 1], 50) == 1 + 3 * 50
    assert relay_seconds([1, 1, 1, 1], [0, 1, 0, 1], 50) == 4 + 3 * 49  # the first rank waits for its second stage


def test_the_reference_is_one_more_forward(folder):
    run, plain = a_run(folder), make_run(folder, "adapter.kind=lora", "adapter.rank=3", "arch.vocab=336")
    more = step_flops(run.arch, 64, 1) / step_flops(plain.arch, 64, 1)
    assert 1.3 < more < 1.6  # 4 forwards for 3, of which frozen weights spare one


@world(2)
def test_a_load_bias_moves_and_that_of_the_frozen_copy_does_not(folder):
    one = one_process(folder, *BIASED) if dist.get_rank() == 0 else None
    first = build(a_run(folder, *BIASED, "plan.replicate=1"), make_corpus(a_run(folder, *BIASED), folder), alone())
    for words in (
        ("plan.shard=2", "plan.zero=3", "plan.grad_accum=2"),
        ("plan.tp=2",),
        ("plan.pp=2", "plan.grad_accum=2"),
    ):
        run = a_run(folder, *BIASED, *words)
        mesh = mesh_of(run.plan)
        mine = drive(run, make_corpus(run, folder), mesh)
        if one is not None:
            assert deviation(mine, one) < TOLERANCE, words
        biases, still, begun = (
            {name: bias for chunk in chunks for name, bias in learned_buffers(chunk, run.arch).items()}
            for chunks in (mine.state.chunks, mine.state.reference, first.chunks)
        )
        assert biases.keys() == still.keys()
        for name, bias in still.items():
            assert torch.equal(bias, begun[name]), (words, name)
            assert not torch.equal(bias, biases[name]), (words, name)
        assert not surprises(folder, *BIASED, *words)
    first.loader.close()


def test_checkpoints_have_the_digest_of_the_copy_and_not_the_copy(folder, tmp_path):
    run = a_run(folder, *COPY, "plan.replicate=1", "steps=1", "checkpoint.every=1", "data.eval_fraction=0")
    corpus = make_corpus(run, folder)
    state = build(run, corpus, alone())
    list(train(run, state, alone(), tmp_path))
    state.loader.close()
    again = build(run, corpus, alone())
    assert restore(again, run, alone(), tmp_path, lambda text: None) is not None
    again.loader.close()
    pairs = zip(again.reference[0].parameters(), state.reference[0].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "made from the base, as at first"
    assert not torch.equal(again.reference[0].embed.weight, again.chunks[0].embed.weight)
    assert not any("reference" in path.name for path in tmp_path.rglob("*"))
    other = build(run, corpus, alone())
    with torch.no_grad():
        other.reference[0].embed.weight[0, 0] += 1
    with pytest.raises(InputError, match=r"the frozen weights .* are not those beside which step"):
        restore(other, run, alone(), tmp_path, lambda text: None)
    other.loader.close()


def test_another_load_bias_is_another_copy(folder, tmp_path):
    run = a_run(folder, *BIASED, "plan.replicate=1", "steps=1", "checkpoint.every=1", "data.eval_fraction=0")
    corpus = make_corpus(run, folder)
    state, again, other = (build(run, corpus, alone()) for _ in range(3))
    list(train(run, state, alone(), tmp_path))
    assert restore(again, run, alone(), tmp_path, lambda text: None) is not None
    (name, moved), *_ = learned_buffers(again.chunks[0], run.arch).items()
    assert torch.equal(moved, learned_buffers(state.chunks[0], run.arch)[name])
    assert not torch.equal(moved, learned_buffers(again.reference[0], run.arch)[name])
    learned_buffers(other.reference[0], run.arch)[name].add_(1)
    with pytest.raises(InputError, match=r"the frozen weights .* are not those beside which step"):
        restore(other, run, alone(), tmp_path, lambda text: None)
    for each in (state, again, other):
        each.loader.close()


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


def test_a_dry_run_of_the_loss_of_tokens_is_refused(capsys):
    words = ["arch.preset=tiny", "objective=dpo", "data.format=chat", "data.source=x.jsonl", "sequence=64", "batch=4"]
    assert main(["plan", *words, "--cluster", "2xh100", "--trace"]) == 2
    assert "objective = dpo compares answers; use --traffic" in capsys.readouterr().err


def test_a_run_of_preferences_keeps_its_digest_apart(folder):
    first, other = a_run(folder), a_run(folder, "dpo.beta=0.2")
    assert digest(first) != digest(other)
    plain = make_run(folder)
    assert not {"objective", "dpo"} & mathematics(plain).keys()
    assert json.dumps(mathematics(first)["dpo"]) == '{"beta": 0.3}'
