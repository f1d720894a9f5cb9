"""Published figures, typed in with their citation: rows like those of a table to be priced, and what we say of them."""

from statistics import fmean

import pytest

from meshwright.cost.flops import step_flops
from meshwright.cost.textbook import megatron_flops
from meshwright.published.rows import answered, job_of
from meshwright.spec.params import count
from meshwright.spec.units import GIB

# Narayanan et al. 2021 (arXiv:2104.04473), table 1: billions of parameters, heads, hidden, layers, tp, pp, GPUs, batch,
# TFLOP/s of a GPU with recomputation counted; microbatch and stages of a rank from the scripts published with it.
MEGATRON = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
]
# Megatron-LM's README: GPT-3 on 1,024 A100, batch 1,536, "around 32 seconds" an iteration.
GPT3 = {
    "framework": "Megatron-LM", "model_name": "GPT-3 175B", "layers": "96", "hidden": "12288", "heads": "96",
    "seq_len": "2048", "gpu": "A100", "n_gpus": "1024", "tp": "8", "pp": "16", "global_batch": "1536",
    "precision": "fp16",
}  # fmt: skip
# The Llama 3 herd of models (arXiv:2407.21783), table 4: GPUs, tp, cp, pp, dp, sequence, batch of a data rank, TFLOP/s.
LLAMA = [
    (8192, 8, 1, 16, 64, 8192, 32, 430),
    (16384, 8, 1, 16, 128, 8192, 16, 400),
    (16384, 8, 16, 16, 8, 131072, 16, 380),
]


def megatron_row(entry) -> dict[str, str]:
    _, heads, hidden, layers, tp, pp, gpus, batch, _, microbatch, chunks = entry
    cells = {
        "layers": layers, "hidden": hidden, "heads": heads, "vocab": 51_200, "seq_len": 2048, "n_gpus": gpus, "tp": tp,
        "pp": pp, "interleave": chunks, "micro_batch": microbatch, "global_batch": batch, "zero_stage": 0,
    }  # fmt: skip
    text = {
        "framework": "Megatron-LM", "model_name": "GPT", "gpu": "A100", "gpu_mem_gb": "80", "precision": "fp16",
        "activation_ckpt": "full", "flash": "no", "sp": "no",
        "interconnect": "Selene: NVLink/NVSwitch; 8x200 Gb/s HDR IB per node",
    }  # fmt: skip
    return {key: str(value) for key, value in cells.items()} | text


def megatron_seconds(entry) -> float:
    """A step's seconds, from the TFLOP/s that the table prints and the formula that the paper counts with."""
    _, _, hidden, layers, _, _, gpus, batch, teraflops, _, _ = entry
    return megatron_flops((batch, 2048, layers, hidden, 51_200)) / (gpus * teraflops * 1e12)


def llama_row(entry) -> dict[str, str]:
    gpus, tp, cp, pp, dp, sequence, batch, _ = entry
    cells = {
        "layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn_hidden": 53248, "vocab": 128256,
        "seq_len": sequence, "n_gpus": gpus, "tp": tp, "cp": cp, "pp": pp, "dp": dp, "global_batch": batch * dp,
        "zero_stage": 2,
    }  # fmt: skip
    text = {
        "framework": "Meta internal (FSDP+TP+CP+PP)", "model_name": "Llama 3 405B", "gpu": "H100", "gpu_mem_gb": "80",
        "sp": "yes", "schedule": "interleaved 1F1B (tunable N)", "precision": "bf16", "flash": "yes",
        "activation_ckpt": "none", "interconnect": "NVLink; 400 Gbps RoCE per GPU",
    }  # fmt: skip
    return {key: str(value) for key, value in cells.items()} | text


def predicted(row: dict[str, str]) -> float:
    answer = answered(row)
    assert answer.price is not None, answer.refused
    return answer.price.seconds


@pytest.mark.parametrize("entry", MEGATRON, ids=lambda entry: f"{entry[0]}B")
def test_megatron_s_models_have_the_parameters_that_table_1_prints(entry):
    found = job_of(megatron_row(entry)).job
    assert found is not None
    assert count(found.arch) / 1e9 == pytest.approx(entry[0], abs=0.1)


@pytest.mark.parametrize("entry", MEGATRON, ids=lambda entry: f"{entry[0]}B")
def test_each_of_megatron_s_runs_is_within_a_fifth(entry):
    # None of these runs was fitted on; a fifth is what a change of the fabric or of NCCL alone can do.
    assert predicted(megatron_row(entry)) == pytest.approx(megatron_seconds(entry), rel=0.2)


def test_megatron_s_ten_runs_are_within_a_tenth_on_average():
    errors = [abs(predicted(megatron_row(entry)) / megatron_seconds(entry) - 1) for entry in MEGATRON]
    assert fmean(errors) <= 0.10


def test_gpt_3_on_1024_gpus_takes_around_32_seconds():
    # Neither microbatch nor recomputation is printed, and the default for the latter was settled with this run in view:
    # it holds the default in place, and is no blind test of it.
    assert predicted(GPT3) == pytest.approx(32, rel=0.2)


@pytest.mark.parametrize("entry", LLAMA, ids=lambda entry: f"{entry[0]} GPUs, cp {entry[2]}")
def test_each_of_llama_3_s_runs_is_within_a_quarter(entry):
    row = llama_row(entry)
    found = job_of(row).job
    assert found is not None
    flops = step_flops(found.arch, found.sequence, found.plan.batch)
    # The stages of a rank are not printed; their default was settled with these runs in view. TFLOP/s
    # only, and how attention over 131,072 tokens is counted is not said: counting half of it moves a quarter.
    assert predicted(row) == pytest.approx(flops / (entry[0] * entry[7] * 1e12), rel=0.25)


def test_llama_3_s_batch_is_sixteen_million_tokens():
    for entry in LLAMA:
        found = job_of(llama_row(entry)).job
        assert found is not None
        assert found.plan.world == entry[0]
        assert found.plan.batch * found.sequence == 16_777_216


def test_more_gpus_for_the_same_batch_use_each_less_well():
    few, many = (answered(llama_row(entry)).price for entry in LLAMA[:2])
    assert few is not None
    assert many is not None
    assert few.mfu > many.mfu


# SimuMax's measurements of Megatron-LM with Transformer Engine on 8 B200, communication not overlapped, bf16: model,
# layers, hidden, heads, kv_heads, feed-forward, vocabulary, experts, top_k, tp, pp, dp, ep, batch; then seconds, GiB.
# The B200's rate of matmuls was fitted on runs of this source.
SIMUMAX = [
    ("llama3-70b reduced", 12, 8192, 64, 8, 28672, 128256, "", "", 2, 1, 4, "", 128, 5.377, 60.68),
    ("llama3-70b reduced", 12, 8192, 64, 8, 28672, 128256, "", "", 4, 1, 2, "", 16, 0.766, 39.07),
    ("llama3-405b reduced", 4, 16384, 128, 16, 53248, 128256, "", "", 8, 1, 1, "", 32, 1.902, 38.57),
    ("deepseekv2 reduced", 4, 5120, 128, "", 12288, 102400, 160, 6, 1, 1, 8, 8, 64, 0.676, 45.63),
    ("deepseekv2 reduced", 4, 5120, 128, "", 12288, 102400, 160, 6, 1, 2, 4, 4, 128, 1.728, 44.70),
]


@pytest.mark.parametrize("entry", SIMUMAX)
def test_runs_on_b200_of_dense_and_moe_models_are_near(entry):
    columns = (
        "model_name", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "experts", "top_k", "tp", "pp",
        "dp", "ep", "global_batch",
    )  # fmt: skip
    row = dict(zip(columns, map(str, entry), strict=False)) | {
        "framework": "Megatron-LM, TE 2.11", "seq_len": "4096", "gpu": "B200", "n_gpus": "8", "zero_stage": "1",
        "micro_batch": "1", "precision": "bf16", "activation_ckpt": "none", "flash": "yes",
        "peak_mem_kind": "torch max_allocated, max over ranks, GiB",
    }  # fmt: skip
    answer = answered(row)
    assert answer.price is not None, answer.refused
    assert answer.price.seconds == pytest.approx(entry[-2], rel=0.10)  # 9 of 10 of its 37 runs are within 9.1 %
    assert answer.memory_bytes / GIB == pytest.approx(entry[-1], rel=0.06)  # and within 5.8 %
