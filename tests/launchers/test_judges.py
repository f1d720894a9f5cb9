"""Every kind of file that `meshwright launch` writes is what its own project reads, whatever a run is called."""

import json
import os
import shlex
import subprocess
import sys

import judge
import pytest
from commands import environment, meshwright, write_text
from judges import bindings

from meshwright.cli.main import main

RUN = [
    "arch.preset=llama3-8b", "sequence=8192", "batch=64", "plan.replicate=2", "plan.shard=8", "plan.zero=3",
    "plan.microbatch=1", "plan.grad_accum=4", "plan.precision=bf16", "plan.recompute=full",
]  # fmt: skip
# What would run, be replaced, or end a string early, in a shell, YAML, HCL, Slurm, Kubernetes or a path.
HOSTILE = "x\" '$(touch pwned) `touch pwned` ${pwned} %{if} $(PWNED) %j\n#SBATCH --wrap=pwned\nkey: - {a: b} \\ é ☃"
FOLDER = "/shared/it's $(here); touch pwned #\n{x}"


def launch(out, *words, name=HOSTILE, folder=FOLDER):
    options = ["--cluster", "2x8xh100", "--shared", "--folder", folder, "--out", str(out)]
    options += ["--volume", "runs:/shared"] if {"kubernetes", "volcano", "skypilot"} & {*words} else []
    setting = f"name={json.dumps(name, ensure_ascii=False)}"
    assert main(["launch", *RUN, setting, *words, *options]) == 0
    return out


@judge.needs("k8s")
@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob", "jobset", "job"])
def test_kubernetes_and_kubeflow_read_every_key(tmp_path, kind, capsys):
    file = launch(tmp_path, "--on", "kubernetes", "--kind", kind) / f"{kind}.yaml"
    assert judge.kubernetes(file) == ""
    text = file.read_text()
    assert "terminationGracePeriodSeconds: 155" in text
    assert '"/dev/shm"' in text
    if kind != "job":  # the judge can refuse: of a misspelt key nothing is left
        key = {"trainjob": "numNodes", "pytorchjob": "nprocPerNode", "jobset": "maxRestarts"}[kind]
        file.write_text(text.replace(f"{key}:", f"{key}x:"))
        assert f"{key}x" in judge.kubernetes(file)


@judge.needs("k8s", "volcano")
@pytest.mark.parametrize("words", [[], ["faults.live=true"]])
def test_volcano_reads_every_key(tmp_path, words, capsys):
    file = launch(tmp_path, "--on", "volcano", *words) / "volcano.yaml"
    assert judge.kubernetes(file) == ""
    file.write_text(file.read_text().replace("minAvailable:", "minAvailabel:"))
    assert "minAvailabel" in judge.kubernetes(file)


@judge.needs("sky")
def test_skypilot_understands_the_task(tmp_path, capsys):
    said = judge.skypilot(launch(tmp_path, "--on", "skypilot") / "task.yaml")
    assert said["nodes"] == 2
    assert said["accelerators"] == {"H100": 8}
    assert said["recovery"]["recover_on_exit_codes"] == [10, 11]
    assert FOLDER in shlex.split(said["run"])


@judge.needs("hcl")
@pytest.mark.parametrize(("cloud", "machine"), [("aws", "p5.48xlarge"), ("gcp", "a3-highgpu-8g")])
def test_terraform_is_terraform(tmp_path, cloud, machine, capsys):
    file = launch(tmp_path, "--on", "terraform", "--cloud", cloud) / "main.tf"
    kind, key = {"aws": ("aws_instance", "instance_type"), "gcp": ("google_compute_instance", "machine_type")}[cloud]
    (node,) = judge.hcl(file)["resource"][kind]["node"]
    assert (node["count"], node[key]) == (2, machine)


@pytest.mark.parametrize("cloud", [pytest.param(cloud, marks=judge.needs("hcl", cloud)) for cloud in ("aws", "gcp")])
def test_the_clouds_own_provider_has_every_resource_key_and_reference(tmp_path, cloud, capsys):
    file = launch(tmp_path, "--on", "terraform", "--cloud", cloud) / "main.tf"
    text, package = file.read_text(), judge.provider(cloud)
    assert list(bindings.problems(judge.hcl(file), package)) == []
    resource, key, referred = {
        "aws": ("aws_placement_group", "strategy", "aws_instance.node[*].private_ip"),
        "gcp": ("google_filestore_instance", "tier", "google_compute_instance.node[*].network_interface"),
    }[cloud]
    for wrong, becomes, told in [  # the judge can refuse
        (f'"{resource}"', f'"{resource}s"', f"{resource}s: the provider has no such resource"),
        (f"  {key} ", f"  {key}s ", f"has no {key}s"),
        (f"  {key} ", f"  # {key} ", f"{key} is missing"),
        (referred, f"{referred}s", f"{referred.rpartition('.')[2]}s"),
        (referred, referred.replace("node", "nodes"), "there is no"),
        ("var.region", "var.regions", "no variable regions"),
        ("count ", "counts ", "has no counts"),
        ("= 200", '= "a lot"', "is no number"),
    ]:
        assert wrong in text
        file.write_text(text.replace(wrong, becomes))
        assert told in "; ".join(bindings.problems(judge.hcl(file), package)), becomes


@judge.needs("terraform")
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_terraform_would_write_it_so(tmp_path, cloud, capsys):
    file = launch(tmp_path, "--on", "terraform", "--cloud", cloud) / "main.tf"
    done = subprocess.run(["terraform", "fmt", "-check", "-diff", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("cloud", "key"),
    [
        pytest.param(cloud, key, marks=judge.needs("terraform", f"terraform-provider-{name}"))
        for cloud, name, key in [("aws", "aws", "strategy"), ("gcp", "google", "tier")]
    ],
)
def test_terraform_validates_it_with_the_clouds_own_provider(tmp_path, cloud, key, capsys):
    file = launch(tmp_path, "--on", "terraform", "--cloud", cloud) / "main.tf"
    judge.terraform(tmp_path, "init", "-input=false", f"-plugin-dir={judge.PLUGINS}")
    judge.terraform(tmp_path, "validate")
    file.write_text(file.read_text().replace(f"  {key} ", f"  {key}s "))
    refused = judge.terraform(tmp_path, "validate", code=1)
    assert f'An argument named "{key}s" is not expected here.' in refused


# So that the provider asks AWS nothing: all that would be made is new.
OFFLINE = """\
provider "aws" {
  access_key                  = "none"
  secret_key                  = "none"
  skip_credentials_validation = true
  skip_requesting_account_id  = true
  skip_metadata_api_check     = true
}
"""


@judge.needs("terraform", "terraform-provider-aws")
def test_terraform_plans_the_machines_of_aws(tmp_path, capsys):
    """Two machines, an adapter of each, a placement group, a security group and a file system."""
    launch(tmp_path, "--on", "terraform", "--cloud", "aws")
    (tmp_path / "offline_override.tf").write_text(OFFLINE)
    judge.terraform(tmp_path, "init", "-input=false", f"-plugin-dir={judge.PLUGINS}")
    given = {"region": "eu-west-1", "image": "ami-1", "subnet": "subnet-1", "vpc": "vpc-1", "key": "pair"}
    options = [f"-var={name}={value}" for name, value in given.items()]
    planned = judge.terraform(tmp_path, "plan", "-input=false", *options)
    assert "Plan: 7 to add, 0 to change, 0 to destroy." in planned


@pytest.mark.parametrize(
    ("on", "name", "words"),
    [
        ("slurm", "rank.sh", []),
        ("slurm", "node.sh", ["faults.live=true"]),
        ("torchrun", "torchrun.sh", ["--hosts", "n0,n1"]),
        ("torchrun", "node.sh", ["--hosts", "n0,n1"]),
        ("mpi", "mpirun.sh", ["--hosts", "n0,n1"]),
    ],
)
def test_a_shell_reads_every_word_as_it_was_given(tmp_path, on, name, words, capsys):
    """The scripts are run, with programs of these names that write down what they are called with."""
    out = launch(tmp_path / "it's $(touch pwned) \n#SBATCH --wrap=x", "--on", on, *words)
    folder = tmp_path / "programs"
    folder.mkdir()
    script = out / name
    text = script.read_text()
    (folder / "python").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$TOLD"\n')
    (folder / "mpirun").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$TOLD"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    script.write_text(text.replace(sys.executable, str(folder / "python")))
    around = {**os.environ, "TOLD": str(tmp_path / "told"), "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [script, "0", "n0:20000"], env=around, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "told").read_text().split("\0")
    assert told[told.index("--folder") + 1] == FOLDER
    assert str(out / "run.toml") in told
    assert not list(tmp_path.rglob("pwned"))


def test_what_slurm_reads_before_the_script_has_no_word_of_the_user(tmp_path, capsys):
    text = (launch(tmp_path, "--on", "slurm") / "job.sbatch").read_text()
    head = text.split("set -u")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    assert all(line.startswith("#SBATCH --") or not line for line in head[1:])
    assert "pwned" not in "".join(line for line in head if "job-name" not in line)
    assert "#SBATCH --signal=TERM@155" in head


@judge.needs("datatrove")
def test_datatrove_runs_the_parts_and_training_finds_the_tokens(tmp_path):
    write_text(tmp_path)
    words = ["arch.preset=tiny", "sequence=32", "data.source=my/*.txt"]
    said = meshwright(
        "data", "prepare", *words, "--on", "datatrove", "--parts", "2", "--out", "it's", "--json", folder=tmp_path
    )
    assert said.returncode == 0, said.stderr
    script = [judge.python("datatrove"), tmp_path / "it's" / "prepare.py", "local"]
    done = subprocess.run(script, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(meshwright("data", "prepare", *words, "--json", folder=tmp_path).stdout)
    assert (report["made"], report["found"]) == (0, 1)
