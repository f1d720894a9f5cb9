"""Places that cannot be written, and readers that leave."""

import io
import subprocess
import sys

import pytest
from waiting import HANG

from meshwright.runtime.files import require_file, require_folder, teller
from meshwright.spec.problem import InputError


def test_a_folder_is_made_and_left_empty(tmp_path):
    require_folder(tmp_path / "a" / "b", "name another")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_that_could_be_written_is_not(tmp_path):
    (tmp_path / "old").write_text("precious")
    for name in ("old", "new"):
        require_file(tmp_path / name, "name another")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old", "precious")]


@pytest.mark.parametrize("require", [require_folder, require_file])
def test_what_cannot_be_is_told_with_its_remedy(tmp_path, require):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/below cannot be written: Not a directory; name another"):
        require(tmp_path / "file" / "below", "name another")


def test_a_stream_that_nobody_reads_is_written_to_no_more():
    class Left(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    teller(Left())("anything")


def test_a_reader_that_leaves_does_not_change_the_exit_code():
    code = "import sys; from meshwright.runtime.files import teller; say = teller(sys.stdout)\n"
    code += "sys.stdin.read(); say('one'); say('two'); sys.exit(7)"
    talking = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert talking.stdout is not None
    talking.stdout.close()
    assert talking.stdin is not None
    talking.stdin.close()
    assert talking.wait(HANG) == 7
