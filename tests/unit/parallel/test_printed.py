"""Printing a chunk shows which transforms were applied, and to which modules."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.models.decoder import Decoder
from meshwright.parallel import mesh as meshes
from meshwright.parallel.apply import apply
from meshwright.parallel.model_spec import DECODER
from meshwright.spec.arch import Arch
from meshwright.spec.plan import Plan

ARCH = Arch(layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=32, context=16)


@pytest.fixture
def printed():
    def text(**fields: object) -> str:
        plan = Plan(microbatch=1, **fields)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world)
        with torch.device("meta"):
            model = Decoder(ARCH)
        (chunk,) = apply(model, plan, meshes.make(plan, torch.device("cpu")), DECODER)
        return repr(chunk)

    yield text
    dist.destroy_process_group()


def test_a_plain_model_is_printed_as_it_is(printed):
    assert printed() == repr(Decoder(ARCH))


def test_every_transform_is_shown_where_it_was_applied(printed):
    text = printed(tp=2, shard=2, zero=3, recompute="full", activation_offload=True)
    assert "FSDPDecoder(" in text
    first, last = text.split("FSDPBlock(")[1:]
    assert "recomputed, saved activations on the host" in first
    assert "recomputed" in last
    assert "saved activations" not in last.split("(attn)")[0]  # without a pipeline its backward comes at once
    assert "(q): Linear(in_features=16, out_features=16, bias=False, ColwiseParallel over tp=2)" in first
    assert "(out): Linear(in_features=16, out_features=16, bias=False, RowwiseParallel over tp=2)" in first


def test_only_the_recomputed_blocks_say_so(printed):
    first, last = printed(recompute="first-1").split("Block(")[1:]
    assert "recomputed" in first
    assert "recomputed" not in last


def test_context_parallel_attention_is_shown(printed):
    assert printed(cp=2, shard=1).count("context parallel, ring over cp=2") == ARCH.layers
