"""What the planner makes of an optimizer's description: bytes of its states, and what an update moves."""

import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.layout import layout_of
from meshwright.cost.memory import ledger
from meshwright.cost.step_time import price
from meshwright.cost.textbook import state_elements, states_bytes, zero_bytes
from meshwright.cost.weight_time import HOST_BYTES, ROUNDED_BYTES
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.search.best_first import search
from meshwright.search.explain import other_optimizers
from meshwright.search.question import Question, variants
from meshwright.search.space import locations, may_live_in_host_memory, problems
from meshwright.spec.optimizers import ADAMW, DESCRIPTIONS, OPTIMIZERS, SGD
from meshwright.spec.params import params
from meshwright.spec.plan import Plan

BF16 = Plan(microbatch=1, precision="bf16", bf16_params=True)


def held(plan, **optim):
    return {(row.name, row.location): row.bytes for row in layout_of(plan, **optim).rows}


def test_bytes_of_a_parameter_in_each_form():
    fp32 = Plan(microbatch=1, precision="fp32")
    assert held(fp32, optimizer="sgd") == {
        ("weights", "device"): 4,
        ("gradients", "device"): 4,
        ("moments", "device"): 4,
    }
    assert held(fp32)["moments", "device"] == 8
    # 2 + 2 beside 4 + 4: the fp32 master weight and the momentum, here or elsewhere.
    beside = held(BF16, optimizer="sgd")
    assert (beside["weights", "device"], beside["gradients", "device"], beside["moments", "device"]) == (4, 2, 4)
    offloaded = msgspec.structs.replace(BF16, optimizer_offload="host")
    assert held(offloaded, optimizer="sgd")["states", "host"] == 8
    assert held(offloaded)["states", "host"] == 12
    assert held(offloaded, optimizer="sgd", state_dtype="bf16")["states", "host"] == 4
    assert held(offloaded, state_dtype="bf16")["states", "host"] == 6
    assert held(BF16, optimizer="sgd", master_weights="split")["moments", "device"] == 4
    assert held(BF16, optimizer="sgd", master_weights="none", state_dtype="bf16")["moments", "device"] == 2
    assert sum(held(BF16, master_weights="split", state_dtype="bf16").values()) == 10  # all there is of a parameter
    assert sum(held(BF16, master_weights="none", state_dtype="bf16").values()) == 8


@pytest.mark.parametrize(("spec", "host", "split", "none"), [(ADAMW, 28, 26, 22), (SGD, 20, 18, 14)])
def test_an_update_reads_and_writes_every_state_once(spec, host, split, none):
    moved = spec.moved_bytes(4)
    assert (HOST_BYTES + moved, ROUNDED_BYTES["split"] + moved, ROUNDED_BYTES["none"] + moved) == (host, split, none)


def test_the_closed_forms_count_the_states_of_the_optimizer():
    assert [states_bytes(1, kind) for kind in ("fp32", "notes", "exact", "megatron", "bf16")] == [16, 20, 16, 18, 8]
    assert [states_bytes(1, kind, 1) for kind in ("fp32", "exact", "bf16")] == [12, 12, 6]
    assert zero_bytes(1, 4, 1, 1) == 4 + 8 / 4
    elements = {name: state_elements(asked(name).job(BF16)) for name in OPTIMIZERS}
    assert (elements["adamw"], elements["sgd"], elements["lion"], elements["lamb"]) == (2, 1, 1, 2)
    assert 0 < elements["adafactor"] < 0.01
    assert elements["sm3"] == 1 + elements["adafactor"]  # vectors too: a number of their own, and the momentum


def asked(optimizer="adamw", machines="1xh100", **more):
    return Question(
        arch=preset("gpt2"), sequence=1024, batch=8, precision="bf16", cluster=cluster(machines),
        stack=stack_of("meshwright"), optimizer=optimizer, **more,
    )  # fmt: skip


def test_a_plan_for_sgd_is_smaller_by_one_state():
    jobs = [asked(name).job(BF16) for name in ("adamw", "sgd")]
    adamw, sgd = ({line.name: line for line in ledger(job).lines} for job in jobs)
    assert sgd["moments"].bytes * 2 == adamw["moments"].bytes
    assert sgd["moments"].why.startswith("SGD's momentum, fp32")
    assert adamw["moments"].why.startswith("AdamW's two, fp32")
    assert sgd["weights"] == adamw["weights"]


def test_the_ledger_of_whole_tensors_is_the_sum_over_parameters():
    shards = Plan(microbatch=1, shard=8, zero=3, precision="bf16")
    for name, spec in DESCRIPTIONS.items():
        if spec.compresses:  # which has replicas alone: see tests/dist/test_onebit.py
            continue
        job = asked(name, "8xh100").job(shards)
        (line,) = (line for line in ledger(job).lines if line.name == "moments")
        whole = spec.total_bytes(params(job.arch), 4)
        alone = ledger(asked(name).job(BF16))
        assert {each.name: each.bytes for each in alone.lines}["moments"] == whole
        if spec.is_elementwise:
            assert line.bytes >= whole / 8
        else:  # columns are on every rank: more than a share, less than all
            assert whole / 8 < line.bytes < whole
        assert line.why.startswith(spec.held)


def test_an_update_of_whole_tensors_costs_what_it_moves_and_what_it_sends():
    plan, far = Plan(microbatch=1, shard=8, zero=1, precision="bf16"), "8xh100"
    spent = {
        name: {share.name: share.seconds for share in price(asked(name, far).job(plan)).waterfall}["optimizer"]
        for name in OPTIMIZERS
    }
    alone = {
        name: {share.name: share.seconds for share in price(asked(name).job(BF16)).waterfall}["optimizer"]
        for name in OPTIMIZERS
    }
    usual = stack_of("meshwright").speed.optimizer_bytes
    for name, spec in OPTIMIZERS.items():
        if spec.compresses:
            continue
        if spec.orthogonalizes:  # whose products cost more than what it moves
            assert alone[name] > alone["adamw"]
            continue
        moved = spec.update_bytes or usual - ADAMW.moved_bytes(4) + spec.moved_bytes(4)
        assert alone[name] == pytest.approx(alone["adamw"] * moved / usual)
        assert spent[name] >= spent["adamw"] * moved / usual * (1 - 1e-9)
        assert (spent[name] > 1.0001 * spent["adamw"] * moved / usual) == spec.whole  # its collectives


@pytest.mark.parametrize("name", ["adafactor", "sm3", "lamb"])
def test_the_search_offers_no_form_that_whole_tensors_have_not(name):
    free = asked(name, vary=("optimizer",))
    kinds = {(each.master_weights, each.state_dtype) for each in variants(free)}
    assert kinds == {("fp32", "fp32"), ("none", "fp32"), ("split", "fp32")}
    assert locations(asked(name)) == (("none", "host"),)
    assert len(locations(asked("lion"))) > 1
    assert not may_live_in_host_memory(asked(name, "8xh100"))
    found = search(asked(name, "8xh100"), top=1).found[0]
    assert not problems(asked(name, "8xh100"), found.plan)


def test_a_search_proposes_replicas_for_optimizers_that_compress():
    found = search(asked("onebit_adam", "8xh100"), top=5).found
    assert found
    assert all(each.plan.replicate > 1 and not problems(asked("onebit_adam", "8xh100"), each.plan) for each in found)


def test_other_optimizers_are_priced_under_the_same_plan():
    plan = Plan(microbatch=1, shard=8, zero=3, precision="bf16")
    others = other_optimizers(asked("adamw", "8xh100"), plan)
    assert [each.change for each in others] == [f"optim.name adamw → {name}" for name in OPTIMIZERS if name != "adamw"]
    replicated = {f"optim.name adamw → {name}" for name, spec in OPTIMIZERS.items() if spec.compresses}
    assert all(each.fits and each.plan == plan for each in others if each.change not in replicated)
    assert all("sums gradients before there is" in each.problem for each in others if each.change in replicated)
    hybrid = other_optimizers(
        asked("adamw", "8xh100"), Plan(microbatch=1, replicate=2, shard=4, zero=3, precision="bf16")
    )
    assert all(each.fits and each.seconds for each in hybrid)
    hosted = other_optimizers(asked("adamw", "8xh100"), msgspec.structs.replace(plan, cpu_offload=True))
    refused = {each.change: each.problem for each in hosted if each.plan is None}
    assert set(refused) == {f"optim.name adamw → {name}" for name, spec in OPTIMIZERS.items() if spec.whole}
    assert all("updates whole tensors" in problem for problem in refused.values())
