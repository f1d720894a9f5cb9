"""How fast text becomes tokens on one core, beside datatrove's DocumentTokenizer in the same run.

    python benchmarks/prepare.py --datatrove PYTHON [--megabytes N]

PYTHON is an interpreter that has datatrove. Both read the same JSON lines, split them by the same tokenizer.json of
GPT-2's size, close every document and write the tokens and the documents' ends; each is a process of its own with one
thread. Seconds are of the process and its children (CPU time), its start included, so that a machine which is busy
otherwise changes little. Rounds alternate. Prints a table and writes results/prepare.json.
"""

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import msgspec
import numpy as np

from meshwright.config.run import Source
from meshwright.data import sources, tokenize

RESULTS = Path(__file__).parents[1] / "results" / "prepare.json"
VOCAB, ROUNDS = 50_257, 3
PEER = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    text, out, tokenizer = sys.argv[1:]
    written = DocumentTokenizer(out, tokenizer, eos_token="<|endoftext|>", shuffle_documents=False)
    LocalPipelineExecutor([JsonlReader(text), written], tasks=1, workers=1, logging_dir=out + "/logs").run()
"""


class PrepareRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and where."""

    machine: str
    load: float  # of the machine when it began: mean of a minute
    datatrove: str
    megabytes: float
    tokens: int
    ours: float  # tokens a second of one core, median
    peer: float
    ratio: float
    spread: tuple[float, float]  # of the ratios of the rounds
    same: bool  # both wrote the same tokens


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--datatrove", required=True, help="an interpreter that has datatrove")
    options.add_argument("--megabytes", type=int, default=64)
    given, load = options.parse_args(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_text(folder / "text", given.megabytes << 20)
        script = folder / "peer.py"
        script.write_text(PEER)
        ours, peer, tokens = [], [], 0
        same = True
        for number in range(ROUNDS):
            run = [
                sys.executable, "-m", "meshwright", "data", "prepare", "arch.preset=gpt2", "sequence=1024",
                f"data.source={folder / 'text'}", f"data.tokenizer={folder / 'tokenizer.json'}", "--workers", "1",
            ]  # fmt: skip
            cache = folder / f"cache{number}"
            ours.append(seconds(run, XDG_CACHE_HOME=str(cache)))
            out = folder / f"peer{number}"
            words = [given.datatrove, script, folder / "text", out, folder / "tokenizer.json"]
            peer.append(seconds(list(map(str, words))))
            mine = np.concatenate([np.fromfile(file, "<u2") for file in sorted(cache.rglob("tokens.bin"))])
            theirs = np.concatenate([np.fromfile(file, "<u2") for file in sorted(out.glob("*.ds"))])
            tokens, same = len(mine), same and np.array_equal(mine, theirs)
            print(f"round {number + 1} of {ROUNDS}: ours {ours[-1]:.1f} s, datatrove {peer[-1]:.1f} s", flush=True)
        ratios = [theirs / mine for theirs, mine in zip(peer, ours, strict=True)]
        version = "import importlib.metadata as m; print(m.version('datatrove'))"
        record = PrepareRecord(
            machine=f"{platform.machine()}, {os.cpu_count()} cores",
            load=load,
            datatrove=subprocess.run([given.datatrove, "-c", version], capture_output=True, text=True).stdout.strip(),
            megabytes=size / 1e6,
            tokens=tokens,
            ours=tokens / statistics.median(ours),
            peer=tokens / statistics.median(peer),
            ratio=statistics.median(ratios),
            spread=(min(ratios), max(ratios)),
            same=bool(same),
        )
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    print(RESULTS.read_text())


def write_text(folder: Path, size: int) -> int:
    """JSON lines of the standard library and its manual, over and over with a number in front; and a tokenizer."""
    folder.mkdir()
    texts = [file.open("rb").read().decode() for file in sources.files(Source(source="stdlib"))] + list(topics.values())
    texts = [text[at : at + 3000] for text in texts for at in range(0, len(text), 3000)]
    tokenize.train(texts, VOCAB).save(str(folder.parent / "tokenizer.json"))
    written, number = 0, 0
    with (folder / "text.jsonl").open("wb") as file:
        while written < size:
            text = texts[number % len(texts)]
            written += file.write(msgspec.json.encode({"text": f"{number}: {text}"}) + b"\n")
            number += 1
    return written


def seconds(command: list[str], **own: str) -> float:
    """CPU seconds of a command and what it starts, on one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    alone = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **alone, **own}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[:6]} failed: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
