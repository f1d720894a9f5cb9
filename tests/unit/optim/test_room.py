"""What a host and its disk have, and the refusals of plans that need more or cannot be."""

import pytest

from meshwright.config import load
from meshwright.optim import host_memory
from meshwright.spec.problem import InputError

TINY = ("arch.preset=tiny", "plan.replicate=1", "plan.precision=bf16")
HOSTED = ("plan.cpu_offload=true", "plan.zero=3")


def make_run(*words):
    return load.load(None, [*TINY, *words]).run


def group(folder, limit, used, cached):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 3\n")


def test_the_smaller_of_machine_and_control_group_counts(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       900 kB\nMemAvailable:   500 kB\n")
    assert host_memory.free_host_bytes(tmp_path / "meminfo", tmp_path) == 500 * 1024
    group(tmp_path, limit=1000, used=700, cached=50)
    assert host_memory.free_host_bytes(tmp_path / "meminfo", tmp_path) == 350
    group(tmp_path, limit="max", used=700, cached=50)
    assert host_memory.free_host_bytes(tmp_path / "meminfo", tmp_path) == 500 * 1024
    assert host_memory.free_host_bytes(tmp_path / "nothing", tmp_path / "nothing") is None


def test_this_machine_has_some():
    free = host_memory.free_host_bytes()
    assert free is None or free > 2**20


@pytest.mark.parametrize(
    ("words", "width"),
    [(("plan.optimizer_offload=host",), 12), (("plan.optimizer_offload=host", "optim.state_dtype=bf16"), 6)],
)
def test_a_parameter_takes_12_bytes_or_6(words, width):
    assert host_memory.width(make_run(*words)) == width


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("optim.state_dtype=bf16",), "is for offloaded states"),
        (("plan.optimizer_offload=host", "plan.replicate=2"), "this plan has 2 ranks"),
        (("plan.optimizer_offload=host", "plan.tp=2"), "this plan has 2 ranks"),
        (("plan.optimizer_offload=host", "plan.deterministic=true"), "without plan.optimizer_offload"),
        (("plan.optimizer_offload=host", "plan.bf16_params=false"), "plan.bf16_params = false keeps none"),
        (
            ("plan.optimizer_offload=host", "optim.state_dtype=bf16", "plan.precision=fp16"),
            "plan.precision = fp16 has none",
        ),
        (("plan.optimizer_offload=disk", "plan.optimizer_offload_host_bytes=-1"), "is negative"),
        (("plan.cpu_offload=true",), "plan.zero = 0 keeps them all"),
        (("plan.cpu_offload=true", "plan.zero=2", "plan.shard=2"), "plan.zero = 2 keeps them all"),
        ((*HOSTED, "plan.pp=2", "plan.grad_accum=4"), "keeps whole stages all-gathered"),
        ((*HOSTED, "plan.bf16_params=true"), "plan.bf16_params keeps a bf16 copy"),
        ((*HOSTED, "plan.optimizer_offload=host"), "plan.cpu_offload includes plan.optimizer_offload = host"),
        ((*HOSTED, "plan.deterministic=true"), "without plan.cpu_offload"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(words, told):
    with pytest.raises(InputError, match=told) as refusal:
        make_run(*words)
    assert all(problem.remedy for problem in refusal.value.problems)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    run = make_run("plan.optimizer_offload=disk")
    with pytest.raises(InputError, match="no folder"):
        host_memory.check(run, [100], tmp_path / "nowhere")
