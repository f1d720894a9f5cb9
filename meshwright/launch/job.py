"""What is to be started: a plan's ranks on so many machines, and what has to be refused before anybody is asked.

Ranks are numbered machine by machine with tp innermost, then cp and shard, so a machine must hold whole groups of
them, or a whole number of machines one group: then what is chatty lies inside a machine as the plan means.

Also a user's strings in other programs' languages, where no letter of them may mean anything: YAML, HCL, labels.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config.run import Run, digest
from meshwright.cost.step_time import price
from meshwright.hardware.cluster import Cluster
from meshwright.runtime.run_folder import state_bytes
from meshwright.search.budget import question_of
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, Problem, mistake
from meshwright.spec.units import plural

PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
NOT_IN_LABELS = re.compile(r"[^a-z0-9]+")
BLOCK = re.compile(r"(?:[!-~][ -~]*\n|\n)*[!-~][ -~]*\n")  # lines of ASCII, the first of them with a letter in front
LONGEST_LABEL = 30  # a Service's name has 63 letters, and a pod's is a job's with more behind it
ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # of YAML, as keys


def quoted(text: str) -> str:
    """A string between double quotes, with the escapes that JSON, YAML and HCL have in common."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(letter: str) -> str:
    if letter in ESCAPES:
        return ESCAPES[letter]
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def hcl(text: str) -> str:
    """A string of Terraform's language, in which `${` and `%{` would begin a template."""
    return quoted(text).replace("${", "$${").replace("%{", "%%{")


def pod_word(text: str) -> str:
    """A word of a container's command, in which Kubernetes would replace `$(NAME)`."""
    return text.replace("$(", "$$(")


def label(name: str, digest: str) -> str:
    """A name that schedulers, pods and clouds all take: letters, digits and hyphens, and told apart by the digest."""
    slug = NOT_IN_LABELS.sub("-", name.lower()).strip("-")[: LONGEST_LABEL - len(digest) - 1].strip("-")
    return f"{slug if slug[:1].isalpha() else f'run-{slug}'.strip('-')}-{digest}"


def yaml(value: Any) -> str:
    """A document. Every string is between quotes, or a block of plain lines; nothing is guessed from its letters."""
    return "\n".join(_lines(value)) + "\n"


def yaml_documents(values: Sequence[Any]) -> str:
    """Several documents in one file."""
    return "---\n".join(map(yaml, values))


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, each in value.items() for line in _entry(f"{_key(key)}:", each)]
    if isinstance(value, list | tuple) and value:
        return [line for each in value for line in _item(each)]
    return [_scalar(value)]


def _entry(head: str, value: Any) -> list[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        return [head, *map(_deeper, _lines(value))]
    if isinstance(value, str) and "\n" in value and BLOCK.fullmatch(value):
        return [f"{head} |", *map(_deeper, value.split("\n")[:-1])]
    return [f"{head} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    first, *rest = _lines(value) if isinstance(value, Mapping | list | tuple) else [_scalar(value)]
    return [f"- {first}", *map(_deeper, rest)]


def _deeper(line: str) -> str:
    return f"  {line}" if line else ""


def _key(key: str) -> str:
    return key if PLAIN_KEY.fullmatch(key) and key.lower() not in WORDS else quoted(key)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    return "{}" if isinstance(value, Mapping) else "[]"


WRITE_BANDWIDTH = 1e9  # bytes a second that a machine writes to a shared file system; slow ones, so that time is left
LEAST_SAVE_SECONDS = 30  # also of a model of no size: ranks end a step, close files and leave
RUN_FILE = "run.toml"
AGAIN = (10, 11, 137, 143)  # exit codes after which the same command resumes: saved, resumable, killed, terminated
# File systems that one machine has to itself. What is not named may be shared.
LOCAL_FILES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs", "apfs", "hfs"}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:/@-]*")  # of partitions, accounts, hosts, images and claims
TIME = re.compile(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})")  # as Slurm writes it: 30, 12:00:00, 2-00


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says of the place; empty where nothing has to be said."""

    partition: str = ""
    account: str = ""
    time: str = "24:00:00"
    requeues: int = 50
    cpus: int = 0  # of one rank; 0: as the scheduler gives
    hosts: tuple[str, ...] = ()
    image: str = "meshwright:cuda"
    namespace: str = ""
    volume: str = ""  # CLAIM:PATH
    kind: str = "trainjob"
    cloud: str = "aws"
    shared: bool = False  # the user says that all machines see the run folder


class LaunchJob(msgspec.Struct, frozen=True, kw_only=True):
    """A plan on machines, everything decided."""

    run: Run
    nodes: int
    per_node: int  # ranks of a machine
    gpus: int  # of a machine; 0: it computes on CPUs
    card: str = ""  # which; empty: nobody said
    folder: Path  # of the run
    where: Path  # the folder that relative paths of the run are below
    out: Path  # of the files
    save_seconds: int  # from a request to end until the ranks have
    target: Target = Target()

    @property
    def label(self) -> str:
        return label(self.run.name, digest(self.run))

    @property
    def has_launchers(self) -> bool:
        """Whether each machine runs a launcher of ours, which starts its ranks again: others start all or none."""
        return self.run.faults.live or self.run.faults.memory_every > 0

    @property
    def file(self) -> Path:
        """The run file that ranks read."""
        return self.out / RUN_FILE

    def train(self, python: str = sys.executable) -> list[str]:
        """What one rank runs, word by word."""
        return [python, "-m", "meshwright", "train", str(self.file), "--folder", str(self.folder)]

    def node(self, file: str, python: str = "python") -> list[str]:
        """What one machine runs, word by word, but for its number: all its ranks, whose exit code is passed on."""
        shape = ["--nodes", str(self.nodes), "--ranks-per-node", str(self.per_node)]
        words = [python, "-m", "meshwright", "launch", file, "--folder", str(self.folder)]
        return [*words, *shape]


class LaunchFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file to be written."""

    name: str
    text: str
    executable: bool = False


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The files that start a job, and the command that hands them in."""

    files: tuple[LaunchFile, ...]
    command: tuple[str, ...]
    checks: tuple[tuple[str, ...], ...] = ()  # commands that refuse what cannot be handed in
    note: str = ""


def spare_ranks(run: Run) -> int:
    """Ranks that are started beside the plan's, and wait."""
    return run.faults.spares * (run.plan.world // run.plan.replicate)


def layout(
    plan: Plan, most: int, wanted: int, machines: int | None = None, switch: int = 1, spares: int = 0
) -> tuple[int, int]:
    """How many machines, and ranks of each; `most` GPUs are in one, and the user may want fewer ranks there.

    `machines` are as many as there are; None: nobody said. `switch` of them share the fast link: several in a rack.
    `spares` are ranks beside the plan's.
    """
    world, block = plan.world + spares, plan.tp * plan.cp * plan.shard
    per_node = wanted or min(most, world)
    found: list[Problem] = []
    able = [count for count in range(min(most, world), 0, -1) if world % count == 0]
    able = [count for count in able if machines is None or world // count <= machines]
    if per_node > most:
        what = f"{plural(per_node, 'rank')} of a machine are more than its {plural(most, 'GPU')}"
        found.append(Problem(what, f"use --ranks-per-node {most} or fewer"))
    if world % per_node:
        what = f"{world} ranks do not divide into machines of {per_node}"
        other = f"use --ranks-per-node {able[0]} ({plural(world // able[0], 'machine')}), or " if able else "use "
        found.append(Problem(what, f"{other}a plan of another number of ranks", "plan"))
    elif machines is not None and world // per_node > machines:
        what = f"{world} ranks are {world // per_node} machines of {per_node}, and there are {machines}"
        other = f"use --ranks-per-node {able[0]}, or " if able else ""
        found.append(Problem(what, f"{other}name more machines by --cluster"))
    for name, size in (("plan.tp", plan.tp), ("plan.tp × cp", plan.tp * plan.cp), ("plan.tp × cp × shard", block)):
        reach = min(per_node * switch, world)  # ranks behind one switch
        if max(size, reach) % min(size, reach) or (name == "plan.tp" and size > reach):
            where = f"machines of {per_node}" if switch == 1 else f"NVLink domains of {reach}"
            what = f"{name} = {size} does not lie inside {where} ranks, so it would cross the network"
            fits = [count for count in able if count * switch % size == 0]
            remedy = f"use --ranks-per-node {fits[0]}" if fits else f"use a size that divides {reach}"
            found.append(Problem(what, remedy, "plan"))
            break
    if found:
        raise InputError(found)
    return world // per_node, per_node


def save_seconds(run: Run, nodes: int, cluster: Cluster | None) -> int:
    """From the request to end until the ranks have saved and gone.

    They finish a step and hear of the request in the next, or finish a validation loss; a save that is being written is
    finished before the last one is.
    """
    step = price(question_of(run, cluster).job(run.plan)).high_seconds if cluster else 0.0
    looks = run.eval.batches * step / 3 if run.eval.every else 0.0  # a forward is a third of a step
    writing = 2 * state_bytes(run) / (nodes * WRITE_BANDWIDTH)
    return LEAST_SAVE_SECONDS + math.ceil(2 * step + looks + writing)


def folder_problems(job: LaunchJob, mounts: Path = Path("/proc/mounts")) -> Iterator[Problem]:
    """A run folder that the other machines would not see."""
    if job.nodes == 1 or job.target.shared:
        return
    kind = file_system(job.folder, mounts)
    if kind in LOCAL_FILES:
        what = f"{job.folder} lies on {kind}, which other machines do not see, and all ranks write there"
        yield Problem(what, "name a --folder on a shared file system, or add --shared if this one is")


def file_system(folder: Path, mounts: Path) -> str:
    """The kind of the file system that a folder is, or will be, on; empty where it cannot be told."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    unescaped = [(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line[1]), line[2]) for line in lines]
    above = [(len(place), kind) for place, kind in unescaped if folder.is_relative_to(place)]
    return max(above, key=lambda one: one[0])[1] if above else ""


def require_names(job: LaunchJob) -> None:
    """Words that other programs read as names are names."""
    said = job.target
    given = {"--partition": said.partition, "--account": said.account, "--image": said.image}
    given |= {"--namespace": said.namespace, "--volume": said.volume}
    given |= {f"--hosts {host!r}": host for host in said.hosts}
    found = [*name_problems(given, said.time)]
    if len(said.hosts) > job.nodes or len({*said.hosts}) < len(said.hosts):
        what = f"--hosts names {plural(len(said.hosts), 'machine')}, and the plan is on {job.nodes}"
        found.append(Problem(what, f"name {plural(job.nodes, 'machine')}, each once"))
    if found:
        raise InputError(found)


def name_problems(given: Mapping[str, str], time: str) -> Iterator[Problem]:
    """Words that are no names, by their flags, and a time that is none."""
    for flag, text in given.items():
        if text and not NAME.fullmatch(text):
            yield Problem(f"{flag} = {text!r} is not a name", "use letters, digits, - _ . , : / and @")
    if not TIME.fullmatch(time):
        yield Problem(f"--time {time!r} is not a time", "write minutes, HH:MM:SS or D-HH:MM:SS")


def mounted(job: LaunchJob, alone: str = "pods", volume: str = "CLAIM:/PATH, a ReadWriteMany claim") -> tuple[str, str]:
    """The claim that pods share and where it is mounted; the run folder must be below."""
    claim, _, path = job.target.volume.partition(":")
    if not claim or not path.startswith("/"):
        what = f"{alone} share nothing by themselves, and all ranks write into the run folder"
        raise mistake(what, f"add --volume {volume}, and a --folder below /PATH")
    if not job.folder.is_relative_to(path):
        raise mistake(f"{job.folder} is not on the volume {claim}", f"name a --folder below {path}")
    return claim, path
