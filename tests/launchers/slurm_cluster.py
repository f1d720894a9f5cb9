"""A Slurm of several machines on this one: a controller, a slurmd for each, munge, and files for GPUs.

Nothing of the system's own configuration is touched, no systemd is needed, and everything ends with the context. Node
names are loopback addresses, so that the first of a node list resolves. Debian: slurmctld slurmd slurm-client munge.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

UP_SECONDS = 120.0
DOWN_SECONDS = 30.0
# Requeued jobs wait for cred_expire (120 s unless stated); time limits are looked at every 30 s whatever is set.
CONFIGURATION = """\
ClusterName=fake
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=1,sched_interval=5,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=60
KillWait=30
GresTypes=gpu
NodeName=127.0.0.[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.[1-{nodes}] Port=[{first}-{last}] CPUs=64 \
CoresPerSocket=64 RealMemory=1000 {gres} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """A Slurm that is up."""

    environment: dict[str, str]

    def run(self, *command: str, seconds: float = 3600.0, **extra: object) -> subprocess.CompletedProcess[str]:
        """A command that may ask this Slurm."""
        around = {"env": self.environment, "capture_output": True, "text": True, "check": False} | extra
        return subprocess.run(command, timeout=seconds, **around)  # type: ignore[call-overload]

    def states(self) -> dict[str, str]:
        """The jobs that are not over, and how they are."""
        lines = self.run("squeue", "--noheader", "--format", "%i %T").stdout.split("\n")
        return dict(line.split() for line in lines if line)


@contextmanager
def slurm(folder: Path, nodes: int = 2, gpus: int = 0) -> Iterator[SlurmCluster]:
    """A cluster of so many machines with so many GPUs each, gone afterwards with all that runs on it."""
    (folder / "state").mkdir(parents=True)
    (folder / "log").mkdir()
    folder.chmod(0o755)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    started: list[Path] = []
    try:
        _write(folder, nodes, gpus)
        munge = ["munged", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
        munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/log/munged.log"]
        subprocess.run([*munge, f"--seed-file={folder}/munge.seed", "--force"], check=True)
        started.append(folder / "munged.pid")
        subprocess.run(["slurmctld", "-f", str(folder / "slurm.conf")], check=True, env=environment)
        started.append(folder / "slurmctld.pid")
        for node in range(1, nodes + 1):
            name = f"127.0.0.{node}"
            subprocess.run(["slurmd", "-f", str(folder / "slurm.conf"), "-N", name], check=True, env=environment)
            started.append(folder / f"slurmd.{name}.pid")
        cluster = SlurmCluster(environment)
        _wait_for_nodes(cluster, nodes, folder)
        yield cluster
        cluster.run("scancel", "--user", "root" if os.geteuid() == 0 else str(os.getuid()))
        _until(lambda: not cluster.states(), DOWN_SECONDS)
    finally:
        for file in reversed(started):
            _end(file)
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, nodes: int, gpus: int) -> None:
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    for number in range(gpus):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" if gpus else "")
    port = _ports(nodes + 1)
    values = {
        "host": socket.gethostname(), "folder": folder, "nodes": nodes, "port": port, "first": port + 1,
        "last": port + nodes, "gres": f"Gres=gpu:{gpus}" if gpus else "",
        "user": "root" if os.geteuid() == 0 else os.environ.get("USER", str(os.getuid())),
    }  # fmt: skip
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))


def _ports(count: int) -> int:
    """The first of so many ports that nobody has; below 20,000, from where jobs take theirs."""
    for first in range(10_000 + os.getpid() % 900 * 10, 20_000, 10):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no ports are free")


def _wait_for_nodes(cluster: SlurmCluster, nodes: int, folder: Path) -> None:
    def idle() -> bool:
        return len(cluster.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split()) == nodes

    if not _until(idle, UP_SECONDS):
        logs = [file.read_text()[-500:] for file in (folder / "log").iterdir()]
        raise RuntimeError("the machines did not come up:\n" + "\n".join(logs))


def _until(is_so, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _end(file: Path) -> None:
    """End a server by the number that it wrote down, and wait until it is gone."""
    with suppress(OSError, ValueError):
        number = int(file.read_text())
        os.kill(number, signal.SIGTERM)
        if not _until(lambda: not Path(f"/proc/{number}").exists(), DOWN_SECONDS):
            os.kill(number, signal.SIGKILL)
