"""What a rank is told when it is started."""

import msgspec

from meshwright.spec.place import Place

ALONE = Place(rank=0, world=1, local_rank=0, local_world=1, address="", port=0, launcher="meshwright")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one attempt at a run."""

    run: str  # the run file
    folder: str  # the run folder
    cache: str  # where tokens are kept
    session: str  # of which launcher
    place: Place = ALONE
    beats: str = ""  # where hearts are watched
    log: str = ""  # where this rank's own words go
    speaks: bool = False  # its standard output is where people read
    attempt: int = 1  # counts from 1 in a session
    began: float  # monotonic: when the user pressed Enter
    inject: str = ""  # a fault to rehearse
