"""A certificate for every family of models: its tiny preset under the standard set of plans, beside one process.

python benchmarks/families.py [--ranks 2] [tiny-qwen3 …]      writes results/families/NAME.json
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from meshwright.verify import prove

RESULTS = Path(__file__).parents[1] / "results" / "families"
FAMILIES = (
    *("tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-gemma2", "tiny-gemma3", "tiny-olmo2", "tiny-phi3"),
    *("tiny-gpt-oss", "tiny-deepseek-v3", "tiny-glm4-moe", "tiny-neox", "tiny-mistral", "tiny-cohere", "tiny-granite"),
    *("tiny-smollm3", "tiny-deepseek-v2", "tiny-gemma", "tiny-starcoder2"),
)


def certify(name: str, ranks: int, without: str) -> bool:
    """Prove one family, and keep its certificate; whether every plan is equal."""
    with tempfile.TemporaryDirectory() as folder:
        plans = [plan for plan in prove.matrix(ranks, name) if without not in prove.fields(plan)]
        words = ["verify", name, *(word for plan in plans for word in ("--plan", plan)), "--folder", folder]
        done = subprocess.run([sys.executable, "-m", "meshwright", *words], check=False)
        certificate = Path(folder) / "certificate.json"
        if certificate.is_file():
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / f"{name}.json").write_text(certificate.read_text().replace(folder, "FOLDER"))
    return done.returncode == 0


def main() -> int:
    """Exit 1 if a plan of any family differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=FAMILIES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--without", default="", help="a field of plans to leave out: compile takes most of the time")
    options = parser.parse_args()
    equal = [certify(name, options.ranks, options.without) for name in options.names]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
