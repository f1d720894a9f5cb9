"""Models whose ranks use different parameters, beside torch's DistributedDataParallel with `find_unused_parameters`."""

from collections import Counter
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from readable_ddp import Replicated
from strangers import FORKS, Forked, Forks, Looped, Short, Tower, batches, forked_batches, loss, signed_batches
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from trials import mesh_of
from worlds import world

from meshwright.config.check import missing
from meshwright.config.run import Optim
from meshwright.optim import clip
from meshwright.optim.resident import ResidentOptimizer
from meshwright.parallel.apply import apply
from meshwright.parallel.model_spec import ModelSpec, one_unit
from meshwright.spec.plan import Plan
from meshwright.train.state import gathered
from meshwright.verify import parity
from meshwright.verify.collectives import Call, Calls, observing
from meshwright.verify.prove_module import Batch, ModuleStep, decided, locations_of, streams_of

# float64 sums in another order: some tens of terms of relative error 1e-16 each, through five AdamW steps.
TOLERANCE = 1e-12
OPTIM = Optim(lr=1e-2, schedule="constant", grad_clip=0.0, weight_decay=0.1)
ROWS = 8

# One world each, whose start costs more than its steps.
TWO = ["replicate=2", "replicate=2,grad_accum=2", *(f"shard=2,zero={zero},grad_accum=2" for zero in (1, 2, 3))]
FOUR = ["shard=4,zero=3", *(f"replicate=2,shard=2,zero={zero},grad_accum=2" for zero in (1, 2, 3))]


def plain() -> Forked:
    torch.manual_seed(5)
    return Forked().double()


def mine(plan: Plan, part: int) -> list[Batch]:
    """The rows of one data rank."""
    rows = plan.microbatch * plan.grad_accum
    return [tuple(x.double()[part * rows :][:rows] for x in batch) for batch in forked_batches()]


def ours(plan: Plan, model_spec: ModelSpec) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after the last step, and the gradient's norm of each."""
    mesh, model = mesh_of(plan), plain()
    locations, streams = locations_of(model, plan, model_spec), streams_of(model, plan, model_spec)
    chunks = apply(model, plan, mesh, model_spec)
    step = ModuleStep(chunks, plan, mesh, loss, streams)
    optimizer = ResidentOptimizer(OPTIM, chain.from_iterable(chunk.parameters() for chunk in chunks), plan)
    measure, norms = clip.choose(plan), []
    for batch in mine(plan, mesh.data_rank):
        optimizer.zero_grad()
        loss_sum, count = step(batch)
        total, square, _ = measure(chunks, loss_sum, mesh, False)
        verdict = clip.grad_stats(total, square, count, OPTIM.grad_clip)
        optimizer.step(OPTIM.lr, verdict)
        norms.append(verdict.norm.item())
    return dict(gathered(chunks, locations, mesh, lambda weight: weight)), norms


def adamw(model: nn.Module) -> torch.optim.AdamW:
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim >= 2], "weight_decay": OPTIM.weight_decay},
        {"params": [weight for weight in model.parameters() if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)


def norm_of(model: nn.Module) -> float:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return torch.stack([gradient.norm() for gradient in gradients]).norm().item()


def backward(model: nn.Module, microbatch: tuple[Tensor, ...], divisor: float) -> None:
    total, _ = loss(model(microbatch[0]), microbatch)
    (total / divisor).backward()


def microbatches(plan: Plan, batch: Batch) -> list[tuple[Tensor, ...]]:
    assert isinstance(batch, tuple)
    return list(zip(*(x.split(plan.microbatch) for x in batch), strict=True))


def by_torch(plan: Plan) -> tuple[dict[str, Tensor], list[float]]:
    model = DistributedDataParallel(plain(), find_unused_parameters=True)
    optimizer, norms, divisor = adamw(model), [], ROWS / dist.get_world_size()  # torch averages over ranks
    for batch in mine(plan, dist.get_rank()):
        optimizer.zero_grad()
        *earlier, last = microbatches(plan, batch)
        with model.no_sync():
            for microbatch in earlier:
                backward(model, microbatch, divisor)
        backward(model, last, divisor)
        norms.append(norm_of(model))
        optimizer.step()
    return dict(model.module.named_parameters()), norms


def by_hand(plan: Plan) -> tuple[dict[str, Tensor], list[float]]:
    model = Replicated(plain(), bucket_bytes=1000)
    optimizer, norms = adamw(model), []
    for batch in mine(plan, dist.get_rank()):
        optimizer.zero_grad()
        *earlier, last = microbatches(plan, batch)
        with model.accumulating():
            for microbatch in earlier:
                backward(model, microbatch, ROWS)
        backward(model, last, ROWS)
        model.finish()
        norms.append(norm_of(model))
        optimizer.step()
    assert len(model.buckets) > 3
    return dict(model.module.named_parameters()), norms


def assert_equal(
    words: str, mine: tuple[dict[str, Tensor], list[float]], others: tuple[dict[str, Tensor], list[float]]
) -> None:
    assert mine[1] == pytest.approx(others[1], rel=TOLERANCE), words
    far = {name: ((mine[0][name] - weight).norm() / weight.norm()).item() for name, weight in others[0].items()}
    assert max(far.values()) < TOLERANCE, f"{words}: {far}"


def compare(plans: list[str]) -> None:
    for words, plan in decided(plans, ROWS, 4, ModelSpec()):
        reference = by_torch(plan)
        for name in ("never", "fixed"):  # of the reference itself: what nobody uses or trains does not even decay
            assert torch.equal(reference[0][name], plain().get_parameter(name))
        assert_equal(words, ours(plan, ModelSpec()), reference)
    assert_equal(f"{words} as one unit", ours(plan, ModelSpec(blocks=one_unit)), reference)


@world(2)
def test_two_ranks_train_like_torchs_own():
    compare(TWO)


@world(4)
def test_four_ranks_train_like_torchs_own():
    compare(FOUR)


@world(2)
def test_the_readable_ddp_does_too():
    for words, plan in decided(TWO[:2], ROWS, 4, ModelSpec()):
        assert_equal(words, by_hand(plan), by_torch(plan))


@world(2)
def test_a_model_that_uses_everything_pays_one_number_a_parameter_in_the_norms_reduction():
    for words, plan in decided(["replicate=2", "shard=2,zero=3,grad_accum=2"], ROWS, 4, ModelSpec()):
        plainly, asking = (collectives(plan, ModelSpec(find_unused_parameters=find)) for find in (False, True))
        parameters = len(list(Tower().parameters()))
        norm, wider = Call("all_reduce", (0, 1), 3 * 8), Call("all_reduce", (0, 1), (3 + parameters) * 8)
        assert plainly - asking == Counter({norm: 1}), words
        assert asking - plainly == Counter({wider: 1}), words


def collectives(plan: Plan, model_spec: ModelSpec) -> Calls:
    """Of the second step of a model that uses everything."""
    mesh = mesh_of(plan)
    model = Tower().double()
    streams = streams_of(model, plan, model_spec)
    chunks = apply(model, plan, mesh, model_spec)
    step, measure = ModuleStep(chunks, plan, mesh, loss, streams), clip.choose(plan)
    for batch in batches():
        mine = tuple(x.double()[mesh.data_rank * ROWS // 2 :][: ROWS // 2] for x in batch)
        with observing() as seen:
            loss_sum, _ = step(mine)
            measure(chunks, loss_sum, mesh, False)
    return seen


def test_blocks_that_a_rank_leaves_out_are_recomputed_and_compiled():
    plans = ["shard=2,zero=3,recompute=full", "replicate=2,grad_accum=2,precision=bf16"]
    if not any(missing(Plan(microbatch=1, compile=True))):
        plans.append("shard=2,zero=3,compile=true")
    for plan in plans:
        (verdict,) = parity(Forked, forked_batches(), loss, [plan])
        assert verdict.passed, verdict


def test_what_is_left_out_inside_a_block_is_split_every_way():
    plans = ["shard=2,zero=3,tp=2", "pp=2,replicate=2", "pp=2,shard=2,zero=2,schedule=interleaved"]
    verdicts = parity(Forks, signed_batches(), loss, plans, FORKS)
    assert [verdict.first_bad or verdict.error for verdict in verdicts] == [""] * len(plans)


def test_blocks_that_are_called_twice_are_refused_unless_all_ranks_call_them_alike():
    (refused,) = parity(Looped, batches(), loss, ["shard=2,zero=3"])
    assert "layers.0 is called twice in a forward, or after a later block" in refused.error
    assert "ModelSpec(find_unused_parameters=False)" in refused.error
    for model_spec in (ModelSpec(find_unused_parameters=False), ModelSpec(blocks=one_unit)):
        (verdict,) = parity(Looped, batches(), loss, ["shard=2,zero=3"], model_spec)
        assert verdict.passed, verdict


def test_blocks_of_a_run_that_is_recomputed_together_cannot_be_left_out():
    plans = ["recompute=every-2", "shard=2,zero=3,recompute=every-2"]
    for verdict in (*parity(Short, batches(), loss, plans), *parity(Forked, forked_batches(), loss, plans[1:])):
        assert verdict.error.strip().endswith("use plan.recompute = full, which takes each block by itself")
