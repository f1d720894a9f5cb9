"""Rules of a run's own numbers, whatever its plan: counts, addresses, data, objective; and of faults."""

from collections.abc import Callable, Iterator
from operator import attrgetter

from meshwright.config.rules.arch import (
    ARCH_COUNTS,
    ARCH_LIMIT,
    VOCAB_LIMIT,
)
from meshwright.config.run import Data, Run
from meshwright.spec.addresses import has_secret, is_address, without_secret
from meshwright.spec.plan import AXES
from meshwright.spec.problem import Problem

POSITIVE = (
    "steps", "sequence", "batch", "plan.microbatch", "plan.grad_accum", *(f"plan.{axis}" for axis in AXES), "plan.ep",
    "plan.chunks", "plan.sync_every", "plan.outer_fragments", "plan.secondary_shard", "plan.grad_reduce_node",
    "optim.var_update_scaler", "optim.local_step_scaler", "optim.local_step_clipper", "log.every", "eval.batches",
    "checkpoint.keep_last",
)  # fmt: skip
NATURAL = (
    "seed", "eval.every", "checkpoint.every", "checkpoint.keep_every", "eval.sample_tokens", "optim.warmup",
    "eval.prompts_every", "eval.command_every",
    "optim.sync_warmup", "optim.freeze_step", "faults.restarts", "faults.not_finite", "faults.compare_every",
    "faults.check_matmuls_every", "faults.memory_every", "faults.spares", "arch.experts", "arch.shared_experts",
    "plan.powersgd",
    *(f"arch.{name}" for name in ("window", "full_every", "no_rope_every", "dense_layers", "mtp_layers")),
    *(f"arch.{name}" for name in ("kv_rank", "q_rank", "rope_dim", "v_dim")),
)  # fmt: skip
MOST = 10**12  # steps, samples or tokens: a typing slip, and still exact wherever they are counted
SEEDS = 2**63  # what fits a signed word, in which seeds travel and are kept
MOST_LIVE_RANKS = 1023  # whose wishes fit beside each other in one number


def _counts(run: Run) -> Iterator[Problem]:
    for key in (*POSITIVE, *(f"arch.{name}" for name in ARCH_COUNTS)):
        if (value := attrgetter(key)(run)) < 1:
            yield Problem(f"{key} = {value} is not a count", f"give {key} a whole number of at least 1", key)
    for key in NATURAL:
        if (value := attrgetter(key)(run)) < 0:
            yield Problem(f"{key} = {value} is negative", f"give {key} a whole number of at least 0", key)
    told = ("seed", *(("plan.microbatch", "plan.grad_accum") if run.batch > MOST else ()))  # which divide the batch
    for key in (*POSITIVE, *NATURAL):
        if (value := attrgetter(key)(run)) > MOST and key not in told:
            yield Problem(f"{key} = {value} is beyond any run", f"use at most {MOST}", key)
    if run.seed >= SEEDS:
        yield Problem(f"seed = {run.seed} has more than 63 bits", f"use 0 to {SEEDS - 1}", "seed")
    for name in ARCH_COUNTS:
        limit = VOCAB_LIMIT if name == "vocab" else ARCH_LIMIT
        if (value := getattr(run.arch, name)) > limit:
            yield Problem(f"arch.{name} = {value} is beyond any model", f"use at most {limit}", f"arch.{name}")


def _addresses(run: Run) -> Iterator[Problem]:
    """Addresses are kept in run folders and shown on screens, so none may hold a secret."""
    named = {"data.source": run.data.source, "checkpoint.remote": run.checkpoint.remote, "init.from": run.init.folder}
    for key, address in [*named.items(), *(("data.mix", one.source) for one in run.data.mix)]:
        if address and has_secret(address):
            what = f"{key} has a password or a signature in it ({without_secret(address)}), and run folders keep both"
            yield Problem(what, "leave it out: fsspec reads credentials from their own files and variables", key)
    if (remote := run.checkpoint.remote) and not is_address(remote):
        what = f"checkpoint.remote = {remote!r} is not an address"
        yield Problem(what, "use one such as s3://bucket/runs/a, or leave it out", "checkpoint.remote")


def _data(run: Run) -> Iterator[Problem]:
    if run.data.pack == "documents" and run.data.mask_documents:
        what = "data.mask_documents = true has no meaning for data.pack = documents, where a sample is one document"
        yield Problem(what, "leave one of them out", "data.mask_documents")
    if run.data.pack == "best_fit" and run.data.mask_documents:
        what = "data.pack = best_fit masks documents by itself, without data.mask_documents"
        yield Problem(what, "leave data.mask_documents out", "data.mask_documents")
    if run.data.is_chat and run.data.pack == "stream":
        what = "data.pack = stream cuts one long stream into samples, and data.format = chat has samples of its own"
        yield Problem(what, "leave data.pack out, or set data.pack = best_fit or documents", "data.pack")
    for name in () if run.data.is_chat else ("template", "train_on", "truncation_side", "columns"):
        if (value := getattr(run.data, name)) != getattr(Data(), name):
            what = f"data.{name} = {value} is for data.format = chat, and data.format = {run.data.format}"
            yield Problem(what, f"set data.format = chat, or leave data.{name} out", f"data.{name}")
    if run.epochs and run.data.mix:
        what = f"epochs = {run.epochs:g} counts one source, and those of data.mix have epochs of their own length"
        yield Problem(what, "state steps; `train` prints how many are an epoch of each source", "epochs")
    # With several sources each has its own settings, and those beside them would be ignored.
    for name in ("source", "format", "field", "columns") if run.data.mix else ():
        if (value := getattr(run.data, name)) != getattr(Data(), name):
            what = f"data.{name} = {value} has no meaning beside data.mix, whose entries have their own {name}"
            yield Problem(what, f"set {name} in the entries of data.mix, and leave data.{name} out", f"data.{name}")


def _preference(run: Run) -> Iterator[Problem]:
    """What DPO asks of a run: a reference, and pairs of answers."""
    if run.objective != "dpo":
        if run.dpo.beta != 0.1:
            yield Problem(
                f"dpo.beta = {run.dpo.beta} is of DPO, and objective = {run.objective}", "leave it out", "dpo.beta"
            )
        return
    if not 0 < run.dpo.beta < 1e3:  # a NaN lands here too
        yield Problem(f"dpo.beta = {run.dpo.beta} is out of range", "use a number above 0, usually 0.1", "dpo.beta")
    if not all(source.format == "chat" for source in run.data.sources) or run.data.pack != "best_fit":
        what = "objective = dpo has pairs of answers, each in one row"
        yield Problem(what, "set data.format = chat, and leave data.pack out", "data.format")
    if run.data.train_on == "all":
        yield Problem("objective = dpo compares answers, not questions", "leave data.train_on out", "data.train_on")


def compared(run: Run) -> Iterator[Problem]:
    """What it cannot have yet."""
    if run.objective != "dpo":
        return
    others = {
        "plan.compile": run.plan.compile,
        "plan.deterministic": run.plan.deterministic,
        "plan.sync_every": run.plan.sync_every > 1,
        "plan.secondary_shard": run.plan.secondary_shard > 1,
        "log.noise_scale": run.log.noise_scale,
        "optim.adascale": run.optim.adascale,
    }
    for name in (name for name, is_set in others.items() if is_set):
        yield Problem(f"objective = dpo is not offered with {name}", f"leave {name} out", name)


def _live(run: Run) -> Iterator[Problem]:
    """Replicas that can do without each other must be alike, whole, and add up plain gradients in every step."""
    plan = run.plan
    if run.faults.spares and not run.faults.live:
        what = (
            f"faults.spares = {run.faults.spares} take the place of replicas that are lost, which faults.live lets go"
        )
        yield Problem(what, "set faults.live = true, or leave faults.spares out", "faults.spares")
    if not run.faults.live:
        return
    if plan.replicate == 1:
        what = "faults.live lets replicas go on without one that is lost, and plan.replicate = 1 has no other"
        yield Problem(
            what, "set plan.replicate to 2 or more, beside plan.shard, or leave faults.live out", "faults.live"
        )
    if run.faults.memory_every:
        what = "faults.memory_every is for ranks that all start again, and with faults.live replicas have the state"
        yield Problem(what, "leave one of them out", "faults.memory_every")
    ranks = plan.world + run.faults.spares * (plan.world // plan.replicate)
    if ranks > MOST_LIVE_RANKS:
        what = f"faults.live is for up to {MOST_LIVE_RANKS} ranks, spares among them, and there are {ranks}"
        yield Problem(what, "use fewer, or leave faults.live out", "faults.live")
    refused = {
        "plan.outer_fragments": (plan.outer_fragments > 1, "syncs parts of the model at different steps"),
        "plan.outer_quant": (plan.outer_quant != "none", "sends codes in collectives of its own"),
        "optim.sync_warmup": (run.optim.sync_warmup > 0, "adds up gradients in collectives of its own"),
        "plan.staleness": (plan.staleness is not None, "lets replicas part"),
        f"optim.name = {run.optim.name}": (run.compresses, "keeps errors of its own on each replica"),
        "plan.grad_reduce": (plan.grad_reduce != "default", "rounds what replicas send in ways of its own"),
        "plan.powersgd": (plan.powersgd > 0, "factors what replicas send, and keeps errors of its own on each"),
        "plan.optimizer_offload": (plan.optimizer_offload != "none", "has states that no peer can be given"),
        "plan.cpu_offload": (plan.cpu_offload, "has states that no peer can be given"),
        "arch.router_load_bias": (run.arch.router_load_bias, "counts tokens over all replicas"),
        "log.noise_scale": (run.log.noise_scale, "compares the gradients of all replicas"),
        "optim.adascale": (run.optim.adascale, "compares the gradients of all replicas"),
        "objective = dpo": (run.objective == "dpo", "counts pairs, not tokens"),
    }
    for key, (is_used, why) in refused.items():
        if is_used:
            yield Problem(
                f"faults.live cannot be combined with {key}, which {why}", "leave one of them out", key.split()[0]
            )
    if run.faults.spares and plan.has_outer_loop:
        what = "faults.spares take the part of a lost replica in every step, and plan.sync_every lets replicas part"
        yield Problem(what, "leave one of them out", "faults.spares")
    if plan.ep > 1 and not plan.zero:
        what = f"faults.live needs every replica to be whole, and plan.ep = {plan.ep} shares experts among replicas"
        yield Problem(what, "set plan.zero = 1 or more with plan.shard, or leave faults.live out", "plan.ep")


def need_own_starter(run: Run, launcher: str, has_memory: bool = False) -> Iterator[Problem]:
    """What a run asks for that no ranks have which somebody else starts; `has_memory`: our own start of one machine."""
    is_asked = {"faults.live": run.faults.live, "faults.spares": run.faults.spares}
    is_asked["faults.memory_every"] = run.faults.memory_every and not has_memory
    for key in (key for key in is_asked if is_asked[key]):
        what = f"{key} needs our own starter, which starts ranks again, and not {launcher}"
        own = "`meshwright train` on one machine, or `meshwright launch --node-rank` on each of several"
        yield Problem(what, f"use {own}, or leave {key} out", key)


def divide_replicas(run: Run, machines: int) -> Iterator[Problem]:
    """Replicas that can do without each other are whole on one machine, or the loss of one would take two of them."""
    there = run.plan.replicate + run.faults.spares
    if run.faults.live and there % machines:
        what = f"faults.live needs whole replicas on each of {machines} machines, and there are {there}"
        remedy = "make plan.replicate and faults.spares together a multiple of the machines, or leave faults.live out"
        yield Problem(what, remedy, "plan.replicate")


COUNT_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (_counts,)

DATA_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (
    _data,
    _preference,
    compared,
    _addresses,
)

FAULT_RULES: tuple[Callable[[Run], Iterator[Problem]], ...] = (_live,)
