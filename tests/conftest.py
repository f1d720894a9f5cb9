"""Tests run beside each other, a file at a time: the files that take longest begin first."""

import os

# Before torch is imported, here and in what tests start: threads that wait for each other on cores that are busy with
# other tests spin, and take three times the work.
os.environ["OMP_NUM_THREADS"] = "1"

LONGEST = (
    "dist/test_verify", "dist/test_traffic", "dist/test_readme", "dist/test_nodes", "dist/test_expert",
    "dist/test_bench", "dist/test_any_model", "dist/test_memory", "dist/test_train_verb", "dist/test_compiled",
    "dist/test_compress", "dist/test_rounding", "dist/test_faults", "dist/test_deterministic", "dist/test_examples",
    "dist/test_offload", "unit/verify/test_trace",
)  # fmt: skip
PLACES = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items):
    """Stable: within a file, and among files that are not named, the order stays."""
    items.sort(key=lambda item: PLACES.get(item.nodeid.split("::")[0], len(PLACES)))
