"""Which machines a plan is put on, what is refused, and how much time a save is given."""

import json
import shlex
from pathlib import Path

import msgspec
import pytest

from meshwright.cli.launch import host_and_port
from meshwright.cli.main import main
from meshwright.hardware.cluster import cluster
from meshwright.launch.job import (
    LaunchJob,
    Target,
    file_system,
    folder_problems,
    hcl,
    label,
    layout,
    pod_word,
    quoted,
    save_seconds,
    yaml,
)
from meshwright.launch.node import NodeRestarts, exit_code
from meshwright.launch.slurm import gpus_of
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError

WORDS = [
    "arch.preset=llama3-8b", "sequence=8192", "batch=64", "plan.shard=8", "plan.zero=3", "plan.replicate=2",
    "plan.microbatch=1", "plan.grad_accum=4", "plan.precision=bf16", "plan.recompute=full",
]  # fmt: skip


def plan(**sizes):
    return Plan(**{"microbatch": 1, **sizes})


@pytest.mark.parametrize(
    ("sizes", "wanted", "expected"),
    [
        ({"replicate": 2, "shard": 8}, 0, (2, 8)),
        ({"shard": 32, "tp": 2}, 0, (8, 8)),  # a group of shards is whole machines
        ({"replicate": 3}, 0, (1, 3)),
        ({"replicate": 4, "shard": 6}, 6, (4, 6)),
        ({"replicate": 16}, 4, (4, 4)),
    ],
)
def test_tp_and_shard_lie_inside_machines(sizes, wanted, expected):
    assert layout(plan(**sizes), 8, wanted) == expected


@pytest.mark.parametrize(
    ("sizes", "wanted", "told"),
    [
        ({"replicate": 12}, 0, "12 ranks do not divide into machines of 8; use --ranks-per-node 6 (2 machines)"),
        ({"tp": 16}, 0, "plan.tp = 16 does not lie inside machines of 8 ranks"),
        ({"replicate": 4, "shard": 6}, 0, "plan.tp × cp × shard = 6 does not lie inside machines of 8"),
        ({"replicate": 16}, 16, "16 ranks of a machine are more than its 8 GPUs; use --ranks-per-node 8 or fewer"),
    ],
)
def test_what_would_cross_the_network_is_refused_with_the_remedy(sizes, wanted, told):
    with pytest.raises(InputError) as refused:
        layout(plan(**sizes), 8, wanted)
    assert told in str(refused.value)


def test_no_more_machines_are_asked_for_than_there_are():
    with pytest.raises(InputError, match="12 ranks are 3 machines of 4, and there are 2; use --ranks-per-node 6"):
        layout(plan(replicate=12), 6, 4, machines=2)
    with pytest.raises(InputError, match=r"does not lie inside machines of 6 ranks, .*; use a size that divides 6"):
        layout(plan(replicate=3, tp=4), 6, 0, machines=2)
    assert layout(plan(replicate=3, tp=4), 6, 4, machines=3) == (3, 4)


def test_a_rack_is_many_machines_behind_one_switch():
    rack = cluster("72xgb200")
    assert (rack.domain, rack.per_node, rack.nodes) == (72, 4, 18)
    assert layout(plan(replicate=9, tp=8), 4, 0, machines=18, switch=18) == (18, 4)  # tp crosses machines, over NVLink
    assert layout(plan(shard=64), 4, 0, machines=18, switch=18) == (16, 4)
    with pytest.raises(InputError, match=r"plan\.tp = 16 does not lie inside NVLink domains of 72 ranks"):
        layout(plan(replicate=9, tp=16), 4, 0, machines=36, switch=18)


@pytest.mark.parametrize(
    ("name", "wanted", "code", "told"),
    [
        ("8xh100-nvl", "8", 0, "1 machine × 8 ranks"),  # four bridged pairs in it
        ("8xh100-nvl", "4", 0, "2 machines × 4 ranks"),
        ("8xh100-nvl", "3", 2, "3 ranks of a machine are more than its 2 GPUs"),
        ("16xh100", "16", 2, "16 ranks of a machine are more than its 8 GPUs"),  # a switch joins those of a machine
    ],
)
def test_a_machine_may_have_several_bridged_pairs(name, wanted, code, told, tmp_path, capsys):
    words = ["launch", "arch.preset=tiny", "batch=16", "--on", "slurm", "--cluster", name, "--ranks-per-node", wanted]
    assert main([*words, "--shared", "--out", str(tmp_path), "--folder", "/shared/r"]) == code
    said = capsys.readouterr()
    assert told in said.out + said.err


@pytest.mark.parametrize(
    ("on", "file", "told"),
    [
        (["slurm"], "job.sbatch", "#SBATCH --no-requeue"),
        (["kubernetes", "--kind", "jobset"], "jobset.yaml", "maxRestarts: 0"),
        (["kubernetes", "--kind", "pytorchjob"], "pytorchjob.yaml", 'restartPolicy: "Never"'),
        (["volcano"], "volcano.yaml", 'action: "TerminateJob"'),
    ],
)
def test_a_job_may_be_one_that_is_never_started_again(on, file, told, tmp_path, capsys):
    options = ["--cluster", "2x8xh100", "--shared", "--out", str(tmp_path), "--folder", "/shared/r", "--requeues", "0"]
    options += [] if on == ["slurm"] else ["--volume", "runs:/shared"]
    assert main(["launch", *WORDS, "--on", *on, *options]) == 0
    text = (tmp_path / file).read_text()
    assert told in text
    assert "RestartJob" not in text
    assert "OnFailure" not in text


def test_every_remedy_of_a_layout_is_one():
    for sizes in ({"replicate": 12}, {"replicate": 4, "shard": 6}):
        with pytest.raises(InputError) as refused:
            layout(plan(**sizes), 8, 0)
        wanted = int(str(refused.value).partition("--ranks-per-node ")[2].split()[0].strip("(,;"))
        layout(plan(**sizes), 8, wanted)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--cluster", "1x8xh100"], "the plan has 16 ranks, and 8xh100 has 8 GPUs"),
        (["--cluster", "2x8xt4"], "the run does not fit"),
        (["--cluster", "2x8xh100", "--partition", "a b"], "--partition = 'a b' is not a name"),
        (["--cluster", "2x8xh100", "--time", "1; rm"], "--time '1; rm' is not a time"),
        (["--cluster", "2x8xh100", "--folder", "/tmp/x"], "which other machines do not see"),
        (["--cluster", "2x8xh100", "--on", "kubernetes"], "pods share nothing by themselves"),
        (["--cluster", "2x8xh100", "--on", "volcano", "--volume", "c:/shared"], "is not on the volume c"),
        (["--cluster", "2x8xh100", "--on", "kubernetes", "--kind", "pod"], "--kind pod is not known; use one of"),
        (["--cluster", "2x8xh100", "--on", "mpi", "--hosts", "a"], "2 machines are needed, and 1 are named"),
        (
            ["--cluster", "2x8xh100", "--on", "torchrun", "--hosts", "a,b,c"],
            "--hosts names 3 machines, and the plan",
        ),
        (["--cluster", "2x8xh100", "--on", "mpi", "--hosts", "a,a"], "name 2 machines, each once"),
        (["--cluster", "2x8xmi300x", "--on", "terraform"], "aws's machine with mi300x is not known"),
        (
            ["--cluster", "2x8xh100", "--on", "torchrun", "--shared", "--submit"],
            "--submit does not start --on torchrun",
        ),
        (
            ["--cluster", "2x8xh100", "--shared", "--on", "ray", "faults.live=true"],
            "needs our own starter, which starts ranks again, and not --on ray; use --on slurm, torchrun, kubernetes",
        ),
        (["--cluster", "2x8xh100", "--on", "mpi", "faults.memory_every=5"], "faults.memory_every needs our own"),
        (
            ["--cluster", "2x8xh100", "--on", "torchrun", "--shared", "faults.live=true", "faults.spares=1"],
            "the plan has 16 ranks and 8 of spares, and 16xh100 has 16 GPUs",
        ),
        (
            ["--cluster", "6x8xh100", "--ranks-per-node", "4", "--shared", "faults.live=true", "faults.spares=1"],
            "faults.live needs whole replicas on each of 6 machines, and there are 3",
        ),
        (["--cluster", "2x8xh100", "--nodes", "3"], "--nodes is for --node-rank, not for --on slurm"),
        (["--on", "mpi", "--node-rank", "0"], "--on cannot be combined with --node-rank"),
        (["--requeues", "0", "--node-rank", "0"], "--requeues cannot be combined with --node-rank"),
        (
            ["faults.memory_every=5", "--node-rank", "0", "--nodes", "2", "--ranks-per-node", "8", "--master", "a"],
            "faults.memory_every over several machines needs to know where the run lives; add --folder",
        ),
        (["--on", "mpi", "--partition", "a"], "--partition is for --on slurm, not for --on mpi"),
        (["--on", "mpi", "--cpus", "4"], "--cpus is for --on slurm"),
        (["--on", "torchrun", "--requeues", "50"], "--requeues is for --on slurm"),
        (["--on", "kubernetes", "--requeues", "3"], "--requeues is not for --kind trainjob"),
        ([], "the plan has 16"),
    ],
)
def test_launch_refuses_before_anything_is_written(options, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not options:
        options, told = ["--node-rank", "0"], "add --nodes and --ranks-per-node"
    on = [] if "--on" in options or "--node-rank" in options else ["--on", "slurm"]
    assert main(["launch", *WORDS, *options, *on]) in (2, 3)
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_live_survivors_have_a_launcher_of_ours_on_each_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    live = ["--cluster", "2x8xh100", "--on", "torchrun", "--shared", "--folder", "run", "faults.live=true"]
    assert main(["launch", *WORDS, *live]) == 0
    assert sorted(file.name for file in (tmp_path / "launch").glob("*/*")) == ["node.sh", "run.toml"]
    assert "node.sh 0" in capsys.readouterr().out
    three = ["plan.replicate=3", "batch=96", "--nodes", "2", "--ranks-per-node", "12", "--node-rank", "0"]
    assert main(["launch", *WORDS, *three, "--master", "127.0.0.1", "--folder", "run", "faults.live=true"]) == 2
    assert "needs whole replicas on each of 2 machines, and there are 3" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("on", "file", "told"),
    [
        (
            ["slurm"],
            "job.sbatch",
            ["#SBATCH --nodes=3", "#SBATCH --ntasks-per-node=1", "--cpus-per-task=64", "--no-kill"],
        ),
        (["torchrun"], "node.sh", ["--nodes 3 --ranks-per-node 8"]),
        (["kubernetes", "--kind", "jobset"], "jobset.yaml", ["completions: 3", "backoffLimit: 150", '"--nodes"\n']),
        (["kubernetes", "--kind", "job"], "job.yaml", ["completions: 3", "parallelism: 3"]),
        (["kubernetes", "--kind", "pytorchjob"], "pytorchjob.yaml", ["replicas: 2", 'restartPolicy: "OnFailure"']),
        (["kubernetes", "--kind", "trainjob"], "trainjob.yaml", ["numNodes: 3"]),
        (["volcano"], "volcano.yaml", ["minAvailable: 3", 'action: "RestartPod"']),
        (["skypilot"], "task.yaml", ["num_nodes: 3"]),
        (["terraform"], "main.tf", ["count           = 3"]),
    ],
)
def test_a_spare_has_a_machine_and_one_that_is_lost_comes_back_alone(on, file, told, tmp_path, capsys):
    """Two replicas of eight shards and a spare are three machines of eight, each with a launcher of ours."""
    words = [*WORDS, "faults.live=true", "faults.spares=1", "--on", *on, "--cluster", "3x8xh100", "--shared"]
    words += ["--volume", "runs:/shared"] if on[0] in ("kubernetes", "volcano", "skypilot") else []
    if on == ["terraform"]:  # whose machines are to be made, and with them what they share
        words.remove("--shared")
    assert main(["launch", *words, "--out", str(tmp_path), "--folder", "/shared/r", "--json"]) == 0
    assert (json.loads(capsys.readouterr().out)["nodes"]) == 3
    text = (tmp_path / file).read_text()
    assert [word for word in told if word not in text] == [], text
    assert "RestartJob" not in text
    assert "backoffLimit: 0" not in text


def test_a_save_is_given_the_time_of_its_bytes_and_the_step_before_it(capsys):
    from meshwright.config import load

    run = load.load(None, WORDS, ranks=16).run
    two, four = (save_seconds(run, nodes, cluster("2x8xh100")) for nodes in (2, 4))
    written = 2 * 12 * 8.03e9 / 1e9  # weights and two moments in fp32, twice, at a gigabyte a second and machine
    assert two - four == pytest.approx(written / 4, rel=0.02)
    assert save_seconds(run, 2, None) == pytest.approx(30 + written / 2, rel=0.02)


def test_a_folder_on_a_disk_of_one_machine_is_told(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nserver:/x /shared nfs4 rw 0 0\n/dev/b /shared/my\\040disk xfs rw 0 0\n")
    assert file_system(Path("/shared/runs/a"), mounts) == "nfs4"
    assert file_system(Path("/shared/my disk/a"), mounts) == "xfs"
    assert file_system(Path("/home/a"), mounts) == "ext4"
    job = LaunchJob(
        run=None, nodes=2, per_node=8, gpus=8, folder=Path("/home/a"), where=Path(), out=Path(), save_seconds=30
    )  # type: ignore[arg-type]
    assert [problem.text for problem in folder_problems(job, mounts)]
    assert not list(folder_problems(msgspec.structs.replace(job, target=Target(shared=True)), mounts))
    assert not list(folder_problems(msgspec.structs.replace(job, nodes=1), mounts))


def test_of_several_codes_the_one_that_says_most():
    assert exit_code([0, 0]) == 0
    assert exit_code([10, 10]) == 10
    assert exit_code([11, 2]) == 2
    assert exit_code([-9, 11]) == exit_code([137, 10]) == 11
    assert exit_code([11, 1]) == 1
    assert exit_code([10, 130]) == 130
    assert exit_code([0, 77]) == 1


def test_ranks_are_started_again_while_that_brings_newer_checkpoints(tmp_path):
    said, memory, disk = [], tmp_path / "memory", tmp_path / "disk"
    restarts = NodeRestarts(2, (disk, memory), said.append)
    assert not any(restarts.after(code) for code in (0, 1, 2, 10, 14, 130))  # at the first start exit 2 is a mistake
    assert [restarts.after(11), restarts.after(11)] == [True, True]
    (memory / "checkpoints" / "step-4").mkdir(parents=True)
    assert restarts.after(11)
    assert restarts.wasted == 0
    # A machine that does not come back is no mistake of whoever waits for it.
    assert [restarts.after(2), restarts.after(2), restarts.after(2)] == [True, True, False]
    assert restarts.meaning(2) == 11
    assert "exit code 2: starting them again; 2 of 2 attempts brought no newer checkpoint" in said[-1]


def test_torchrun_cannot_keep_memory_so_only_our_own_start_is_written(capsys, tmp_path):
    words = [*WORDS, "faults.memory_every=5", "--cluster", "2x8xh100", "--shared", "--out", str(tmp_path)]
    assert main(["launch", *words, "--on", "torchrun", "--folder", str(tmp_path / "run")]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["node.sh", "run.toml"]
    assert "start it by: " + str(tmp_path / "node.sh") in capsys.readouterr().out


def test_strings_are_strings_in_every_language():
    text = 'a"b\\c\n${d} %{e} \x00 é ☃ 🦊'
    assert quoted(text) == '"a\\"b\\\\c\\n${d} %{e} \\u0000 é ☃ 🦊"'
    assert hcl("${a} %{b}") == '"$${a} %%{b}"'
    assert pod_word("$(HOME) $x") == "$$(HOME) $x"
    assert (
        yaml({"no": [{"a": "1"}, []], "b": {}, "c": "x\ny\n"}) == '"no":\n  - a: "1"\n  - []\nb: {}\nc: |\n  x\n  y\n'
    )
    assert yaml({"c": " x\ny\n"}) == 'c: " x\\ny\\n"\n'  # a first blank would be an indent


def test_labels_are_what_all_schedulers_take():
    assert label("My Run!", "0123abcd") == "my-run-0123abcd"
    assert label("7b", "0123abcd") == "run-7b-0123abcd"
    assert label("☃", "0123abcd") == "run-0123abcd"
    assert len(label("x" * 99, "0123abcd")) <= 30


def test_gpus_as_slurm_writes_them():
    assert [gpus_of(text) for text in ("gpu:8(S:0-1)", "gpu:h100:8", "gpu:a:2,gpu:b:1", "(null)", "craynetwork:4")] == [
        8, 8, 3, 0, 0,
    ]  # fmt: skip


def test_what_ranks_are_told_is_what_the_files_say(tmp_path, capsys):
    options = ["--cluster", "2x8xh100", "--on", "slurm", "--shared", "--out", str(tmp_path), "--folder", "/shared/r"]
    assert main(["launch", *WORDS, *options, "--json"]) == 0
    lines = (tmp_path / "rank.sh").read_text().splitlines()
    assert shlex.split(lines[-1])[-3:] == [str(tmp_path / "run.toml"), "--folder", "/shared/r"]
    assert main(["config", "show", str(tmp_path / "run.toml")]) == 0


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("node0:1234", ("node0", 1234)),
        ("node0", ("node0", 29500)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[fd00::7]:1234", ("fd00::7", 1234)),
        ("[fd00::7]", ("fd00::7", 29500)),
        ("fd00::7", ("fd00::7", 29500)),
    ],
)
def test_where_rank_0_listens_may_be_a_name_or_a_number_of_either_kind(said, found):
    assert host_and_port(said) == found


@pytest.mark.parametrize(
    "said", ["", ":1234", "node0:port", "[fd00::7", "[fd00::7]1234", "node0:1234567", "node0:65536"]
)
def test_what_is_no_address_is_refused(said):
    with pytest.raises(InputError, match="is not where rank 0 could listen"):
        host_and_port(said)
