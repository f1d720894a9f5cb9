"""Signs with a scale and error feedback; the calendar of 1-bit optimizers; what is refused."""

import pytest
import torch

from meshwright.config import load
from meshwright.config.run import Optim, digest
from meshwright.cost.traffic import traffic
from meshwright.optim.onebit import SignExchange
from meshwright.spec.communication import chunk_length, exchange_of, packed_bytes, variance_steps
from meshwright.spec.problem import InputError

TINY = ("arch.preset=tiny", "batch=8", "steps=20")


def once(values: list[torch.Tensor], worker: list[torch.Tensor], server: list[torch.Tensor]) -> list[torch.Tensor]:
    return SignExchange(None).mean(values, worker, server, torch.tensor(True))


def test_what_a_compression_leaves_out_is_shorter_than_what_it_was_given():
    torch.manual_seed(1)
    sparse = torch.zeros(40, 25).index_put_((torch.tensor([3]),), torch.randn(25))  # as of an embedding
    for value in (torch.randn(7, 5), sparse, torch.full((9,), -2.0)):
        worker, server = torch.zeros_like(value), torch.zeros(chunk_length(value.numel(), 1))
        (received,) = once([value], [worker], [server])
        assert worker.norm() < value.norm()
        assert received.abs().unique().numel() == 1
        left = worker.flatten() + server[: value.numel()]
        assert torch.allclose(received.flatten() + left, value.flatten(), atol=1e-6)  # nothing is lost


def test_errors_come_later():
    """Over many exchanges of the same tensor the mean of what is received is the tensor."""
    torch.manual_seed(2)
    value = torch.randn(33, dtype=torch.float64)
    worker, server = torch.zeros_like(value), torch.zeros(chunk_length(33, 1), dtype=torch.float64)
    total = torch.zeros_like(value)
    for _ in range(400):
        total += once([value], [worker], [server])[0]
    assert (total / 400 - value).abs().max() < 0.05
    assert not server[33:].any()


def test_a_gradient_that_is_not_finite_leaves_errors_as_they_are():
    worker, server = torch.ones(8), torch.ones(8)
    SignExchange(None).mean([torch.full((8,), torch.nan)], [worker], [server], torch.tensor(False))
    assert worker.eq(1).all()
    assert server.eq(1).all()


def test_a_message_is_one_bit_an_element_and_a_scale_a_weight():
    assert [chunk_length(size, 4) for size in (1, 32, 33, 1024)] == [8, 8, 16, 256]
    assert packed_bytes([1024, 33], 4) == 2 * 4 + (256 + 16) // 8
    run = load.load(None, [*TINY, "optim.name=onebit_adam", "plan.replicate=4"]).run
    exact, signs = (
        sum(each.total_bytes for each in traffic(run.arch, run.plan, 64, optimizer="onebit_adam", warm_up=warm_up))
        for warm_up in (True, False)
    )
    assert 2 / 33 < signs / exact < 2 / 31  # both ways


def test_variance_updates_become_rarer_and_so_do_syncs():
    assert sorted(variance_steps(16, 2)) == [1, 2, 4, 6, 8, 12, 16]
    optim = Optim(name="zero_one_adam", freeze_step=6, var_update_scaler=2, local_step_scaler=4, local_step_clipper=4)
    found = "".join(exchange_of(optim, step, 30)[0] for step in range(1, 31))
    assert found[:6] == "eecece"
    assert found[6:10] == "cccc"
    assert found[10:14] == "lclc"
    assert found[14:] == "lclllclllclllclc"[:16]


def test_the_warm_up_is_a_fifth_of_the_run_unless_it_is_stated():
    run = load.load(None, [*TINY, "optim.name=onebit_lamb", "plan.replicate=2"]).run
    assert (run.optim.freeze_step, run.optim.beta2) == (4, 0.999)
    other = load.load(None, [*TINY, "optim.name=onebit_lamb", "plan.replicate=4"]).run
    assert digest(run) != digest(other)  # each replica's momentum is rounded


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan.replicate=1",), "plan.replicate = 1 has none; set plan.replicate to 2 or more"),
        (("plan.replicate=2", "optim.freeze_step=20"), "not shorter than the run, whose steps = 20; use 1 to 19"),
        (("plan.replicate=2", "steps=1", "optim.freeze_step=0"), "not shorter than the run, whose steps = 1"),
        (("plan.replicate=2", "plan.tp=2"), "plan.tp = 2 cuts the model; use plan.tp = 1"),
        (("plan.shard=2", "plan.zero=1"), "plan.zero = 1 shards them; use plan.zero = 0"),
        (("plan.replicate=2", "plan.sync_every=2"), "by its own calendar"),
        (("plan.replicate=2", "plan.deterministic=true"), "plan.deterministic"),
        (("plan.replicate=2", "log.noise_scale=true"), "which optim.name = onebit_adam never has after its warm-up"),
        (("plan.replicate=2", "optim.local_step_clipper=4"), "is for 0/1 Adam"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(words, said):
    with pytest.raises(InputError) as caught:
        load.load(None, [*TINY, "optim.name=onebit_adam", *words])
    assert said in str(caught.value)
