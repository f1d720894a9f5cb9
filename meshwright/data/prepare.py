"""Everything between a run's sources and a corpus: checked beforehand, tokenised once, kept in a cache.

The pieces of a run's text are tokenised in any order by any number of processes on any number of machines. A piece has
a folder of its own in the cache, named by what is in it: whoever finds it has nothing to do, whoever is killed leaves
none. All pieces one after another are the tokens of a source.
"""

import hashlib
import math
import multiprocessing
import os
import shutil
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from tokenizers import Tokenizer

from meshwright.config.run import Data, Run, Source
from meshwright.data import chat, order, remote, shards, sources, tokenize
from meshwright.data.chat import ChatTemplate
from meshwright.data.conversation import Conversation, columns_of, conversation, preference
from meshwright.data.mask import Masker, truncated
from meshwright.data.pack import held_count, packing
from meshwright.data.remote import File, RemoteFile
from meshwright.data.shards import Tokens
from meshwright.data.sources import Listing, ReadyKind, TextKind
from meshwright.data.tokenize import TokenizerInfo
from meshwright.runtime.files import require_folder
from meshwright.runtime.object_store import RemoteFolder, telling, words_of
from meshwright.runtime.ranks import die_with_parent
from meshwright.spec.problem import UNDECODABLE, InputError, Problem, mistake
from meshwright.spec.units import plural

Say = Callable[[str], None]
REMEDY = "set XDG_CACHE_HOME to a folder that can be written"
SMALL = 64 << 20  # bytes of files that are told apart by their content; larger ones by name, size and time of change
SAMPLE = 2_000_000  # characters to train a tokenizer on; of Python's library, twice as many save 1 % of the tokens
SAMPLE_FILES = 256  # files they are taken from
MUCH_FILLER = 0.5  # share of the samples from which on another packing is advised
CHAT_VERSION = 2
LOOKED_AT = 1 << 16  # tokens of a ready source that are held against the vocabulary before the run

try:
    import fcntl
except ImportError:  # not POSIX: whoever comes at the same time works too, and the first to finish is kept
    fcntl = None


def once(folder: Path, make: Callable[[Path], None], say: Say) -> Path:
    """The folder, which `make` has filled: by this process, or by another one that was first."""
    if folder.is_dir():
        return folder
    require_folder(folder.parent, REMEDY)
    # Closing the file releases the lock, and so does the end of the process.
    with folder.with_name(f".{folder.name}.lock").open("a") as lock:
        is_alone = _lock(lock.fileno(), say)
        if folder.is_dir():
            return folder
        if is_alone:  # only the holder of the lock may say that whoever left these was killed
            for leftover in folder.parent.glob(f".{folder.name}.*.part"):
                shutil.rmtree(leftover, ignore_errors=True)
        hidden = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.part")
        hidden.mkdir()
        try:
            make(hidden)
            os.rename(hidden, folder)  # in one step: what has the name is whole
        except OSError:
            if not folder.is_dir():  # else someone was faster where there are no locks, and theirs is as good
                raise
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    return folder


def digest(*values: object) -> str:
    """A name for the values: any that JSON can hold, in this order."""
    return hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()[:24]


def fingerprint(files: Sequence[File]) -> str:
    """A name for the content of files, in this order."""
    if away := [file.version() for file in files if isinstance(file, RemoteFile)]:
        return digest(away)  # a source has files of one kind
    files = [file for file in files if isinstance(file, Path)]
    stats = [file.stat() for file in files]
    if sum(stat.st_size for stat in stats) > SMALL:
        names = [str(file.resolve()) for file in files]
        return digest(names, [(stat.st_size, stat.st_mtime_ns) for stat in stats])
    return digest([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])


def _lock(descriptor: int, say: Say) -> bool:
    """Wait for the lock; False where the system or the file system has none."""
    if fcntl is None:
        return False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that prepares the same data")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # some network file systems
        return False
    return True


@dataclass(frozen=True, slots=True)
class Corpus:
    """All the tokens of a run."""

    sources: tuple[Tokens, ...]  # one for each of data.sources
    end_token: int | None  # None: ready tokens, and nobody said it
    tokenizer: Path | None  # None: ready tokens, and no tokenizer was named
    chats: tuple["ChatReport | None", ...] = ()  # of sources with conversations


class ChatReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the conversations of a source."""

    records: int
    untrained: int  # that had no token to be trained, and were left out
    truncated: int  # that were longer than the sequence
    trained: int  # tokens
    tokens: int
    stops: tuple[int, ...]  # the tokens that close trained answers
    ends: tuple[int, ...]  # the tokens that end a text as the model folder states them
    template: str  # as it was rendered
    notes: tuple[str, ...]  # what should be known of the template

    @property
    def share(self) -> float:
        return self.trained / self.tokens


def problems(run: Run) -> list[Problem]:
    """What is wrong with the data of a run, as far as can be told in a moment."""
    if found := sources.problems(run.data):
        return found  # what follows needs sources that can be opened
    listings = [sources.listing(one) for one in run.data.sources]
    found, end = _tokenizer_problems(run, listings), run.data.end_token
    if end is not None and not 0 <= end < run.arch.vocab:
        text = f"data.end_token = {end} is not a token below arch.vocab = {run.arch.vocab}"
        found.append(Problem(text, f"use 0 to {run.arch.vocab - 1}", "data.end_token"))
    for each in listings:
        if each.ready:
            found += _token_problems(run, each)
        elif each.source.format == "chat":
            found += _chat_problems(run, each) if not found else []
        # Too short whatever the tokenizer: no token is less than a byte, and a document adds its end.
        elif each.plain and each.size + len(each.files) <= run.sequence and run.data.pack != "documents":
            found.append(_too_short(run, each.source, plural(each.size, "byte")))
    return found


def prepare(run: Run, folder: Path, say: Say) -> Corpus:
    """The corpus of a run. Any number of processes may ask at once: one works, the others wait and find it ready."""
    if found := problems(run):
        raise InputError(found)
    listings = [sources.listing(one) for one in run.data.sources]
    if all(each.ready for each in listings):
        named = None if run.data.tokenizer == "train" else tokenize.path(run.data.tokenizer)
        corpus = Corpus(tuple(_with_ends(run, each, folder, say) for each in listings), run.data.end_token, named)
    else:
        lexicon = _lexicon(run, [each for each in listings if not each.ready], folder, say)
        opened, chats = [], []
        for each in listings:
            chats.append(None)
            if each.source.format == "chat":
                tokens, chats[-1] = _chat(run, each, lexicon, folder, say)
                opened.append(tokens)
            else:
                reading = _with_ends(run, each, folder, say) if each.ready else _tokenised(each, lexicon, folder, say)
                opened.append(reading)
        corpus = Corpus(tuple(opened), lexicon.end_token, lexicon.file, tuple(chats))
    short = [
        _too_short(run, one, plural(tokens.total, "token"))
        for one, tokens in zip(run.data.sources, corpus.sources, strict=True)
        if packing(tokens, run, corpus.end_token).count == 0
    ]
    if short:
        raise InputError(short)
    return corpus


def with_epochs(run: Run, folder: Path, say: Say) -> Run:
    """A run whose epochs have become steps, which follow from the samples of its data; others as they are."""
    if not run.epochs:
        return run
    corpus = prepare(run, folder, say)
    (count,) = (packing(tokens, run, corpus.end_token).count for tokens in corpus.sources)
    samples = count - held_count(count, run.data.eval_fraction)
    steps = max(math.ceil(run.epochs * samples / run.batch), 1)
    say(f"epochs = {run.epochs:g}: {plural(steps, 'step')} of {run.batch} of {plural(samples, 'sample')}")
    return msgspec.structs.replace(run, steps=steps)


def _rounded(number: str, noun: str) -> str:
    """A number that need not be whole, as it is shown, with its noun."""
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def described(run: Run, corpus: Corpus) -> Iterator[str]:
    """The data in a line for each source, and a warning where most of it is filler."""
    packings = [packing(tokens, run, corpus.end_token) for tokens in corpus.sources]
    slots = order.slots(tuple(one.weight for one in run.data.sources))
    chats = corpus.chats or (None,) * len(packings)
    for one, each, share, report in zip(run.data.sources, packings, slots / sum(slots), chats, strict=True):
        held = held_count(each.count, run.data.eval_fraction)
        filler = 1 - each.predicted / (each.count * run.sequence)
        epoch = (each.count - held) / (run.batch * share)  # steps
        samples = f"{plural(each.count, 'sample')} of {run.sequence} ({held:,} for validation, {filler:.0%} filler)"
        passes = _rounded(f"{run.steps / epoch:.3g}", "epoch")
        epochs = f"{_rounded(f'{epoch:,.4g}', 'step')} per epoch ({plural(run.steps, 'step')}: {passes})"
        yield f"data: {_files(one)}; {plural(each.tokens.total, 'token')}, {samples}; {epochs}"
        if report is not None and corpus.tokenizer is not None:
            yield from _described_chat(report, tokenize.load(corpus.tokenizer))
        if filler > MUCH_FILLER:
            pack = "" if run.data.pack == "best_fit" else "data.pack=best_fit lays several documents in a sample, or "
            yield (
                f"warning: {filler:.0%} of {one.source} is filler, computed and not learnt from: {pack}use a shorter "
                f"sequence"
            )


def _files(source: Source) -> str:
    """The files of a source that are read, and those of its folder that are not, by their endings."""

    def counted(found: Counter[str]) -> str:
        return ", ".join(f"{count:,} {ending}" for ending, count in found.most_common())

    left = sources.left_out(source)
    read = counted(sources.endings(sources.files(source)))
    return f"{source.source}: {read} read" + (f", left out: {counted(left)}" if left else "")


def _lexicon(run: Run, texts: list[Listing], folder: Path, say: Say) -> TokenizerInfo:
    """The tokenizer that was named, or one trained on the text and kept in the cache."""
    vocab = run.arch.vocab

    def train(made: Path) -> None:
        say(f"training a tokenizer of {vocab} entries")
        tokenize.train(_sample(texts), vocab).save(str(made / "tokenizer.json"))

    if run.data.tokenizer == "train":
        settings = (vocab, SAMPLE, SAMPLE_FILES)
        name = digest("tokenizer", shards.VERSION, settings, [_content(each) for each in texts])
        file = once(folder / name, train, say) / "tokenizer.json"
        try:
            tokenizer = tokenize.load(file)
        except InputError:
            what = f"{file}, which was trained here, is damaged"
            raise mistake(what, f"delete {file.parent}: it is made again", "data.tokenizer") from None
    else:
        file = tokenize.path(run.data.tokenizer)
        tokenizer = tokenize.load(file)
    return TokenizerInfo(file, tokenizer, chat.document_end(run, tokenizer))


def _sample(texts: list[Listing]) -> Iterator[str]:
    """Beginnings of files, as much of each as is fair: what short files leave over goes to longer ones."""
    found = [(file, kind, each.source.field) for each in texts for file, kind in each.kinds.items()]
    found = found[:: -(-len(found) // SAMPLE_FILES)]
    found.sort(key=lambda entry: (entry[0].stat().st_size, str(entry[0])))
    left = SAMPLE
    for number, (file, kind, field) in enumerate(found):
        share = left // (len(found) - number)
        for text in sources.read_records(file, cast(TextKind, kind), field):
            part = text[:share]
            yield part
            share, left = share - len(part), left - len(part)
            if share == 0:
                break


def _tokenised(text: Listing, lexicon: TokenizerInfo, folder: Path, say: Say) -> Tokens:
    found = [shards.open_folder(piece.make(say)) for piece in _pieces(text, lexicon, folder)]
    if not (filled := [shard for shard in found if len(shard.tokens)]):
        raise mistake(f"{text.source.source} holds no text", "name files with content", "data.source")
    return shards.join(filled)


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """Some text of a source, and the folder of the cache that its tokens are in, or go to."""

    text: Listing
    lexicon: TokenizerInfo
    folder: Path

    def make(self, say: Say) -> Path:
        """The folder, filled now or before."""

        def write(made: Path) -> None:
            text, lexicon = self.text, self.lexicon
            say(f"tokenising {text.size / 1e6:.1f} MB of {text.source.source}")
            documents = tokenize.encode(lexicon, text.documents(), text.size if text.plain else 0, say)
            shards.write(made, documents, lexicon.vocab, lexicon.end_token)

        return once(self.folder, write, say)


def _pieces(text: Listing, lexicon: TokenizerInfo, folder: Path) -> list[TokenPiece]:
    """The pieces of a source; all of it in one where it was made so before, or is not long."""

    def piece(part: Listing) -> TokenPiece:
        span = [] if part.span is None else [part.span]
        name = digest("tokens", shards.VERSION, _content(part), fingerprint([lexicon.file]), lexicon.end_token, *span)
        return TokenPiece(part, lexicon, folder / name)

    whole = piece(text)
    return [whole] if whole.folder.is_dir() else [piece(part) for part in sources.cut(text)]


def token_pieces(run: Run, folder: Path, say: Say) -> list[TokenPiece]:
    """All pieces of the sources of a run that are text; its tokenizer is made on the way, by whoever is first."""
    if found := problems(run):
        raise InputError(found)
    listings = [sources.listing(one) for one in run.data.sources]
    texts = [each for each in listings if not each.ready]
    if not texts:
        return []
    lexicon = _lexicon(run, texts, folder, say)
    plain = (each for each in texts if each.source.format != "chat")
    return [piece for each in plain for piece in _pieces(each, lexicon, folder)]


def _chat(run: Run, text: Listing, lexicon: TokenizerInfo, folder: Path, say: Say) -> tuple[Tokens, ChatReport]:
    """Conversations as tokens with their masks, proved on every sample."""
    template = chat.chat_template(run, lexicon.tokenizer)
    # The two answers of a preference lie in one row.
    together, data = 2 if run.objective == "dpo" else 1, run.data
    limit = run.sequence // together + 1

    def write(made: Path) -> None:
        say(f"rendering, masking and tokenising {text.size / 1e6:.1f} MB of {text.source.source}")
        masker = _masker(run, template, lexicon.tokenizer)
        begin = lexicon.tokenizer.token_to_id(template.special.get("bos_token", ""))
        counts = Counter[str]()

        def kept() -> Iterator[tuple[np.ndarray, np.ndarray, tuple[int, int, int]]]:
            waiting: list[tuple[np.ndarray, np.ndarray, tuple[int, int, int]]] = []
            for number, sample in enumerate(masker.samples(conversations(text, run))):
                cut = truncated(sample, limit, data.truncation_side, begin)
                cut.mask[0] = 0  # nothing is before it to predict it from
                counts["records"] += 1
                counts["truncated"] += len(cut.tokens) < len(sample.tokens)
                waiting.append((cut.tokens, cut.mask, (number, int(cut.mask.sum()), len(sample.tokens))))
                if len(waiting) < together:
                    continue
                if all(trained for _, _, (_, trained, _) in waiting):
                    counts["trained"] += sum(trained for _, _, (_, trained, _) in waiting)
                    counts["tokens"] += sum(len(tokens) for tokens, _, _ in waiting)
                    yield from waiting
                else:
                    counts["untrained"] += together
                waiting.clear()

        if not shards.write_masked(made, kept(), lexicon.vocab, lexicon.end_token):
            raise _nothing_trained(run, text, counts)
        report = ChatReport(
            **{name: counts[name] for name in ("records", "untrained", "truncated", "trained", "tokens")},
            stops=tuple(sorted(masker.stops)),
            ends=tuple(sorted(masker.ends)),
            template=template.source,
            notes=tuple(masker.notes.values()),
        )
        (made / "chat.json").write_bytes(msgspec.json.encode(report))

    settings = (run.trains_on, data.truncation_side, limit, text.source.columns)
    named = (template.source, sorted(template.special.items()), sorted(ends_of(run, lexicon.tokenizer)))
    settings += ("dpo",) if together > 1 else ()
    name = digest("chat", CHAT_VERSION, _content(text), fingerprint([lexicon.file]), lexicon.end_token, settings, named)
    made = once(folder / name, write, say)
    try:
        report = msgspec.json.decode((made / "chat.json").read_bytes(), type=ChatReport)
    except (OSError, *UNDECODABLE):
        raise mistake(f"{made} has no readable chat.json", f"delete {made}: it is made again") from None
    return shards.open_masked(made), report


def conversations(text: Listing, run: Run) -> Iterator[Conversation]:
    """The conversations of a source, in order; of preferences each chosen one before its rejected one."""
    columns = columns_of(text.source.columns)
    records = ((place, record) for file in text.files for place, record in sources.read_objects(file))
    if run.objective == "dpo":
        return (each for place, record in records for each in preference(place, record, columns))
    return (conversation(place, record, columns) for place, record in records)


def _masker(run: Run, template: ChatTemplate, tokenizer: Tokenizer) -> Masker:
    return Masker(template, tokenizer, run.trains_on, ends_of(run, tokenizer))


def ends_of(run: Run, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: the model folder's, and the one that closes a document."""
    return chat.end_tokens(chat.text_folder(run), tokenizer) | {chat.document_end(run, tokenizer)}


def _nothing_trained(run: Run, text: Listing, counts: Counter[str]) -> InputError:
    if not counts["records"]:
        return mistake(f"{text.source.source} has no samples", "name files with content", "data.source")
    what = f"none of the {plural(counts['records'], 'sample')} of {text.source.source} has a token to be trained"
    if counts["truncated"]:
        what += f", and {counts['truncated']} were cut to sequence = {run.sequence}"
        return mistake(what, "use a longer sequence, or set data.truncation_side = left", "sequence")
    return mistake(what, f"add answers, or set data.train_on (it is {run.data.train_on})", "data.train_on")


def _chat_problems(run: Run, text: Listing) -> list[Problem]:
    """What is wrong with the template and with the first sample of every file."""
    try:
        tokenizer = tokenize.load(tokenize.path(run.data.tokenizer))
        masker = _masker(run, chat.chat_template(run, tokenizer), tokenizer)
        columns = columns_of(text.source.columns)
        for file in text.files[: sources.CHECKED]:
            first = next(sources.read_objects(file), None)
            read = preference if run.objective == "dpo" else lambda *given: (conversation(*given),)
            list(masker.samples(() if first is None else read(*first, columns)))
    except InputError as error:
        return [msgspec.structs.replace(each, key=each.key or "data.source") for each in error.problems]
    return []


def _described_chat(report: ChatReport, lexicon: Tokenizer) -> Iterator[str]:
    """What is trained of the conversations of a source, and what was left out."""
    lost = [f"{report.untrained:,} left out without a trained token"] if report.untrained else []
    lost += [f"{report.truncated:,} truncated"] if report.truncated else []
    stops = ", ".join(str(lexicon.id_to_token(stop)) for stop in report.stops)
    said = (
        f"{report.trained:,} of {plural(report.tokens, 'token')} trained ({report.share:.0%}), answers end with {stops}"
    )
    yield f"chat: {plural(report.records, 'sample')}{''.join(f', {each}' for each in lost)}; {said}"
    yield from (f"note: {each}" for each in report.notes)
    if new := [str(lexicon.id_to_token(stop)) for stop in report.stops if stop not in report.ends]:
        yield f"note: {', '.join(new)} did not end a text before: `convert` adds it to generation_config.json"


def _with_ends(run: Run, tokens: Listing, folder: Path, say: Say) -> Tokens:
    """Ready tokens; where documents matter and their ends are not known, they are searched once and kept."""
    opened, end = _opened(tokens), run.data.end_token
    if len(opened.ends) or not _documents_matter(run.data):
        return opened
    assert end is not None, "problems() asks for it"

    def search(made: Path) -> None:
        say(f"searching {tokens.source.source} for the ends of documents")
        shards.write_ends(made, shards.scan(opened, end))

    name = digest("ends", shards.VERSION, _content(tokens), end)
    return Tokens(opened.shards, shards.open_ends(once(folder / name, search, say)))


def _opened(tokens: Listing) -> Tokens:
    return shards.join(sources.read_tokens(file, cast(ReadyKind, kind)) for file, kind in tokens.kinds.items())


def _content(listing: Listing) -> tuple[str, str, list[str]]:
    """What decides the documents of a source: its bytes and how they are read, not its name."""
    return fingerprint(listing.files), listing.source.field, list(listing.kinds.values())


def _tokenizer_problems(run: Run, listings: list[Listing]) -> list[Problem]:
    texts = [each.source.source for each in listings if not each.ready]
    tokens = [each.source.source for each in listings if each.ready]
    if run.data.tokenizer != "train":
        return _file_problems(run, bool(texts))
    if run.data.is_chat:
        text = "data.format = chat needs the tokenizer of a model, and one trained here would have no marks of turns"
        return [Problem(text, "set init.from, or data.tokenizer, to a folder with tokenizer.json", "data.tokenizer")]
    if texts and tokens:
        text = f"a tokenizer trained on {texts[0]} would not be the one that made the tokens of {tokens[0]}"
        return [Problem(text, "set data.tokenizer to the one that made them", "data.tokenizer")]
    if texts and run.init.folder:
        text = f"init.from = {run.init.folder} has no tokenizer, and one trained here would number its tokens otherwise"
        return [Problem(text, "set data.tokenizer to the one that its weights were trained with", "data.tokenizer")]
    if texts and run.arch.vocab < tokenize.SMALLEST:
        text = f"arch.vocab = {run.arch.vocab} is too small to hold every byte and the end of a document"
        return [Problem(text, f"use at least {tokenize.SMALLEST}", "arch.vocab")]
    return []


def _file_problems(run: Run, encodes: bool) -> list[Problem]:
    try:
        tokenizer = tokenize.load(tokenize.path(run.data.tokenizer))
        if encodes:
            chat.document_end(run, tokenizer)
    except InputError as error:
        return error.problems
    if (size := tokenize.entries(tokenizer)) > run.arch.vocab:
        text = f"the tokenizer {run.data.tokenizer} has {size} entries and arch.vocab is {run.arch.vocab}"
        return [Problem(text, f"set arch.vocab to at least {size}, or use a smaller tokenizer", "data.tokenizer")]
    return []


def _token_problems(run: Run, tokens: Listing) -> list[Problem]:
    opened, end, name = _opened(tokens), run.data.end_token, tokens.source.source
    looked_at = opened.read(0, min(LOOKED_AT, opened.total)).astype(np.int64)
    found = []
    if unknown := looked_at[(looked_at < 0) | (looked_at >= run.arch.vocab)].tolist():
        text = f"{name} holds token {unknown[0]}, and arch.vocab is {run.arch.vocab}"
        found.append(Problem(text, "use the vocabulary that the tokens were made with", "arch.vocab"))
    if end is not None and end > np.iinfo(opened.dtype).max:
        text = f"data.end_token = {end} cannot occur in {name}, whose tokens are {opened.dtype}"
        found.append(Problem(text, "use the end token that the tokens were made with", "data.end_token"))
    if end is None and _documents_matter(run.data) and not len(opened.ends):
        text = f"{name} does not say where its documents end"
        found.append(Problem(text, "set data.end_token to the token that closes one", "data.end_token"))
    if opened.total <= run.sequence and run.data.pack == "stream":
        found.append(_too_short(run, tokens.source, plural(opened.total, "token")))
    return found


def _too_short(run: Run, one: Source, size: str) -> Problem:
    need = run.sequence + 1 if run.data.pack == "stream" else 2
    text = f"{one.source} holds {size}, and one sample needs {need} tokens"
    return Problem(text, "use a smaller sequence, or more data", "sequence")


def _documents_matter(data: Data) -> bool:
    return data.masks or data.pack == "documents"


class PieceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What preparing came to."""

    pieces: int  # of the whole run
    made: int  # here and now
    found: int  # of this part, that were ready
    fetched: int = 0  # from a store
    tokens: int  # of this part
    seconds: float


def prepare_pieces(
    run: Run, cache: Path, part: tuple[int, int], workers: int, say: Say, store: RemoteFolder | None = None
) -> PieceReport:
    """Make every piece that is this part's, the `part[0]`-th of `part[1]`, and not there yet.

    Those that a store has are fetched from there, and it is given those that are made.
    """
    began = time.monotonic()
    every = token_pieces(run, cache, say)
    mine = range(part[0], len(every), part[1])  # every so-many-th: neighbours are alike
    absent = [number for number in mine if not every[number].folder.is_dir()]
    missing = [number for number in absent if store is None or not _fetched(every[number], store, say)]
    if missing:
        say(f"{len(missing)} of {plural(len(every), 'piece')} to tokenise, on {plural(workers, 'worker')}")
    total, left = sum(every[number].text.size for number in missing), len(missing)
    done, size = 0, 0
    for number, tokens in _made(every, missing, workers):
        done, left, size = done + tokens, left - 1, size + every[number].text.size
        if store is not None:
            _put(every[number], store)
        seconds = time.monotonic() - began
        rest = f"; about {seconds * (total - size) / size:,.0f} s left" if left and size else ""
        say(f"piece {number + 1} of {len(every)}: {plural(tokens, 'token')}; {done / seconds:,.0f} tokens/s{rest}")
    return PieceReport(
        pieces=len(every),
        made=len(missing),
        found=len(mine) - len(absent),
        fetched=len(absent) - len(missing),
        tokens=sum(len(shards.open_folder(every[number].folder).tokens) for number in mine),
        seconds=time.monotonic() - began,
    )


def _fetched(piece: TokenPiece, store: RemoteFolder, say: Say) -> bool:
    """Whether a store had a piece, which is in the cache now; one that is damaged there is made again."""
    with telling(store.address):
        if not remote.has_piece(piece.folder.name, store):
            return False
    try:
        once(piece.folder, lambda made: remote.get_piece(piece.folder.name, store, made), say)
    except (OSError, *UNDECODABLE) as error:
        say(f"warning: {words_of(error)}; the piece is made here")
        with telling(store.address):
            remote.drop_piece(piece.folder.name, store)  # another is put in its place
        return False
    return True


def _put(piece: TokenPiece, store: RemoteFolder) -> None:
    with telling(store.address):
        remote.put_piece(piece.folder, store)


def _made(every: list[TokenPiece], missing: list[int], workers: int) -> Iterator[tuple[int, int]]:
    """The number and the tokens of each piece as it is made, in any order."""
    if workers == 1 or len(missing) <= 1:
        for number in missing:
            yield number, _tokens(every[number])
        return
    context = multiprocessing.get_context("spawn")  # the tokenizer's threads do not live through a fork
    pool = ProcessPoolExecutor(min(workers, len(missing)), context, _begin)
    try:
        calls = {pool.submit(_tokens, every[number]): number for number in missing}
        for call in as_completed(calls):
            yield calls[call], call.result()
    except BrokenProcessPool:
        what = "a worker was killed, perhaps for want of memory; the pieces that are done are kept"
        raise mistake(what, "run the same command again, with fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _tokens(piece: TokenPiece) -> int:
    return len(shards.open_folder(piece.make(lambda text: None)).tokens)


def _begin() -> None:
    die_with_parent()  # who is ended by SIGTERM, say, ends none of them, and each waits for ever for a next piece
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
