"""`meshwright config`: a run with every choice made, and the schema of run files."""

import argparse

import msgspec

from meshwright.search import budget
from meshwright.spec import load, schema
from meshwright.verbs import surroundings, words


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    verb = words.verb(verbs, "config", config, "show a resolved run, or the schema of run files")
    verb.add_argument("what", choices=("show", "schema"))
    verb.add_argument("words", nargs="*", metavar="RUN.toml | key=value", help=words.OVERRIDES)
    verb.add_argument("--ranks", type=words.count, help="as of train")


def config(options: argparse.Namespace) -> int:
    """A resolved run with the origin of each value, or the schema of run files."""
    if options.what == "schema":
        print(msgspec.json.format(msgspec.json.encode(schema.json_schema())).decode())
        return 0
    file, overrides = words.split(options.words)
    loaded = load.load(file, overrides, ranks=options.ranks, default_ranks=surroundings.default_ranks())
    loaded, _ = budget.resolved(loaded)  # as train does
    if options.json:
        both = {"run": msgspec.to_builtins(loaded.run), "origins": loaded.origins}
        print(msgspec.json.encode(both).decode())
    else:
        print(load.write(loaded.run, loaded.origins), end="")
    return 0
