import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from meshwright.config.run import Data, Source
from meshwright.data import sources
from meshwright.data.sources import STDLIB_BYTES, files, listing
from meshwright.spec.problem import InputError


@pytest.fixture
def library(tmp_path) -> Path:
    """A folder of files of many kinds."""
    for name in ("b.txt", "a.md", "deep/er/c.py", ".hidden/d.txt", "deep/.e.txt", "f.jpeg", "g.txt.gz"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"this is {name}")
    return tmp_path


def names(found: list[Path], folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in found]


def problem_texts(**values: object) -> list[str]:
    return [str(problem) for problem in sources.problems(Data(**values))]  # pyright: ignore[reportArgumentType]


def test_a_folder_gives_its_known_files_sorted(library):
    assert names(files(Source(source=str(library))), library) == ["a.md", "b.txt", "deep/er/c.py", "g.txt.gz"]


def test_a_glob_goes_as_deep_as_it_says(library):
    assert names(files(Source(source=f"{library}/*.txt")), library) == ["b.txt"]
    assert names(files(Source(source=f"{library}/**/*.py")), library) == ["deep/er/c.py"]


def test_a_file_is_itself(library):
    assert files(Source(source=str(library / "f.jpeg"))) == [library / "f.jpeg"]


def test_a_name_with_brackets_is_a_file_when_it_exists(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert files(Source(source=str(tmp_path / "a[1].txt"))) == [tmp_path / "a[1].txt"]


def test_megatron_files_are_found_by_their_prefix(tmp_path):
    (tmp_path / "web_text_document.bin").write_bytes(b"12")
    (tmp_path / "web_text_document.idx").write_bytes(b"12")
    expected = [tmp_path / "web_text_document.bin"]
    assert files(Source(source=str(tmp_path / "web_text_document"))) == expected
    assert files(Source(source=str(tmp_path / "web*"))) == expected


def test_documents_come_in_the_order_of_files(library):
    (library / "g.txt.gz").unlink()
    documents = list(listing(Source(source=str(library))).documents())
    assert documents == ["this is a.md", "this is b.txt", "this is deep/er/c.py"]


def test_the_library_of_python_is_a_bounded_source_without_tests():
    found = listing(Source(source="stdlib"))
    assert 1_000_000 < found.size <= STDLIB_BYTES
    assert found.files == files(Source(source="stdlib"))
    assert "argparse.py" in {file.name for file in found.files}
    assert not {"test", "tests", "site-packages"} & {part for file in found.files for part in file.parts[-2:]}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.TXT", "text"),
        ("a.jsonl.zst", "jsonl"),
        ("a.json.gz", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.bin", "nanogpt"),
    ],
)
def test_endings_tell_the_kind(tmp_path, name, kind):
    (tmp_path / name).write_bytes(b"12")
    assert list(listing(Source(source=str(tmp_path / name))).kinds.values()) == [kind]


def test_a_stated_format_wins(tmp_path):
    (tmp_path / "corpus").write_text('{"text": "x"}')
    assert list(listing(Source(source=str(tmp_path / "corpus"), format="jsonl")).documents()) == ["x"]


def test_a_good_source_has_no_problems(library):
    (library / "g.txt.gz").unlink()
    assert problem_texts(source=str(library)) == []


def test_a_pattern_that_matches_nothing_names_the_nearest_folder(tmp_path):
    (text,) = problem_texts(source=f"{tmp_path}/no/such/*.txt")
    assert text.startswith(f"no file matches {tmp_path}/no/such/*.txt; the nearest folder that exists is {tmp_path};")


def test_an_empty_folder_is_named(tmp_path):
    assert problem_texts(source=str(tmp_path))[0].startswith(f"the folder {tmp_path} is empty")


def test_a_folder_of_unknown_endings_is_named(tmp_path):
    (tmp_path / "a.jpeg").write_text("x")
    assert "none of the 1 file(s)" in problem_texts(source=str(tmp_path))[0]


def test_empty_files_are_named(tmp_path):
    (tmp_path / "a.txt").touch()
    assert "are empty" in problem_texts(source=str(tmp_path))[0]


def test_an_unknown_ending_asks_for_the_format(tmp_path):
    (tmp_path / "a.dat").write_text("x")
    assert "set data.format" in problem_texts(source=str(tmp_path / "a.dat"))[0]


def test_text_and_tokens_in_one_source_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    np.zeros(4, np.uint16).tofile(tmp_path / "b.bin")
    (text,) = problem_texts(source=str(tmp_path))
    assert "mixes text" in text
    assert "data.mix" in text


def test_all_problems_of_all_sources_are_told_at_once(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"txt": "x"}')
    (tmp_path / "b.jsonl").write_text("nonsense")
    (tmp_path / "c.bin").write_bytes(b"123")
    mix = (
        Source(source=f"{tmp_path}/*.jsonl"),
        Source(source=str(tmp_path / "c.bin")),
        Source(source=str(tmp_path / "none")),
    )
    found = sources.problems(Data(mix=mix))
    assert len(found) == 4
    assert {problem.key for problem in found} == {"data.mix"}


@contextmanager
def another_user():
    """Root may read everything, so root becomes nobody for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_without_permission_is_named():
    folder = Path(tempfile.mkdtemp())  # pytest's own folder is closed to other users
    folder.chmod(0o755)
    try:
        for name in ("a.txt", "b.bin"):
            (folder / name).write_text("some")
            (folder / name).chmod(0)
        with another_user():
            assert "may not be read" in problem_texts(source=str(folder / "a.txt"))[0]
            assert "cannot be read: Permission denied" in problem_texts(source=str(folder / "b.bin"))[0]
    finally:
        shutil.rmtree(folder)


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError):
        files(Source(source=str(tmp_path / "none.txt")))


def test_in_a_mixture_the_remedy_names_the_entry(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "text"}\n')
    (tmp_path / "b.dat").write_text("text")
    named = [str(tmp_path / name) for name in ("a.jsonl", "b.dat")]
    field, ending = sources.problems(Data(mix=tuple(Source(source=name) for name in named)))
    assert (field.key, ending.key) == ("data.mix", "data.mix")
    assert field.remedy == f"set field to the one that holds the text, in the entry of data.mix for {named[0]}"
    assert ending.remedy.startswith("set format (")
    assert ending.remedy.endswith(f", in the entry of data.mix for {named[1]}")
    (alone,) = sources.problems(Data(source=named[0]))
    assert alone.remedy == "set data.field to the one that holds the text"
