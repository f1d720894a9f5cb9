"""TF32: a plan's own peak, part of the mathematics, and a switch of torch's on a GPU alone."""

import msgspec
import pytest
import torch

from meshwright.config import check, load
from meshwright.config.run import digest
from meshwright.cost.primitives import peak_of
from meshwright.hardware.cluster import cluster
from meshwright.parallel import precision
from meshwright.spec.plan import Plan


def test_fp32_with_tf32_has_the_peak_of_tf32():
    gpu = cluster("1xa100-80g").gpu
    plain, allowed = (Plan(microbatch=1, tf32=tf32) for tf32 in (False, True))
    assert (peak_of(gpu, plain.arithmetic), peak_of(gpu, allowed.arithmetic)) == (19.5e12, 156e12)
    assert msgspec.structs.replace(allowed, precision="bf16").arithmetic == "bf16"
    assert peak_of(cluster("1xv100-32g").gpu, "tf32") == cluster("1xv100-32g").gpu.fp32  # which has none


def test_it_is_part_of_the_mathematics():
    words = ["arch.preset=tiny", "plan.precision=fp32", "plan.replicate=1"]
    plain, allowed = (load.load(None, [*words, *more]).run for more in ([], ["plan.tf32=true"]))
    assert digest(plain) != digest(allowed)
    doubles = msgspec.structs.replace(allowed, plan=msgspec.structs.replace(allowed.plan, precision="fp64"))
    assert [problem.key for problem in check.problems(doubles)] == ["plan.tf32"]


@pytest.mark.parametrize(("tf32", "word"), [(True, "high"), (False, "highest")])
def test_torch_is_told_on_a_gpu(monkeypatch, tf32, word):
    said = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    precision.pin(Plan(microbatch=1, tf32=tf32), torch.device("cpu"))
    assert said == []
    precision.pin(Plan(microbatch=1, tf32=tf32), torch.device("cuda"))
    assert said == [word]
