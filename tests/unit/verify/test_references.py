"""What a plan is compared with: one process, or a reference of its own that its optimizer or a field asks for."""

import pytest
import torch
from torch import nn

from meshwright.kernels.fp8 import Fp8Linear
from meshwright.verify import prove
from meshwright.verify.scaled import by_parts, exact


def references(folder, overrides, plans, model="tiny"):
    jobs = prove.jobs(model, overrides, plans, 6, folder)
    return [(prove.named(reference)[0], reference.plan, [name for name, _ in planned]) for reference, planned in jobs]


def test_adascale_is_compared_in_microbatches_of_the_same_size(tmp_path):
    found = references(tmp_path, ["optim.adascale=true"], ["replicate=2", "shard=2,zero=1", "grad_accum=4"])
    assert [(name, plan.microbatch, plan.grad_accum, plan.world) for name, plan, _ in found] == [
        ("one process, in microbatches of the same size", 2, 2, 1),
        ("one process, in microbatches of the same size", 1, 4, 1),
    ]
    assert [len(plans) for *_, plans in found] == [2, 1]


def test_the_matrix_of_adascale_has_whole_microbatches_and_several(tmp_path):
    plans = prove.matrix(4, None, ["optim.adascale=true"])
    assert {"replicate=2", "shard=2,zero=3", "grad_accum=4", "pp=2,schedule=1f1b"} <= set(plans)
    assert not {"tp=2", "cp=2", "recompute=every-4", "shard=2,zero=1,ep=2", "replicate=2,powersgd=2"} & set(plans)
    found = references(tmp_path, ["optim.adascale=true"], plans)
    assert sorted(plan.microbatch for _, plan, _ in found) == [3, 4, 6, 12]  # of 24 sequences, as a pipeline of 3 asks
    assert {plan.world for _, plan, _ in found} == {1}


def test_a_meter_of_noise_is_the_plan_s_alone(tmp_path):
    (reference, planned), *_ = prove.jobs("tiny", ["log.noise_scale=true"], ["replicate=2"], 6, tmp_path)
    assert [reference.log.noise_scale, *(run.log.noise_scale for _, run in planned)] == [False, True]


@pytest.mark.parametrize("name", ["onebit_adam", "zero_one_adam", "onebit_lamb"])
def test_optimizers_that_compress_have_a_reference_of_as_many_workers(tmp_path, name):
    word = f"optim.name={name}"
    plans = prove.matrix(4, "tiny", [word])
    assert set(plans) >= {"replicate=2", "replicate=4,grad_accum=2", "replicate=2,shard=2,zero=3", "replicate=2,tp=2"}
    assert all("replicate" in plan for plan in plans)
    assert not any(field in plan for plan in plans for field in ("sync_every", "grad_reduce", "powersgd", "staleness"))
    found = references(tmp_path, [word], plans)
    # What cuts a replica has the reference of as many that are not cut.
    assert [(plan.replicate, plan.grad_accum, plan.world) for _, plan, _ in found] == [(2, 1, 2), (4, 1, 4)]
    assert [len(planned) for *_, planned in found] == [len(plans) - 1, 1]
    assert all("same compression" in said for said, *_ in found)


def test_staleness_zero_is_compared_with_one_process_and_more_with_what_happened(tmp_path):
    found = references(tmp_path, [], ["replicate=2,staleness=0", "replicate=2,staleness=2"])
    assert [said for said, *_ in found] == [prove.ONE, prove.OWN_REFERENCES["staleness"][0]]


def test_fp8_is_compared_with_the_same_scales_and_of_models_that_route_in_reference_arithmetic(tmp_path):
    plans = ["replicate=2", "cp=2", "tp=2"]
    for model, tolerance in (("tiny", prove.TOLERANCES["fp8"][0]), ("tiny-moe", prove.EXACTLY[0])):
        jobs = prove.jobs(model, ["plan.precision=fp8"], plans, 6, tmp_path)
        assert {(each.plan.microbatch, each.plan.cp, len(planned)) for each, planned in jobs} == {
            (2, 1, 1),
            (4, 2, 1),
            (4, 1, 1),
        }
        assert {prove.allowed(each)[0] for each, _ in jobs} == {tolerance}
    split = prove.jobs("tiny-moe", ["plan.precision=fp8", "optim.master_weights=split"], ["cp=2"], 6, tmp_path)
    plain = exact(split[0][0])
    assert (plain.plan.precision, plain.optim.master_weights) == ("fp64", "fp32")


def test_what_divides_signs_by_a_small_number_states_its_own_tolerance_and_why(tmp_path):
    def said(*words: str) -> tuple[float, str]:
        (allowed,) = {prove.allowed(each) for each, _ in prove.jobs("tiny", [*words], ["replicate=2"], 3, tmp_path)}
        return allowed

    usual = prove.TOLERANCES["fp64"]
    number, why = said("optim.name=onebit_adam")
    assert number == pytest.approx(3 * 2**-23)  # three updates, each of a scale's step
    assert "divided by √v + 1e-08" in why
    assert said("optim.name=zero_one_adam", "optim.eps=1e-10")[0] == pytest.approx(3e-6)
    assert said("optim.name=onebit_adam", "optim.eps=1e-5") == usual
    assert said("optim.name=onebit_lamb") == usual  # whose moves are as long as the weights
    assert said("optim.name=adamw") == usual


def test_parts_of_sequences_are_multiplied_by_scales_of_their_own():
    torch.manual_seed(0)
    linear = nn.Linear(32, 16, bias=False, dtype=torch.float64)
    linear.__class__ = Fp8Linear
    x = torch.randn(2, 64, 32, dtype=torch.float64)
    x[:, 20:24] *= 50  # in the second rank's part alone
    whole, parts = linear(x), by_parts(linear, 2, x)
    first = [*range(16), *range(48, 64)]  # of four slices the first and the last are the first rank's
    assert torch.equal(parts[:, first], linear(x[:, first]))
    assert not torch.equal(parts[:, first], whole[:, first])


def test_the_matrix_leaves_out_what_servers_cannot_have():
    stale = [plan for plan in prove.matrix(2) if "staleness" in plan]
    assert stale == ["replicate=2,staleness=0", "replicate=2,staleness=2"]
    assert stale == [plan for plan in prove.matrix(2, None, ["optim.name=sgd"]) if "staleness" in plan]
    for word in ("optim.name=lamb", "optim.state_dtype=int8", "optim.master_weights=split"):
        assert not any("staleness" in plan for plan in prove.matrix(2, None, [word]))


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-gpt-oss", "tiny-deepseek-v3"])
def test_the_standard_plans_of_a_family_are_ones_that_it_can_have(tmp_path, name):
    plans = prove.matrix(4, name)
    assert len(plans) >= 20
    assert len(prove.runs(name, [], plans, 3, tmp_path / "text")[1]) == len(plans)
