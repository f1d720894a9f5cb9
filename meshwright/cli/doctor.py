"""`meshwright doctor`: what each rank sees, what differs or is too small, and how fast machines reach each other."""

import argparse
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli import env
from meshwright.cli import options as words
from meshwright.runtime import doctor as facts_of
from meshwright.runtime.devices import gpu_health
from meshwright.runtime.doctor import Finding, LinkFacts, RankFacts
from meshwright.runtime.failure import Exit
from meshwright.runtime.files import replace_file, require_folder
from meshwright.runtime.links import LinkServer, call, own_address, rounds
from meshwright.runtime.meeting import named
from meshwright.runtime.place import ALONE, Place
from meshwright.spec.problem import mistake
from meshwright.spec.units import plural

if TYPE_CHECKING:
    import torch.distributed as dist

TOKEN = "doctor.token"
PATIENCE = 30.0  # seconds for a rank to say something
ROUND_SECONDS = 30.0


def add_doctor(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument("--folder", type=Path, default=Path(), help="where runs live (default: this folder)")


def doctor(options: argparse.Namespace) -> int:
    """Look at this machine, or as each rank of a job at all of them; exit code 1 if something is wrong."""
    here, folder = env.here() or ALONE, nearest(options.folder)
    mine = msgspec.structs.replace(
        facts_of.look(env.gpu_names()),
        rank=here.rank,
        node=f"{socket.gethostname()}{f'/{here.node}' if here.node else ''}",
        folder=str(options.folder.absolute()),
        address=_address(here),
    )
    if here.local_rank == 0:
        require_folder(folder, "name another --folder")
        disk = facts_of.disk_speed(folder)
        tried = {"disk_error": disk} if isinstance(disk, str) else {"disk": disk}
        mine = msgspec.structs.replace(mine, **tried, health=gpu_health())
    everyone, links = [mine], list[LinkFacts]()
    if here.world > 1:
        words.require_training()
        everyone, links = _together(here, mine, folder)
        if here.rank:
            return Exit.DONE
    found = facts_of.findings(everyone, links, env.of_ranks())
    record = {"ranks": everyone, "links": links, "findings": found}
    words.show(options, record, _lines(everyone, links, found))
    return Exit.FAILED if any(one.kind == "problem" for one in found) else Exit.DONE


def nearest(folder: Path) -> Path:
    """A folder, or of one that is not there yet the one in which it will be made."""
    return next((each for each in (folder, *folder.absolute().parents) if os.path.lexists(each)), folder)


def _address(here: Place) -> str:
    with suppress(OSError):
        return str(socket.getaddrinfo(here.address, here.port)[0][4][0]) if here.address else ""
    return ""


def _together(here: Place, mine: RankFacts, folder: Path) -> tuple[list[RankFacts], list[LinkFacts]]:
    """What all ranks see, on rank 0; the others say theirs and take part."""
    from meshwright.train.world import fresh_name, open_store

    store = open_store(here)
    name = fresh_name(store, here.rank, here.world, lambda: False) if here.is_agent else "doctor"
    talk = StoreTalk(store, name, here)
    try:
        return _heard(talk, here, mine, folder)
    finally:
        if here.rank == 0:  # also when a rank was not heard
            (folder / TOKEN).unlink(missing_ok=True)


def _heard(talk: "StoreTalk", here: Place, mine: RankFacts, folder: Path) -> tuple[list[RankFacts], list[LinkFacts]]:
    if here.rank == 0:
        replace_file(folder / TOKEN, (token := secrets.token_hex(32)).encode(), mode=0o600)
        talk.say("token", token)
    token = talk.hear("token", 0, str)
    seen = b""
    with suppress(OSError):
        seen = (folder / TOKEN).read_bytes()
    server = LinkServer(address := own_address(here.address, here.port) or socket.gethostname(), token.encode())
    try:
        own = msgspec.structs.replace(mine, sees_folder=seen.decode(errors="replace") == token)
        talk.say("facts", own)
        everyone = [talk.hear("facts", rank, RankFacts) for rank in range(here.world)]
        links = _links(talk, here, everyone, (address, server.port), token.encode())
        talk.say("done", True)
        if here.rank == 0:  # the store ends with this process
            for rank in range(here.world):
                talk.hear("done", rank, bool)
        return everyone, links
    finally:
        server.close()


def _links(
    talk: "StoreTalk", here: Place, everyone: list[RankFacts], server: tuple[str, int], secret: bytes
) -> list[LinkFacts]:
    """Every pair of machines once, by their first ranks, in rounds in which none is busy twice."""
    leaders: dict[str, int] = {}
    for one in everyone:
        leaders.setdefault(one.node, one.rank)
    names, ranks = list(leaders), list(leaders.values())
    if len(ranks) == 1:
        return []
    found: list[LinkFacts] = []
    if here.rank in ranks:
        talk.say("server", server)
        for number, pairs in enumerate(rounds(len(ranks))):
            for pair in pairs:
                if ranks[pair[0]] == here.rank:
                    address, port = talk.hear("server", ranks[pair[1]], tuple[str, int])
                    talk.say(f"link{number}.{pair[0]}", call(names, pair, address, port, secret))
            found += [talk.hear(f"link{number}.{one}", ranks[one], LinkFacts, ROUND_SECONDS) for one, _ in pairs]
    return found


class StoreTalk:
    """Words between ranks, as JSON in a store."""

    def __init__(self, store: "dist.Store", name: str, here: Place) -> None:
        self.store, self.name, self.here = store, name, here

    def say(self, topic: str, value: Any) -> None:
        """Leave a word for all."""
        self.store.set(f"{self.name}/{topic}/{self.here.rank}", msgspec.json.encode(value).decode())

    def hear(self, topic: str, rank: int, kind: Any, seconds: float = PATIENCE) -> Any:
        """What a rank said; one that does not is named."""
        from meshwright.train.world import wait

        key = f"{self.name}/{topic}/{rank}"
        if not wait(self.store, [key], lambda: False, seconds):
            silent = [each for each in range(self.here.world) if not self.store.check([f"{self.name}/facts/{each}"])]
            who = named(silent) if silent else f"rank {rank}"
            raise mistake(f"{who} said nothing within {seconds:g} s", "see why it did not start, or what it says")
        return msgspec.json.decode(self.store.get(key), type=kind)


def _lines(everyone: list[RankFacts], links: list[LinkFacts], found: list[Finding]) -> list[str]:
    lines = []
    for one in everyone:
        gpus = f"{len(one.gpus)} × {one.gpus[0]}" if one.gpus else "no GPU"
        nets = ", ".join(f"{each.name} {each.rate}" for each in one.interfaces) or "no network"
        hcas = "".join(f", {each.name} {each.layer} {each.rate}" for each in one.adapters)
        disk = f", disk {one.disk / 1e6:,.0f} MB/s" if one.disk else ""
        joined = min((gpu.links for gpu in one.health or ()), default=0)
        gpus += f" with {joined} NVLinks" if joined else ""
        lines.append(
            f"rank {one.rank} on {one.node}: {gpus}, {plural(one.cores, 'core')}, torch {one.torch or 'none'}, "
            f"{nets}{hcas}{disk}"
        )
    lines += [
        f"{link.first} – {link.second}: {link.bandwidth / 1e9:.2f} GB/s, {link.seconds * 1e6:.0f} µs there and back"
        for link in links
        if not link.error
    ]
    lines += [str(one) for one in found] or ["nothing is wrong that could be seen"]
    return lines
