"""Alpaca's recipe as published, tiny: raw records, real weights made on the spot, and back to Hugging Face whole."""

import json
from pathlib import Path

import torch
from chats import byte_level
from commands import meshwright
from tokenizers import Tokenizer

from meshwright.data.chat import NAMED

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE, LORA_RECIPE = (str(RECIPES / f"{name}.toml") for name in ("alpaca-7b", "alpaca-7b-lora"))
SMALL = ("sequence=256", "batch=4", "epochs=2", "optim.warmup=0", "optim.lr=1e-3", "plan.shard=2", "plan.microbatch=2")
RECORDS = [
    {"instruction": f"What is {number}?", "input": "green, blue" if number % 3 else "", "output": f"It is {number}."}
    for number in range(18)
]


def a_base(tmp_path: Path) -> tuple[Path, Tokenizer]:
    """A tiny Llama and its folder, and the records beside it."""
    # Here, as it takes more than a second, of every worker that collects this file.
    from transformers import LlamaConfig, LlamaForCausalLM

    lexicon = byte_level(("<s>", "</s>"), begin="<s>")
    folder = tmp_path / "llama-tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=336, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False,
        eos_token_id=lexicon.token_to_id("</s>"),
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    lexicon.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "LICENSE").write_text("as it is")
    (tmp_path / "alpaca_data.json").write_text(json.dumps(RECORDS, indent=1))
    return folder, lexicon


def test_the_recipe_with_lora_trains_an_adapter_that_merges(tmp_path):
    folder, _ = a_base(tmp_path)
    own = (f"init.from={folder}", f"data.source={tmp_path}/alpaca_data.json", "sequence=256", "batch=4", "epochs=2")
    alone = ("plan.microbatch=2", "plan.grad_accum=2", "plan.tf32=false", "adapter.rank=4", "optim.warmup=0")
    run = str(tmp_path / "run")
    trained = meshwright("train", LORA_RECIPE, *own, *alone, "--ranks", "1", "--folder", run, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "epochs = 2: 9 steps of 4 of 18 samples" in trained.stdout
    merged = meshwright("convert", run, str(tmp_path / "made"), "--merge", folder=tmp_path)
    assert merged.returncode == 0, merged.stderr
    assert "merged = adapter + base" in merged.stdout + merged.stderr
    assert (tmp_path / "made" / "LICENSE").read_text() == "as it is"


def test_the_recipe_trains_answers_and_goes_back_with_all_its_files(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, lexicon = a_base(tmp_path)
    own = (f"init.from={folder}", f"data.source={tmp_path}/alpaca_data.json", *SMALL, "plan.grad_accum=1")

    shown = meshwright("data", "show", RECIPE, *own, "--sample", "2", "--json", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (sample,) = json.loads(shown.stdout)["samples"]
    assert sample["text"].startswith("<s>Below is an instruction that describes a task, paired with an input")
    trained = [token for token, mark in zip(sample["tokens"], sample["mask"], strict=True) if mark]
    assert lexicon.decode(trained, skip_special_tokens=False) == "It is 1.</s>"

    trained = meshwright("train", RECIPE, *own, "--folder", str(tmp_path / "run"), folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "epochs = 2: 9 steps of 4 of 18 samples" in trained.stdout
    made = tmp_path / "made"
    assert meshwright("convert", str(tmp_path / "run"), str(made), folder=tmp_path).returncode == 0
    assert (made / "LICENSE").read_text() == "as it is"
    assert (made / "chat_template.jinja").read_text() == NAMED["alpaca"][1]
    again = AutoTokenizer.from_pretrained(made)
    prompt = again.apply_chat_template([{"role": "user", "content": "What is 3?"}], tokenize=False)
    assert prompt.startswith("<s>Below is an instruction")
    assert prompt.endswith("### Response:")
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.generation_config.eos_token_id == lexicon.token_to_id("</s>")
