"""A certificate for every family of models: its tiny preset under the standard set of plans, beside one process.

python benchmarks/families.py [--ranks 2] [tiny-qwen3 …]      writes results/families/NAME.json
python benchmarks/families.py --ranks 4 --piece 1/8 tiny-gpt-oss      the first of eight parts of NAME-4-ranks.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshwright.verify import prove

RESULTS = Path(__file__).parents[1] / "results" / "families"
FAMILIES = (
    *("tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-gemma2", "tiny-gemma3", "tiny-olmo2", "tiny-phi3"),
    *("tiny-gpt-oss", "tiny-deepseek-v3", "tiny-glm4-moe", "tiny-neox", "tiny-mistral", "tiny-cohere", "tiny-granite"),
    *("tiny-smollm3", "tiny-deepseek-v2", "tiny-gemma", "tiny-starcoder2"),
)


def certify(name: str, ranks: int, without: str, piece: tuple[int, int]) -> bool:
    """Prove one family, or some of its plans, and keep the certificate; whether every plan is equal."""
    record = RESULTS / (f"{name}.json" if ranks == 2 else f"{name}-{ranks}-ranks.json")
    with tempfile.TemporaryDirectory() as folder:
        plans = [plan for plan in prove.matrix(ranks, name) if without not in prove.fields(plan)]
        plans = plans[piece[0] - 1 :: piece[1]]
        words = ["verify", name, *(word for plan in plans for word in ("--plan", plan)), "--folder", folder]
        done = subprocess.run([sys.executable, "-m", "meshwright", *words], check=False)
        certificate = Path(folder) / "certificate.json"
        if certificate.is_file():
            RESULTS.mkdir(parents=True, exist_ok=True)
            found = json.loads(certificate.read_text().replace(folder, "FOLDER"))
            others = json.loads(record.read_text()) if piece[1] > 1 and record.is_file() else []
            record.write_text(json.dumps(joined(others, found), indent=2) + "\n")
    return done.returncode == 0


def joined(others: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Certificates of several parts: those that are beside one reference are one, a plan's last verdict counts."""
    whole: dict[str, dict[str, Any]] = {}
    for certificate in [*others, *found]:
        key = json.dumps({name: value for name, value in certificate.items() if name != "verdicts"}, sort_keys=True)
        before = whole.setdefault(key, certificate | {"verdicts": []})
        verdicts = {verdict["plan"]: verdict for verdict in [*before["verdicts"], *certificate["verdicts"]]}
        before["verdicts"] = list(verdicts.values())
    return list(whole.values())


def of_pieces(text: str) -> tuple[int, int]:
    """ "2/8": the second of eight."""
    number, _, pieces = text.partition("/")
    return int(number), int(pieces)


def main() -> int:
    """Exit 1 if a plan of any family differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=FAMILIES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--without", default="", help="a field of plans to leave out: compile takes most of the time")
    parser.add_argument("--piece", type=of_pieces, default=(1, 1), help="2/8: every eighth plan from the second on")
    options = parser.parse_args()
    equal = [certify(name, options.ranks, options.without, options.piece) for name in options.names]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
