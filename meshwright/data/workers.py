"""The pieces of a run's text, tokenised in any order by any number of processes on any number of machines.

A piece has a folder of its own in the cache, named by what is in it: whoever finds it has nothing to do, whoever is
killed leaves none. All pieces one after another are the tokens of a source.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import msgspec

from meshwright.config.run import Run
from meshwright.data import remote, shards
from meshwright.data.prepare import TokenPiece, once, token_pieces
from meshwright.runtime.object_store import RemoteFolder, telling, words_of
from meshwright.spec.problem import mistake
from meshwright.spec.units import plural

Say = Callable[[str], None]


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
    except (OSError, msgspec.MsgspecError) as error:
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
