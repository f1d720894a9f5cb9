"""Terraform: a skeleton for the machines themselves, side by side, with a shared file system and no open port."""

from meshwright.launch.job import Launch, LaunchFile, LaunchJob, hcl
from meshwright.spec.problem import mistake
from meshwright.spec.units import plural

# Machines by card: the type, and how many GPUs one has; names as the clouds' own pages list them.
MACHINES = {
    "aws": {
        "a100-40g": ("p4d.24xlarge", 8), "a100-80g": ("p4de.24xlarge", 8), "h100": ("p5.48xlarge", 8),
        "h200": ("p5en.48xlarge", 8), "b200": ("p6-b200.48xlarge", 8), "v100-32g": ("p3dn.24xlarge", 8),
        "l4": ("g6.48xlarge", 8), "l40s": ("g6e.48xlarge", 8), "a10g": ("g5.48xlarge", 8),
    },
    "gcp": {
        "a100-40g": ("a2-highgpu-8g", 8), "a100-80g": ("a2-ultragpu-8g", 8), "h100": ("a3-highgpu-8g", 8),
        "h200": ("a3-ultragpu-8g", 8), "b200": ("a4-highgpu-8g", 8), "l4": ("g2-standard-96", 8),
    },
}  # fmt: skip

AWS = """\
terraform {
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.0"
    }
  }
}

variable "region" {
  type = string
}

variable "image" {
  description = "An AMI with the driver, EFA and Python."
  type        = string
}

variable "subnet" {
  description = "One subnet, so that all machines are side by side."
  type        = string
}

variable "vpc" {
  type = string
}

variable "key" {
  description = "The name of a key pair. Its secret half stays with you."
  type        = string
}

provider "aws" {
  region = var.region
}

resource "aws_placement_group" "ranks" {
  name     = @NAME@
  strategy = "cluster"
}

# Ranks speak to each other alone; torch's own store has no password.
resource "aws_security_group" "ranks" {
  name   = @NAME@
  vpc_id = var.vpc

  ingress {
    from_port = 0
    to_port   = 0
    protocol  = "-1"
    self      = true
  }

  egress {
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    self        = true
    cidr_blocks = ["0.0.0.0/0"]
  }
}

resource "aws_network_interface" "node" {
  count           = @NODES@
  subnet_id       = var.subnet
  security_groups = [aws_security_group.ranks.id]
  interface_type  = "efa"
}

resource "aws_instance" "node" {
  count           = @NODES@
  ami             = var.image
  instance_type   = @MACHINE@
  key_name        = var.key
  placement_group = aws_placement_group.ranks.name

  network_interface {
    network_interface_id = aws_network_interface.node[count.index].id
    device_index         = 0
  }

  root_block_device {
    volume_size = 200
    encrypted   = true
  }

  tags = {
    Name = "${@NAME@}-${count.index}"
  }
}

# The run folder: every machine mounts it at @MOUNT@.
resource "aws_fsx_lustre_file_system" "runs" {
  storage_capacity            = @GIB@
  subnet_ids                  = [var.subnet]
  security_group_ids          = [aws_security_group.ranks.id]
  deployment_type             = "PERSISTENT_2"
  per_unit_storage_throughput = 250
}

output "hosts" {
  value = aws_instance.node[*].private_ip
}

output "runs" {
  value = aws_fsx_lustre_file_system.runs.dns_name
}
"""

GCP = """\
terraform {
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 6.0"
    }
  }
}

variable "project" {
  type = string
}

variable "region" {
  type = string
}

variable "zone" {
  type = string
}

variable "image" {
  description = "An image with the driver and Python."
  type        = string
}

provider "google" {
  project = var.project
  region  = var.region
  zone    = var.zone
}

resource "google_compute_network" "ranks" {
  name = @NAME@
}

# Ranks speak to each other alone; torch's own store has no password.
resource "google_compute_firewall" "ranks" {
  name        = @NAME@
  network     = google_compute_network.ranks.name
  source_tags = [@NAME@]
  target_tags = [@NAME@]

  allow {
    protocol = "all"
  }
}

resource "google_compute_resource_policy" "ranks" {
  name   = @NAME@
  region = var.region

  group_placement_policy {
    collocation = "COLLOCATED"
  }
}

resource "google_compute_instance" "node" {
  count             = @NODES@
  name              = "${@NAME@}-${count.index}"
  machine_type      = @MACHINE@
  tags              = [@NAME@]
  resource_policies = [google_compute_resource_policy.ranks.self_link]

  boot_disk {
    initialize_params {
      image = var.image
      size  = 200
    }
  }

  network_interface {
    network    = google_compute_network.ranks.name
    nic_type   = "GVNIC"
    stack_type = "IPV4_ONLY"
  }

  scheduling {
    on_host_maintenance = "TERMINATE"
  }
}

# The run folder: every machine mounts it at @MOUNT@.
resource "google_filestore_instance" "runs" {
  name     = @NAME@
  location = var.zone
  tier     = "ZONAL"

  file_shares {
    name        = "runs"
    capacity_gb = @GIB@
  }

  networks {
    network = google_compute_network.ranks.name
    modes   = ["MODE_IPV4"]
  }
}

output "hosts" {
  value = google_compute_instance.node[*].network_interface[0].network_ip
}

output "runs" {
  value = google_filestore_instance.runs.networks[0].ip_addresses
}
"""
LEAST_GIB = {"aws": 1200, "gcp": 1024}  # that the shared file systems are sold in


def launch(job: LaunchJob) -> Launch:
    """One file, to be read before it is applied: it costs money."""
    cloud, known = job.target.cloud, MACHINES[job.target.cloud]
    if job.card not in known:
        what = f"{cloud}'s machine with {job.card} is not known" if job.card else "no cluster is named"
        raise mistake(what, f"add --cluster with one of {', '.join(known)}")
    machine, gpus = known[job.card]
    if job.gpus != gpus:
        raise mistake(
            f"{machine} has {plural(gpus, 'GPU')}, and the plan uses {job.gpus} of a machine", f"plan for {gpus}"
        )
    values = {
        "NAME": hcl(job.label),
        "NODES": str(job.nodes),
        "MACHINE": hcl(machine),
        "GIB": str(LEAST_GIB[cloud]),
        "MOUNT": "/runs",
    }
    text = {"aws": AWS, "gcp": GCP}[cloud]
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return Launch(
        files=(LaunchFile(name="main.tf", text=text),),
        command=("terraform", f"-chdir={job.out}", "plan"),
        note="terraform init there comes first, and terraform apply, which costs money, is yours to run; "
        "then launch with --on slurm, torchrun or mpi",
    )
