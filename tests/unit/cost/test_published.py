"""Published rows become jobs: tolerant of how sources write, strict about what was assumed."""

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.published import rows as price_table
from meshwright.published.columns import Cells, by_threshold, llama_width, number, padded
from meshwright.published.rows import ADDED, answered, as_measured, job_of, measured_rank, price_file
from meshwright.spec.params import count
from meshwright.spec.plan import even_stages
from meshwright.spec.problem import InputError

LLAMA = {
    "framework": "nanotron v0.5", "model_name": "Llama-style 8B", "layers": "32", "hidden": "4096", "heads": "32",
    "kv_heads": "32", "ffn_hidden": "14336", "vocab": "131072", "seq_len": "4096", "gpu": "H100", "gpu_mem_gb": "80",
    "n_gpus": "64", "gpus_per_node": "8", "interconnect": "NVLink intra-node; EFA inter-node", "dp": "8",
    "zero_stage": "1", "tp": "4", "sp": "yes", "cp": "1", "pp": "2", "interleave": "1", "schedule": "1F1B",
    "micro_batch": "2", "grad_accum": "16", "global_batch": "256", "activation_ckpt": "none", "compile": "no",
    "precision": "bf16 (fp32 grad accumulation, fp32 master)", "flash": "yes", "offload": "no",
}  # fmt: skip
GPT = {
    "framework": "Megatron-LM", "model_name": "GPT 145B", "layers": "80", "hidden": "12288", "heads": "96",
    "seq_len": "2048", "gpu": "A100-SXM4-80GB", "n_gpus": "1,536", "tp": "8", "pp": "8", "interleave": "2",
    "schedule": "interleaved 1F1B", "micro_batch": "2.0", "global_batch": "2304", "precision": "fp16",
    "activation_ckpt": "full", "flash": "no", "sp": "no", "zero_stage": "0",
    "interconnect": "Selene: NVLink/NVSwitch; 8x200 Gb/s HDR IB per node",
}  # fmt: skip


def job(row, **cells):
    found = job_of(row | cells)
    assert found.job is not None, found.refused
    return found.job


def test_a_whole_row_needs_no_assumption():
    found = job_of(LLAMA)
    assert found.job is not None
    assert found.assumed == ()
    plan = found.job.plan
    assert (plan.tp, plan.pp, plan.shard, plan.replicate, plan.zero) == (4, 2, 8, 1, 1)
    assert (plan.microbatch, plan.grad_accum, plan.batch, plan.world) == (2, 16, 256, 64)
    assert found.job.arch.mlp == "swiglu"
    assert not found.job.arch.tied
    assert found.job.cluster.network.name == "efa"
    assert found.job.stack.name == "nanotron"


def test_empty_cells_are_filled_and_named():
    found = job_of({key: value for key, value in GPT.items() if key not in ("flash", "sp", "zero_stage")})
    assert found.job is not None
    told = " ".join(found.assumed)
    for column in ("vocab = 50257", "kv_heads = 96", "ffn_hidden = 49152", "zero_stage = 0", "sp = no", "flash = no"):
        assert column in told
    assert found.job.arch.vocab == 51_200  # 50,257 filled up to a multiple of 128 × 8
    assert found.job.plan.grad_accum == 48
    assert found.job.plan.data == 24
    assert count(found.job.arch) == pytest.approx(145.6e9, rel=0.002)


def test_a_network_is_read_for_one_gpu():
    rates = {
        "8x200 Gb/s HDR IB per node": 200,
        "1600 Gbps node-node RoCE": 200,
        "NVLink; 400 Gbps RoCE per GPU": 400,
        "NDR 400 Gb/s InfiniBand": 400,
        "4x Omni-Path 100 Gbps per node": 50,
        "NVLink 900 GB/s": 200,  # bytes, inside the node: the card's usual network stays
        "3.2 Tb/s per node": 400,
        "NVLink 4 inter-gpu connects, 4 OmniPath links": 50,
        "InfiniBand NDR": 400,
        "8x HDR InfiniBand": 200,
    }
    found = {text: job(GPT, interconnect=text).cluster.network.bandwidth * 8 / 1e9 for text in rates}
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(
    ("gpu", "memory", "card"),
    [
        ("A100", "40", "a100-40g"),
        ("A100", "", "a100-80g"),
        ("H100 SXM", "80", "h100"),
        ("H100-80GB", "", "h100"),
        ("DGX A100", "80.0", "a100-80g"),
        ("GB200 NVL72", "", "gb200"),
        ("NVIDIA H100-SXM5-80GB", "80", "h100"),
        ("H100 96GB HBM2e", "", "h100-96g"),
        ("B200", "192", "b200"),
        ("8xH200", "141", "h200"),
    ],
)
def test_cards_are_recognised_as_sources_write_them(gpu, memory, card):
    assert job(GPT, gpu=gpu, gpu_mem_gb=memory).cluster.gpu.name == card


def test_a_rack_stays_one_domain_however_small_its_trays():
    assert job(LLAMA, gpu="GB200", gpu_mem_gb="", gpus_per_node="4").cluster.domain == 72
    assert job(LLAMA, gpu="H200", gpu_mem_gb="", gpus_per_node="4").cluster.domain == 4


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("amp_bf16 (mixed_precision=DEFAULT)", "bf16"),
        ("bf16+fp8(hybrid,tensorwise)", "fp8"),
        ("fp16", "fp16"),
        ("MXFP8", "fp8"),
        ("NVFP4", "fp8"),
        ("float8", "fp8"),
        ("BF16", "bf16"),
        ("mixed (fp16)", "fp16"),
        ("", "bf16"),
    ],
)
def test_precision_is_read_from_many_spellings(text, precision):
    assert job(LLAMA, precision=text).plan.precision == precision


@pytest.mark.parametrize(
    ("text", "interleave", "schedule", "chunks"),
    [
        ("1F1B", "1", "1f1b", 1),
        ("1F1B", "4", "interleaved", 4),
        ("interleaved 1F1B", "2", "interleaved", 2),
        ("GPipe", "", "gpipe", 1),
        ("1F1B-I", "2", "interleaved", 2),
        ("ZB-H1", "", "zb1p", 1),
        ("ZB-2p", "", "zb1p", 1),
        ("zero bubble", "", "zb1p", 1),
        ("ZB-V", "", "zbv", 2),
        ("DualPipeV", "", "dualpipev", 2),
        ("", "", "1f1b", 1),
    ],
)
def test_schedules_are_read_from_many_spellings(text, interleave, schedule, chunks):
    plan = job(LLAMA, framework="Megatron-LM", schedule=text, interleave=interleave).plan
    assert (plan.schedule, plan.chunks) == (schedule, chunks)
    assert sum(plan.stages) == 32
    assert len(plan.stages) == 2 * chunks


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", "none"),
        ("no", "none"),
        ("full", "full"),
        ("full/uniform/1", "full"),
        ("full/uniform/4", "every-4"),
        ("full/block/3", "first-3"),
        ("selective", "selective"),
        ("selective (op)", "selective"),
        ("selective/[moe_act]", "selective"),
        ("selective 2", "first-16"),
    ],
)
def test_recomputation_is_read_from_many_spellings(text, policy):
    assert job(LLAMA, activation_ckpt=text).plan.recompute == policy


@pytest.mark.parametrize(
    ("stage", "zero", "shard", "replicate"),
    [("0", 0, 1, 8), ("1", 1, 8, 1), ("3", 3, 8, 1), ("FSDP", 3, 8, 1), ("3 (HSDP)", 3, 2, 4)],
)
def test_sharding_is_read_from_many_spellings(stage, zero, shard, replicate):
    plan = job(LLAMA, zero_stage=stage).plan  # tp 4 leaves two data ranks in a node of eight
    assert (plan.zero, plan.shard, plan.replicate) == (zero, shard, replicate)


def test_what_only_the_stack_does_is_beside_the_plan():
    stack = job(LLAMA, sp="no", flash="unfused").stack
    assert not stack.sequence_parallel
    assert stack.attention == "math"
    assert job(LLAMA).stack.attention == "flash"


def test_a_launcher_s_arguments_in_the_notes_say_what_columns_cannot():
    notes = "args: swiglu, normalization=RMSNorm, position-embedding-type=rope, disable-bias-linear, kv-channels=128"
    arch = job(GPT, notes=notes).arch
    assert (arch.mlp, arch.norm, arch.positions, arch.bias, arch.tied) == ("swiglu", "rms", "rope", False, True)
    arch = job(GPT, notes="args: untie-embeddings-and-output-weights").arch
    assert (arch.mlp, arch.norm, arch.positions, arch.bias, arch.tied) == ("gelu", "layer", "learned", True, False)


def test_experts_get_their_own_width_from_the_parameter_count():
    row = LLAMA | {
        "framework": "Megatron-Bridge", "model_name": "Qwen3 30B A3B", "params": "30.5B", "layers": "48",
        "hidden": "2048", "kv_heads": "4", "ffn_hidden": "6144", "vocab": "151936", "experts": "128", "top_k": "8",
        "ep": "8", "pp": "1", "tp": "1", "dp": "64", "n_gpus": "64", "grad_accum": "", "micro_batch": "1",
    }  # fmt: skip
    found = job(row)
    assert found.arch.expert_ffn == 768
    assert (found.arch.top_k, found.plan.ep) == (8, 8)
    assert count(found.arch) == pytest.approx(30.5e9, rel=0.02)


def test_a_named_moe_model_brings_what_no_column_says():
    row = LLAMA | {
        "model_name": "DeepSeekV2 reduced to 4 layers", "layers": "4", "hidden": "5120", "heads": "128", "kv_heads": "",
        "ffn_hidden": "12288", "vocab": "102400", "experts": "160", "top_k": "6", "tp": "1", "pp": "1", "ep": "8",
        "n_gpus": "8", "dp": "8", "grad_accum": "4", "global_batch": "64",
    }  # fmt: skip
    arch = job(row).arch
    assert (arch.layers, arch.expert_ffn, arch.shared_experts, arch.dense_layers) == (4, 1536, 2, 1)
    assert arch.kv_rank == 512  # latent attention, not grouped queries
    other = job(row, hidden="4096")  # of that name, and another model
    assert other.arch.kv_rank == 0


def test_adapters_are_refused_by_the_notes_too():
    assert "adapters" in job_of(LLAMA | {"notes": "24.07; Finetuning LoRA; recompute not listed"}).refused
    assert job_of(LLAMA | {"notes": "24.07; Finetuning SFT (LoRA is another row)"}).job is not None


def test_megatron_with_its_communication_overlapped_is_priced_so():
    row = {key: value for key, value in GPT.items() if key not in ("schedule", "interleave", "flash", "sp")}
    row |= {"precision": "bf16", "zero_stage": ""}
    plain, overlapped = job(row), job(row, notes="interleave not stated; DP/TP/PP comm overlap on")
    assert (plain.stack.name, plain.plan.schedule, plain.plan.zero) == ("megatron", "1f1b", 0)
    assert (overlapped.stack.name, overlapped.plan.schedule, overlapped.plan.zero) == ("nvidia-nemo", "interleaved", 1)


def test_a_pipeline_of_unknown_batch_is_filled():
    row = LLAMA | {"global_batch": "", "grad_accum": ""}
    assert job(row).plan.grad_accum == 16
    assert job(row, pp="1", dp="16").plan.grad_accum == 1


def test_a_tied_output_is_found_by_the_parameter_count():
    row = LLAMA | {"model_name": "Llama 3.2 3B", "layers": "28", "hidden": "3072", "heads": "24", "kv_heads": "8"}
    row |= {"ffn_hidden": "8192", "vocab": "128256", "params": "3.21e9"}
    assert job(row).arch.tied
    assert not job(row | {"params": "3.61e9"}).arch.tied


def test_an_early_run_that_does_not_say_so_recomputes_only_where_it_must():
    small = job(GPT, layers="8", hidden="1024", heads="16", activation_ckpt="", model_name="GPT", pp="1", tp="1")
    assert small.plan.recompute == "none"
    large = job_of(GPT | {"activation_ckpt": "", "pp": "1", "interleave": "", "micro_batch": "4"})
    assert large.job is not None
    assert large.job.plan.recompute == "full"
    assert any("would hardly fit otherwise" in each for each in large.assumed)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"gpu": ""}, "no GPU is named"),
        ({"gpu": "H1000"}, "did you mean h100"),
        ({"seq_len": ""}, "the sequence length is not given"),
        ({"layers": "", "hidden": ""}, "neither layers and hidden nor a parameter count"),
        ({"model_name": "llama3-8b QLoRA"}, "adapters"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(cells, why):
    found = job_of(GPT | {"model_name": "GPT"} | cells)
    assert found.job is None
    assert why in found.refused
    assert not found.impossible


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"pp": "64", "tp": "1", "dp": "1", "framework": "Megatron-LM"}, "more stages than layers"),
        ({"tp": "5"}, "not a multiple of tp"),
        ({"global_batch": "4", "grad_accum": "1"}, "less than one sequence"),
    ],
)
def test_a_plan_that_cannot_run_does_not_fit_either(cells, why):
    found = job_of(LLAMA | cells)
    assert why in found.refused
    assert found.impossible
    assert answered(LLAMA | cells).cells()["pred_fits"] == "no"


def test_a_cut_that_leaves_ranks_empty_is_priced_and_cannot_run():
    cells = {"layers": "16", "hidden": "2048", "ffn_hidden": "8192", "pp": "16", "tp": "1", "dp": "4"}
    found = job_of(LLAMA | cells)
    assert found.job is not None
    assert found.job.plan.stages.count(0) == 3
    assert found.impossible
    answer = answered(LLAMA | cells).cells()
    assert answer["pred_fits"] == "no"
    assert float(answer["pred_iter_time_s"]) > 0
    assert "with nothing to hold" in answer["assumed"]


def test_only_a_parameter_count_is_enough_for_a_gpt():
    found = job_of(GPT | {"layers": "", "hidden": "", "heads": "", "params": "52B"})
    assert found.job is not None
    assert count(found.job.arch) == pytest.approx(52e9, rel=0.05)
    assert any("a GPT of that many parameters" in each for each in found.assumed)


def test_batches_that_disagree_are_settled_by_the_global_one_and_told():
    found = job_of(LLAMA | {"grad_accum": "3"})
    assert found.job is not None
    assert found.job.plan.batch == 256
    assert any("grad_accum = 16" in each for each in found.assumed)
    ragged = job_of(LLAMA | {"micro_batch": "3", "grad_accum": ""})
    assert ragged.job is not None
    assert ragged.job.plan.grad_accum == 11  # 32 sequences of a rank in microbatches of 3
    assert any("global_batch = 264" in each for each in ragged.assumed)
    assert job(LLAMA, global_batch="1M tokens (1,048,576)", grad_accum="").plan.batch in (240, 256)


def test_numbers_are_found_among_words():
    texts = ["8", "1.0", "50,257", "405e9", "52B", "8×", "131072 or 128256 (figure does not say)", "3.2T", "", "none"]
    assert [number(text) for text in texts] == [8, 1, 50257, 405e9, 52e9, 8, 131072, 3.2e12, None, None]
    assert job(LLAMA, seq_len="8k").sequence == 8192


def test_an_argument_is_a_whole_word_of_the_notes():
    cells = Cells({"notes": "steady; args: moe-ffn-hidden-size=1024, swiglu, overlap-grad-reduce"})
    assert cells.argument("moe-ffn-hidden-size") == "1024"
    assert cells.argument("swiglu") == ""
    assert cells.argument("grad-reduce") is None


@given(layers=st.integers(2, 126), pp=st.integers(2, 32))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_every_cut_holds_every_layer_once(layers, pp):
    assert sum(even_stages(layers, pp)) == layers
    arch = job(LLAMA, layers=str(max(layers, 2))).arch
    assert sum(by_threshold(arch, pp)) == arch.layers


def test_nanotron_s_last_rank_is_shorter_by_its_output_projection():
    arch = job(LLAMA, layers="16", hidden="2048", ffn_hidden="8192").arch
    assert by_threshold(arch, 2) == (10, 6)  # the projection weighs as much as four layers
    assert by_threshold(arch, 4) == (5, 5, 5, 1)
    assert by_threshold(arch, 8) == (3, 2, 3, 2, 3, 2, 1, 0)


def test_widths_follow_their_rules():
    assert llama_width(4096) == 11_008
    assert padded(50_257, 128, 8) == 51_200
    assert padded(50_257, 1, 1) == 50_257


def test_answers_of_a_whole_row_are_figures_in_order():
    cells = answered(LLAMA).cells()
    assert set(cells) == set(ADDED)
    low, seconds, high = (float(cells[name]) for name in ("pred_low_s", "pred_iter_time_s", "pred_high_s"))
    assert 0 < low <= seconds <= high
    tokens = 256 * 4096 / seconds / 64
    assert float(cells["pred_tokens_per_s_per_gpu"]) == pytest.approx(tokens, rel=1e-4)
    low, peak, high = (float(cells[f"pred_{name}_mem_gib"]) for name in ("low", "peak", "high"))
    assert 1 < low <= peak <= high < 80
    assert cells["pred_fits"] == "yes"
    assert cells["refused"] == ""


def test_the_rank_and_the_kind_of_number_are_those_that_the_source_measured():
    found = job(LLAMA, framework="Megatron-LM")
    assert measured_rank("torch allocated_bytes.all.peak on the last rank (last pp stage), gib", found) == 1
    assert measured_rank("nanotron rank-0 (alloc or reserved, see readme)", found) == 0
    assert measured_rank("nvidia-smi", found) is None
    held = price_table.fits(found).ledger
    assert as_measured(held, "torch max_allocated") == held.allocated
    assert as_measured(held, "max_reserved") == held.reserved
    assert as_measured(held, "nvidia-smi") == held.shown
    assert as_measured(held, "alloc or reserved") == held.reported


def test_megatron_s_selective_recomputation_keeps_no_scores_and_everything_else():
    """Korthikanti et al. 2022: sbh·34/t bytes a layer, where full recomputation keeps 2·sbh and none keeps more."""
    kept = {
        policy: answered(GPT | {"sp": "yes", "activation_ckpt": policy}).memory_bytes
        for policy in ("none", "selective", "full")
    }
    assert kept["full"] < kept["selective"] < kept["none"]
    fused = answered(GPT | {"sp": "yes", "activation_ckpt": "none", "flash": "yes"}).memory_bytes
    assert kept["selective"] == fused


def test_a_table_comes_back_whole_with_our_columns_and_a_reason_for_every_refusal(tmp_path):
    rows = [LLAMA | {"id": "a", "mine": "kept, with a comma"}, LLAMA | {"id": "b", "gpu": "abacus", "mine": ""}]
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    with source.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    told: list[str] = []
    price_file(source, target, told.append)
    with target.open(newline="") as lines:
        found = list(csv.DictReader(lines))
    assert [row["mine"] for row in found] == ["kept, with a comma", ""]
    assert float(found[0]["pred_iter_time_s"]) > 0
    assert found[1]["pred_iter_time_s"] == ""
    assert "abacus" in found[1]["refused"]
    assert told[-1].startswith("1 row priced, 1 refused")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]
    price_file(target, target, told.append)  # its own table again: the columns are replaced, not doubled
    with target.open(newline="") as lines:
        assert next(csv.reader(lines)).count("refused") == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"id,layers\n1,2\n", "lacks the columns hidden, seq_len, gpu, n_gpus"),
        (b"layers,hidden,seq_len,gpu,n_gpus\n1,2,3,h100,8,9\n", "line 2: more cells than the header"),
        (b"\xff\xfe\x00", "not a CSV table"),
        (b'layers,hidden,seq_len,gpu,n_gpus\n1,2,3,"h100\n', "not a CSV table"),
        (None, "No such file"),
    ],
)
def test_a_malformed_table_is_one_clear_sentence(tmp_path, content, why):
    source = tmp_path / "in.csv"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(InputError, match=why) as caught:
        price_file(source, tmp_path / "out.csv", print)
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "out.csv").exists()


@given(
    st.dictionaries(
        st.sampled_from(
            ["tp", "pp", "dp", "micro_batch", "global_batch", "interleave", "schedule", "zero_stage", "vocab"]
        ),
        st.sampled_from(["", "0", "1", "3", "8", "7.5", "many", "-4", "1e9", "8×"]),
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_cell_is_priced_or_refused_with_a_reason(cells):
    answer = answered(LLAMA | {"n_gpus": ""} | cells)
    assert (answer.price is None) == bool(answer.refused)
    assert "a fault of ours" not in answer.refused


@pytest.mark.parametrize(
    ("column", "text", "why"),
    [
        ("layers", "-1", "layers = -1 is negative"),
        ("layers", "1e400", "layers = 1e400 is too large"),
        ("hidden", "1e12", "hidden = 1e12 is too large"),
        ("n_gpus", "1e8", "n_gpus = 100000000 is more than any cluster has"),
    ],
)
def test_a_number_that_no_run_has_is_a_reason_to_refuse_the_row(column, text, why):
    assert answered(LLAMA | {column: text}).refused == why
