import msgspec
import pytest

from meshwright.hardware.cluster import cluster
from meshwright.search.advise import Advice, advise
from meshwright.spec.problem import InputError
from tests.unit.search.questions import question


def answers(advice: Advice) -> dict[str, str]:
    return {step.question: step.answer for step in advice.steps}


def names(advice: Advice) -> list[str]:
    return [leaf.name for leaf in advice.leaves]


def test_a_small_model_on_one_gpu_is_left_alone():
    advice = advise(question("gpt2", "1xh100", 1024, 8))
    assert answers(advice)["Is the model too big for one GPU?"] == "no"
    assert answers(advice)["Is there more than one GPU?"] == "no"
    assert advice.found is not None
    assert advice.found.plan.world == 1


def test_a_small_model_on_a_node_is_copied():
    advice = advise(question("gpt2", "8xh100", 1024, 512))
    assert "DDP" in names(advice)
    assert advice.found is not None
    assert (advice.found.plan.replicate, advice.found.plan.zero) == (8, 0)


def test_states_that_are_too_big_for_one_gpu_are_shared_out_no_further_than_they_must():
    advice = advise(question("llama3-8b", "8xh100", 8192, 64))
    assert answers(advice)["Are its weights, gradients and optimizer states alone too big?"] == "yes"
    tried = [step.answer for step in advice.steps if "(ZeRO-" in step.question]
    assert tried == ["no"] * (len(tried) - 1) + ["yes"]
    (leaf,) = (leaf for leaf in advice.leaves if leaf.name.startswith("ZeRO"))
    assert leaf.found is not None
    assert leaf.found.fit.fits
    assert leaf.name == f"ZeRO-{leaf.found.plan.zero}" == f"ZeRO-{len(tried)}"


def test_activations_that_are_too_big_are_computed_anew():
    small = question("gpt2-xl", "1xa100-80g", 1024, 8)
    needed = advise(small).found
    assert needed is not None
    # Room for the states and little more: what is kept for the backward no longer fits.
    gpu = msgspec.structs.replace(small.cluster.gpu, memory_bytes=26 * 2.0**30)
    tight = msgspec.structs.replace(small, cluster=msgspec.structs.replace(small.cluster, gpu=gpu))
    advice = advise(msgspec.structs.replace(tight, sequence=1024, batch=8))
    assert answers(advice)["Are its weights, gradients and optimizer states alone too big?"] == "no"
    assert "recompute" in names(advice)
    assert advice.found is not None
    assert advice.found.plan.recompute != "none"


def test_a_model_that_no_sharding_fits_is_cut():
    advice = advise(question("llama3-70b", "16xh100", 8192, 64))
    assert answers(advice)["Does it fit with tensor, pipeline or context parallelism?"] == "yes"
    cut = advice.leaves[0].found
    assert cut is not None
    assert cut.fit.fits
    assert cut.plan.tp * cut.plan.pp * cut.plan.cp > 1


def test_what_fits_nowhere_waits_elsewhere():
    advice = advise(question("llama-7b", "1xa100-80g", 2048, 256))
    assert names(advice) == ["offload", "another optimizer"]
    assert advice.found is not None
    assert advice.found.fit.fits
    assert advice.found.plan.optimizer_offload != "none"


def test_a_model_that_no_split_fits_is_offloaded_on_several_gpus():
    advice = advise(question("llama3-70b", "8xa100-80g", 8192, 512))
    assert names(advice) == ["offload", "another optimizer"]
    assert advice.found is not None
    assert advice.found.fits
    assert (advice.found.plan.zero, advice.found.plan.cpu_offload) == (3, True)
    assert not any("e+0" in step.because for step in advice.steps)  # 1350 s/step, as `plan` writes it


def test_a_host_of_which_nobody_knows_is_asked_about():
    advice = advise(question("llama3-8b", "1xrtx-4090", 8192, 64))
    step = next(step for step in advice.steps if "offloaded" in step.question)
    assert step.answer == "if the host has room"
    assert "goal.host_gib=" in step.because
    assert advice.found is not None
    assert advice.found.fits is None


def test_what_fits_not_even_then_is_given_more_gpus():
    advice = advise(question("llama3-70b", "1xa100-80g", 2048, 256))
    assert advice.found is None
    assert names(advice) == ["more GPUs"]


def test_a_slow_network_is_found_out_and_gone_around():
    slow = msgspec.structs.replace(
        question("gpt2-xl", "16xa100-80g", 1024, 64), cluster=cluster("16xa100-80g", network="10gbe")
    )
    advice = advise(slow)
    scales = next(step for step in advice.steps if step.question.startswith("Does it scale"))
    assert scales.answer == "no"
    assert scales.because.endswith("most of the rest is replicate")
    told = {leaf.name: leaf.text for leaf in advice.leaves}
    assert {"gradients in eight bits", "PowerSGD", "DiLoCo"} <= told.keys()
    # No weights are sharded; and bf16, exchanged by all-to-all, gains less than 5 % by the estimate.
    assert not {"ZeRO++", "DDP with a low-precision hook"} & told.keys()
    first, later = (float(told[name].split(": ")[1].split()[0]) for name in ("gradients in eight bits", "DiLoCo"))
    assert later < first
    assert all("whose loss is not predicted" in told[name] for name in ("PowerSGD", "DiLoCo"))
    assert advice.found is not None
    assert advice.found.price.seconds < 1.0  # copies over this network would take more than ten


def test_shards_over_nodes_are_told_to_sum_inside_a_node_first():
    machines = cluster("4x8xa100-80g", network="100gbe")
    advice = advise(msgspec.structs.replace(question("llama3-8b", "4x8xa100-80g", 2048, 32), cluster=machines))
    told = {leaf.name: leaf.text for leaf in advice.leaves}
    assert "plan.grad_reduce_node=8" in told["ZeRO++ in two levels"]
    assert "ZeRO++" not in told  # one all-to-all of every gradient over the network gains nothing


def test_wide_arithmetic_is_told_of_the_narrow():
    wide = msgspec.structs.replace(question("gpt2", "1xh100", 1024, 8), precision="fp32")
    advice = advise(wide)
    assert answers(advice)["Is the arithmetic in low precision?"] == "no"
    assert "low precision" in names(advice)
    assert advice.found is not None
    assert advice.found.plan.precision == "fp32"  # it changes the mathematics, so it is advised and not done


@pytest.mark.parametrize("model", ["gpt2", "llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("machines", ["1xh100", "8xh100", "32xa100-80g"])
def test_every_way_through_the_chart_ends_in_a_plan_that_fits_or_in_none(model, machines):
    advice = advise(question(model, machines, 1024, 32))
    assert advice.steps
    assert advice.found is None or advice.found.fit.fits
    assert advice.found is not None or advice.leaves


@pytest.mark.parametrize("fixed", [{"tp": 8}, {"pp": 2}, {"stages": (16, 16)}, {"zero": 3}, {"microbatch": 2, "tp": 4}])
@pytest.mark.parametrize("model", ["llama3-8b", "llama3.2-1b"])
def test_what_is_fixed_of_several_gpus_is_in_the_advice_and_not_asked_of_one(model, fixed):
    if model == "llama3.2-1b":
        fixed = {name: (8, 8) if name == "stages" else value for name, value in fixed.items()}
    advice = advise(question(model, "8xh100", 4096, 32, **fixed))
    assert advice.steps[0].question == "Is the model too big for one GPU?"
    assert advice.found is not None
    assert {name: getattr(advice.found.plan, name) for name in fixed} == fixed
    named = {"tp": "DDP", "pp": "DDP", "stages": "DDP", "zero": "ZeRO-1", "microbatch": "DDP"}
    assert not {named[name] for name in fixed} & set(names(advice))  # they would have it otherwise


def test_a_question_without_a_legal_plan_is_refused():
    with pytest.raises(InputError, match=r"plan\.tp = 3 does not divide 8 GPUs"):
        advise(question("llama3-8b", "8xh100", tp=3))
