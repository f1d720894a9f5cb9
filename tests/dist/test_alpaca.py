"""Alpaca's recipe as published, tiny: raw records, real weights made on the spot, and back to Hugging Face whole."""

import json
from pathlib import Path

import torch
from chats import byte_level
from commands import meshwright

from meshwright.data.template import NAMED

RECIPE = str(Path(__file__).parents[2] / "recipes" / "alpaca-7b.toml")
SMALL = ("sequence=256", "batch=4", "epochs=2", "optim.warmup=0", "optim.lr=1e-3", "plan.shard=2", "plan.microbatch=2")
RECORDS = [
    {"instruction": f"What is {number}?", "input": "green, blue" if number % 3 else "", "output": f"It is {number}."}
    for number in range(18)
]


def test_the_recipe_trains_answers_and_goes_back_with_all_its_files(tmp_path):
    # More than a second, of every worker that collects it.
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

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
