"""`meshwright launch`: what starts a plan on a cluster, written or submitted; and one machine's ranks of several."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from meshwright.cli import env, preflight
from meshwright.cli import options as words
from meshwright.cli.query import machines_of
from meshwright.config import check, load
from meshwright.config.run import Run
from meshwright.hardware.cluster import Cluster
from meshwright.launch import kubernetes, node, slurm
from meshwright.launch.job import (
    RUN_FILE,
    Launch,
    LaunchJob,
    Target,
    folder_problems,
    layout,
    require_names,
    save_seconds,
    spare_ranks,
)
from meshwright.runtime import run_folder
from meshwright.runtime.failure import Exit
from meshwright.runtime.files import replace_file, teller, writing
from meshwright.runtime.place import DEFAULT_PORT, MEMORY
from meshwright.search import budget
from meshwright.spec.problem import InputError, Problem, mistake
from meshwright.spec.units import plural

TARGETS = ("slurm", "torchrun", "kubernetes", "volcano", "skypilot", "mpi", "ray", "terraform")
PODS = ("kubernetes", "volcano", "skypilot")  # which share nothing but a volume
CLAIMED = ("kubernetes", "volcano")
OWN_START = ("slurm", "torchrun", *PODS)  # whose machines run `launch --node-rank`, where a run needs that
# Flags that are read for some targets, and would be ignored for the others.
READ_FOR = {
    "partition": ("slurm",), "account": ("slurm",), "time": ("slurm",), "hosts": ("torchrun", "mpi"),
    "kind": ("kubernetes",), "image": CLAIMED, "namespace": CLAIMED, "volume": PODS, "cloud": ("terraform",),
    "requeues": ("slurm", *CLAIMED), "cpus": ("slurm", *CLAIMED, "ray"),
}  # fmt: skip
# What people call a target, and the words that name it here.
MEANT = {
    "kubeflow": "kubernetes --kind trainjob", "trainjob": "kubernetes --kind trainjob",
    "pytorchjob": "kubernetes --kind pytorchjob", "jobset": "kubernetes --kind jobset", "job": "kubernetes --kind job",
    "k8s": "kubernetes", "kubectl": "kubernetes", "vcjob": "volcano", "sbatch": "slurm", "srun": "slurm",
    "sky": "skypilot", "openmpi": "mpi", "mpirun": "mpi", "mpiexec": "mpi", "kuberay": "ray", "elastic": "torchrun",
    "aws": "terraform --cloud aws", "gcp": "terraform --cloud gcp", "tofu": "terraform", "opentofu": "terraform",
}  # fmt: skip
OF_A_NODE = ("nodes", "master", "stop_is_done", "inject")
OF_FILES = ("on", "submit", "out", "cluster", "cpu", "shared", *READ_FOR)  # which `--node-rank` writes none of
PORTS = 2**16
STARTERS = ("mpi", "ray")  # whose command is the run itself, from its first rank to its end
USUAL_DOMAIN = 8  # GPUs that one machine's switch joins; fewer are bridged, and a machine may have several such domains
BY_HAND = {
    "torchrun": "start the script on every machine, with its number",
    "terraform": "run terraform apply yourself: it costs money",
}


def add_launch(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    said = Target()
    verb.add_argument("words", nargs="*", metavar="RUN.toml | key=value", help=words.OVERRIDES)
    starts = f"what starts the ranks: {', '.join(TARGETS)}"
    verb.add_argument("--on", type=target_named, choices=TARGETS, metavar="TARGET", help=starts)
    verb.add_argument("--out", type=Path, help="where the files go (default: launch/NAME-TARGET)")
    verb.add_argument("--submit", action="store_true", help="submit the job as well")
    verb.add_argument("--folder", type=Path, help="where the run lives (default: runs/NAME-DIGEST)")
    verb.add_argument("--cluster", help="the machines, such as 2x8xh100 (default: goal.cluster of the run)")
    verb.add_argument("--ranks-per-node", type=words.count, help="ranks of a machine (default: its GPUs)")
    verb.add_argument("--cpu", action="store_true", help="ask for no GPUs")
    verb.add_argument("--cpus", type=words.count, help="slurm, pods, ray: cores of a rank (default: 8 with a GPU)")
    verb.add_argument("--shared", action="store_true", help="all machines see the run folder, though it looks local")
    verb.add_argument("--partition", help="slurm: where the job runs")
    verb.add_argument("--account", help="slurm: who pays")
    verb.add_argument("--time", help=f"slurm: the limit of one start (default: {said.time})")
    verb.add_argument(
        "--requeues", type=words.whole, help=f"slurm, pods: starts after the first, at most (default: {said.requeues})"
    )
    verb.add_argument("--hosts", help="torchrun, mpi: the machines, rank 0's first: node0,node1")
    verb.add_argument("--kind", help=f"kubernetes: {', '.join(kubernetes.KINDS)}")
    verb.add_argument("--image", help=f"pods: the container image (default: {said.image})")
    verb.add_argument("--namespace", help="pods: the namespace")
    verb.add_argument("--volume", help="pods, skypilot: CLAIM:/PATH or BUCKET:/PATH that all share")
    verb.add_argument("--cloud", choices=("aws", "gcp"), help="terraform: whose machines")
    verb.add_argument(
        "--node-rank", metavar="NUMBER", help="start the ranks of this machine now; auto: by the environment"
    )
    verb.add_argument("--nodes", type=words.count, help="with --node-rank: total machines")
    verb.add_argument("--master", default="", metavar="HOST:PORT", help="with --node-rank: where rank 0 listens")
    verb.add_argument("--inject", default="", metavar="FAULT", help=argparse.SUPPRESS)  # as of `train`
    verb.add_argument(
        "--stop-is-done", action="store_true", help="with --node-rank: end with 0, not 130, after a stop file"
    )


def target_named(text: str) -> str:
    """A target by its name; of another name, the one that it is near to or is called elsewhere."""
    if text in TARGETS:
        return text
    name = text.lower()
    near = get_close_matches(name, [*TARGETS, *MEANT], n=1, cutoff=0.6)
    remedy = f"did you mean --on {MEANT.get(near[0], near[0])}?" if near else f"use one of {', '.join(TARGETS)}"
    raise argparse.ArgumentTypeError(f"{text!r} is not known; {remedy}")


def launch(options: argparse.Namespace) -> int:
    """Write what starts the run, or start the ranks of one machine."""
    if options.node_rank is not None:
        said = [name for name in OF_FILES if (value := getattr(options, name)) is not None and value is not False]
        if said:
            raise mistake(f"--{said[0]} cannot be combined with --node-rank", "leave one of them out")
        from meshwright.cli.train import until_asked

        return until_asked(lambda: _start(options), options)
    if options.on is None:
        raise mistake("nothing says what is to start the ranks", f"add --on {'|'.join(TARGETS)}")
    _require_read(options)
    job = _job(options)
    made: Launch = import_module(f"meshwright.launch.{options.on}").launch(job)
    problems = [] if options.on in (*PODS, "terraform") else [*folder_problems(job)]  # which are not this machine's
    problems += slurm.problems(job) if options.on == "slurm" else []
    if options.submit:
        problems += submission_problems(options.on, made)
    if problems:
        raise InputError(problems)
    files = written(job.out, run=job.run, made=made)
    starts = options.submit and options.on in STARTERS
    answer = submitted(made) if options.submit and not starts else ""
    record = {
        "on": options.on, "files": [str(file) for file in files], "command": list(made.command),
        "submitted": options.submit, "answer": answer, "nodes": job.nodes, "ranks_per_node": job.per_node,
        "save_seconds": job.save_seconds, "folder": str(job.folder),
    }  # fmt: skip
    lines = [
        f"{plural(job.nodes, 'machine')} × {plural(job.per_node, 'rank')}; "
        f"{job.save_seconds} s to save and end before a kill"
    ]
    lines += [f"wrote {file}" for file in files]
    lines += [f"note: {made.note}"] if made.note else []
    how = "starting" if starts else "submitted by" if options.submit else "start it by"
    lines += [f"{how}: {shlex.join(made.command)}", *([answer] if answer else [])]
    words.show(options, record, lines)
    if starts:
        become(made.command, leaves_output=options.json)
    return Exit.DONE


def _require_read(options: argparse.Namespace) -> None:
    """Nothing is ignored: a flag of another target, or of one machine's own start, is refused."""
    for name in (name for name in OF_A_NODE if getattr(options, name)):
        flag = f"--{name.replace('_', '-')}"
        raise mistake(f"{flag} is for --node-rank, not for --on {options.on}", f"leave {flag} out")
    for name, targets in READ_FOR.items():
        if options.on not in targets and getattr(options, name) is not None:
            what = f"--{name} is for --on {' and '.join(targets)}, not for --on {options.on}"
            raise mistake(what, f"leave --{name} out")
    target = _target(options)
    kubernetes.require_kind(target.kind)
    if options.requeues is not None and options.on == "kubernetes" and target.kind == "trainjob":
        what = "--requeues is not for --kind trainjob, whose runtime on the cluster says how often it starts again"
        raise mistake(what, "leave --requeues out, or use --kind jobset")


def _job(options: argparse.Namespace) -> LaunchJob:
    """The plan on its machines, or why it cannot be there."""
    file, overrides = words.split(options.words)
    loaded, found = load.examine(file, overrides, default_ranks=_ranks(options, file, overrides))
    if loaded is None or found:
        raise InputError(found)
    run = budget.resolved(loaded)[0].run
    if problems := [*_starter_problems(options, run)]:
        raise InputError(problems)
    machines = _machines(options, run)
    spares, wanted = spare_ranks(run), options.ranks_per_node or 0
    most = machine_gpus(machines, wanted) if machines else wanted or run.plan.world + spares
    count = machines.gpus // most if machines and most > machines.per_node else machines.nodes if machines else None
    if machines and run.plan.world + spares > machines.gpus:
        beside = f" and {spares} of spares" if spares else ""
        there = plural(machines.gpus, "GPU")
        what = f"the plan has {plural(run.plan.world, 'rank')}{beside}, and {machines.name} has {there}"
        raise mistake(what, "plan for these machines, or name others by --cluster", "plan")
    switch = max(machines.domain // most, 1) if machines else 1
    nodes, per_node = layout(run.plan, most, wanted, count, switch, spares)
    if problems := [*check.divide_replicas(run, nodes)]:
        raise InputError(problems)
    if machines:
        preflight.require_cards(run, msgspec.structs.replace(machines, gpus=run.plan.world))
    out = (options.out or Path("launch") / f"{run.name}-{options.on}").absolute()
    job = LaunchJob(
        run=run,
        nodes=nodes,
        per_node=per_node,
        gpus=0 if options.cpu else per_node,
        card=machines.gpu.name if machines else "",
        folder=(options.folder or run_folder.find(run)).absolute(),
        where=Path.cwd(),
        out=out,
        save_seconds=save_seconds(run, nodes, machines),
        target=_target(options),
    )
    require_names(job)
    return job


def machine_gpus(machines: Cluster, wanted: int) -> int:
    """The GPUs of one machine, of which as many are `wanted`; 0: nobody said.

    Several bridged pairs, or fours, may be in one machine, which the catalogue does not know: then the user does.
    """
    is_bridged = machines.per_node == machines.domain < USUAL_DOMAIN and wanted % machines.domain == 0
    return max(machines.per_node, wanted) if is_bridged else machines.per_node


def _starter_problems(options: argparse.Namespace, run: Run) -> Iterator[Problem]:
    """What only ranks have that we start ourselves, of targets that start them one by one."""
    if options.on == "terraform" or options.on in OWN_START:
        return
    for problem in check.need_own_starter(run, f"--on {options.on}"):
        remedy = f"use --on {', '.join(OWN_START)}, or leave {problem.key} out"
        yield msgspec.structs.replace(problem, remedy=remedy)


def _ranks(options: argparse.Namespace, file: Path | None, overrides: list[str]) -> int:
    """Ranks of a plan that leaves its replicas open: one for each GPU of the cluster."""
    loaded, _ = load.examine(file, overrides)
    if loaded is None:
        return 1  # what is wrong is told when it is examined for good
    goal = loaded.run.goal
    text = options.cluster or goal.cluster
    return max(machines_of(text, goal).gpus - spare_ranks(loaded.run), 1) if text else 1


def _machines(options: argparse.Namespace, run: Run) -> Cluster | None:
    text = options.cluster or run.goal.cluster
    return machines_of(text, run.goal) if text and not options.cpu else None


def _target(options: argparse.Namespace) -> Target:
    """What was said of the place."""
    same = ("partition", "account", "time", "requeues", "image", "namespace", "volume", "kind", "cloud", "shared")
    hosts = tuple(host for host in (options.hosts or "").split(",") if host)
    said: dict[str, Any] = {name: getattr(options, name) for name in same if getattr(options, name) is not None}
    return Target(**said, hosts=hosts, cpus=options.cpus or (0 if options.cpu else 8))


def submission_problems(target: str, made: Launch) -> list[Problem]:
    """Why the job cannot be handed in from here."""
    if target in BY_HAND:
        return [Problem(f"--submit does not start --on {target}", BY_HAND[target])]
    program = {"mpi": "mpirun", "ray": "ray"}.get(target, made.command[0])
    is_here = find_spec(program) if target == "ray" else shutil.which(program)
    if is_here is None:
        return [Problem(f"there is no {program} here to submit with", "leave --submit out, and copy the files there")]
    return []


def written(out: Path, run: Run, made: Launch) -> list[Path]:
    """The run file and what was made; none of it is secret."""
    with writing(out, "name another folder by --out"):
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / RUN_FILE, load.write(run).encode())
        for file in made.files:
            replace_file(out / file.name, file.text.encode(), mode=0o777 if file.executable else 0o666)
    return [out / RUN_FILE, *(out / file.name for file in made.files)]


def submitted(made: Launch) -> str:
    """Have the scheduler look at it first, then hand it in, and return what it says. No shell is in between."""
    done = None
    for command in (*made.checks, made.command):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
            raise mistake(f"{shlex.join(command)} was refused: {said}", "change what it names, and launch again")
    return done.stdout.strip() if done else ""


def become(command: Sequence[str], leaves_output: bool) -> NoReturn:
    """Be the program that runs the ranks: signals, exit code and terminal are its own."""
    sys.stdout.flush()
    if leaves_output:  # which ends with the answer for a program
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.execv(command[0], list(command))


def _start(options: argparse.Namespace) -> int:
    """The ranks of one machine of several, with the exit code that says how they ended."""
    number, address = env.node(options.node_rank)
    if options.nodes is None or options.ranks_per_node is None:
        raise mistake("--node-rank alone does not say how large the job is", "add --nodes and --ranks-per-node")
    if not 0 <= number < options.nodes:
        raise mistake(f"--node-rank {number} is not one of {plural(options.nodes, 'machine')}", "number them from 0")
    address = options.master or address or ("127.0.0.1" if options.nodes == 1 else "")
    host, port = host_and_port(address)
    folder = ["--folder", str(options.folder)] if options.folder else []
    command = [sys.executable, "-m", "meshwright", "train", *options.words, *folder]
    place = node.NodePlace(number, options.nodes, options.ranks_per_node, host, port)
    loaded, _ = load.examine(*words.split(options.words))  # what is wrong is told when it is loaded for good
    ranks = place.nodes * place.ranks - (spare_ranks(loaded.run) if loaded is not None else 0)
    run = load.load(*words.split(options.words), ranks=ranks).run
    if run.faults.live:
        from meshwright.cli.train import train_on_machine

        return train_on_machine(options, place, ranks)
    code = _with_memory(command, place, run, options) if run.faults.memory_every else (
        node.start(command, place, env.of_ranks(), run.faults.grace_seconds)
    )  # fmt: skip
    return Exit.DONE if options.stop_is_done and code == Exit.INTERRUPTED else code


def _with_memory(command: list[str], place: node.NodePlace, run: Run, options: argparse.Namespace) -> int:
    """The same where ranks save to this machine's memory: they are started again, and resume from it."""
    if options.folder is None:  # machines find each other there before ranks do
        what = "faults.memory_every over several machines needs to know where the run lives"
        raise mistake(what, "add --folder, which all machines see", "faults.memory_every")
    say = teller(sys.stderr)
    if run_folder.HOST_MEMORY.is_dir():
        preflight.require_host_memory(run, run_folder.HOST_MEMORY, place.nodes)
    with node.keeping(run, place, options.folder.absolute(), say) as memory:
        restarts = node.NodeRestarts(run.faults.restarts, (options.folder, memory), say)
        around = {**env.of_ranks(), MEMORY: str(memory)}
        return node.start(command, place, around, run.faults.grace_seconds, restarts)


def host_and_port(address: str) -> tuple[str, int]:
    """The two of HOST:PORT, HOST, or an IPv6 address as in a browser, [::1]:29500."""
    is_number = address.count(":") > 1 and not address.startswith("[")
    found = re.fullmatch(r"(?:\[([^]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?", f"[{address}]" if is_number else address)
    if found is None or int(found[3] or 0) >= PORTS:
        raise mistake(f"{address or 'nothing'} is not where rank 0 could listen", "add --master HOST:PORT")
    return found[1] or found[2], int(found[3] or DEFAULT_PORT)
