import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from asking import LLAMA_7B, answer, told

from meshwright.cli import main, options
from meshwright.cli import plan_tables as tables
from meshwright.cli.query import put
from meshwright.config import load
from meshwright.config.huggingface import config_of
from meshwright.config.presets import preset
from meshwright.hardware.cluster import cluster as machines
from meshwright.hardware.stacks import stacks
from meshwright.runtime import terminal
from meshwright.search.best_first import ALIKE, notch, search
from meshwright.search.question import Question
from meshwright.spec.plan import Plan

ALPACA = (
    "plan llama-7b --cluster 4xa100-80g --sequence 512 "
    "plan.shard=4 plan.zero=3 plan.microbatch=4 plan.grad_accum=8 --exact"
)
SMALL = "plan llama3-8b --cluster 8xh100 --sequence 4096 --batch 32"
KEYS = {
    "plan", "seconds", "low_seconds", "high_seconds", "tokens_per_second_per_gpu", "mfu", "hfu", "peak_bytes", "ledger",
    "waterfall", "fits", "why",
}  # fmt: skip


def test_plans_come_in_order_with_everything_scripts_need(capsys):
    found = answer(capsys, SMALL)
    plans = found["plans"]
    assert len(plans) == 5
    assert all(set(plan) >= KEYS for plan in plans)
    fastest = min(plan["seconds"] for plan in plans)
    notches = [notch(plan["seconds"], fastest) for plan in plans]
    assert notches == sorted(notches)
    for plan in plans:
        assert plan["low_seconds"] < plan["seconds"] < plan["high_seconds"]
        assert sum(share["seconds"] for share in plan["waterfall"]) == pytest.approx(plan["seconds"], rel=1e-9)
        assert sum(line["bytes"] for line in plan["ledger"]) == plan["peak_bytes"]
        assert plan["fits"]
    counts = found["counts"]
    assert counts["legal"] == sum(counts["too_large"].values()) + counts["slower"] + counts["priced"]


def test_the_table_says_why_and_what_else(capsys):
    text = told(capsys, SMALL, "--tokens", "1e9", "--dollars", "2")
    for word in ("tokens/s/GPU", "legal plans", "Why the first", "Neighbouring plans", "GPU-hours", "dollars"):
        assert word in text


def test_a_fixed_field_is_kept(capsys):
    found = answer(capsys, SMALL, "plan.tp=2", "--top", "2")
    assert [plan["plan"]["tp"] for plan in found["plans"]] == [2, 2]


def test_mathematics_varies_only_when_allowed(capsys):
    fixed = answer(capsys, SMALL, "--top", "3")
    assert {plan["plan"]["precision"] for plan in fixed["plans"]} == {"bf16"}
    varied = answer(capsys, SMALL, "--vary", "precision", "--top", "1")["plans"][0]
    assert varied["plan"]["precision"] == "fp8"  # twice the rate on this card
    assert varied["seconds"] < fixed["plans"][0]["seconds"]


WHOLE_8B = "plan llama3-8b --cluster 1xh200 --sequence 8192 --batch 1"


def test_all_of_llama3_8b_trains_on_one_card_where_the_optimizer_may_vary(capsys):
    offloads = ("optimizer_offload", "cpu_offload", "activation_offload")
    fixed = answer(capsys, WHOLE_8B)["plans"]
    varied = answer(capsys, WHOLE_8B, "--vary", "optimizer", "--vary", "precision")["plans"][0]
    assert varied["fits"]
    # Bf16 states, which fit too, would save less than 5 % of a step.
    assert (varied["plan"]["precision"], varied["state_dtype"]) == ("fp8", "fp32")
    assert not any(varied["plan"].get(name) not in (None, "none", False) for name in offloads)
    assert varied["plan"]["recompute"] == "none"
    assert all(varied["seconds"] < plan["seconds"] for plan in fixed)
    halves = ("optim.master_weights=split", "optim.state_dtype=bf16", "plan.precision=fp8")
    said = answer(capsys, WHOLE_8B, *halves)["plans"][0]
    lines = {line["name"]: line["bytes"] for line in said["ledger"]}
    parameters = 8_030_261_248
    assert [lines[name] for name in ("weights", "master", "moments")] == [
        2 * parameters,
        2 * parameters,
        4 * parameters,
    ]
    assert said["plan"]["recompute"] == "none"


def test_the_alpaca_recipe_fits_four_cards_with_room(capsys):
    found = answer(capsys, ALPACA)
    plan = found["plans"][0]
    assert plan["fits"]
    assert found["batch"] == 128
    assert plan["plan"]["shard"] == 4
    # Weights, gradients and two moments in fp32, 16 bytes of 6.74 billion parameters, over four ranks: 25.1 GiB.
    states = sum(line["bytes"] for line in plan["ledger"] if line["name"] in ("weights", "gradients", "moments"))
    assert states == pytest.approx(16 * 6.738e9 / 4, rel=0.01)
    assert plan["headroom_bytes"] > 20 * 2**30
    text = told(capsys, ALPACA)
    assert "fits: yes" in text
    assert "allocated" in text


def test_an_exact_plan_that_does_not_fit_is_three(capsys):
    words = "plan llama-7b --cluster 1xa100-80g --sequence 512 plan.microbatch=4 --exact"
    assert answer(capsys, words, code=3)["plans"][0]["fits"] is False
    assert "fits: no" in told(capsys, words, code=3)


def test_an_exact_plan_must_be_legal(capsys):
    words = "plan llama3-8b --cluster 8xh100 --sequence 4096 --batch 8 plan.tp=3 --exact"
    assert "arch.heads" in told(capsys, words, code=2)


def test_a_written_plan_is_a_run_that_loads(capsys, tmp_path):
    file = tmp_path / "run.toml"
    found = answer(capsys, SMALL, "--write", str(file))
    run = load.load(file).run
    assert run.arch == preset("llama3-8b")
    assert run.goal.cluster == "8xh100"
    assert (run.sequence, run.batch) == (4096, 32)
    assert json.loads(json.dumps(found["plans"][0]["plan"]))["microbatch"] == run.plan.microbatch
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert "--force" in told(capsys, SMALL, "--write", str(file), code=2)
    assert main.main([*SMALL.split(), "--write", str(file), "--force"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        SMALL,
        f"{SMALL} plan.pp=2",
        "plan gpt2 --cluster 1xh200 --batch 8 plan.bf16_params=false",
        "plan mixtral-8x7b --cluster 16xh100 --batch 64 adapter.kind=lora adapter.rank=8",
        "plan arch.layers=4 arch.hidden=512 --cluster 2xrtx4090 --batch 8 --vary optimizer epochs=3",
    ],
)
def test_a_written_plan_is_short_and_says_all_that_the_whole_run_says(capsys, tmp_path, words):
    brief, whole = tmp_path / "run.toml", tmp_path / "whole.toml"
    told(capsys, words, "--write", str(brief))
    run = load.load(brief).run
    text = load.write(run)
    whole.write_text(text.replace(f"steps = {run.steps}\n", "") if run.epochs else text)
    assert load.load(whole).run == run
    assert len(brief.read_text().splitlines()) < 60 < len(text.splitlines())
    assert ('preset = "' in brief.read_text()) == ("arch." not in words)


def test_a_written_plan_states_all_where_a_short_file_would_be_another_run(capsys, tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    monkeypatch.setattr(
        load, "write_brief", lambda run, named: 'sequence = 4096\nbatch = 32\narch.preset = "llama3-8b"\n'
    )
    found = answer(capsys, SMALL, "--write", str(file))["plans"][0]["plan"]
    assert load.load(file).run.plan.microbatch == found["microbatch"]
    assert "norm_eps" in file.read_text()


def test_a_run_file_is_planned_and_its_own_plan_priced(capsys, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nsequence = 1024\nbatch = 64\n[arch]\npreset = "gpt2"\n[goal]\ncluster = "8xa100-80g"\n'
        "[plan]\nreplicate = 8\nmicrobatch = 8\nprecision = 'bf16'\n"
    )
    assert len(answer(capsys, "plan", str(file))["plans"]) == 5
    mine = answer(capsys, "plan", str(file), "--exact")["plans"][0]
    assert (mine["plan"]["replicate"], mine["plan"]["microbatch"]) == (8, 8)


def test_a_hugging_face_config_is_a_model(capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_7B))
    for target in (file, tmp_path):
        found = answer(capsys, "plan", str(target), "--layers", "--cluster", "8xh100")
        assert sum(layer["count"] * layer["parameters"] for layer in found["layers"]) == 6_738_415_616


def test_layers_add_up_to_the_model(capsys):
    found = answer(capsys, "plan mixtral-8x7b --layers --cluster 8xh100 --sequence 4096")
    assert sum(layer["count"] * layer["parameters"] for layer in found["layers"]) == 46_702_792_704
    assert "MoE block" in told(capsys, "plan mixtral-8x7b --layers --cluster 8xh100")


def test_how_many_gpus(capsys):
    words = "plan llama3-8b --cluster 8xh100 --sequence 4096 --batch 32 plan.optimizer_offload=none --gpus-needed"
    found = answer(capsys, words, "plan.cpu_offload=false")
    assert found["gpus"] in (2, 4)  # 16 bytes of 8 billion parameters are 120 GiB: more than one card, and two suffice
    assert found["plans"][0]["fits"]
    assert "is needed" in told(capsys, "plan gpt2 --cluster 8xh100 --batch 8 --gpus-needed")


def test_the_largest_that_fits(capsys):
    box = "--cluster 8xa100-80g --sequence 2048"
    model = answer(capsys, f"plan --largest model {box} --batch 64")
    # 16 bytes of 123 billion are 1,827 GiB of its hosts' 2,000; of 141, too many
    assert model["value"] == "mistral-large-123b"
    microbatch = answer(capsys, f"plan llama-7b --largest microbatch {box}")
    assert microbatch["plans"][0]["plan"]["microbatch"] == microbatch["value"] < microbatch["next"]
    sequence = answer(
        capsys,
        "plan gpt2-xl --largest sequence --cluster 1xh100 --batch 1 arch.positions=rope",
    )
    assert sequence["value"] >= 1024


def test_what_if_the_network_were_slow(capsys):
    words = "plan gpt2 --cluster 2x8xa100-80g --sequence 1024 --batch 64 plan.tp=1 plan.pp=1 plan.cp=1"
    found = answer(capsys, words, "--network", "10gbe")
    assert found["same_plan"]["plan"] == found["base"]["plan"]
    assert found["same_plan"]["seconds"] > 2 * found["base"]["seconds"]
    assert found["plans"][0]["seconds"] <= found["same_plan"]["seconds"] * (1 + ALIKE)
    assert "best then" in told(capsys, words, "--what-if", "network=10gbe")
    assert "is unknown" in told(capsys, words, "--what-if", "colour=red", code=2)


def test_nothing_fits_is_three_with_the_nearest_and_what_would(capsys):
    words = "plan llama3-70b --cluster 2xa100-80g --sequence 4096 --batch 8 plan.recompute=full"
    found = answer(capsys, words, code=3)
    assert found["plans"] == []
    assert len(found["misses"]) == 3
    assert all(miss["fits"] is False for miss in found["misses"])  # two hosts of 250 GiB lack what the cards do
    assert found["changes"]
    assert all(change["fits"] for change in found["changes"])
    text = told(capsys, words, code=3)
    assert "Nothing fits" in text
    assert "What would fit" in text


def test_a_written_run_says_what_the_planner_did_not_choose(capsys, tmp_path):
    file = tmp_path / "planned.toml"
    text = told(capsys, SMALL, "optim.lr=1e-4", "--write", str(file))
    assert "steps = 100, data.source = stdlib, optim.warmup = 0" in text
    assert "optim.lr" not in text.split("written:")[1]
    run = load.load(file).run
    assert (run.steps, run.optim.lr, run.eval.prompt) == (100, 1e-4, "")  # nothing of the default run


def test_weights_that_will_come_from_a_folder_need_not_be_there_to_plan(capsys, tmp_path):
    file = tmp_path / "second.toml"
    file.write_text('sequence = 512\nbatch = 8\n[arch]\npreset = "tiny"\n[init]\nfrom = "runs/first"\n')
    assert "plan" in told(capsys, "plan", str(file), "--cluster", "8xh100")
    file.write_text('sequence = 512\nbatch = 8\n[init]\nfrom = "runs/first"\n')
    assert "runs/first" in told(capsys, "plan", str(file), "--cluster", "8xh100", code=2)


def test_a_narrow_terminal_has_figures_below_their_plans():
    cluster, stack = machines("64xh100"), stacks()["meshwright"]
    asked = Question(arch=preset("llama3-8b"), sequence=8192, batch=64, precision="bf16", cluster=cluster, stack=stack)
    found = search(asked, 3)
    wide, narrow = (list(tables.ranking(found, asked, columns)) for columns in (None, 80))
    assert len(narrow) - len(wide) == 1 + len(found.found)
    assert [" ".join(line.split()) for line in wide[:1]] == [" ".join(" ".join(narrow[:2]).split())]


def test_lines_are_broken_between_words_on_a_terminal():
    line = "  one two three four"
    assert list(terminal.wrapped([line], None)) == [line]
    assert list(terminal.wrapped([line], 12)) == ["  one two", "  three four"]
    assert list(terminal.wrapped([line], 12, "  ")) == ["  one two", "    three", "    four"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --cluster 8xh100", "no model is named"),
        ("plan llama3-8b", "--cluster"),
        ("plan llama3-8b --cluster 8xh100 --dollars 2", "add --tokens"),
        ("plan llama3-8b --cluster 8xh100 plan.tp=3", "plan.tp = 3 does not divide 8 GPUs"),
        ("train llama3-8b", "write arch.preset=llama3-8b"),
        ("train --ranks 3 plan.tp=2", "start 2, 4 or 6 ranks"),
        ("plan llama3-9b --cluster 8xh100", "llama3-8b"),
        ("plan llama3-8b --cluster 8xh1000", "h100"),
        ("plan llama3-8b --cluster 8xh100 plan.tp=16", "does not divide 8 GPUs"),
        ("plan llama3-8b --cluster 64xh100 plan.tp=64", "arch.heads"),
        ("plan llama3-8b --cluster 8xh100 --batch 7 plan.microbatch=2", "multiple of 2"),
        ("plan llama3-8b --cluster 7xh100 --batch 8 plan.pp=1", "batch"),
        ("plan llama3-8b --cluster 8xh100 plan.tpp=2", "plan.tp"),
        ("plan llama3-8b --cluster 8xh100 plan.recompute=some", "recompute"),
        ("plan llama3-8b --cluster 8xh100 --sequence 4096 plan.pp=64", "does not divide"),
        ("plan gpt2 --cluster 8xh100 --sequence 4096", "learned positions"),
        ("plan missing.toml --cluster 8xh100", "missing.toml"),
        ("plan --price in.csv", "--out"),
    ],
)
def test_a_mistake_is_two_and_says_what_to_do(capsys, words, said):
    assert said in told(capsys, words, code=2)


def test_traffic_needs_no_cluster(capsys):
    assert main.main(["plan", "tiny", "plan.replicate=2", "--traffic", "--json"]) == 0
    assert {call["kind"] for call in json.loads(capsys.readouterr().out)} >= {"all_reduce"}


def test_planning_imports_neither_torch_nor_numpy():
    code = f"""
import sys
from meshwright.cli.main import main
assert main({SMALL.split()!r}) == 0
heavy = {{"torch", "numpy", "rich", "tokenizers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parents[3])


def test_measured_machines_are_priced_as_measured(capsys):
    words = "plan gpt2 --cluster 1xh200 --sequence 1024 --batch 64"
    profile = str(Path(__file__).parents[3] / "results" / "profile-h200.json")
    usual, measured = answer(capsys, words), answer(capsys, words, "--profile", profile)
    assert usual["cluster"]["efficiency"] is None
    assert measured["cluster"]["efficiency"]["name"] == "NVIDIA H200"
    assert measured["plans"][0]["seconds"] != usual["plans"][0]["seconds"]
    assert "predicted from a measured profile (NVIDIA H200)" in told(capsys, words, "--profile", profile)
    assert "the cluster has h100" in told(capsys, words.replace("h200", "h100"), "--profile", profile, code=2)
    kept = answer(capsys, words.replace("1xh200", "16xh200"), "--profile", profile, "--what-if", "network=10gbe")
    assert kept["base"]["seconds"] < kept["same_plan"]["seconds"]


def test_the_answer_is_the_first_three_lines(capsys):
    words = [*SMALL.split(), "--tokens", "15T", "--dollars", "$2"]
    fits, speed, run, blank, *_ = told(capsys, " ".join(words)).splitlines()
    assert re.match(r"Fits: [\d.]+ of 79\.1 GiB per GPU, [\d.]+ GiB headroom \([\d.]+ GiB if .* 5% too low\)\.", fits)
    assert re.match(
        r"[\d.]+ s/step \(.* – .*\), [\d,]+ tokens/s \(.* – .*\), MFU [\d.]+% \(.* – .*\); 15 T tokens: ", speed
    )
    assert re.search(r"days \(.*\), [\d,]+ GPU-hours, [\d,]+ dollars$", speed)
    assert run.startswith("Run: meshwright train arch.preset=llama3-8b ")
    assert blank == ""
    found = answer(capsys, " ".join(words))
    first, brief = found["plans"][0], found["answer"]
    assert brief["fits"] is True
    assert (brief["seconds"], brief["headroom_bytes"]) == (first["seconds"], first["headroom_bytes"])
    assert brief["days"] == pytest.approx(15e12 / (32 * 4096) * first["seconds"] / 86400, rel=1e-6)
    assert brief["dollars"] == pytest.approx(brief["days"] * 24 * 8 * 2, rel=1e-6)
    assert (brief["command"], brief["margin"]) == (run.removeprefix("Run: "), pytest.approx(0.05))
    unasked = answer(capsys, SMALL)["answer"]
    assert (unasked["days"], unasked["dollars"]) == (None, None)


OWN = """
name = "mine"
sequence = 1024
batch = 64
arch.preset = "gpt2"
goal.cluster = "8xa100-80g"
plan.tp = 4
"""


@pytest.mark.parametrize(
    "line",
    [
        SMALL,
        f"{SMALL} plan.pp=2 plan.schedule=interleaved",
        f"{SMALL} plan.pp=2 plan.schedule=zb1p plan.chunks=1",  # which has two of them where nobody says
        f"{SMALL} plan.zero=3 optim.lr=1e-4 plan.stages=[] goal.memory_gib=60",
        f"{SMALL} --vary optimizer",
        "plan llama3-8b --cluster 1xh100 --sequence 4096 --batch 8",
        "plan gpt2 --cluster 1xrtx-4090",
        "plan mixtral-8x7b --cluster 2x8xh100 --sequence 4096 --batch 64",
        "plan own.toml",
        "plan own.toml batch=32 --sequence 512",  # which are not the file's
        "plan hf/config.json --cluster 4xh100",
        "plan hf --cluster 8xh100",
        "plan arch.layers=12 arch.hidden=768 --cluster 2xrtx4090",
    ],
)
def test_the_command_trains_the_first_plan(capsys, tmp_path, monkeypatch, line):
    """The words are read as `train` reads them, on a machine with another number of GPUs."""
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(OWN)
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(LLAMA_7B))
    found = answer(capsys, line)
    typed = shlex.split(found["answer"]["command"])
    assert typed[0] == ("torchrun" if "2x8x" in line else "meshwright")
    options_of_it = main.parse(typed[typed.index("train") :])
    file, overrides = options.split(options_of_it.words)
    run = load.load(file, overrides, default_ranks=3).run
    first = found["plans"][0]
    assert run.plan == msgspec.convert(first["plan"], Plan)
    assert run.arch == put(main.parse(line.split())).question.arch
    assert (run.sequence, run.batch) == (found["sequence"], first["batch"])
    assert (run.optim.master_weights, run.optim.state_dtype) == (first["master_weights"], first["state_dtype"])
    exactly = answer(capsys, "plan", *options_of_it.words, "--exact")  # which also knows the cluster
    assert exactly["plans"][0]["peak_bytes"] == first["peak_bytes"]
    assert exactly["answer"]["seconds"] == pytest.approx(first["seconds"])


QWEN = {
    "model_type": "qwen_next", "architectures": ["QwenNextForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
FALCON = {
    "model_type": "falcon", "architectures": ["FalconForCausalLM"], "vocab_size": 65024, "hidden_size": 4544,
    "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True,
}  # fmt: skip
QWEN_MOE = QWEN | {
    "model_type": "qwen_next_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "said"),
    [
        (QWEN, 8.19, "model_type qwen_next is not one that `meshwright train` knows; priced as a decoder like Llama"),
        (FALCON, 6.92, "model_type falcon is not one that `meshwright train` knows; priced as a decoder like GPT"),
        (QWEN_MOE, 30.5, "like Llama with 128 experts"),
        ({"model_type": "vision_chat", "text_config": QWEN}, 8.19, "model_type vision_chat is not one"),
        (LLAMA_7B | {"hidden_act": "gelu"}, 6.74, 'hidden_act = "gelu", which is not supported; priced as'),
    ],
)
def test_a_decoder_of_another_family_is_priced_by_its_numbers_and_said_to_be(capsys, tmp_path, config, billions, said):
    """The sizes of Qwen3-8B, 8.2 billion, of Falcon-7B, 6.9, and of Qwen3-30B-A3B, 30.5."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = f"plan {tmp_path} --cluster 8xh100 --sequence 2048 --batch 64"
    found = answer(capsys, line, "--layers")
    parameters = sum(layer["count"] * layer["parameters"] for layer in found["layers"])
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)
    text = told(capsys, line, "--top", "1")
    assert "\napproximate: " in text
    assert said in text
    assert text.splitlines()[2].startswith("Not to be trained here: ")
    assert answer(capsys, line, "--top", "1")["answer"]["command"] is None
    assert "not supported" in told(capsys, f"train init.from={tmp_path}", code=2)


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("tiny-deepseek-v3", {"n_group": 3}, "n_group"),
        ("tiny-deepseek-v3", {"first_k_dense_replace": 99}, "first_k_dense_replace"),
        ("tiny-qwen3-moe", {"num_experts_per_tok": 99}, "num_experts_per_tok"),
        ("tiny-gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("tiny-olmo2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("tiny-smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("tiny-mistral", {"sliding_window": 513}, "sliding_window"),
        ("tiny-qwen3", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("tiny-qwen3", {"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ("tiny-qwen3", {"rms_norm_eps": -1}, "rms_norm_eps"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_every_verb(capsys, tmp_path, name, change, key):
    (tmp_path / "config.json").write_text(json.dumps(config_of(preset(name)) | change))
    verbs = (f"plan {tmp_path} --cluster 8xh100", f"train init.from={tmp_path}", f"convert {tmp_path} {tmp_path}/out")
    for line in verbs:
        text = told(capsys, line, code=2)
        assert key in text
        assert ("; use " in text) or ("; give " in text) or ("; supported: " in text)


@pytest.mark.parametrize("config", [{"model_type": "bert"}, QWEN | {"is_encoder_decoder": True}, {"hidden_size": 8}])
def test_what_is_no_decoder_is_refused(capsys, tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "model_type" in told(capsys, f"plan {tmp_path} --cluster 8xh100", code=2)


def test_a_model_by_its_numbers_says_what_was_left_out(capsys):
    words = "plan arch.layers=32 arch.hidden=4096 arch.kv_heads=8 arch.ffn=14336 arch.vocab=128256 --cluster 8xh100"
    found = answer(capsys, words, "--sequence", "8192", "--batch", "64")
    assert found["assumed"][:2] == ["arch.heads = 32", "arch.context = 8192"]
    named = answer(capsys, "plan llama3-8b --cluster 8xh100 --sequence 8192 --batch 64")
    assert found["plans"][0]["peak_bytes"] == named["plans"][0]["peak_bytes"]
    assert "arch.hidden is missing" in told(capsys, "plan arch.layers=32 --cluster 8xh100", code=2)
    odd = answer(capsys, "plan arch.layers=4 arch.hidden=1000 --cluster 1xh100 --sequence 512 --batch 8")
    assert odd["assumed"][0] == "arch.heads = 10"  # 15 of 64 would not divide it


def test_a_command_states_every_number_that_was_stated(capsys):
    words = "arch.layers=4 arch.hidden=256 arch.heads=4"  # four layers, as the default run has
    found = answer(capsys, f"plan {words} --cluster 2xrtx5090 --sequence 1024 --batch 16")["answer"]
    stated = found["command"].removeprefix("meshwright train ")
    assert set(words.split()) <= set(stated.split())
    assert answer(capsys, f"plan {stated} --exact")["answer"]["seconds"] == found["seconds"]


def test_a_name_like_no_model_is_not_taken_for_one(capsys):
    text = told(capsys, "plan nomodel --cluster 8xh100", code=2)
    assert "nomodel is neither a known model nor a file" in text
    assert "did you mean" not in text
    assert "did you mean llama3-8b?" in told(capsys, "plan Llama3-8B --cluster 8xh100", code=2)


def test_an_unknown_flag_shows_the_usage_of_its_verb(capsys):
    text = refused(capsys, "plan gpt2 --fro")
    assert text.startswith("usage: meshwright plan ")
    assert "--fro is not a flag; did you mean --force?" in text


def test_a_written_plan_is_trained_by_its_file(capsys, tmp_path):
    file = str(tmp_path / "run.toml")
    assert answer(capsys, SMALL, "--write", file)["answer"]["command"] == f"meshwright train {file}"


def test_a_command_goes_on_over_the_lines_of_a_terminal():
    words = ["meshwright", "train", "data.source=my files/*.txt", "plan.shard=8"]
    assert options.pasted("Run:", words, None) == "Run: meshwright train 'data.source=my files/*.txt' plan.shard=8"
    lines = options.pasted("Run:", words, 40).split("\n")
    assert all(len(line) <= 40 for line in lines)
    assert shlex.split("\n".join(lines).replace("\\\n", "").removeprefix("Run:")) == words


def test_the_margin_is_kept_and_can_be_set(capsys):
    for words, margin in (("", 0.05), ("--margin 15%", 0.15), ("--margin 0", 0.0)):
        found = answer(capsys, f"{SMALL} {words}")
        assert found["answer"]["margin"] == pytest.approx(margin)
        first = found["plans"][0]
        assert first["peak_bytes"] * (1 + margin) <= first["peak_bytes"] + first["headroom_bytes"]
    assert "should be a share" in refused(capsys, f"{SMALL} --margin 7")


def refused(capsys, line: str) -> str:
    """What argparse says of a word that it cannot read."""
    with pytest.raises(SystemExit) as error:
        main.main(line.split())
    assert error.value.code == 2
    return capsys.readouterr().err


def test_a_plan_that_fits_by_the_estimate_alone_says_so(capsys):
    words = ALPACA.replace("microbatch=4 plan.grad_accum=8", "microbatch=8 plan.grad_accum=4")
    assert told(capsys, words).startswith("Fits: ")
    assert told(capsys, f"{words} --margin 99%").startswith("Fits by the estimate alone: ")
    assert "less than the margin of 99%" in told(capsys, f"{words} --margin 99%").splitlines()[0]


def test_a_question_about_the_host_comes_first_and_is_no_answer(capsys):
    words = "plan llama3-8b --cluster 1xrtx4090 --sequence 2048 --batch 8"
    found = answer(capsys, words)
    assert found["answer"]["fits"] is None
    asked, _, run, *_ = told(capsys, words).splitlines()
    assert asked == found["answer"]["question"]
    assert asked.startswith("Does each machine have ")
    assert run.startswith("Run: meshwright train arch.preset=llama3-8b ")
    told_of_it = answer(capsys, words, "goal.host_gib=500")["answer"]
    assert (told_of_it["fits"], told_of_it["question"]) == (True, None)
    assert "goal.host_gib=500" in told_of_it["command"]


def test_nothing_that_fits_has_an_answer_too(capsys):
    words = "plan llama3-70b --cluster 2xa100-80g --sequence 4096 --batch 8 plan.recompute=full plan.cpu_offload=false"
    found = answer(capsys, words, code=3)["answer"]
    assert (found["fits"], found["seconds"], found["days"], found["dollars"], found["command"]) == (False, *[None] * 4)
    assert found["headroom_bytes"] < 0
    assert told(capsys, words, code=3).startswith("Nothing fits. Of the nearest plan, the most loaded rank needs ")


def test_five_plans_are_five_kinds_and_more_are_the_next_best(capsys):
    found = answer(capsys, SMALL)
    kinds = [plan["kind"] for plan in found["plans"]]
    assert len(set(kinds)) == len(kinds) == 5
    assert found["left_out"]["DDP"] == "does not fit"  # 16 bytes of 8 billion parameters on each card
    many = answer(capsys, SMALL, "--top", "12")["plans"]
    assert len({json.dumps(plan["plan"]) for plan in many}) == 12
    assert {plan["kind"] for plan in many} >= set(kinds)
    text = told(capsys, SMALL)
    assert "    FSDP: weights sharded too (ZeRO-3)" in text
    assert "Left out: DDP (does not fit)" in text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1.5e12", 1.5e12),
        ("15T", 15e12),
        ("2B", 2e9),
        ("300M", 3e8),
        ("10k", 1e4),
        ("$2", 2),
        ("$2.50/h", 2.5),
        ("1,000", 1e3),
    ],
)
def test_numbers_are_read_as_people_write_them(text, number):
    assert options.amount(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "T", "-1", "0", "2Q", "nan", "inf", "$", "1.2.3"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="should be a number above 0"):
        options.amount(text)


def test_a_plan_is_compiled_unless_told_otherwise(capsys, tmp_path):
    file = tmp_path / "run.toml"
    assert answer(capsys, SMALL, "--write", str(file))["plans"][0]["plan"]["compile"]
    assert load.load(file).run.plan.compile
    assert not any(plan["plan"]["compile"] for plan in answer(capsys, SMALL, "plan.compile=false")["plans"])
    alone = answer(capsys, "plan gpt2 --cluster 1xh200 --batch 8", "--write", str(file), "--force")["plans"][0]["plan"]
    assert alone["bf16_params"]
    assert load.load(file).run.plan.bf16_params


def test_one_card_trains_what_it_cannot_hold_and_the_reason_is_told(capsys):
    text = told(capsys, "plan llama3-8b --cluster 1xh100 --sequence 4096 --batch 8")
    assert " optimizer_offload=host optimizer_offload_update=" in text
    assert "fp32 master weights and optimizer states offloaded to host memory; needs " in text
    assert "Without offload this plan would need " in text


def test_an_exact_plan_shows_what_lies_elsewhere(capsys):
    words = "plan llama3-8b --cluster 1xh100 --sequence 4096 --batch 1 --exact"
    words += " plan.optimizer_offload=disk plan.activation_offload=true"
    (found,) = answer(capsys, words)["plans"]
    assert found["disk_bytes"] == 12 * 8_030_261_248
    assert {line["name"] for line in found["host"]} == {"activations", "pieces"}
    text = told(capsys, words)
    assert "GiB of host RAM per GPU (" in text
    assert "GiB of disk per GPU (" in text


def test_a_budget_is_resolved_where_a_run_is_shown(capsys):
    words = ["config", "show", "arch.preset=llama3.2-1b", "plan.precision=bf16", "sequence=2048", "batch=8"]
    assert main.main([*words, "goal.memory_gib=28", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["plan"]["recompute"] != "none"
    assert shown["origins"]["plan.recompute"] == "derived: goal.memory_gib"


def test_times_below_each_other_have_three_digits_and_stand_in_line(capsys):
    ranking, rest = told(capsys, "plan gpt2 --cluster 64xh100 --sequence 1024 --batch 512 --top 3").split(
        "Times within"
    )
    heads, *rows = [line for line in ranking.splitlines() if re.match(r" *(plan|\d) ", line)]
    assert len(rows) == 3
    for row in rows:
        assert len(re.findall(r"0\.0[1-9]\d\d\b", row)) == 3
        assert row.index("%") + 1 == heads.index("MFU") + 3
    times = re.findall(r"^  \S.* ([\d.]+) s  +[+-]\d", rest, re.MULTILINE)
    assert len(times) > 5
    assert all(len(time.replace(".", "").lstrip("0")) == 3 for time in times)
