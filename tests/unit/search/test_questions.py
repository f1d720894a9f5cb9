from itertools import pairwise

import msgspec
import pytest

from meshwright.cost.flops import attention_flops_per_token, matmul_flops_per_token
from meshwright.search.best_first import priced, search
from meshwright.search.explain import changes, nearest
from meshwright.search.sizes import duration, gpu_counts, gpus_needed, layers, with_gpus
from meshwright.search.space import ON_DEVICE
from meshwright.spec.params import count
from meshwright.spec.plan import Plan
from search.questions import question

ASKED = question("llama3-8b", "8xh100", sequence=4096, batch=32)
LARGE = question("llama3-70b", "8xh100", sequence=4096, batch=32)  # its narrow weights and gradients fill three cards
SHARDED = Plan(shard=8, zero=3, microbatch=1, grad_accum=4, precision="bf16")


def test_gpu_counts_are_parts_of_a_node_and_then_nodes():
    counts = list(gpu_counts(ASKED))
    assert counts[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert all(count % 8 == 0 for count in counts[3:])
    assert all(after <= before * 1.15 for before, after in pairwise(counts[10:]))
    trays = gpu_counts(question("llama3-8b", "72xgb200"))  # machines of four, eighteen behind one switch
    assert list(trays)[:22] == [1, 2, *range(4, 73, 4), 144, 216]


@pytest.mark.parametrize("asked", [msgspec.structs.replace(ASKED, fixed=ON_DEVICE), LARGE])
def test_fewer_gpus_than_needed_are_too_few(asked):
    needed = gpus_needed(asked)
    assert needed is not None
    gpus, answer = needed
    assert answer.found[0].plan.world == gpus
    smaller = [each for each in gpu_counts(asked) if each < gpus]
    assert smaller
    assert not any(search(with_gpus(asked, each)).found for each in smaller)


def test_one_gpu_is_enough_if_states_live_elsewhere():
    needed = gpus_needed(ASKED)
    assert needed is not None
    gpus, answer = needed
    assert gpus == 1
    assert all(found.plan.optimizer_offload != "none" for found in answer.found)


def test_duration_and_money():
    found = priced(ASKED.job(SHARDED))
    tokens = 1000.5 * 32 * 4096
    span = duration(found, tokens, 2.0)
    assert span.steps == 1001
    assert span.seconds == pytest.approx(1001 * found.price.seconds)
    assert span.gpu_hours == pytest.approx(8 * span.seconds / 3600)
    assert span.dollars == pytest.approx(2 * span.gpu_hours)
    assert duration(found, tokens).dollars is None


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2", "mixtral-8x7b", "tiny-moe"])
def test_layers_add_up_to_the_model(model):
    asked = question(model, sequence=64)
    table = layers(asked)
    assert sum(layer.count * layer.parameters for layer in table) == count(asked.arch)
    # A tied output is multiplied though it holds nothing of its own; learned positions are looked up.
    total = sum(layer.count * layer.flops_per_token for layer in table)
    assert total == pytest.approx(matmul_flops_per_token(asked.arch) + attention_flops_per_token(asked.arch, 64))


def test_the_nearest_misses_lack_least_and_changes_fit():
    asked = question("llama3-8b", "1xh100", sequence=4096, batch=8, **ON_DEVICE)
    assert not search(asked).found
    misses = nearest(asked)
    lacking = [-miss.fit.headroom_bytes for miss in misses]
    assert lacking == sorted(lacking)
    assert lacking[0] > 0
    suggested = changes(asked)
    assert len(suggested) == 3
    assert all(change.found.fit.fits for change in suggested)


def test_releasing_a_fixed_field_is_the_first_suggestion():
    asked = question("llama3-8b", "8xh100", sequence=4096, batch=8, replicate=8, cpu_offload=False)
    assert not search(asked).found
    assert changes(asked)[0].change == "leave plan.replicate = 8 to the search"


def test_what_may_vary_may_need_fewer_gpus():
    asked = question("llama-7b", "8xh100", sequence=64, batch=8, **ON_DEVICE)
    # Sixteen bytes of each parameter are more than this, the twelve of weights in bf16 alone are less.
    gpu = msgspec.structs.replace(asked.cluster.gpu, memory_bytes=100e9)
    asked = asked.on(msgspec.structs.replace(asked.cluster, gpu=gpu))
    needed = [gpus_needed(each) for each in (asked, msgspec.structs.replace(asked, vary=("optimizer",)))]
    assert [found and found[0] for found in needed] == [2, 1]


def test_a_larger_card_does_not_help_where_memory_is_limited():
    limit = 8 * 2.0**30
    asked = msgspec.structs.replace(question("llama3-8b", "8xh100", sequence=4096, batch=32), limit_bytes=limit)
    asked = asked.on(asked.cluster)
    assert asked.cluster.gpu.memory_bytes == limit
    suggested = changes(asked)
    assert suggested
    assert all(change.found.peak_bytes <= limit for change in suggested)
