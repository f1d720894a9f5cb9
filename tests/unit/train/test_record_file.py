"""Records on a disk that takes no more."""

import errno
import os

from meshwright.train.log import RecordFile


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
