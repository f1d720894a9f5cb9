"""How fast conversations become packed, masked tokens on one core, beside transformers' own chat template and mask.

    python benchmarks/chat.py [--words N]

Both render the same template over the same conversations, tokenise the text and say which tokens are trained; ours is
timed with reading, checks, proofs and packing as well. Seconds are of the process (CPU time), so that a machine which
is busy otherwise changes little. Prints a table and writes results/chat.json.
"""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core means one
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers import __version__ as transformers_version

from meshwright.config.run import Data, Source
from meshwright.data import sources, tokenize
from meshwright.data.chat import NAMED, ChatTemplate
from meshwright.data.conversation import conversation
from meshwright.data.mask import Masker
from meshwright.data.pack import best_fit
from meshwright.data.sources import read_objects

RESULTS = Path(__file__).parents[1] / "results" / "chat.json"
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB, SEQUENCE, REPEATS = 32_000, 4096, 3
SYSTEM = "You are a helpful assistant who answers briefly."
# As many models ship theirs: without marks, so that prefixes are rendered.
UNMARKED = NAMED["chatml"][1].replace("{% generation %}", "").replace("{% endgeneration %}", "")
CASES = {  # turns of a conversation, words of a question and of an answer
    "one question, short answers": (1, 20, 60),
    "one question, long answers": (1, 60, 600),
    "four questions": (4, 30, 150),
}


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second of one core."""

    case: str
    conversations: int
    tokens: int
    marks: float  # ours, the template with generation marks
    prefixes: float  # ours, the template without
    transformers: float  # apply_chat_template(return_assistant_tokens_mask=True), a conversation at a time
    same: bool  # both made the same tokens and the same mask

    @property
    def ratio(self) -> float:
        return self.marks / self.transformers


class ChatRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and where."""

    machine: str
    load: float  # other work of the machine when it began: mean of a minute
    transformers: str
    vocab: int
    speeds: list[Speed]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--words", type=int, default=400_000, help="of all conversations of a case together")
    count = options.parse_args().words
    load = os.getloadavg()[0]
    library = [
        text
        for file in sources.files(Source(source="stdlib"))
        for text in [file.open("rb").read().decode(errors="replace")]
    ]
    lexicon = tokenize.train([*library[:300], *topics.values()], VOCAB)
    lexicon.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    words = " ".join(topics.values()).split()  # the prose that Python has with it: its language reference
    speeds = [measured(case, count, lexicon, words) for case in CASES]
    record = ChatRecord(
        machine=f"{platform.machine()}, {os.cpu_count()} cores, one used",
        load=round(load, 2),
        transformers=transformers_version,
        vocab=lexicon.get_vocab_size(),
        speeds=speeds,
    )
    print(f"{'':<30}{'marks':>12}{'prefixes':>12}{'transformers':>14}{'ratio':>8}")
    for each in speeds:
        print(
            f"{each.case:<30}{each.marks:>12,.0f}{each.prefixes:>12,.0f}{each.transformers:>14,.0f}{each.ratio:>7.1f}×"
        )
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def measured(case: str, count: int, lexicon: Tokenizer, words: list[str]) -> Speed:
    """One kind of conversation, by both."""
    draw = random.Random(1)
    turns, asked, answered = CASES[case]

    def said(length: int) -> str:
        at = draw.randrange(len(words) - 2 * length)
        return " ".join(words[at : at + draw.randrange(length // 2, 2 * length)])

    chats = []
    for _ in range(count // (turns * (asked + answered))):
        messages = [{"role": "system", "content": SYSTEM}]
        for _ in range(turns):
            messages += [
                {"role": "user", "content": said(asked)},
                {"role": "assistant", "content": said(answered)},
            ]
        chats.append(messages)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "chat.jsonl")
        file.write_bytes(b"".join(msgspec.json.encode({"messages": each}) + b"\n" for each in chats))
        ours, marks = timed(lambda: a_masker(lexicon, NAMED["chatml"][1]), lambda masker: prepared(file, masker))
        _, prefixes = timed(lambda: a_masker(lexicon, UNMARKED), lambda masker: prepared(file, masker))
    stock = PreTrainedTokenizerFast(tokenizer_object=lexicon, eos_token=MARKS[0])
    template = NAMED["chatml"][1].replace("{{ bos_token }}", "")
    theirs, seconds = timed(lambda: stock, lambda made: [rendered(made, each, template) for each in chats])
    tokens = sum(len(ids) for ids, _ in theirs)
    same = all(
        np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])
        for one, other in zip(ours, theirs, strict=True)
    )
    return Speed(
        case=case,
        conversations=len(chats),
        tokens=tokens,
        marks=tokens / marks,
        prefixes=tokens / prefixes,
        transformers=tokens / seconds,
        same=same,
    )


def a_masker(lexicon: Tokenizer, template: str) -> Masker:
    """One that has met no word yet."""
    return Masker(ChatTemplate("chatml", template, {"bos_token": ""}), lexicon, Data().train_on)


def prepared(file: Path, masker: Masker) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read, checked, rendered, masked, tokenised and packed."""
    found = [
        (sample.tokens, sample.mask)
        for sample in masker.samples(conversation(place, record, {}) for place, record in read_objects(file))
    ]
    best_fit(np.array([min(len(tokens) - 1, SEQUENCE) for tokens, _ in found]), SEQUENCE)
    return found


def rendered(
    stock: PreTrainedTokenizerFast, messages: list[dict[str, str]], template: str
) -> tuple[list[int], list[int]]:
    """The same by transformers, as trainers map it over a dataset."""
    made: Any = stock.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], made["assistant_masks"]


def timed(make: Callable[[], Any], work: Callable[[Any], list]) -> tuple[list, float]:
    """What it does with something made anew, and the median of its CPU seconds."""
    seconds, done = [], []
    for _ in range(REPEATS):
        made = make()
        began = time.process_time()
        done = work(made)
        seconds.append(time.process_time() - began)
    return done, statistics.median(seconds)


if __name__ == "__main__":
    main()
