"""Our own start of one machine of several, and Ray's: the same run, and exit codes that reach whoever started it."""

import json
import signal
import subprocess
import sys
import time

import judge
import pytest
from commands import SMALL, environment, free_port, meshwright, write_text

from meshwright.launch import node
from meshwright.runtime.failure import Exit

GIVEN_UP = 900.0  # seconds, for hangs: half a minute is usual
RUN = [*SMALL, "name=small", "data.source=my/*.txt", "eval.every=0", "plan.microbatch=1", "plan.replicate=2"]


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    write_text(folder)
    return folder


def test_two_machines_save_and_end_with_the_code_that_says_so(user):
    """One is told its number as pods are, the other on the command line; one signal to one of them ends both."""
    launch = [sys.executable, "-m", "meshwright", "launch", *RUN, "steps=100000", "--folder", "run", "--nodes", "2"]
    launch += ["--ranks-per-node", "1", "--master", f"127.0.0.1:{free_port()}", "--node-rank"]
    own = environment(user, PET_NODE_RANK="1", OMP_NUM_THREADS="1")
    nodes = [
        subprocess.Popen(
            [*launch, number], cwd=user, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for number in ("0", "auto")
    ]
    deadline = time.monotonic() + GIVEN_UP
    while not (user / "run" / "steps.rank0.jsonl").exists():
        assert all(node.poll() is None for node in nodes), [node.communicate() for node in nodes]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    nodes[1].send_signal(signal.SIGTERM)
    said = [node.communicate(timeout=GIVEN_UP) for node in nodes]
    assert [node.returncode for node in nodes] == [10, 10], said
    assert "checkpoint saved at step" in said[0][0]


def machine_alone(user, name, master, *words):
    """The first of two machines whose replicas can do without each other, and nobody starts the second."""
    live = [*RUN, "plan.grad_accum=2", "faults.live=true", *words]
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "launch",
        *live,
        "--folder",
        name,
        "--nodes",
        "2",
        "--node-rank",
        "0",
    ]
    command += ["--ranks-per-node", "1", "--master", master]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=user, env=environment(user), **pipes)


def test_a_machine_whose_first_one_has_no_known_name_says_so_and_leaves_nothing(user):
    machine = machine_alone(user, "unnamed", "no.such.host.invalid", "faults.meet_seconds=1")
    _, said = machine.communicate(timeout=GIVEN_UP)
    assert machine.returncode == 2, said
    assert "no.such.host.invalid cannot be resolved" in said
    assert not (user / "unnamed").exists()


def test_a_machine_that_waits_for_another_heeds_a_signal_and_leaves_nothing(user):
    machine = machine_alone(user, "waits", f"127.0.0.1:{free_port()}")
    deadline = time.monotonic() + GIVEN_UP
    while not (user / "waits" / ".machines" / "machine.0.json").exists():
        assert machine.poll() is None, machine.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    machine.send_signal(signal.SIGTERM)
    _, said = machine.communicate(timeout=GIVEN_UP)
    assert machine.returncode == 10, said
    assert "stopped by SIGTERM before the first step" in said
    assert not (user / "waits").exists()


@judge.needs("ray")
def test_ray_places_an_actor_for_each_rank_passes_ctrl_c_on_and_ends_with_their_code(user):
    """Two machines of Ray's on this one; the driver's interpreter has Ray, the ranks' has torch."""
    files = []
    for steps, name in ((100_000, "interrupted"), (3, "rayed")):
        done = meshwright(
            "launch", *RUN, f"steps={steps}", "--on", "ray", "--cpu", "--ranks-per-node", "1", "--cpus", "1",
            "--folder", name, "--shared", "--out", str(user / f"ray-{name}"), "--json", folder=user,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        files.append(json.loads(done.stdout)["command"][-1])
    driver = (
        "import os, signal, sys, threading, time; from ray.cluster_utils import Cluster\n"
        "cluster = Cluster(); [cluster.add_node(num_cpus=1) for _ in range(2)]\n"
        "import msgspec, ray; from meshwright.launch.ray import RayJob, drive\n"
        "def interrupt():\n"
        "    while not os.path.exists(sys.argv[1]): time.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "codes = []\n"
        "for file in sys.argv[2:]:\n"
        "    ray.init(address=cluster.address)\n"
        "    codes.append(drive(msgspec.json.decode(open(file, 'rb').read(), type=RayJob)))\n"
        "cluster.shutdown(); print('codes', list(map(int, codes)))\n"
    )
    # On a crowded machine Ray's own servers take longer to start than it waits for them by itself.
    patient = {"RAY_raylet_start_wait_time_s": "240", "RAY_gcs_server_request_timeout_seconds": "240"}
    around = environment(user, PYTHONPATH=str(judge.HERE.parents[1]), RAY_USAGE_STATS_ENABLED="0", **patient)
    command = [judge.python("ray"), "-c", driver, user / "interrupted" / "steps.rank0.jsonl", *files]
    ended = subprocess.run(command, env=around, capture_output=True, text=True, timeout=GIVEN_UP, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "codes [130, 0]" in ended.stdout, ended.stdout + ended.stderr
    assert list((user / "interrupted" / "checkpoints").glob("step-*"))
    assert "done: 3 steps" in ended.stdout
    assert (user / "rayed" / "summary.json").exists()


def test_a_signal_while_ranks_are_started_reaches_those_that_it_could_not_know(tmp_path):
    """The first rank has its machine told to end; who was not yet started then would wait for it in vain."""
    rank = f'touch {tmp_path}/$LOCAL_RANK; [ "$LOCAL_RANK" = 0 ] && kill -TERM $PPID; exec sleep {GIVEN_UP:g}'
    lines = [
        "import os, sys",
        "from meshwright.launch import node",
        "place = node.NodePlace(0, 1, 64, '127.0.0.1', 29500)",
        "sys.exit(node.start(['sh', '-c', sys.argv[1]], place, dict(os.environ), 5.0))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines), rank], timeout=node.FALL_SECONDS, check=False)
    assert done.returncode == Exit.RESUMABLE  # a signal ended them, before they could listen
    assert len(list(tmp_path.iterdir())) < 64
