"""`import meshwright`: ten names, imported when they are used, whatever else was imported before."""

import subprocess
import sys

import pytest

import meshwright
from meshwright.cost.job import Job
from meshwright.hardware.cluster import Cluster, cluster
from meshwright.spec.problem import InputError

NAMES = {"Arch", "Plan", "Run", "Cluster", "load", "price", "report", "search", "train", "parity"}
WORDS = ("arch.preset=gpt2", "sequence=1024", "batch=8", "plan.shard=8", "plan.zero=3", "plan.precision=bf16")


def python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_imports_nothing_and_its_names_no_torch():
    python("""
import sys
before = set(sys.modules)
import meshwright
new = {name for name in set(sys.modules) - before if name.startswith("meshwright") or name == "typing"}
assert new == {"meshwright"}, new
from meshwright import Arch, Cluster, Plan, Run, load, parity, price, report, search, train
assert callable(train) and callable(search) and callable(parity) and callable(report)
assert "torch" not in sys.modules and "numpy" not in sys.modules
""")


def test_every_name_is_there_and_no_other():
    assert set(meshwright.__all__) == NAMES
    assert all(getattr(meshwright, name) is not None for name in meshwright.__all__)
    assert set(meshwright.__all__) <= set(dir(meshwright))
    with pytest.raises(AttributeError, match="fly"):
        meshwright.fly  # noqa: B018


@pytest.mark.parametrize("first", ["import meshwright.search.space", "from meshwright import search", "pass"])
@pytest.mark.parametrize("second", ["import meshwright.search.space as m", "from meshwright.search import space as m"])
def test_a_package_is_called_and_imported_from_in_any_order(first, second):
    python(f"""
{first}
import meshwright
assert callable(meshwright.search)
{second}
assert m.__name__ == "meshwright.search.space" and meshwright.search.space is m
from meshwright import search
from meshwright.search.best_first import search as best_first
assert search is meshwright.search and best_first is not search
assert len(search("gpt2", "8xh100", top=2)) == 2
""")


def test_a_plan_is_priced_on_the_machines_that_are_named():
    run = meshwright.load(None, *WORDS, ranks=8)
    on_h100, on_a100 = meshwright.price(run, "8xh100"), meshwright.price(run, "8xa100-80gb")
    assert 0 < on_h100.price.seconds < on_a100.price.seconds
    assert meshwright.price(run, "h100") == on_h100 == meshwright.price(run, cluster("8xh100"))
    assert isinstance(on_h100.job, Job)
    assert meshwright.price(on_h100.job) == on_h100
    assert isinstance(on_h100.job.cluster, Cluster)
    with pytest.raises(InputError, match="8 ranks"):
        meshwright.price(run, "4xh100")


def test_a_search_is_the_planners():
    found = meshwright.search("gpt2", "8xh100", "plan.precision=bf16", sequence=1024, batch=64, top=3)
    assert len(found) == 3
    assert {each.plan.world for each in found} == {8}
    assert found[0].plan.batch == 64
    assert (
        meshwright.search(found[0].job.arch, "8xh100", "plan.precision=bf16", sequence=1024, batch=64, top=3) == found
    )


def test_more_ranks_than_there_are_is_a_mistake_with_a_remedy():
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2"):
        meshwright.train(meshwright.load(None, ranks=2))
