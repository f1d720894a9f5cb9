"""Tests run beside each other, a file at a time: the files that take longest begin first."""

import os
import sys

# Before torch is imported, here and in what tests start: threads that wait for each other on cores that are busy with
# other tests spin, and take three times the work.
os.environ["OMP_NUM_THREADS"] = "1"

# Compiled modules are kept, also where the environment would have it otherwise: each worker compiles all tests, and
# each process that they start all of ours.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

LONGEST = (
    "dist/test_verify", "dist/test_traffic", "dist/test_readme", "dist/test_nodes", "dist/test_expert",
    "dist/test_memory", "dist/test_deterministic", "unit/kernels/test_interpreter", "dist/test_any_model",
    "dist/test_bench", "dist/test_train_verb", "dist/test_compress", "dist/test_examples", "dist/test_offload",
    "dist/test_offload_weights", "dist/test_sgd", "dist/test_unused", "dist/test_rounding", "dist/test_faults",
    "dist/test_compiled", "dist/test_checkpoint", "dist/test_checkpoint_verb", "dist/test_resume",
    "unit/verify/test_trace",
)  # fmt: skip
PLACES = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items):
    """Stable: within a file, and among files that are not named, the order stays."""
    items.sort(key=lambda item: PLACES.get(item.nodeid.split("::")[0], len(PLACES)))
