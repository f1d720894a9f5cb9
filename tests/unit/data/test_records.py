import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from meshwright.data.sources import BLOCK, read_records, record_problems
from meshwright.spec.problem import InputError

STORIES = ["once", "upon\na time", "Ärger ✓"]
LINES = "".join(json.dumps({"id": 1, "text": story}) + "\n" for story in STORIES).encode()


def packed(file: Path, data: bytes) -> Path:
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(file.suffix.lower(), bytes)
    file.write_bytes(pack(data))
    return file


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "A.JSONL.GZ"])
def test_json_lines_are_documents(tmp_path, name):
    file = packed(tmp_path / name, LINES)
    assert list(read_records(file, "jsonl", "text")) == STORIES


def test_lines_may_be_longer_than_a_block(tmp_path):
    stories = ["a" * (2 * BLOCK + 3), "b", "c" * BLOCK]
    file = packed(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": story}) for story in stories).encode())
    assert list(read_records(file, "jsonl", "text")) == stories


def test_several_zstandard_frames_are_one_file(tmp_path):
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(b"".join(zstandard.compress(line) for line in LINES.splitlines(keepends=True)))
    assert list(read_records(file, "jsonl", "text")) == STORIES


def test_a_text_file_is_one_document(tmp_path):
    file = packed(tmp_path / "a.txt", "\ufefftwo\nlines".encode())
    assert list(read_records(file, "text", "text")) == ["two\nlines"]


def test_empty_documents_are_left_out(tmp_path):
    assert list(read_records(packed(tmp_path / "a.txt", b""), "text", "text")) == []
    assert list(read_records(packed(tmp_path / "a.jsonl", b'{"text": ""}\n\n{"text": "x"}'), "jsonl", "text")) == ["x"]


def test_parquet_rows_are_documents(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], "body": STORIES}), tmp_path / "a.parquet")
    assert list(read_records(tmp_path / "a.parquet", "parquet", "body")) == STORIES


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", b"good \xff bad", "a.txt is not UTF-8: byte 0xff at offset 5"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n["text"]\n', "a.jsonl:2 is not a JSON object"),
        (
            "a.jsonl",
            b'{"txt": "x", "id": 3}\n',
            "a.jsonl:1 has no field 'text', only txt, id; set data.field = \"txt\"",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"txt": "x"}\n',
            "a.jsonl:2 has no field 'text', only txt; repair or remove the line",
        ),
        ("a.jsonl", b'{"zzz": "x"}\n', "only zzz; set data.field to the one that holds the text"),
        ("a.jsonl", b'{"text": 3}\n', "the field 'text' holds int, not text"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1 is not JSON"),
        ("a.parquet", b"PAR1 and no more", "a.parquet is not a whole Parquet file"),
    ],
)
def test_broken_content_is_named_with_its_place(tmp_path, name, data, words):
    file = packed(tmp_path / name, data)
    kind = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}[file.suffix]
    with pytest.raises(InputError) as caught:
        list(read_records(file, kind, "text"))
    assert words in str(caught.value)


def test_a_parquet_file_without_the_field_names_what_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"texts": STORIES, "id": [1, 2, 3]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"has no field 'text', only texts, id; set data\.field = .texts"):
        list(read_records(tmp_path / "a.parquet", "parquet", "text"))


def test_a_parquet_row_without_text_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="row 2 of 'text' holds no text"):
        list(read_records(tmp_path / "a.parquet", "parquet", "text"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_packed_files_that_are_cut_short_are_refused(tmp_path, name):
    file = packed(tmp_path / name, LINES)
    file.write_bytes(file.read_bytes()[:-6])
    with pytest.raises(InputError, match=f"{name} is cut short or broken"):
        list(read_records(file, "jsonl", "text"))


@pytest.mark.parametrize(("name", "words"), [("a.jsonl.gz", "cut short or broken"), ("a.jsonl.zst", "not whole Zst")])
def test_files_that_are_not_packed_as_they_say_are_refused(tmp_path, name, words):
    (tmp_path / name).write_bytes(LINES)
    assert words in record_problems(tmp_path / name, "jsonl", "text")[0].text


def test_a_look_at_the_beginning_does_not_mind_a_cut_character(tmp_path):
    file = packed(tmp_path / "a.txt", b"x" * (BLOCK - 1) + "é".encode() * 10)
    assert record_problems(file, "text", "text") == []
    assert record_problems(packed(tmp_path / "b.txt", b"x\xff"), "text", "text") != []
