import random
from itertools import islice, product

import msgspec
import pytest

from meshwright.config import check
from meshwright.config.run import Run
from meshwright.search.question import Question, variants
from meshwright.search.space import (
    CHUNKS,
    SCHEDULES,
    PipelineChoice,
    empty,
    layouts,
    locations,
    plans,
    policies,
    problems,
)
from meshwright.spec.plan import Plan, balanced_stages
from meshwright.spec.tuning import Adapter, Tuning
from search.questions import question

SAMPLE = random.Random(4)


def every_spelling(asked: Question) -> set[Plan]:
    """Every combination of numbers, sorted out by the rules alone; compiled if they let it; without other policies."""
    world, batch = asked.cluster.gpus, asked.batch
    degrees = [each for each in range(1, world + 1) if world % each == 0]
    shares = [each for each in range(1, batch + 1) if batch % each == 0]
    found = set()
    for pp, replicate, shard, cp, tp in product(degrees, repeat=5):
        if pp * replicate * shard * cp * tp != world:
            continue
        even = [count for count in range(3, 8) if asked.arch.layers % (count * pp) == 0]
        pipelines = product(SCHEDULES, {*CHUNKS, *even}) if pp > 1 else [("1f1b", 1)]
        for (schedule, chunks), zero, kind, ep, microbatch, accumulate in product(
            pipelines, range(4), ("ring", "ulysses"), degrees, shares, shares
        ):
            if pp * chunks > asked.arch.layers or microbatch * accumulate * replicate * shard != batch:
                continue
            plan = Plan(
                pp=pp, replicate=replicate, shard=shard, zero=zero, cp=cp, cp_kind=kind, ep=ep, tp=tp,
                schedule=schedule, chunks=chunks, microbatch=microbatch, grad_accum=accumulate, precision="bf16",
                stages=balanced_stages(asked.arch, pp * chunks) if pp > 1 else (),
            )  # fmt: skip
            for saved, weights in product((False, True), repeat=2):
                there = msgspec.structs.replace(plan, activation_offload=saved, cpu_offload=weights)
                both = (msgspec.structs.replace(there, compile=each) for each in (True, False))
                found.update(list(islice((each for each in both if not problems(asked, each)), 1)))
    return found


def is_the_only_spelling(plan: Plan) -> bool:
    if plan.cp == 1 and plan.cp_kind != "ring":
        return False
    if plan.shard * plan.cp == 1 and plan.zero and (plan.zero, plan.pp) != (3, 1):
        return False
    if plan.pp > 1:
        return plan.zero <= 1
    return plan.zero != 2 or plan.grad_accum > 1


@pytest.mark.parametrize("gpus", [1, 4])
def test_weights_that_are_kept_in_host_memory_are_planned_with_zero_3(gpus):
    asked = question("tiny", f"{gpus}xh100", batch=12, recompute="none", cpu_offload=True)
    found = list(plans(asked))
    assert found
    assert {(plan.zero, plan.pp, plan.bf16_params, plan.optimizer_offload) for plan in found} == {(3, 1, False, "none")}
    assert not [plan for plan in found if problems(asked, plan)]


@pytest.mark.parametrize(("model", "gpus"), [("tiny", 4), ("tiny", 6), ("tiny-moe", 4)])
def test_the_space_is_what_the_rules_let_pass(model, gpus):
    asked = question(model, f"{gpus}xh100", batch=12, recompute="none")
    ours = list(plans(asked))
    assert len(ours) == len(set(ours)), "no plan comes twice"
    assert set(ours) == {plan for plan in every_spelling(asked) if is_the_only_spelling(plan)}


@pytest.mark.parametrize(
    ("model", "machines", "batch"), [("llama3-70b", "64xh100", 512), ("mixtral-8x7b", "32xh100", 96)]
)
def test_every_plan_passes_the_rules(model, machines, batch):
    asked = question(model, machines, sequence=4096, batch=batch)
    chosen = [layout for layout in layouts(asked) if SAMPLE.random() < 0.02]
    assert chosen
    for layout in chosen:
        fixed = {name: value for name, value in layout._asdict().items() if name != "replicate"}
        for plan in plans(question(model, machines, sequence=4096, batch=batch, **fixed)):
            if SAMPLE.random() < 0.05:
                run = Run(arch=asked.arch, plan=plan, sequence=asked.sequence, batch=asked.batch)
                assert check.problems(run) == []
                assert plan.world == asked.cluster.gpus


def test_the_order_is_always_the_same():
    assert list(plans(question())) == list(plans(question()))


def test_a_fixed_field_is_kept():
    for plan in plans(question(tp=2, zero=3, recompute="full")):
        assert (plan.tp, plan.zero, plan.recompute) == (2, 3, "full")


def test_a_fixed_spelling_is_not_taken_for_another():
    assert {plan.zero for plan in plans(question(zero=2, pp=2))} == {2}


def test_a_schedule_that_is_asked_for_is_used():
    asked = list(plans(question(schedule="zbv")))
    assert asked
    assert all(plan.pp > 1 and plan.schedule == "zbv" and plan.chunks == 2 for plan in asked)


def test_stages_that_are_given_are_kept():
    asked = list(plans(question(stages=(2, 4), tp=1, cp=1)))
    assert asked
    assert all(plan.pp * plan.chunks == 2 and plan.stages == (2, 4) for plan in asked if plan.pp > 1)


def test_deterministic_plans_are_those_the_rules_allow():
    asked = question(deterministic=True, machines="8xh100", batch=24)
    ours = list(plans(asked))
    assert ours
    assert all(plan.deterministic and not problems(asked, plan) for plan in ours)


def test_policies_differ_from_each_other():
    asked = question("llama3-8b", "8xh100", sequence=4096)
    found = policies(asked, next(layouts(asked)), PipelineChoice("1f1b", 1))
    firsts = tuple(f"first-{4 * part}" for part in range(1, 8))
    words = ("none", "selective-16", "selective", *firsts, "full", "sqrt", "every-2", "every-3", "every-4")
    assert tuple(each.recompute for each in found if not each.is_helped) == words
    sent = ("none", *firsts, "full")  # by operation, and of several blocks, is kept elsewhere
    assert tuple(each.recompute for each in found if each.activation_offload) == sent
    assert len(found) == len(set(found)) == len(words) + len(sent)


def test_a_field_that_no_level_chooses_is_carried_by_every_plan():
    assert {plan.kernels for plan in plans(question(kernels="plain"))} == {"plain"}
    assert next(plans(question(bf16_params=True)), None) is None  # for one rank that shares nothing
    assert all(plan.bf16_params for plan in plans(question(bf16_params=True, machines="1xh100")))


def test_blocks_are_compiled_wherever_the_rules_let_them_be():
    asked = question(machines="4xh100", batch=24)
    found = list(plans(asked))
    assert {plan.compile for plan in found} == {True, False}
    for plan in found:
        assert plan.compile or problems(asked, msgspec.structs.replace(plan, compile=True))


def test_compilation_can_be_fixed_either_way():
    off = list(plans(question(machines="4xh100", compile=False)))
    assert {plan.compile for plan in off} == {False}
    on = list(plans(question(machines="4xh100", batch=24, compile=True)))
    assert {plan.compile for plan in on} == {True}
    assert not any(plan.splits_backward for plan in on)


def test_nothing_is_compiled_for_what_torch_writes_no_kernels_for():
    assert not any(plan.compile for plan in plans(question(machines="4xtpu-v5p")))


@pytest.mark.parametrize(
    ("machines", "fixed", "kept"),
    [("1xh100", {}, True), ("1xh100", {"bf16_params": False}, False), ("1xh100", {"deterministic": True}, False),
     ("2xh100", {}, False)],
)  # fmt: skip
def test_a_lone_rank_keeps_a_shadow(machines, fixed, kept):
    found = [plan for plan in plans(question(machines=machines, **fixed)) if plan.zero != 3]
    assert {plan.bf16_params for plan in found} == {kept}


def test_a_lone_rank_in_full_precision_keeps_no_shadow():
    asked = msgspec.structs.replace(question(machines="1xh100"), precision="fp32")
    assert {plan.bf16_params for plan in plans(asked)} == {False}


def test_fp8_is_as_the_rules_allow_it():
    asked = msgspec.structs.replace(question(machines="4xh100"), precision="fp8")
    ours = list(plans(asked))
    assert ours
    assert {plan.tp for plan in ours} == {1, 2}  # of four heads of 8 elements a rank of four would have 8
    assert not any(problems(asked, plan) for plan in ours)


@pytest.mark.parametrize(("base", "offered"), [("fp8", {"bf16", "fp8"}), ("bf16", {"bf16"})])
def test_fp8_beside_adapters_is_offered_where_the_base_is_held_so(base, offered):
    tuning = Tuning(adapter=Adapter(kind="lora", rank=4, base=base))
    plain = question(machines="2xh100")
    asked = msgspec.structs.replace(plain, arch=msgspec.structs.replace(plain.arch, tuning=tuning), vary=("precision",))
    able = {each.precision for each in variants(asked)} & {"bf16", "fp8"}
    assert able == offered
    for precision in able:
        one = msgspec.structs.replace(asked, precision=precision)
        assert (found := list(plans(one)))
        assert not any(problems(one, plan) for plan in found)


@pytest.mark.parametrize(
    ("rounding", "states"), [("fp32", "fp32"), ("split", "fp32"), ("split", "bf16"), ("none", "bf16"), ("fp32", "bf16")]
)
def test_nothing_is_offered_that_the_trainer_refuses(rounding, states):
    asked = msgspec.structs.replace(question(machines="1xh100"), master_weights=rounding, state_dtype=states)
    ours = list(plans(asked))
    assert ours
    assert len(ours) == len(set(ours))
    assert not any(problems(asked, plan) for plan in ours)
    away = {plan.optimizer_offload for plan in ours}
    assert away == {"fp32 fp32": {"none", "host", "disk"}, "fp32 bf16": {"host", "disk"}}.get(
        f"{rounding} {states}", {"none"}
    )


def test_several_ranks_offload_nothing():
    assert {plan.optimizer_offload for plan in plans(question(machines="2xh100"))} == {"none"}
    assert next(plans(question(machines="2xh100", optimizer_offload="host")), None) is None


def test_a_host_of_which_nobody_knows_is_not_counted_on():
    asked = question(machines="1xh100")
    unknown = msgspec.structs.replace(asked.cluster, host_bytes=0.0, disk_bytes=0.0)
    blind = msgspec.structs.replace(asked, cluster=unknown)
    found = {(plan.optimizer_offload, plan.activation_offload, plan.cpu_offload) for plan in plans(blind)}
    assert found == {("none", False, False)}
    trusting = {(plan.optimizer_offload, plan.cpu_offload) for plan in plans(blind.with_unknown_host("too"))}
    assert trusting == {("none", False), ("host", False), ("disk", False), ("none", True)}


def test_codes_and_states_vary_only_when_allowed():
    asked = question(machines="1xh100")
    assert {plan.activation_quant for plan in plans(asked)} == {"none"}
    free = msgspec.structs.replace(asked, vary=("precision", "optimizer"))
    assert {plan.activation_quant for plan in plans(free)} == {"none", "int8", "fp8"}
    kinds = {(each.master_weights, each.state_dtype) for each in variants(free) if each.precision == "bf16"}
    states = ("fp32", "bf16", "int8", "int4", "fp8")
    assert kinds == {(weights, each) for weights in ("fp32", "none", "split") for each in states}
    many = msgspec.structs.replace(question(machines="8xh100"), vary=free.vary)
    assert ("fp32", "bf16") not in {(each.master_weights, each.state_dtype) for each in variants(many)}
    assert {(each.master_weights, each.state_dtype) for each in variants(asked)} == {("fp32", "fp32")}


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"stages": (16, 15)}, "has 31 layers, and the model has 32"),
        ({"stages": (32, 0)}, "a stage without a layer"),
        ({"stages": (16, 15), "pp": 2}, "has 31 layers, and the model has 32"),
        ({"pp": 1, "chunks": 2}, "plan.chunks is for pipelines, and plan.pp = 1"),
        ({"pp": 1, "stages": (16, 16)}, "plan.stages is for pipelines, and plan.pp = 1"),
        ({"replicate": 8, "schedule": "zbv"}, "the machines have no GPUs left for one"),
        ({"tp": 3}, "plan.tp = 3 does not divide"),
    ],
)
def test_fields_that_no_plan_can_have_leave_none_and_the_rule_is_told(fixed, said):
    asked = question("llama3-8b", "8xh100", **fixed)
    assert not list(plans(asked))
    assert said in empty(asked)[0].text


def test_stages_that_are_fixed_are_those_of_every_plan():
    found = list(plans(question("llama3-8b", "8xh100", stages=(8, 8, 8, 8))))
    assert {plan.stages for plan in found} == {(8, 8, 8, 8)}
    assert {plan.pp * plan.chunks for plan in found} == {4}


@pytest.mark.parametrize("gpus", [1, 4])
def test_scaled_products_have_every_microbatch_that_fills_their_tiles(gpus):
    asked = msgspec.structs.replace(question("tiny", f"{gpus}xh100", sequence=72, batch=48), precision="fp8")
    found = list(plans(asked))
    assert {plan.microbatch * 72 // plan.cp % 16 for plan in found} == {0}
    assert not [plan for plan in SAMPLE.sample(found, 50) if problems(asked, plan)]
    assert {plan.microbatch for plan in found if plan.world == plan.data} >= {2, 4, 6, 12}


def test_communication_is_lossy_only_when_allowed():
    asked = question(machines="16xh100")
    lossy = ("grad_reduce", "powersgd", "gather", "secondary_shard")
    assert not any(plan.uses(name) for plan in islice(plans(asked), 2000) for name in lossy)
    free = [*variants(msgspec.structs.replace(asked, vary=("communication",)))]
    forms = [{name: each.fixed[name] for name in lossy if name in each.fixed} for each in free]
    assert {} in forms
    assert {"grad_reduce": "int8", "gather": "int8", "secondary_shard": 8} in forms  # all of ZeRO++
    zeropp = [each.fixed for each in free if "secondary_shard" in each.fixed and "gather" in each.fixed]
    assert {each["grad_reduce_node"] for each in zeropp} == {8}  # the ranks of a domain
    for variant, form in zip(free, forms, strict=True):
        for plan in islice(plans(variant), 50):
            assert {name: getattr(plan, name) for name in form} == form
            assert not problems(variant, plan)
    fixed = msgspec.structs.replace(asked, vary=("communication",), fixed={"grad_reduce": "default"})
    assert all(each.fixed["grad_reduce"] == "default" for each in variants(fixed))


TUNED = {
    "stages that train nothing": Tuning(freeze=("embed", "blocks.0", "blocks.1", "blocks.2")),
    "blocks of NF4": Tuning(adapter=Adapter(kind="qlora", rank=4)),
    "dropout beside experts": Tuning(adapter=Adapter(kind="lora", rank=4, dropout=0.1)),
    "dropout beside codes": Tuning(adapter=Adapter(kind="dora", rank=4, dropout=0.1, base="fp8")),
}


@pytest.mark.parametrize(("name", "model"), list(zip(TUNED, ("tiny", "tiny", "tiny-moe", "tiny"), strict=True)))
def test_a_search_offers_no_plan_that_what_is_trained_forbids(name, model):
    asked = question(model, "4xh100", recompute="none")
    if "codes" in name:
        asked = msgspec.structs.replace(asked, precision="fp8")
    asked = msgspec.structs.replace(asked, arch=msgspec.structs.replace(asked.arch, tuning=TUNED[name]))
    found = list(plans(asked))
    assert found
    assert not [plan for plan in found if problems(asked, plan)]


def test_no_answers_are_compared_beside_a_secondary_shard():
    asked = msgspec.structs.replace(question("tiny", "16xh100", batch=16), vary=("communication",))
    tuning = Tuning(adapter=Adapter(kind="lora"), compared=True)
    compared = msgspec.structs.replace(asked, arch=msgspec.structs.replace(asked.arch, tuning=tuning))
    assert any("secondary_shard" in each.fixed for each in variants(asked))
    assert not any("secondary_shard" in each.fixed for each in variants(compared))


def test_states_of_what_is_trained_may_be_elsewhere_where_the_trainer_lets_them():
    asked = question("tiny", "1xh100", sequence=512, batch=4)
    for tuning in (Tuning(adapter=Adapter(kind="lora")), Tuning(freeze=("embed",)), Tuning(compared=True)):
        tuned = msgspec.structs.replace(asked, arch=msgspec.structs.replace(asked.arch, tuning=tuning))
        offloaded = Plan(microbatch=4, precision="bf16", bf16_params=True, optimizer_offload="host")
        assert (("host", "host") in locations(tuned)) == (not problems(tuned, offloaded)), tuning
    both = Tuning(freeze=("embed",), compared=True)
    frozen = msgspec.structs.replace(asked, arch=msgspec.structs.replace(asked.arch, tuning=both))
    assert "frozen copy" in problems(frozen, offloaded)[0].text


def test_a_disk_is_not_counted_on_where_nothing_is_known_of_the_host():
    asked = question("tiny", "1xh100", sequence=512, batch=4)
    machines = msgspec.structs.replace(asked.cluster, host_bytes=0.0, disk_bytes=1e12)
    unknown = msgspec.structs.replace(asked, cluster=machines)
    assert {location for location, _ in locations(unknown)} == {"none"}
    assert {location for location, _ in locations(unknown.with_unknown_host("too"))} == {"none", "host", "disk"}
