"""Tests run beside each other, a file at a time: the files that take longest begin first."""

import os

# Before torch is imported, here and in what tests start: threads that wait for each other on cores that are busy with
# other tests spin, and take three times the work.
os.environ["OMP_NUM_THREADS"] = "1"

LONGEST = ("verify", "readme", "nodes", "bench", "faults", "compress", "any_model", "train_verb", "traffic", "compiled")
PLACES = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items):
    """Stable: within a file, and among files that are not named, the order stays."""
    items.sort(key=lambda item: PLACES.get(item.path.name, len(PLACES)) if "dist" in item.path.parts else len(PLACES))
