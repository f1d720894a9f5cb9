"""What the planner makes of an optimizer's description: bytes of its states, and what an update moves."""

import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.layout import layout_of
from meshwright.cost.memory import ledger
from meshwright.cost.textbook import states_bytes, zero_bytes
from meshwright.cost.weight_time import HOST_BYTES, ROUNDED_BYTES
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.search.question import Question
from meshwright.spec.optimizers import ADAMW, SGD
from meshwright.spec.plan import Plan

BF16 = Plan(microbatch=1, precision="bf16", bf16_params=True)


def held(plan, **optim):
    return {(row.name, row.home): row.bytes for row in layout_of(plan, **optim).rows}


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
    assert [states_bytes(1, kind, SGD) for kind in ("fp32", "exact", "bf16")] == [12, 12, 6]
    assert zero_bytes(1, 4, 1, SGD) == 4 + 8 / 4


def test_a_plan_for_sgd_is_smaller_by_one_state():
    question = Question(
        arch=preset("gpt2"), sequence=1024, batch=8, precision="bf16", cluster=cluster("1xh100"),
        stack=stack_of("meshwright"),
    )  # fmt: skip
    jobs = [msgspec.structs.replace(question, optimizer=name).job(BF16) for name in ("adamw", "sgd")]
    adamw, sgd = ({line.name: line for line in ledger(job).lines} for job in jobs)
    assert sgd["moments"].bytes * 2 == adamw["moments"].bytes
    assert sgd["moments"].why.startswith("SGD's momentum, fp32")
    assert adamw["moments"].why.startswith("AdamW's two, fp32")
    assert sgd["weights"] == adamw["weights"]
