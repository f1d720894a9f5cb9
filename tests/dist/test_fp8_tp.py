"""FP8 matmuls that tp cuts, or whose backward a pipeline splits: the codes of one process.

And so, where products are exact, the same training.
"""

from contextlib import contextmanager
from unittest import mock

import msgspec
import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from trials import GPT, alone, corpus_file, deviation, drive, make_corpus, make_run, mesh_of
from worlds import world

from meshwright.kernels import fp8
from meshwright.parallel import precision, shared_fp8

SMALL = ("arch.layers=2", "steps=3", "data.eval_fraction=0.0", "plan.precision=fp64", "sequence=32", "optim.lr=1e-2")
MOE = ("arch.experts=16", "arch.top_k=2", "arch.expert_ffn=32", "arch.shared_experts=2")
LATENT = ("arch.preset=tiny-deepseek-v3", "arch.head_dim=32", "arch.rope_dim=16", "arch.v_dim=16")
AHEAD = ("arch.mtp_layers=1", "plan.microbatch=8")
ONE_HEAD = ("arch.kv_heads=1", "arch.head_dim=16")
WIDER = ("arch.kv_heads=8", "arch.head_dim=16", "arch.ffn=256")
# Codes are the same, unless a sum in another order comes to lie on the other side of a step, once in some 10⁹ elements;
# what is left is float64's rounding, which a few updates by AdamW amplify.
ALLOWED = 1e-12
ONE = ("plan.tp=1", "plan.shard=1", "plan.zero=0", "plan.pp=1", "plan.schedule=1f1b", "plan.chunks=1")
ONE += ("plan.recompute=none", "plan.ep=1")
SPLIT = ("plan.pp=2", "plan.chunks=1", "plan.grad_accum=4", "plan.schedule=zb1p")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fp8")
    corpus_file(path)
    make_corpus(make_run(path), path)
    return path


@contextmanager
def in_reference_arithmetic(**how):
    """While it lasts, runs in float64 have linear layers in FP8, whose matmuls are exact products of FP8 numbers."""
    wrap = precision.wrap

    def wrapped(model, plan, mesh, model_spec):
        return wrap(model, msgspec.structs.replace(plan, precision="fp8", **how), mesh, model_spec)

    with mock.patch.object(precision, "wrap", wrapped):
        yield


def compare(folder, words, **how):
    """A plan beside one process; and beside one in plain float64, to see that it was FP8."""
    run, one = (make_run(folder, *SMALL, *words, *plan) for plan in ((), ONE))
    corpus = make_corpus(run, folder)
    with in_reference_arithmetic(**how):
        mine = drive(run, corpus, mesh_of(run.plan))
        if dist.get_rank():
            return
        reference = drive(one, corpus, alone())
    assert deviation(mine, reference) < ALLOWED
    assert deviation(drive(one, corpus, alone()), reference) > 1e-4


@world(2)
def test_two_ranks_train_as_one_process(folder):
    compare(folder, ("plan.tp=2",))
    compare(folder, ("plan.tp=2", *GPT, "plan.recompute=full"), fp8_grad="e5m2")
    compare(folder, ("plan.tp=2", "plan.recompute=selective"), fp8_scaling="rowwise")


@world(2)
def test_adapters_beside_a_base_that_is_multiplied_as_it_is_held(folder):
    lora = ("adapter.kind=lora", "adapter.base=fp8", "adapter.rank=4")
    compare(folder, ("plan.tp=2", *lora))
    compare(folder, ("plan.tp=2", *lora, "plan.recompute=full"), fp8_scaling="rowwise", fp8_grad="e5m2")
    compare(folder, ("plan.shard=2", "plan.zero=3", *lora), fp8_scaling="rowwise")  # a scale of a rank's own tokens
    compare(folder, (*SPLIT, "adapter.kind=dora", *lora[1:]))


@world(2)
def test_matrices_that_every_rank_holds_whole_train_as_one_process(folder):
    compare(folder, ("plan.tp=2", *LATENT))
    compare(folder, ("plan.tp=2", *LATENT, *AHEAD, "plan.recompute=full"), fp8_scaling="rowwise")
    compare(folder, ("plan.tp=2", *ONE_HEAD, "arch.qk_norm=full", "arch.attention_bias=qkv"), fp8_grad="e5m2")
    compare(folder, ("plan.tp=2", *ONE_HEAD, *AHEAD), fp8_scaling="rowwise")
    compare(folder, ("plan.tp=2", *AHEAD))


@world(2)
@pytest.mark.parametrize("words", [LATENT, ONE_HEAD], ids=["latent attention", "a head of two ranks"])
def test_a_gradient_that_is_rounded_in_parts_is_another(folder, words):
    def in_parts(x, group, parts=1):
        return x

    with (
        mock.patch.object(shared_fp8, "read_together", in_parts),
        mock.patch.object(shared_fp8, "shared_out", lambda x, ranks: x),
    ):
        if dist.get_rank():
            compare(folder, ("plan.tp=2", *words))
        else:
            with pytest.raises(AssertionError):
                compare(folder, ("plan.tp=2", *words))


@world(2)
def test_scales_of_parts_would_be_other_numbers(folder):
    with mock.patch.object(fp8, "_agreed", lambda sharing, *amaxes: amaxes):
        if dist.get_rank():
            compare(folder, ("plan.tp=2",))
        else:
            with pytest.raises(AssertionError):
                compare(folder, ("plan.tp=2",))


@world(2)
def test_shared_experts_and_attention_beside_routed_experts_train_as_one_process(folder):
    compare(folder, ("plan.tp=2", *MOE))
    compare(folder, ("plan.tp=2", *MOE, "arch.dense_layers=1", "plan.recompute=full"), fp8_scaling="rowwise")


@world(4)
def test_experts_of_several_ranks_train_as_one_process(folder):
    compare(folder, ("plan.tp=2", "plan.shard=2", "plan.zero=1", "plan.ep=2", *MOE, "plan.microbatch=4"))


@world(4)
def test_four_ranks_train_as_one_process(folder):
    compare(folder, ("plan.tp=4", *WIDER))
    compare(folder, ("plan.tp=4", *WIDER, "arch.kv_heads=2", *AHEAD))


@world(2)
def test_a_split_backward_trains_as_one_process(folder):
    compare(folder, SPLIT)
    compare(folder, ("plan.pp=2", "plan.schedule=zbv", "plan.grad_accum=4", "arch.layers=4"), fp8_scaling="rowwise")


@world(4)
def test_a_split_backward_over_tp_trains_as_one_process(folder):
    compare(folder, ("plan.tp=2", *SPLIT))
    compare(folder, ("plan.tp=2", *SPLIT, *GPT), fp8_grad="e5m2")
    compare(folder, ("plan.tp=2", *SPLIT, *LATENT, "arch.mtp_layers=1"))
    compare(
        folder,
        ("plan.tp=2", "plan.pp=2", "plan.schedule=zbv", "plan.grad_accum=4", "arch.layers=4"),
        fp8_scaling="rowwise",
    )


@world(4)
def test_both_halves_of_a_backward_need_the_scale_of_all_ranks(folder):
    first = fp8._SharedScale.of

    def by_itself(scale, gradient):  # in the second half
        own = scale.agreed is not None
        return fp8.scale_of(gradient, "tensorwise", scale.dtype) if own else first(scale, gradient)

    with mock.patch.object(fp8._SharedScale, "of", by_itself):
        if dist.get_rank():
            compare(folder, ("plan.tp=2", *SPLIT))
        else:
            with pytest.raises(AssertionError):
                compare(folder, ("plan.tp=2", *SPLIT))


@world(2)
def test_a_split_backward_makes_every_matmul_once(folder):
    made = list[int]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            if (flops := flop_registry.get(func._overloadpacket)) is not None:
                made[-1] += flops(*args, **kwargs or {}, out_val=out)
            return out

    for schedule in ("1f1b", "zb1p"):
        run = make_run(folder, *SMALL, "steps=1", *SPLIT[:-1], f"plan.schedule={schedule}")
        made.append(0)
        with in_reference_arithmetic(), Counting():
            drive(run, make_corpus(run, folder), mesh_of(run.plan))
    assert made[0] == made[1] > 0
