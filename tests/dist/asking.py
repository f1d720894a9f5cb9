"""How tests put questions to the planner, and a model from elsewhere to ask about."""

import json

from meshwright.cli import main

LLAMA_7B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def answer(capsys, line: str, *more: str, code: int = 0) -> dict:
    """What a program is told."""
    assert main.main([*line.split(), *more, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def told(capsys, line: str, *more: str, code: int = 0) -> str:
    """What a person is told."""
    assert main.main([*line.split(), *more]) == code
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out
