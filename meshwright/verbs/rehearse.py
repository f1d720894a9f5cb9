"""`meshwright rehearse`: break a copy of a run on purpose, and see it heal."""

import argparse
import tempfile
from pathlib import Path

import msgspec

from meshwright.spec.exits import Exit
from meshwright.verbs import words
from meshwright.verbs.examined import examined

FAULTS = ("kill", "term", "hang", "sleep", "lock", "data", "skip", "cross", "nan", "flip")


def add(verbs: words.Verbs) -> None:
    """Say the verb's words."""
    verb = words.verb(verbs, "rehearse", rehearse, "break a short copy of a run on purpose, and see it heal")
    verb.add_argument("words", nargs="*", metavar="RUN.toml | key=value", help=words.OVERRIDES)
    verb.add_argument("--fault", choices=FAULTS, default="kill", help="what to do to its last rank (default: kill)")
    verb.add_argument("--ranks", type=words.count, help="processes to start (default: as train)")
    verb.add_argument("--folder", type=Path, help="where the copies stay (default: a temporary place)")


def rehearse(options: argparse.Namespace) -> int:
    """Exit 0 when the weights came out as if nothing had happened, 1 when not."""
    words.require_training()
    run = examined(options.words, options.ranks).run
    from meshwright.verify.rehearse import rehearse as rehearsed

    say = words.say_to(options.json)
    with tempfile.TemporaryDirectory(prefix="meshwright-rehearse-") as temporary:
        result = rehearsed(run, options.fault, options.folder or Path(temporary), say)
    if options.json:
        print(msgspec.json.encode(result).decode(), flush=True)
    weights = "the same weights, to the last bit" if result.same_weights else "OTHER WEIGHTS"
    say(
        f"{result.fault}: training again after {result.recovery_seconds:.1f} s, "
        f"{result.lost_steps} steps made again, {weights} (sha256 {result.digest[:16] or 'none'})"
    )
    return Exit.DONE if result.same_weights else Exit.FAILED
