import re

import pytest

from meshwright.config import check, load
from meshwright.spec.problem import InputError

MIXTURE = ["arch.experts=6", "arch.expert_ffn=8", "arch.top_k=2"]
REPLICAS = ["plan.replicate=2"]
INT8 = [*REPLICAS, "plan.grad_reduce=int8"]
FP8_TP = ["arch.preset=tiny", "plan.precision=fp8", "plan.grad_accum=4", "batch=4"]
WRONG = [
    (["arch.heads=7", "arch.kv_heads=7"], "does not divide into arch.heads"),
    (["arch.kv_heads=4"], "cannot be divided by arch.kv_heads = 4 evenly"),
    (["arch.head_dim=31"], "RoPE rotates pairs"),
    (["arch.positions=learned", "sequence=512"], "longer than the 256 learned positions"),
    (["arch.experts=4", "arch.top_k=2"], "arch.expert_ffn is missing"),
    (["arch.experts=4", "arch.expert_ffn=8", "arch.top_k=5"], "cannot be chosen among"),
    (["arch.experts=4", "arch.expert_ffn=8", "arch.router=switch", "arch.top_k=1"], "needs arch.capacity"),
    (["arch.experts=4", "arch.expert_ffn=8", "arch.router=gshard", "arch.top_k=1", "arch.capacity=2.0"], "chooses 2"),
    (["plan.shard=2"], "shards nothing"),
    (["plan.replicate=2", "plan.ep=2"], "this model has none"),
    ([*MIXTURE, "plan.replicate=4", "plan.ep=4"], "cannot be distributed evenly over plan.ep = 4"),
    ([*MIXTURE, "plan.replicate=2", "plan.ep=3"], "from replicate · cp = 2, which it does not divide"),
    ([*MIXTURE, "plan.shard=2", "plan.zero=1", "plan.replicate=3", "plan.ep=3"], "from shard · cp = 2, which"),
    (["plan.ep=0"], "plan.ep = 0 is not a count"),
    (["plan.precision=bf16", "plan.fp8_accumulate=exact"], "plan.fp8_accumulate = exact is for FP8 matmuls"),
    (["plan.fp8_grad=e5m2"], "plan.fp8_grad = e5m2 is for FP8 matmuls, and plan.precision = fp32"),
    ([*FP8_TP, "plan.tp=4"], "leaves each rank 8 of arch.kv_heads · head_dim = 32, which is no multiple of 16"),
    ([*FP8_TP, "plan.tp=8"], "leaves each rank 8 of arch.kv_heads · head_dim = 32, which is no multiple of 16"),
    ([*FP8_TP, "plan.tp=2", "arch.mtp_layers=1", "sequence=16"], "leaves each rank 8 tokens of a microbatch for what"),
    (
        [*FP8_TP, "plan.tp=2", "arch.kv_heads=1", "arch.head_dim=16", "adapter.kind=qlora", "adapter.base=fp8"],
        "beside adapters is not offered for arch.kv_heads = 1 shared heads, with frozen matrices",
    ),
    (
        [*FP8_TP, "plan.tp=2", "arch.experts=4", "arch.top_k=2", "arch.expert_ffn=16", "arch.shared_experts=1"],
        "leaves each rank 8 of arch.shared_experts · expert_ffn = 16, which is no multiple of 16",
    ),
    (["plan.precision=fp8", "sequence=100", "batch=1"], "the 100 tokens of a microbatch to be a multiple of 16"),
    (["plan.deterministic=true", "plan.replicate=3", "batch=12"], "plan.replicate = 3 is not a power of two"),
    (["plan.deterministic=true", "plan.shard=6", "plan.zero=1", "batch=24"], "plan.shard = 6 is not a power of two"),
    (["plan.deterministic=true", "plan.grad_accum=3", "batch=12"], "plan.grad_accum = 3 is not a power of two"),
    (["plan.deterministic=true", "plan.tp=2"], "plan.tp = 2 adds up partial matmuls"),
    (["plan.deterministic=true", "plan.cp=2"], "plan.cp = 2 adds up parts of a sequence"),
    (["plan.deterministic=true", "plan.pp=2"], "plan.pp = 2 adds them up itself"),
    ([*MIXTURE, "plan.deterministic=true", "plan.replicate=2", "plan.ep=2"], "plan.ep = 2 adds up tokens of an expert"),
    (
        ["plan.replicate=1", "plan.tp=2", "plan.grad_reduce=int8"],
        "rounds gradients on their way between ranks, and there is one data rank",
    ),
    ([*INT8, "plan.cp=2"], "plan.cp = 2 cuts them"),
    ([*MIXTURE, *INT8, "plan.ep=2"], "plan.ep = 2 mixes the tokens"),
    ([*INT8, "plan.pp=2", "arch.tied=true"], "the tied embedding in two stages"),
    ([*INT8, "plan.sync_every=4"], "plan.sync_every = 4 sums none over replicas"),
    ([*INT8, "plan.deterministic=true"], "plan.deterministic has the same bits under every plan"),
    ([*INT8, "plan.zero=3", "plan.cpu_offload=true"], "plan.cpu_offload keeps weights and gradients in host memory"),
    ([*INT8, "plan.powersgd=2"], "plan.powersgd = 2 factors the gradients that plan.grad_reduce = int8 would round"),
    ([*INT8, "plan.precision=fp16"], "plan.precision = fp16 scales each step's otherwise"),
    ([*INT8, "plan.precision=bf16", "optim.master_weights=split"], "optim.master_weights = split keeps bf16 gradients"),
    ([*INT8, "log.noise_scale=true"], "log.noise_scale compares exact gradients"),
    ([*INT8, "plan.tp=2", "arch.ffn=100"], "plan.tp = 2 cuts blocks.0.mlp.down.weight within a block of"),
    (["plan.error_feedback=false"], "plan.error_feedback = false is for gradients that are rounded, and none are"),
    ([*REPLICAS, "plan.powersgd=-1"], "plan.powersgd = -1 is negative"),
    ([*REPLICAS, "plan.powersgd=4096"], "plan.powersgd = 4096 is more than the rank of any matrix of the model"),
    (
        ["plan.shard=2", "plan.zero=1", "plan.powersgd=2"],
        "factors what replicas tell each other, and plan.replicate = 1",
    ),
    ([*REPLICAS, "plan.cp=2", "plan.powersgd=2"], "plan.cp = 2 with plan.zero = 0 spreads each over the copies"),
    ([*MIXTURE, *REPLICAS, "plan.ep=2", "plan.powersgd=2"], "plan.ep = 2 with plan.zero = 0 spreads each over"),
    ([*REPLICAS, "plan.gather=int8"], "rounds weights that are all-gathered, and none are sharded"),
    ([*MIXTURE, "plan.shard=2", "plan.zero=1", "plan.ep=2", "plan.gather=int8"], "with plan.ep = 2 no experts are"),
    (["plan.shard=4", "plan.zero=2", "plan.secondary_shard=2"], "and plan.zero = 2 keeps them gathered"),
    (["plan.shard=4", "plan.zero=3", "plan.secondary_shard=3"], "is no smaller part of the 4 ranks"),
    (["plan.shard=4", "plan.zero=3", "plan.tp=2", "plan.secondary_shard=2"], "those that plan.tp = 2 cuts"),
    (["plan.shard=4", "plan.zero=1", "plan.grad_reduce_node=2"], "is for gradients that are rounded over shards, and"),
    ([*INT8, "plan.grad_reduce_node=2"], "is for gradients that are rounded over shards, and no weight is sharded"),
    (
        ["plan.shard=4", "plan.zero=1", "plan.grad_reduce=int8", "plan.grad_reduce_node=4"],
        "plan.grad_reduce_node = 4 is no smaller part of the 4 ranks that share the weights",
    ),
    (["plan.shard=4", "plan.zero=1", "plan.grad_reduce=int8", "plan.grad_reduce_node=0"], "plan.grad_reduce_node = 0"),
    (["plan.replicate=1", "plan.sync_every=4"], "is for replicas that sync rarely, and plan.replicate = 1"),
    (
        [*REPLICAS, "faults.live=true", "plan.sync_every=4", "plan.outer_quant=int8"],
        "cannot be combined with plan.outer_quant, which sends",
    ),
    (
        [*REPLICAS, "faults.live=true", "plan.sync_every=4", "optim.sync_warmup=2"],
        "cannot be combined with optim.sync_warmup, which adds",
    ),
    ([*REPLICAS, "faults.live=true", "faults.memory_every=4"], "with faults.live replicas have the state"),
    ([*REPLICAS, "faults.spares=1"], "faults.spares = 1 take the place of replicas that are lost, which faults.live"),
    ([*REPLICAS, "faults.live=true", "faults.spares=-1"], "faults.spares"),
    ([*REPLICAS, "faults.live=true", "faults.spares=1", "plan.sync_every=4"], "plan.sync_every lets replicas part"),
    ([*REPLICAS, "plan.sync_every=0"], "plan.sync_every = 0 is not a count"),
    ([*REPLICAS, "plan.sync_every=4", "steps=3"], "plan.sync_every = 4 is more than the steps = 3"),
    ([*REPLICAS, "plan.sync_every=4", "optim.sync_warmup=9", "steps=9"], "sync_warmup = 9 is not shorter than the run"),
    ([*REPLICAS, "optim.sync_warmup=9"], "optim.sync_warmup = 9 is of an outer loop"),
    ([*REPLICAS, "plan.outer_quant=int8"], "plan.outer_quant = int8 is of an outer loop"),
    ([*REPLICAS, "plan.outer_fragments=2"], "plan.outer_fragments = 2 is of an outer loop"),
    ([*REPLICAS, "optim.outer_lr=0.5"], "optim.outer_lr = 0.5 is not used"),
    ([*REPLICAS, "plan.sync_every=4", "optim.outer_momentum=0.5"], "plan.outer = average takes no outer step"),
    ([*REPLICAS, "plan.sync_every=4", "plan.outer_fragments=5"], "plan.outer_fragments = 5 is more than"),
    ([*REPLICAS, "plan.sync_every=4", "plan.deterministic=true"], "plan.sync_every = 4 makes other mathematics"),
    ([*REPLICAS, "plan.sync_every=4", "plan.zero=3", "plan.cpu_offload=true"], "plan.cpu_offload keeps them in host"),
    (
        [*REPLICAS, "plan.sync_every=4", "plan.precision=bf16", "optim.master_weights=split"],
        "optim.master_weights = split has none",
    ),
    (
        [*REPLICAS, "plan.sync_every=4", "plan.outer_quant=int8", "plan.tp=2", "arch.ffn=100"],
        "cuts blocks.0.mlp.down.weight within a block of 100 elements",
    ),
    ([*MIXTURE, *REPLICAS, "plan.sync_every=4", "plan.ep=2"], "borrows its ranks from cp = 1"),
    ([*REPLICAS, "plan.sync_every=4", "plan.outer=diloco", "optim.outer_momentum=1.0"], "out of range"),
    (["steps=0"], "is not a count"),
    (["seed=-1"], "is negative"),
    (["seed=9223372036854775808"], "more than 63 bits"),
    (["optim.beta2=1.0"], "out of range"),
    (["optim.name=sgd", "optim.momentum=1.0"], "optim.momentum = 1.0 is out of range"),
    (["optim.eps=0.0"], "optim.eps = 0.0 is out of range"),
    (["optim.eps=nan"], "optim.eps = nan is out of range"),
    (["faults.restarts=-1"], "faults.restarts = -1 is negative"),
    (["faults.not_finite=-1"], "faults.not_finite = -1 is negative"),
    (["faults.compare_every=-5"], "faults.compare_every = -5 is negative"),
    (["faults.hang_seconds=0.0"], "faults.hang_seconds = 0.0 is out of range"),
    (["faults.grace_seconds=-1.0"], "faults.grace_seconds = -1.0 is out of range"),
    (["faults.meet_seconds=nan"], "faults.meet_seconds = nan is out of range"),
    (["faults.spike=nan"], "faults.spike = nan is out of range"),
    (["faults.straggler=-1.0"], "faults.straggler = -1.0 is out of range"),
    (["data.eval_fraction=0.9"], "out of range"),
    (["data.pack=documents", "data.mask_documents=true"], "has no meaning"),
    (['data.mix=[{source="a", weight=0.0}]'], "is not positive"),
    (['data.mix=[{source="a"}]', "data.source=b"], "data.source = b has no meaning beside data.mix"),
    (['data.mix=[{source="a"}]', "data.field=body"], "data.field = body has no meaning beside data.mix"),
    (['data.mix=[{source="a"}]', "data.format=jsonl"], "data.format = jsonl has no meaning beside data.mix"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_what_bf16_states_are_told_to_do_is_enough(precision):
    words = ["optim.state_dtype=bf16", f"plan.precision={precision}"]
    with pytest.raises(InputError) as caught:
        load.load(None, words, default_ranks=1)
    (problem,) = caught.value.problems
    told = re.findall(r"(\S+) = (\w+)", problem.remedy)
    load.load(None, [*words, *(f"{key}={value}" for key, value in told)], default_ranks=1)


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_wrong_pair_is_told_with_a_remedy(words, sentence):
    with pytest.raises(InputError) as caught:
        load.load(None, words, default_ranks=2)
    told = [problem for problem in caught.value.problems if sentence in problem.text]
    assert told, str(caught.value)
    assert all(problem.remedy for problem in told)


@pytest.mark.parametrize(
    "words",
    [
        ["plan.replicate=2", "plan.ep=2"],
        ["plan.cp=3", "plan.ep=3", "sequence=240"],
        ["plan.shard=2", "plan.cp=3", "plan.zero=3", "plan.ep=6", "sequence=240"],
        ["plan.shard=4", "plan.zero=1", "plan.ep=2"],
    ],
    ids=["replicate", "cp", "shard-and-cp", "half-of-shard"],
)
def test_experts_borrow_ranks_of_data_and_context(words):
    assert load.load(None, [*MIXTURE, *words]).run.plan.ep > 1


@pytest.mark.parametrize(
    "words",
    [["plan.replicate=4", "plan.grad_accum=2"], ["plan.replicate=2", "plan.shard=4", "plan.zero=3"], [*MIXTURE]],
    ids=["replicate", "hybrid", "experts"],
)
def test_deterministic_sums_are_for_powers_of_two(words):
    plan = load.load(None, ["plan.deterministic=true", *words]).run.plan
    assert plan.deterministic
    assert str(plan).endswith("deterministic")


def test_expert_choice_is_allowed_with_its_warning():
    words = ["arch.experts=4", "arch.expert_ffn=8", "arch.router=expert_choice", "arch.capacity=2.0"]
    (warning,) = check.warnings(load.load(None, words).run)
    assert "depends on later tokens" in warning
    assert check.warnings(load.load(None).run) == []


BATCHES = [
    (["batch=7"], 2), (["batch=7", "plan.microbatch=2"], 2), (["batch=9", "plan.grad_accum=4"], 2),
    (["batch=8", "plan.microbatch=3"], 2), (["batch=12", "plan.microbatch=5", "plan.grad_accum=7"], 3),
    (["batch=1000000007", "plan.microbatch=999999937"], 8), (["batch=3"], 4),
]  # fmt: skip


@pytest.mark.parametrize(("words", "ranks"), BATCHES, ids=str)
def test_every_remedy_for_a_batch_is_a_possible_one(words, ranks):
    _, (problem,) = load.examine(None, words, ranks=ranks)
    for remedy in problem.remedy.removeprefix("set ").split(", or "):
        said = [f"{key}={value}" for key, value in re.findall(r"([\w.]+) = (\d+)", remedy)]
        assert said
        _, found = load.examine(None, [*words, *said], ranks=ranks)
        assert not found, remedy


@pytest.mark.parametrize("deterministic", ["true", "false"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_remedies_for_bf16_states_work(precision, deterministic):
    words = [f"plan.precision={precision}", f"plan.deterministic={deterministic}"]
    with pytest.raises(InputError) as error:
        load.load(None, [*words, "optim.state_dtype=bf16"])
    (problem,) = error.value.problems
    load.load(None, words)  # without optim.state_dtype
    offered = re.findall(r"([a-z_]+\.[a-z_]+) = ([a-z0-9]+)", problem.remedy)
    assert bool(offered) == (deterministic == "false")
    if offered:
        words = [*words, "optim.state_dtype=bf16", *(f"{key}={value}" for key, value in offered)]
        assert load.load(None, words).run.optim.state_dtype == "bf16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan.replicate=1",), "set plan.replicate to 2 or more"),
        (("plan.replicate=2", "plan.deterministic=true"), "without plan.deterministic; leave plan.deterministic out"),
        (("plan.replicate=2", "plan.shard=2", "plan.zero=1"), "without plan.zero; leave plan.zero out"),
        (("plan.replicate=2", "plan.tp=2"), "without plan.tp; leave plan.tp out"),
        (("plan.replicate=2", "plan.sync_every=2"), "without plan.sync_every"),
        (("plan.replicate=2", "plan.precision=fp16"), "use plan.precision = bf16"),
        (("plan.replicate=2", "optim.name=lamb"), "use adamw, sgd, lion"),
        (("plan.replicate=2", "plan.staleness=-1"), "0 is synchronous"),
    ],
)
def test_asynchronous_replicas_are_refused_what_they_cannot_have(words, said):
    with pytest.raises(InputError) as caught:
        load.load(None, ["arch.preset=tiny", "batch=8", "plan.staleness=1", *words])
    assert said in str(caught.value)
