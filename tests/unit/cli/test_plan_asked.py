import pytest
from asking import answer, told

from meshwright.config import load
from meshwright.search.budget import resolved

GIB = 2**30
LIMITED = """
sequence = 4096
batch = 32
[arch]
preset = "llama3-8b"
[goal]
cluster = "8xh100"
memory_gib = 40
vary = ["batch"]
[plan]
precision = "bf16"
"""


def test_a_budget_of_memory_is_kept_to_and_kept(capsys, tmp_path):
    asked, written = tmp_path / "asked.toml", tmp_path / "written.toml"
    asked.write_text(LIMITED)
    text = told(capsys, "plan", str(asked), "--write", str(written))
    assert "memory limit: 40.0 GiB per GPU (goal.memory_gib)" in text
    assert all(plan["peak_bytes"] <= 40 * GIB for plan in answer(capsys, "plan", str(asked))["plans"])
    loaded = load.load(written)
    assert (loaded.run.goal.memory_gib, loaded.run.goal.vary) == (40, ("batch",))
    assert resolved(loaded)[0].run.plan == loaded.run.plan  # which `train` finds within the budget


def test_a_stated_plan_is_computed_anew_as_its_budget_makes_it(capsys, tmp_path):
    asked = tmp_path / "asked.toml"
    asked.write_text(LIMITED.replace('vary = ["batch"]', ""))
    words = ["plan", str(asked), "--exact", "plan.shard=8", "plan.zero=3", "plan.microbatch=1"]
    (found,) = answer(capsys, *words)["plans"]
    assert found["plan"]["recompute"] not in ("none", "full")
    assert found["peak_bytes"] <= 40 * GIB
    assert "goal.memory_gib = 20 is too little" in told(capsys, *words, "goal.memory_gib=20", code=2)


def test_what_was_chosen_beside_the_plan_is_said(capsys):
    words = ["plan", "llama3-8b", "--cluster", "8xh100", "--sequence", "4096", "--batch", "32", "--top", "1"]
    plain, varied = told(capsys, *words), told(capsys, *words, "--vary", "precision", "--vary", "batch")
    assert " precision=" not in plain
    assert "also search over: precision, batch" in varied
    (row,) = (line for line in varied.splitlines() if line.startswith(" 1  "))
    assert " batch=64 precision=fp8 " in row
    found = answer(capsys, *words, "--vary", "precision", "--vary", "batch")
    assert (found["batch"], found["plans"][0]["batch"]) == (32, 64)


def test_sizes_say_what_was_chosen_and_assumed(capsys):
    words = ["plan", "llama3-8b", "--cluster", "8xh100", "--sequence", "4096"]
    text = told(capsys, *words, "--largest", "microbatch", "--vary", "precision")
    assert " precision=fp8" in text
    assert "assumed: precision = bf16" in text
    found = answer(capsys, *words, "--largest", "microbatch")
    assert (found["sequence"], found["precision"], found["assumed"]) == (4096, "bf16", ["precision = bf16"])
    assert found["batch"] == 8 * found["value"]
    assert found["next"] == found["value"] + 1
    text = told(capsys, *words, "--batch", "32", "--gpus-needed", "--vary", "precision", "plan.optimizer_offload=none")
    assert " precision=fp8 " in text


def test_the_largest_sequence_may_end_with_the_positions(capsys):
    text = told(capsys, "plan", "gpt2", "--cluster", "8xh100", "--largest", "sequence")
    assert "1024; the table of learned positions ends there" in text
    assert "does not fit" not in text


@pytest.mark.parametrize("what", ["microbatch", "sequence", "model"])
def test_the_largest_of_an_illegal_plan_is_refused(capsys, what):
    words = ["plan", *([] if what == "model" else ["llama3-8b"]), "--cluster", "8xh100", "--largest", what, "plan.tp=3"]
    assert "plan.tp = 3 does not divide 8 GPUs" in told(capsys, *words, code=2)


def test_where_nothing_fits_there_is_no_largest(capsys):
    words = ["plan", "llama-7b", "--cluster", "1xa100-80g", "plan.optimizer_offload=none", "--largest", "microbatch"]
    words.append("plan.cpu_offload=false")
    assert "no microbatch fits 1xa100-80g (sequence 2,048, llama-7b, bf16)" in told(capsys, *words, code=3)


@pytest.mark.parametrize(("gpus", "batch"), [(8, 64), (56, 56), (13, 52), (24, 48)])
def test_an_assumed_batch_can_be_shared_by_the_gpus(capsys, gpus, batch):
    found = answer(capsys, "plan", "llama3-8b", "--cluster", f"{gpus}xh100", "--top", "1")
    assert found["batch"] == batch
    assert f"batch = {batch}" in found["assumed"]


def test_a_sequence_that_nobody_stated_fits_few_learned_positions(capsys):
    found = answer(capsys, "plan", "gpt2", "arch.context=128", "--cluster", "1xh100")
    assert "sequence = 128" in found["assumed"]


@pytest.mark.parametrize(("word", "tokens"), [("8k", 8192), ("8192", 8192), ("1M", 2**20)])
def test_a_sequence_is_given_as_people_write_it(capsys, word, tokens):
    words = ["plan", "llama3-8b", "--cluster", "64xh100", "--batch", "64", "--sequence", word, "--top", "1"]
    assert answer(capsys, *words)["sequence"] == tokens


def test_cards_in_one_machine_are_joined_by_its_bus(capsys):
    words = ["plan", "gpt2", "--cluster", "4xrtx3090", "--batch", "64", "--top", "1"]
    assert "4xrtx-3090 (4 GPUs in one PCIe domain)" in told(capsys, *words)
    assert answer(capsys, *words)["answer"]["command"].startswith("meshwright train ")


DOCUMENTS = ("plan", "llama3-8b", "--cluster", "2xh200", "--batch", "8", "data.mask_documents=true")


def test_documents_are_as_long_whatever_sequence_is_asked_about(capsys):
    words = (*DOCUMENTS, "--document-tokens", "100000")
    changed = answer(capsys, *words, "--sequence", "8k", "--what-if", "sequence=128k")["plans"][0]
    asked = answer(capsys, *words, "--sequence", "128k")["plans"][0]
    assert (changed["seconds"], changed["mfu"], changed["tflops"]) == (asked["seconds"], asked["mfu"], asked["tflops"])
    longest = answer(capsys, *words, "--largest", "sequence")
    asked = answer(capsys, *words, "--sequence", str(longest["value"]))["plans"][0]
    assert longest["plans"][0]["seconds"] == asked["seconds"]


def test_the_length_of_documents_is_refused_where_they_are_not_masked(capsys):
    words = (*DOCUMENTS[:-1], "--document-tokens", "500")
    text = told(capsys, *words, code=2)
    assert "--document-tokens 500 is for masked documents, and data.mask_documents = false" in text
    assert "documents of 500 tokens in the mean" in told(capsys, *words, "data.mask_documents=true")


def test_a_sequence_is_changed_to_in_the_words_it_is_asked_in(capsys):
    text = told(capsys, "plan", "llama3-8b", "--cluster", "8xh200", "--what-if", "sequence=8q", code=2)
    assert "--what-if sequence=8q is not a count" in text
    assert "such as 8192 or 8k" in text


def test_the_length_of_documents_is_given_as_people_write_it(capsys):
    words = ["plan", "gpt2", "--cluster", "1xh100", "--batch", "8", "--document-tokens", "1k"]
    assert "documents of 1,024 tokens in the mean" in told(capsys, *words, "data.mask_documents=true")
