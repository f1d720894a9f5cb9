"""A certificate for every family of models: its tiny preset under the standard set of plans, beside one process.

Then some of the plans again with several documents in a sequence, none of which sees another.

python benchmarks/families.py [--ranks 2] [tiny-qwen3 …]      writes results/families/NAME.json
python benchmarks/families.py --only compile tiny-qwen3      adds the compiled plans to its record
python benchmarks/families.py --ranks 4 --piece 1/8 tiny-gpt-oss      the first of eight parts of NAME-4-ranks.json
python benchmarks/families.py --ranks 4 --above 2 --piece 1/2 tiny-qwen3      of the plans that two ranks cannot run
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.verify import prove

RESULTS = Path(__file__).parents[1] / "results" / "families"
FAMILIES = (
    *("tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-gemma2", "tiny-gemma3", "tiny-olmo2", "tiny-phi3"),
    *("tiny-gpt-oss", "tiny-deepseek-v3", "tiny-glm4-moe", "tiny-neox", "tiny-mistral", "tiny-cohere", "tiny-granite"),
    *("tiny-smollm3", "tiny-deepseek-v2", "tiny-gemma", "tiny-starcoder2", "tiny-olmo3"),
    *("tiny-glm4", "tiny-olmoe"),
)
# At the rate of the others OLMo-2's norms of outputs multiply rounding a thousandfold in three steps.
MASKED = ("data.pack=stream", "data.mask_documents=true", "optim.lr=1e-3")
MASKED_PLANS = ("shard=2,zero=3,recompute=full", "tp=2", "cp=2", "cp=2,cp_kind=ulysses", "pp=2,schedule=zbv")


@dataclass(frozen=True)
class Chosen:
    """Which of the plans."""

    only: str  # a field that they have, or "documents": those of several documents
    without: str  # a field that they have not
    above: int  # ranks that are too few for them
    piece: tuple[int, int]  # (2, 8): every eighth from the second on

    @property
    def is_part(self) -> bool:
        """Whether the record is added to, and not written anew."""
        return bool(self.only or self.above) or self.piece[1] > 1

    def of(self, plans: Sequence[str], masked: bool = False) -> Sequence[str]:
        """Those of a list; `masked` is that of several documents."""
        number, pieces = self.piece
        plans = [
            plan
            for plan in plans
            if self.without not in (fields := prove.fields(plan))
            and self._is_in(fields, masked)
            and prove.world(plan) > self.above
        ]
        return plans[number - 1 :: pieces]

    def _is_in(self, fields: Mapping[str, str], masked: bool) -> bool:
        return masked if self.only == "documents" else not self.only or (self.only in fields and not masked)


def certify(name: str, ranks: int, chosen: Chosen) -> bool:
    """Prove one family, or some of its plans, and keep the certificate; whether every plan is equal."""
    record = RESULTS / (f"{name}.json" if ranks == 2 else f"{name}-{ranks}-ranks.json")
    certificates = json.loads(record.read_text()) if chosen.is_part and record.is_file() else []
    equal = True
    for words, plans in (((), chosen.of(prove.matrix(ranks, name))), (MASKED, chosen.of(MASKED_PLANS, masked=True))):
        found, is_equal = proved(name, words, plans)
        certificates, equal = joined(certificates, found), equal and is_equal
    RESULTS.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(certificates, indent=2) + "\n")
    return equal


def proved(name: str, words: Sequence[str], plans: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    """The certificates that `verify` leaves of some plans, and whether every plan is equal."""
    if not plans:
        return [], True
    with tempfile.TemporaryDirectory() as folder:
        options = [*(word for plan in plans for word in ("--plan", plan)), "--folder", folder]
        done = subprocess.run([sys.executable, "-m", "meshwright", "verify", name, *words, *options], check=False)
        certificate = Path(folder) / "certificate.json"
        found = json.loads(certificate.read_text().replace(folder, "FOLDER")) if certificate.is_file() else []
    return found, done.returncode == 0


def joined(others: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Certificates of several parts: those that are beside one reference are one, a plan's last verdict counts.

    One that did not run to its end is left out once it has, beside whatever reference.
    """
    whole: dict[str, dict[str, Any]] = {}
    again = {(masked(certificate), verdict["plan"]) for certificate in found for verdict in certificate["verdicts"]}
    for certificate in [*(without_late(other, again) for other in others), *found]:
        key = json.dumps({name: value for name, value in certificate.items() if name != "verdicts"}, sort_keys=True)
        before = whole.setdefault(key, certificate | {"verdicts": []})
        verdicts = {verdict["plan"]: verdict for verdict in [*before["verdicts"], *certificate["verdicts"]]}
        before["verdicts"] = list(verdicts.values())
    return list(whole.values())


def without_late(certificate: dict[str, Any], again: set[tuple[bool, str]]) -> dict[str, Any]:
    """A certificate without the plans that did not run to their end, if they have been tried again."""
    verdicts = certificate["verdicts"]
    kept = [each for each in verdicts if not each["error"] or (masked(certificate), each["plan"]) not in again]
    return certificate | {"verdicts": kept}


def masked(certificate: Mapping[str, Any]) -> bool:
    """Whether it is one of several documents in a sequence."""
    return certificate["run"]["data"]["mask_documents"]


def of_pieces(text: str) -> tuple[int, int]:
    """ "2/8": the second of eight."""
    number, _, pieces = text.partition("/")
    return int(number), int(pieces)


def main() -> int:
    """Exit 1 if a plan of any family differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=FAMILIES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="a field of plans to add, or documents: those of several documents")
    parser.add_argument("--without", default="", help="a field of plans to leave out: compile takes most of the time")
    parser.add_argument("--above", type=int, default=0, help="plans of more ranks than these alone")
    parser.add_argument("--piece", type=of_pieces, default=(1, 1), help="2/8: every eighth plan from the second on")
    options = parser.parse_args()
    chosen = Chosen(options.only, options.without, options.above, options.piece)
    equal = [certify(name, options.ranks, chosen) for name in options.names]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
