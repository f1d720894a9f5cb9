"""Tests run beside each other, a file at a time: the files that take longest begin first."""

LONGEST = ("verify", "readme", "nodes", "bench", "faults", "compress", "any_model", "train_verb", "traffic", "compiled")
PLACES = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items):
    """Stable: within a file, and among files that are not named, the order stays."""
    items.sort(key=lambda item: PLACES.get(item.path.name, len(PLACES)) if "dist" in item.path.parts else len(PLACES))
