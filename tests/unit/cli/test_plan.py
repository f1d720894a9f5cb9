import json
import subprocess
import sys
from pathlib import Path

import pytest
from asking import LLAMA_7B, answer, told

from meshwright.cli import main, options
from meshwright.cli import plan as plan_answers
from meshwright.cli import plan_tables as tables
from meshwright.config import load
from meshwright.config.presets import preset
from meshwright.hardware.cluster import cluster as machines
from meshwright.hardware.stacks import stacks
from meshwright.search.best_first import TOLD_APART, notch, search
from meshwright.search.question import Question

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
    found = answer(
        capsys, "plan llama3-8b --cluster 8xh100 --sequence 4096 --batch 32 plan.optimizer_offload=none --gpus-needed"
    )
    assert found["gpus"] in (2, 4)  # 16 bytes of 8 billion parameters are 120 GiB: more than one card, and two suffice
    assert found["plans"][0]["fits"]
    assert "are needed" in told(capsys, "plan gpt2 --cluster 8xh100 --batch 8 --gpus-needed")


def test_the_largest_that_fits(capsys):
    box = "--cluster 8xa100-80g --sequence 2048"
    model = answer(capsys, f"plan --largest model {box} --batch 64")
    assert "13b" in model["value"]  # 16 bytes of 13 billion are 194 GiB of the box's 634; of 47 billion, too many
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
    assert found["plans"][0]["seconds"] <= found["same_plan"]["seconds"] * (1 + TOLD_APART)
    assert "best then" in told(capsys, words, "--what-if", "network=10gbe")
    assert "is unknown" in told(capsys, words, "--what-if", "colour=red", code=2)


def test_nothing_fits_is_three_with_the_nearest_and_what_would(capsys):
    words = "plan llama3-70b --cluster 2xa100-80g --sequence 4096 --batch 8 plan.recompute=full"
    found = answer(capsys, words, code=3)
    assert found["plans"] == []
    assert len(found["misses"]) == 3
    assert all(miss["headroom_bytes"] < 0 for miss in found["misses"])
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
    assert list(options.wrapped([line], None)) == [line]
    assert list(options.wrapped([line], 12)) == ["  one two", "  three four"]


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
        ("plan llama3-8b --cluster 64xh100 plan.tp=16", "arch.kv_heads"),
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


def test_what_is_asked_is_said_before_it_is_answered(capsys, monkeypatch):
    def nobody(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_answers, "search", nobody)
    assert main.main(SMALL.split()) != 0
    assert "32 (131,072 tokens/step)" in capsys.readouterr().out


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
    assert main.main([*words, "goal.memory_gib=30", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["plan"]["recompute"] != "none"
    assert shown["origins"]["plan.recompute"] == "derived: goal.memory_gib"
