"""Text to tokens: a tokenizer.json that exists, or a byte-level BPE trained on the documents themselves."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.data.shards import token_dtype
from meshwright.spec.problem import mistake

END = "<|endoftext|>"  # of tokenizers trained here
ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]")
SMALLEST = 257  # every byte and the end of a document
PIECE = 1 << 20  # characters encoded as one string: bounds memory, and lets a single long document use all cores
BATCH = 1 << 22  # characters encoded in one go
SAY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """A tokenizer, where it is kept, and the token that closes a document."""

    file: Path
    tokenizer: Tokenizer
    end_token: int

    @property
    def vocab(self) -> int:
        """What every token is below."""
        return max(entries(self.tokenizer), self.end_token + 1)


def path(tokenizer: str) -> Path:
    """The file that a run means: a tokenizer.json, or the one in a folder."""
    named = Path(tokenizer).expanduser()
    file = named / "tokenizer.json" if named.is_dir() else named
    if not file.is_file():
        raise mistake(
            f"there is no tokenizer at {file}",
            'name a tokenizer.json or its folder, or set data.tokenizer = "train"',
            "data.tokenizer",
        )
    return file


def load(file: Path) -> Tokenizer:
    """A tokenizer from its file."""
    try:
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
    except Exception as error:  # the library raises nothing more exact
        raise mistake(
            f"{file} is not a tokenizer.json: {error}", "name a file that `tokenizers` wrote", "data.tokenizer"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab` entries; the same texts give the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def entries(tokenizer: Tokenizer) -> int:
    """One more than the largest token: there may be holes, so the number of entries would not do."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_token(tokenizer: Tokenizer, stated: int | None) -> int:
    """The token that closes a document: as stated, or the first of the usual ones that the tokenizer has."""
    if stated is not None:
        return stated
    known = (tokenizer.token_to_id(name) for name in ENDS)
    found = next((token for token in known if token is not None), None)
    if found is None:
        raise mistake(
            f"the tokenizer has none of the usual end tokens ({', '.join(ENDS)})",
            "set data.end_token to the number of the token that closes a document",
            "data.end_token",
        )
    return found


def encode(
    lexicon: TokenizerInfo, documents: Iterable[str], size: int, say: Callable[[str], None]
) -> Iterator[np.ndarray]:
    """Every document as tokens with the end token behind; `size` is the text's length when known, else 0."""
    tokenizer = lexicon.tokenizer
    tokenizer.encode_special_tokens = True  # text that spells out a special token is text: nothing forges an end
    dtype = token_dtype(lexicon.vocab)
    end = np.array([lexicon.end_token], dtype)
    parts: list[np.ndarray] = []
    for batch in _announced(_batches(documents), size, say):
        encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for encoding, (_, last) in zip(encodings, batch, strict=True):
            parts.append(np.array(encoding.ids, dtype))
            if last:
                yield np.concatenate([*parts, end])
                parts = []


def pieces(document: str) -> Iterator[tuple[str, bool]]:
    """A document in parts of a bounded length, and whether each is its last.

    A cut lies behind a line's end that has no other white space around it, where byte-level and word-level tokenizers
    cut as well: the tokens do not change. Where a document has no such place it is cut all the same.
    """
    start = 0
    while len(document) - start > PIECE:
        low, high = start + PIECE // 2, start + PIECE
        at = document.rfind("\n", low, high)
        while at > low and (document[at - 1].isspace() or document[at + 1].isspace()):
            at = document.rfind("\n", low, at)
        stop = at + 1 if at > low else high
        yield document[start:stop], False
        start = stop
    yield document[start:], True


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    batch, length = [], 0
    for document in documents:
        for piece in pieces(document):
            batch.append(piece)
            length += len(piece[0])
            if length >= BATCH:
                yield batch
                batch, length = [], 0
    if batch:
        yield batch


def _announced(
    batches: Iterator[list[tuple[str, bool]]], size: int, say: Callable[[str], None]
) -> Iterator[list[tuple[str, bool]]]:
    """The batches as they are, with word of how far they have come every second or so."""
    whole = f" of {size / 1e6:.0f}" if size else ""
    done, said = 0, time.monotonic()
    for batch in batches:
        yield batch
        done += sum(len(text) for text, _ in batch)
        if time.monotonic() - said > SAY_SECONDS:
            say(f"tokenising {done / 1e6:.0f}{whole} MB")
            said = time.monotonic()
