"""Records on a disk that takes no more."""

import errno
import os

from meshwright.runtime.records import EvalRecord
from meshwright.runtime.records import line as line_of
from meshwright.train.log import RecordFile, read_records


class Disk:
    """A file whose disk has room for so many bytes."""

    def __init__(self, stream, room):
        self.stream, self.room = stream, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.stream.write(data[: self.room])
        self.room -= taken
        return taken

    def close(self):
        self.stream.close()


def test_a_line_is_on_disk_when_it_is_written(tmp_path):
    file = RecordFile(tmp_path / "a", print)
    file.write(b"one\n")
    assert (tmp_path / "a").read_bytes() == b"one\n"
    file.close()


def test_what_a_full_disk_refuses_is_written_later_and_said_once(tmp_path):
    said = []
    file = RecordFile(tmp_path / "a", said.append)
    file.stream = disk = Disk(file.stream, room=6)
    for line in (b"one\n", b"two\n", b"three\n"):
        file.write(line)
    assert (tmp_path / "a").read_bytes() == b"one\ntw"
    (words,) = said
    assert "No space left on device. Training continues" in words
    disk.room = 100
    file.write(b"four\n")
    file.close()
    assert (tmp_path / "a").read_bytes() == b"one\ntwo\nthree\nfour\n"
    assert len(said) == 1


def test_what_a_disk_gives_back_of_nobody_is_left_out_and_said(tmp_path):
    held, said, file = EvalRecord(step=1, loss=2.0, tokens=64, seconds=0.5), list[str](), tmp_path / "steps.rank0.jsonl"
    file.write_bytes(line_of(held) + b"\x00" * 40 + b"\n" + line_of(held) + b'{"kind":"st')
    assert read_records(file, said.append) == [held, held]
    assert said == [f"warning: 1 line of {file} cannot be read: what was recorded there is left out"]
    assert file.read_bytes().endswith(line_of(held))  # so that the next one begins on its own
