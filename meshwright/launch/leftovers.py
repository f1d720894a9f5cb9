"""Temporary folders carry the name of the process they belong to; those of the dead are removed by the next to come."""

import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

from meshwright.launch.verdicts import process_name, this_session

OWNED = re.compile(r"meshwright-(?P<owner>(?P<host>.+):(?P<pid>\d+):\d+)(-\w+)?")


def prefix() -> str:
    """How the names of this launcher's temporary folders begin."""
    return f"meshwright-{this_session()}-"


def sweep(folder: Path | None = None) -> list[Path]:
    """Remove what processes of this machine and user have left that were killed; what was removed."""
    found = [entry for entry in (folder or Path(tempfile.gettempdir())).glob("meshwright-*") if _is_left(entry)]
    for entry in found:
        shutil.rmtree(entry, ignore_errors=True)  # another launcher may be at it too
    return found


def _is_left(entry: Path) -> bool:
    """A number is given to another process one day; together with when that began it is not."""
    name = OWNED.fullmatch(entry.name)
    if name is None or name["host"] != socket.gethostname() or entry.is_symlink() or not entry.is_dir():
        return False
    return entry.lstat().st_uid == os.geteuid() and process_name(int(name["pid"])) != name["owner"]
