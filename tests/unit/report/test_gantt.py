import msgspec
import pytest

from meshwright.config.presets import preset
from meshwright.cost.job import Job
from meshwright.cost.step_time import price
from meshwright.hardware.cluster import cluster
from meshwright.hardware.stacks import stack_of
from meshwright.report.plan_charts import pipeline
from meshwright.spec.plan import Plan, balanced_stages


def job(**changes) -> Job:
    arch = preset("llama3-8b")
    plan = Plan(pp=4, shard=2, zero=1, stages=balanced_stages(arch, 4), microbatch=1, grad_accum=8, precision="bf16")
    plan = msgspec.structs.replace(plan, **changes)
    return Job(arch=arch, plan=plan, sequence=4096, cluster=cluster("8xh100"), stack=stack_of("meshwright"))


def test_a_pipeline_is_drawn_at_the_seconds_it_is_priced_at():
    made = pipeline(job())
    assert made is not None
    shares = {share.name: share.seconds for share in price(job()).waterfall}
    outside = sum(
        shares.get(name, 0.0) for name in ("stragglers", "shard", "replicate", "tied", "optimizer", "host_overhead")
    )
    assert made.timeline.seconds == pytest.approx(price(job()).seconds - outside, rel=1e-6)
    assert (made.shown, made.microbatches) == (8, 8)


def test_of_a_long_step_the_first_rounds_are_drawn_and_said():
    made = pipeline(job(grad_accum=64))
    assert made is not None
    assert (made.shown, made.microbatches) == (8, 64)
    assert made.title.endswith("8 of 64 microbatches")


def test_without_a_pipeline_there_is_nothing_to_draw():
    assert pipeline(job(pp=1, shard=8, stages=())) is None
