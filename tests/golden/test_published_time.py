"""Tokens a second that projects print of their own runs, typed in with their source and priced; none was fitted."""

from statistics import fmean

import pytest

from meshwright.cost.step_time import Price, price
from meshwright.published.rows import job_of

# foundation-model-stack/fms-fsdp, README, throughput of Llama 2 at sequence 4096, microbatch 2, bf16, compiled: model,
# layers, hidden, heads, kv_heads, feed-forward, card, GPUs, Gb/s of a node, recomputation, tokens a second of a GPU.
FMS = [
    ("7b", 32, 4096, 32, 32, 11008, "A100", 128, 400, "none", 4550),
    ("7b", 32, 4096, 32, 32, 11008, "H100", 96, 800, "none", 9600),
    ("13b", 40, 5120, 40, 40, 13824, "A100", 128, 400, "selective", 2150),
    ("13b", 40, 5120, 40, 40, 13824, "H100", 96, 800, "selective", 4850),
    ("34b", 48, 8192, 64, 8, 22016, "A100", 128, 400, "selective", 820),
    ("34b", 48, 8192, 64, 8, 22016, "H100", 96, 800, "selective", 1830),
    ("70b", 80, 8192, 64, 8, 28672, "A100", 128, 400, "selective", 410),
    ("70b", 80, 8192, 64, 8, 28672, "H100", 96, 800, "selective", 890),
]
# pytorch/torchtune, README: Llama 3.2 3B on one A100, sequence 4096, microbatch 2: compiled?, recomputation, tokens/s.
TUNE = [("no", "none", 7075), ("yes", "none", 8998), ("yes", "full", 7210)]
BAND = 0.16  # of one run; "selective" does not say of how many blocks, and half is assumed: 13 % at worst


def priced(row: dict[str, str]) -> Price:
    job = job_of(row).job
    assert job is not None
    return price(job)


def fms_row(entry) -> dict[str, str]:
    model, layers, hidden, heads, kv_heads, ffn, gpu, gpus, gbit, recompute, _ = entry
    cells = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn, "vocab": 32_000,
        "seq_len": 4096, "gpu_mem_gb": 80, "n_gpus": gpus, "gpus_per_node": 8, "tp": 1, "pp": 1, "micro_batch": 2,
        "global_batch": 2 * gpus,
    }  # fmt: skip
    text = {
        "framework": "PyTorch FSDP1 (IBM fms-fsdp)", "model_name": f"Llama2 {model}", "gpu": gpu, "compile": "yes",
        "zero_stage": "3 (HSDP)" if model == "7b" else "3", "interconnect": f"{gbit} Gbps", "precision": "bf16",
        "activation_ckpt": recompute, "flash": "yes",
    }  # fmt: skip
    return {key: str(value) for key, value in cells.items()} | text


def tune_row(entry) -> dict[str, str]:
    compiled, recompute, _ = entry
    return {
        "framework": "torchtune full_finetune_single_device", "model_name": "Llama 3.2 3B", "layers": "28",
        "hidden": "3072", "heads": "24", "kv_heads": "8", "ffn_hidden": "8192", "vocab": "128256", "seq_len": "4096",
        "gpu": "A100", "n_gpus": "1", "micro_batch": "2", "grad_accum": "1", "precision": "bf16",
        "activation_ckpt": recompute, "compile": compiled,
    }  # fmt: skip


RUNS = [(fms_row(entry), entry[-1]) for entry in FMS] + [(tune_row(entry), entry[-1]) for entry in TUNE]


@pytest.mark.parametrize(("row", "measured"), RUNS, ids=lambda value: value if isinstance(value, int) else None)
def test_a_printed_throughput_is_near_ours(row, measured):
    answer = priced(row)
    assert answer.tokens_per_second_per_gpu == pytest.approx(measured, rel=BAND)
    width = answer.high_seconds / answer.seconds
    assert measured / width < answer.tokens_per_second_per_gpu < measured * width


def test_the_mean_error_is_small():
    errors = [abs(priced(row).tokens_per_second_per_gpu / measured - 1) for row, measured in RUNS]
    assert fmean(errors) < 0.08
