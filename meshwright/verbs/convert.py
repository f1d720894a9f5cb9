"""`meshwright convert`: weights between Hugging Face's layout and ours."""

import argparse
import sys
from pathlib import Path

import msgspec

from meshwright.verbs import words


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    text = "turn a Hugging Face folder into ours, or a trained model into theirs"
    verb = words.verb(verbs, "convert", convert, text)
    verb.add_argument("source", type=Path, help="a Hugging Face folder, or a run folder")
    verb.add_argument("target", type=Path, help="the folder to write")
    verb.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the written weights")


def convert(options: argparse.Namespace) -> int:
    """Weights between Hugging Face's layout and ours."""
    words.require_training()
    from meshwright.checkpoint.convert import convert as convert_folder
    from meshwright.checkpoint.judge import MismatchError

    try:
        report = convert_folder(options.source, options.target, words.say_to(options.json), dtype=options.dtype)
    except MismatchError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(msgspec.json.encode(report).decode())
    return 0
