"""Text in pieces: whoever makes them, in whatever order, the tokens are those of one process."""

from itertools import pairwise

import fsspec
import msgspec
import numpy as np
import pytest
from chats import byte_level, ragged, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cli.data import part_of
from meshwright.cli.main import main
from meshwright.config.run import Data, Source
from meshwright.data import sources
from meshwright.data.prepare import prepare, prepare_pieces, token_pieces
from meshwright.data.sources import listing
from meshwright.runtime.object_store import RemoteFolder
from meshwright.spec.problem import InputError

SMALL_PIECE = 4096


def silent(_: str) -> None: ...


@pytest.fixture
def text(tmp_path):
    """A long file of JSON lines between short ones, and a packed one that cannot be cut."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [{"text": f"line {number}: the quick brown fox jumps over {number * 7 % 13} dogs"} for number in range(400)]
    encoded = [msgspec.json.encode(line) for line in lines]
    (folder / "a.jsonl").write_bytes(b"\n".join(encoded[:20]))
    (folder / "b.jsonl").write_bytes(b"\n".join(encoded[20:]) + b"\n")
    (folder / "c.jsonl").write_bytes(b"\n\n".join(encoded[:5]))
    with fsspec.open(folder / "d.jsonl.gz", "wb", compression="gzip") as packed:
        packed.write(b"\n".join(encoded))
    return folder


@pytest.fixture
def cut_small(monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", SMALL_PIECE)


def tokens_of(corpus):
    (tokens,) = corpus.sources
    return tokens.read(0, tokens.total), tokens.ends


@settings(deadline=None)  # slowness is no failure
@given(st.lists(st.text("ab é\n", max_size=9), min_size=1, max_size=12), st.data())
def test_every_line_is_in_one_piece_wherever_a_file_is_cut(tmp_path_factory, texts, data):
    file = tmp_path_factory.mktemp("cut") / "text.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode({"text": text}) for text in texts))
    size = file.stat().st_size
    bounds = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=5))})
    spans = pairwise(bounds)
    found = [text for span in spans for text in sources.read_records(file, "jsonl", "text", span)]
    assert found == [text for text in texts if text]


def test_pieces_are_cut_by_files_and_within_long_ones(text, cut_small):
    parts = sources.cut(listing(Source(source=str(text))))
    assert len(parts) > 5
    assert [part.span for part in parts if "a.jsonl" in str(part.files)] == [None]
    spans = [part.span for part in parts if "b.jsonl" in str(part.files)]
    assert spans[0][0] == 0
    assert spans[-1][1] == (text / "b.jsonl").stat().st_size
    whole = listing(Source(source=str(text)))
    assert [each for part in parts for each in part.documents()] == list(whole.documents())


@pytest.mark.parametrize("workers", [1, 2])
def test_parts_and_workers_make_what_one_process_makes(make_run, text, tmp_path, monkeypatch, workers):
    run = make_run(Data(source=str(text)))
    whole = tokens_of(prepare(run, tmp_path / "whole", silent))
    monkeypatch.setattr(sources, "PIECE_BYTES", SMALL_PIECE)
    cache, said = tmp_path / "cache", []
    count = len(token_pieces(run, cache, silent))
    first = prepare_pieces(run, cache, (1, 2), workers, said.append)
    assert (first.pieces, first.made, first.found) == (count, count // 2, 0)
    rest = prepare_pieces(run, cache, (0, 1), workers, said.append)
    assert (rest.made, rest.found) == (count - count // 2, count // 2)
    assert prepare_pieces(run, cache, (0, 1), workers, said.append).made == 0
    assert any("tokens/s" in text for text in said)
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("tokens.bin")}
    found = tokens_of(prepare(run, cache, silent))
    assert before == {file: file.stat().st_mtime_ns for file in cache.rglob("tokens.bin")}  # nothing was made again
    assert all(np.array_equal(one, other) for one, other in zip(found, whole, strict=True))


def test_what_was_made_whole_is_not_made_in_pieces(make_run, text, tmp_path, monkeypatch):
    run = make_run(Data(source=str(text)))
    prepare(run, tmp_path, silent)
    monkeypatch.setattr(sources, "PIECE_BYTES", SMALL_PIECE)
    assert len(token_pieces(run, tmp_path, silent)) == 1


def test_a_piece_that_was_half_made_is_made_again(make_run, text, tmp_path, cut_small, monkeypatch):
    run = make_run(Data(source=str(text)))
    every = token_pieces(run, tmp_path, silent)
    left = tmp_path / f".{every[0].folder.name}.dead.part"
    left.mkdir()
    (left / "tokens.bin").write_bytes(b"half")
    prepare_pieces(run, tmp_path, (0, 1), 1, silent)
    assert not left.exists()
    assert all(piece.folder.is_dir() for piece in every)


@pytest.fixture
def bucket(text):
    """The same files at addresses: in memory, and on a disk by its address."""
    system = fsspec.filesystem("memory")
    for file in text.iterdir():
        system.pipe(f"/bucket/text/{file.name}", file.read_bytes())
    system.pipe("/bucket/text/.hidden.jsonl", b"no")
    system.pipe("/bucket/text/picture.png", b"no")
    yield system
    system.rm("/bucket", recursive=True)


def test_text_is_read_from_where_it_is(make_run, text, bucket, tmp_path, cut_small):
    here = tokens_of(prepare(make_run(Data(source=str(text))), tmp_path / "here", silent))
    for number, address in enumerate(("memory://bucket/text", "memory://bucket/text/*.jsonl*", f"file://{text}")):
        run = make_run(Data(source=address))
        cache = tmp_path / str(number)
        report = prepare_pieces(run, cache, (0, 1), 1, silent)
        assert report.made == report.pieces > 5
        found = tokens_of(prepare(run, cache, silent))
        assert all(np.array_equal(one, other) for one, other in zip(found, here, strict=True))


def test_a_file_that_changes_is_tokenised_again(make_run, bucket, tmp_path):
    run = make_run(Data(source="memory://bucket/text/b.jsonl"))
    first = prepare(run, tmp_path, silent).sources[0].total
    bucket.pipe("/bucket/text/b.jsonl", bucket.cat("/bucket/text/b.jsonl") * 2)
    assert prepare(run, tmp_path, silent).sources[0].total > first * 1.5


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_pieces_that_a_store_has_are_fetched_and_not_made(make_run, text, bucket, tmp_path, cut_small, kind):
    """One machine makes some, another the rest; a third, which shares no disk with them, makes none."""
    run = make_run(Data(source=str(text)))
    store = RemoteFolder("memory://bucket/tokens" if kind == "memory" else f"file://{tmp_path}/tokens")
    reports = [prepare_pieces(run, tmp_path / str(part), (part, 2), 1, silent, store) for part in (0, 1)]
    assert all(report.made and not report.fetched for report in reports)
    said = []
    third = prepare_pieces(run, tmp_path / "third", (0, 1), 1, said.append, store)
    assert (third.made, third.fetched) == (0, third.pieces)
    whole = tokens_of(prepare(run, tmp_path / "alone", silent))
    found = tokens_of(prepare(run, tmp_path / "third", silent))
    assert all(np.array_equal(one, other) for one, other in zip(found, whole, strict=True))
    store.write(next(name for name in store.names() if name.endswith(".bin")), b"damaged")
    # As if whoever put the last one there had been killed before it was whole.
    store.remove([name for name in store.names() if name.endswith("whole.json")][-1])
    fourth = prepare_pieces(run, tmp_path / "fourth", (0, 1), 1, said.append, store)
    assert (fourth.made, fourth.fetched) == (2, third.pieces - 2)
    assert any("checksum mismatch (sha256); the piece is made here" in text for text in said)
    assert prepare_pieces(run, tmp_path / "fifth", (0, 1), 1, silent, store).fetched == third.pieces  # it is mended
    assert all(
        np.array_equal(one, other)
        for one, other in zip(tokens_of(prepare(run, tmp_path / "fourth", silent)), whole, strict=True)
    )


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("memory://bucket/none", "no file is at memory://bucket/none"),
        ("memory://bucket/tokens.bin", "holds ready tokens, which are mapped into memory from a disk"),
        ("s3://bucket/text", "needs s3fs to be read; run: pip install s3fs"),
        ("sftp://host/text", "needs a package of its own: .*paramiko.*; install what is named there"),
        ("what://bucket/text", "is of a kind that fsspec does not know"),
    ],
)
def test_what_cannot_be_read_from_afar_is_told(make_run, bucket, tmp_path, monkeypatch, address, told):
    bucket.pipe("/bucket/tokens.bin", b"\0\0" * 4096)
    for package in ("s3fs", "paramiko"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(InputError, match=told):
        prepare(make_run(Data(source=address)), tmp_path, silent)


def test_the_verb_prepares_and_then_has_nothing_to_do(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["data", "prepare", "arch.preset=tiny", "sequence=32", f"data.source={text}", "--workers", "1", "--json"]
    assert main(words) == 0
    first = msgspec.json.decode(capsys.readouterr().out)
    assert main(words) == 0
    again = msgspec.json.decode(capsys.readouterr().out)
    assert (first["made"], first["found"]) == (1, 0)
    assert (again["made"], again["found"], again["tokens"]) == (0, 1, first["tokens"])


def test_tokens_of_conversations_are_counted_though_they_are_not_in_pieces(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write_lines(tmp_path / "chat.jsonl", ragged(3))
    own = [f"data.source={tmp_path}/chat.jsonl", f"data.tokenizer={tmp_path}/tokenizer.json", "data.template=chatml"]
    words = ["data", "prepare", "arch.preset=tiny", "arch.vocab=336", "sequence=256", "data.format=chat", *own]
    counts = []
    for _ in range(2):  # made, and read from the cache
        assert main([*words, "--workers", "1", "--json"]) == 0
        counts.append(msgspec.json.decode(capsys.readouterr().out)["tokens"])
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("said", ["2/2", "1", "a/b", "-1/2", "1/0"])
def test_a_part_is_one_of_several(said):
    with pytest.raises(InputError, match="is no part of several"):
        part_of(said)


def test_an_array_makes_all_parts(capsys):
    assert main(["data", "prepare", "--on", "slurm", "--part", "3/16"]) == 2
    assert "--part cannot be combined with --on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("show --part 1/2", "--part is for `data prepare`"),
        ("show --submit", "--submit is for `data prepare --on`"),
        ("prepare --submit", "--submit is for `data prepare --on`"),
        ("prepare --sample 3", "--sample is for `data show`"),
        ("prepare --on slurm --partition a;b", "--partition = 'a;b' is not a name"),
        ("prepare --on slurm --time soon", "--time 'soon' is not a time"),
        ("prepare --on datatrove --partition a", "--partition is for --on slurm"),
    ],
)
def test_no_flag_is_ignored(words, told, capsys):
    assert main(["data", *words.split()]) == 2
    assert told in capsys.readouterr().err
