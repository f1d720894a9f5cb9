"""The product's data parallelism beside torch's own and a readable one: four ways to the same numbers."""

import pytest
import torch
import torch.distributed as dist
from readable_ddp import Replicated
from test_data_parallel import TOLERANCE, folder  # noqa: F401
from torch.nn.parallel import DistributedDataParallel
from trials import CPU, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.data.loader import Loader
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill_model
from meshwright.models.layers import token_loss_sum
from meshwright.train.state import weights

WORDS = ("data.pack=documents", "steps=3", "optim.grad_clip=0.0", "optim.schedule=constant", "plan.grad_accum=2")


def plain(run):
    model = Decoder(run.arch).double()
    fill_model(model, run.arch, run.seed)
    return model


def loss_of(model, microbatch, tokens):
    logits = model(microbatch.tokens, microbatch.positions, microbatch.documents, microbatch.index)
    return token_loss_sum(logits, microbatch.targets) / tokens


def groups(model, run):
    """Matrices decay, vectors do not."""
    return [
        {"params": [w for w in model.parameters() if w.ndim >= 2], "weight_decay": run.optim.weight_decay},
        {"params": [w for w in model.parameters() if w.ndim < 2], "weight_decay": 0.0},
    ]


def settings(run):
    return {"lr": run.optim.lr, "betas": (run.optim.beta1, run.optim.beta2), "eps": run.optim.eps}


def by_torch(run, corpus, *, zero):
    """DistributedDataParallel, with AdamW whole or its states sharded (ZeRO-1)."""
    model = DistributedDataParallel(plain(run))
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # half a second, of every worker that collects it

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, weight_decay=0.0, **settings(run))
    else:
        optimizer = torch.optim.AdamW(groups(model, run), **settings(run))
    loader = Loader(corpus, run, dist.get_rank(), CPU)
    for step in range(run.steps):
        batch = loader.take(step)
        optimizer.zero_grad()
        with model.no_sync():
            for microbatch in batch.microbatches[:-1]:
                loss_of(model, microbatch, batch.tokens / dist.get_world_size()).backward()  # torch averages over ranks
        loss_of(model, batch.microbatches[-1], batch.tokens / dist.get_world_size()).backward()
        optimizer.step()
    loader.close()
    return dict(model.module.named_parameters())


def by_hand(run, corpus):
    model = Replicated(plain(run), bucket_bytes=100_000)
    optimizer = torch.optim.AdamW(groups(model, run), **settings(run))
    loader = Loader(corpus, run, dist.get_rank(), CPU)
    for step in range(run.steps):
        batch = loader.take(step)
        optimizer.zero_grad()
        with model.accumulating():
            for microbatch in batch.microbatches[:-1]:
                loss_of(model, microbatch, batch.tokens).backward()
        loss_of(model, batch.microbatches[-1], batch.tokens).backward()
        model.finish()
        optimizer.step()
    loader.close()
    assert len(model.buckets) > 3
    return dict(model.module.named_parameters())


def far(ours, theirs):
    return max(((ours[name] - weight.detach()).norm() / weight.norm()).item() for name, weight in theirs.items())


@pytest.mark.parametrize("plan", [("plan.replicate=2",), ("plan.shard=2", "plan.zero=1")], ids=["ddp", "zero1"])
@world(2)
def test_the_product_torch_and_a_page_of_code_agree(folder, plan):  # noqa: F811
    zero = "plan.zero=1" in plan
    run = make_run(folder, *WORDS, *plan, *(("optim.weight_decay=0.0",) if zero else ()))
    corpus = make_corpus(run, folder)
    mesh = mesh_of(run.plan)
    trial = drive(run, corpus, mesh)
    ours = dict(weights(trial.state.chunks, run, mesh))
    assert far(ours, by_torch(run, corpus, zero=zero)) < TOLERANCE
    if not zero:
        assert far(ours, by_hand(run, corpus)) < TOLERANCE
