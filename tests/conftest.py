"""Tests run beside each other, a file at a time: the files that take longest begin first."""

import gc
import os
import sys

# What is imported stays, and looking for garbage in it is a sixth of the time that importing torch takes.
gc.disable()

# Before torch is imported, here and in what tests start: threads that wait for each other on cores that are busy with
# other tests spin, and take three times the work.
os.environ["OMP_NUM_THREADS"] = "1"

# Compiled modules are kept, also where the environment would have it otherwise: each worker compiles all tests, and
# each process that they start all of ours.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

LONGEST = (  # by CPU time (benchmarks/suite.py), but for those that mostly wait
    "launchers/test_slurm", "launchers/test_openmpi", "dist/test_nodes", "dist/test_survivors", "dist/test_machines",
    "dist/test_whole_tensors", "dist/test_traffic", "dist/test_verify", "dist/test_local_sgd",
    "dist/test_quantized_states", "dist/test_readme", "dist/test_lora", "dist/test_memory", "dist/test_bench",
    "dist/test_lossy", "dist/test_sample", "dist/test_families", "dist/test_train_verb", "dist/test_any_model",
    "dist/test_dpo", "dist/test_offload", "dist/test_deterministic", "dist/test_expert", "unit/cli/test_plan",
    "unit/search/test_order", "unit/search/test_brute_force", "unit/kernels/test_interpreter", "unit/verify/test_trace",
    "unit/cli/test_plan_asked", "dist/test_checkpoint_verb", "dist/test_faults", "dist/test_muon", "dist/test_compress",
    "dist/test_examples", "dist/test_offload_weights", "dist/test_onebit", "dist/test_muon_exchange", "dist/test_sgd",
    "dist/test_rounding", "dist/test_compiled", "dist/test_checkpoint", "dist/test_resume", "dist/test_pipeline",
    "dist/test_bf16_states", "dist/test_unused", "dist/test_slow_network", "dist/test_postponed",
    "dist/test_data_parallel", "dist/test_context",
)  # fmt: skip
PLACES = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items):
    """Stable: within a file, and among files that are not named, the order stays."""
    items.sort(key=lambda item: PLACES.get(item.nodeid.split("::")[0], len(PLACES)))


def pytest_terminal_summary(terminalreporter):
    """The judges of launchers' files that are not installed here, by name."""
    told = {str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []) if report.longrepr}
    absent = sorted({name for text in told if "judge: " in text for name in _judges(text)})
    if absent:
        terminalreporter.write_line(f"not judged here: {', '.join(absent)} (make launchers installs the judges)")


def _judges(reason):
    return reason.partition("judge: ")[2].partition(" (")[0].split(", ")


def pytest_collection_finish():
    """From here on there is garbage; what was imported is none, and a search among 700 new objects finds little."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
