# Two commands: `make train` runs the main job, `make test` passes every test. Each does all its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Files beside each other: ranks often wait, for each other or for a clock, and four keep two cores busy.
BESIDE := -n 4 --dist loadscope --no-loadscope-reorder

.PHONY: train test check lint types docs unit bench validate prove setup clean

train: $(READY)
	$(BIN)/meshwright train

# One session for all tests: the short ones fill the gaps that the long ones leave.
test: lint types docs
	$(BIN)/python -m pytest $(BESIDE) tests

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

setup: $(READY)

# Versions are pinned, and torch comes first so that nothing asks for a larger build of it.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
