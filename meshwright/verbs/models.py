"""`meshwright models`: the model zoo."""

import argparse

import msgspec

from meshwright.spec import zoo
from meshwright.spec.params import active, count
from meshwright.verbs import words


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    words.verb(verbs, "models", models, "list the model zoo")


def models(options: argparse.Namespace) -> int:
    """The model zoo."""
    models = [(name, zoo.preset(name)) for name in zoo.preset_names()]
    if options.json:
        rows = [{"name": name, "parameters": count(arch), "arch": msgspec.to_builtins(arch)} for name, arch in models]
        print(msgspec.json.encode(rows).decode())
        return 0
    print(f"{'name':<16}{'parameters':>18}{'active':>18}  layers × hidden, heads/kv, vocabulary")
    for name, arch in models:
        shape = f"{arch.layers} × {arch.hidden}, {arch.heads}/{arch.kv_heads}, {arch.vocab:,}"
        print(f"{name:<16}{count(arch):>18,}{active(arch):>18,}  {shape}")
    return 0
