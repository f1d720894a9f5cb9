"""Greedy text is that of transformers, token by token, for every family that a folder may hold."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from checkpoint.test_convert import STOCK, stock  # noqa: F401
from meshwright.checkpoint.model_folder import open_folder
from meshwright.cli.main import main
from meshwright.models.generate import Sampling
from meshwright.train.sample import load_decoder, written

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [35, 8, 9]]
COUNT = 24


@torch.inference_mode()
def theirs(model, prompt: list[int], end: int | None = None) -> list[int]:
    """What transformers writes after a prompt alone."""
    tokens = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": COUNT, "eos_token_id": end, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(prompt) :].tolist()


def ours(path, prompts: list[list[int]], end: int | None = None) -> list[list[int]]:
    decoder = load_decoder(open_folder(path), torch.device("cpu"), None)
    *_, texts = written(decoder, prompts, COUNT, Sampling(), frozenset() if end is None else frozenset([end]))
    return texts


@pytest.mark.parametrize(("kind", "sizes"), STOCK.values(), ids=STOCK)
def test_a_batch_of_prompts_is_continued_as_transformers_continues_each(stock, kind, sizes):  # noqa: F811
    path, model = stock(kind, sizes)
    expected = [theirs(model, prompt) for prompt in PROMPTS]
    assert ours(path, PROMPTS) == expected
    end = expected[0][COUNT // 2]  # any token that comes: both end with it, once
    assert ours(path, PROMPTS, end) == [theirs(model, prompt, end) for prompt in PROMPTS]


def test_the_verb_says_what_transformers_says_with_the_folders_tokenizer(transformers, stock, capsys):  # noqa: F811
    path, model = stock(*STOCK["llama"])
    vocab = {f"w{number}": number for number in range(60)} | {"<unk>": 60}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    stated = json.loads((path / "generation_config.json").read_text())
    end = theirs(model, [3, 1, 4])[10]
    (path / "generation_config.json").write_text(json.dumps(stated | {"eos_token_id": [end, 99]}))
    expected = [theirs(model, prompt, end) for prompt in ([3, 1, 4], [7])]
    assert (
        main(["generate", str(path), "--prompt", "w3 w1 w4", "--prompt", "w7", "--tokens", "24", "--greedy", "--json"])
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert [each["tokens"] for each in answer["completions"]] == expected
    first = answer["completions"][0]
    assert (first["prompt"], first["prompt_tokens"], first["finish"]) == ("w3 w1 w4", 3, "stop")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    assert first["text"].split() == fast.decode(expected[0]).split()
