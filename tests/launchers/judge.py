"""Who judges the files that `meshwright launch` writes, where each is, and what to do where one is not."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "build" / "launchers"  # made by `make launchers`
PROVIDERS = {"aws": "cdktf-provider-aws-19.65.1.tgz", "gcp": "cdktf-provider-google-16.12.1.tgz"}  # of 5.99 and 6.50
PLUGINS = ENVIRONMENTS / "terraform" / "providers"  # Terraform's own, by the layout of its file system mirrors
CRD = ENVIRONMENTS / "volcano" / "jobs.yaml"  # Volcano's own, Apache-2.0: config/crd/volcano/bases of its repository

PROGRAMS = {
    "slurm": ("slurmctld", "slurmd", "munged", "sbatch"),
    "mpirun": ("mpirun",),
    "terraform": ("terraform",),
}


def python(name: str) -> Path:
    return ENVIRONMENTS / name / "bin" / "python"


def provider(cloud: str) -> Path:
    """Typed bindings of a cloud's Terraform provider."""
    return ENVIRONMENTS / "hcl" / PROVIDERS[cloud]


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip, saying which judge is not here; the suite's last lines name them."""
    absent = [name for name in names if not is_here(name)]
    return pytest.mark.skipif(bool(absent), reason=f"judge: {', '.join(absent)} (make launchers)")


def is_here(name: str) -> bool:
    if name in PROGRAMS:
        return all(shutil.which(program) for program in PROGRAMS[name])
    files = {"volcano": CRD, "hcl": ENVIRONMENTS / "hcl" / "npm" / "node_modules" / "@cdktf" / "hcl2json"}
    files |= {cloud: provider(cloud) for cloud in PROVIDERS}
    hashicorp = PLUGINS / "registry.terraform.io" / "hashicorp"
    files |= {f"terraform-provider-{name}": hashicorp / name for name in ("aws", "google")}
    return files.get(name, python(name)).exists()


def kubernetes(file: Path) -> str:
    """What is wrong with the documents of a file; empty: nothing."""
    command = [python("k8s"), HERE / "judges" / "documents.py", file, CRD]
    return _said(command)


def skypilot(file: Path) -> dict:
    return json.loads(_said([python("sky"), HERE / "judges" / "task.py", file]).splitlines()[-1])


def hcl(file: Path) -> dict:
    """What a parser of Terraform's language reads in a file."""
    code = "require('@cdktf/hcl2json').parse('main.tf', require('fs').readFileSync(process.argv[1], 'utf8'))"
    code += ".then(found => console.log(JSON.stringify(found)))"
    return json.loads(_said(["node", "-e", code, file], ENVIRONMENTS / "hcl" / "npm"))


def terraform(folder: Path, *words: str, code: int = 0) -> str:
    """What Terraform says of the files in a folder, with the providers that are here; no cloud is asked."""
    command = ["terraform", f"-chdir={folder}", *words, "-no-color"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def _said(command: list, folder: Path | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.strip() or done.returncode == 0, done.stderr
    return done.stdout.strip()
