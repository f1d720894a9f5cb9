"""Run: everything decided. The mathematics (what is computed) beside the Plan (how it is spread over machines)."""

import hashlib
from typing import Any, Literal

import msgspec

from meshwright.config.renamed import former
from meshwright.spec import communication
from meshwright.spec.arch import Arch
from meshwright.spec.optimizers import OPTIMIZERS
from meshwright.spec.plan import Plan
from meshwright.spec.tuning import Adapter, Tuning


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the supervisor and of the checks inside a run."""

    restarts: int = 3  # in a row that bring no newer checkpoint; those that do are free
    grace_seconds: float = 30.0  # from SIGTERM to the end of the save
    hang_seconds: float = 5.0  # the least stillness that can be a hang; learnt limits only raise it
    meet_seconds: float = 30.0  # at the start, without a newcomer, until the ranks that are missing are given up
    not_finite: int = 5  # steps in a row whose gradient is not finite
    spike: float = 12.0  # robust z-score of loss or gradient norm that is worth a warning; 0: never
    straggler: float = 1.3  # own work of a rank ÷ the others' that is worth a warning; 0: never
    compare_every: int = 100  # steps between comparisons of the replicas' weights; 0: never
    check_matmuls_every: int = 0  # steps between checks of one linear layer's matmuls by checksum; 0: never
    live: bool = False  # replicas go on without one that is lost, which comes back with the state of a peer
    spares: int = 0  # replicas more, that wait until one is lost or named as faulty, and take its place
    memory_every: int = 0  # steps between in-memory checkpoints, which restarted ranks resume from; 0: none


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some text or tokenized shards, and their weight in the data mix."""

    source: str  # a file, a folder or a glob; "stdlib": the Python standard library's own source
    weight: float = 1.0
    format: Literal["auto", "text", "jsonl", "parquet", "chat", "nanogpt", "llmc", "megatron"] = "auto"
    field: str = "text"  # of JSON lines and Parquet: where the text is
    columns: tuple[str, ...] = ()  # of chat: fields under other names, such as "prompt=question"


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is read, how it becomes tokens, how tokens become samples."""

    source: str = "stdlib"
    format: Literal["auto", "text", "jsonl", "parquet", "chat", "nanogpt", "llmc", "megatron"] = "auto"
    field: str = "text"
    columns: tuple[str, ...] = ()
    mix: tuple[Source, ...] = ()  # several sources by weight, instead of `source`
    tokenizer: str = "train"  # "train": a byte-level BPE of arch.vocab entries; else a tokenizer.json or its folder
    end_token: int | None = None  # closes a document; None: the tokenizer's own. Ready shards must say it to be masked
    # Of chat: a named template (chatml, llama3, gemma, alpaca, plain) or a .jinja file; empty: the model folder's own.
    template: str = ""
    # Of chat, what is trained: every answer; those of the completion; every token; the last answer.
    train_on: Literal["assistant", "completion", "all", "last"] = "assistant"
    truncation_side: Literal["right", "left"] = "right"  # of chat: where a sample longer than the sequence is cut
    # Windows of one long stream; a document (or part) a sample; or as many documents as fit in one, none seeing another
    # and positions from 0 in each: best_fit, which is usual for chat.
    pack: Literal["stream", "documents", "best_fit"] = "stream"
    mask_documents: bool = False  # stream only: no attention and no prediction across a document's end
    eval_fraction: float = 0.01  # share of the samples held out for the validation loss

    @property
    def sources(self) -> tuple[Source, ...]:
        own = Source(source=self.source, format=self.format, field=self.field, columns=self.columns)
        return self.mix or (own,)

    @property
    def is_chat(self) -> bool:
        return any(source.format == "chat" for source in self.sources)

    @property
    def masks(self) -> bool:
        """Whether several documents are in a sample, none of which sees another."""
        return self.mask_documents or self.pack == "best_fit"


class Init(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"folder": "from"}):
    """Where the weights begin."""

    folder: str = ""  # a Hugging Face folder, or a run (RUN, RUN@STEP, RUN@best); empty: random, from the seed
    optimizer_state: bool = False  # and the optimizer's state, from that run's checkpoint of the same step


class Optim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer and its learning rate."""

    name: Literal[
        "adamw", "sgd", "adafactor", "sm3", "lion", "lamb", "muon", "onebit_adam", "zero_one_adam", "onebit_lamb"
    ] = "adamw"
    lr: float = 3e-4  # the peak learning rate
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: int = 0  # steps of linear rise
    decay_fraction: float = 0.2  # wsd only: the share of the steps spent falling
    min_lr_ratio: float = 0.1  # the last learning rate ÷ the peak
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    eps1: float = 1e-30  # adafactor only: added to squares of gradients
    eps2: float = 1e-3  # adafactor only, with relative_step: the least RMS of a weight
    relative_step: bool = False  # adafactor only: the learning rate is a share of a weight's own RMS
    momentum: float = 0.9  # sgd, sm3 and muon, there 0.95: the share of the buffer that stays
    nesterov: bool = False  # sgd only: the buffer as it will be, after one more step of momentum
    weight_decay: float = 0.1  # of matrices, not of vectors; by sgd added to the gradient, by others apart from it
    grad_clip: float = 1.0  # largest global gradient norm; 0: measured, never clipped
    # Of plan.sync_every: the step that replicas take together, and how many steps of plain training come first.
    outer_lr: float = 0.7  # slowmo, diloco: 1 with no momentum is the average
    outer_momentum: float = 0.9  # slowmo's beta, or of diloco's Nesterov momentum
    sync_warmup: int = 0  # steps in which gradients are summed over all replicas (post-local SGD)
    # onebit_adam, onebit_lamb, zero_one_adam: the last step that updates the variance, and of the first two the last
    # that sums gradients exactly; 0: a fifth of the run.
    freeze_step: int = 0
    var_update_scaler: int = 16  # zero_one_adam only: after so many updates of the variance they are half as frequent
    local_step_scaler: int = 32768  # zero_one_adam only: steps after which replicas sync half as often
    local_step_clipper: int = 16  # zero_one_adam only: the most steps between two syncs
    # bf16, beside bf16 weights (master_weights split or none) or offloaded: rounded stochastically. int8, int4 or
    # fp8 (e4m3), on the device, of adamw, sgd and lion: codes in blocks of whole rows, the same under every plan.
    state_dtype: Literal["fp32", "bf16", "int8", "int4", "fp8"] = "fp32"
    # What keeps an update smaller than the last bit of a bf16 weight: an fp32 master weight; a split one, whose 16 low
    # bits are beside the bf16 ones; or none, with stochastic rounding.
    master_weights: Literal["fp32", "split", "none"] = "fp32"
    stochastic_rounding: bool = False  # of bf16 weights without master weights: right on average
    freeze: tuple[str, ...] = ()  # weights that are not trained, by name or pattern: "embed", "blocks.0.*"
    adascale: bool = False  # the rate is multiplied by what a step is worth in steps of the base batch
    adascale_batch: int = 0  # sequences of the base batch, for which lr is right; 0: those of a microbatch


class Dpo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Direct preference optimization, where objective = "dpo" (Rafailov 2023)."""

    # How dearly a step away from the reference is paid, which is the base without its adapter, or a frozen copy.
    beta: float = 0.1


class Eval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The validation loss, texts that the model writes, and a command on the exported model."""

    every: int = 100  # steps between validation losses; 0: only at the end
    batches: int = 4  # global batches in one validation loss
    sample_tokens: int = 120  # tokens generated at the end, at most; 0: none
    prompt: str = ""  # what they continue; empty: the beginning of a validation document
    temperature: float = 0.8
    prompts: tuple[str, ...] | str = ()  # that are continued too: a list, or a file with one a line; of chat, questions
    prompts_every: int = 0  # steps between; 0: only at the end
    # A program and its arguments, run beside training on the model as a Hugging Face folder, which {folder} stands for.
    command: str = ""
    command_every: int = 0  # steps between; 0: only at the end
    command_seconds: float = 3600.0  # after which it is ended


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is printed while training. Records on disk are always complete."""

    every: int = 10  # steps between printed lines
    writers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    noise_scale: bool = False  # measure the gradient noise scale; the end of the run says which batch it suggests


class Checkpoint(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"asynchronous": "async"}
):
    """When the state is saved, and what is kept. None of it changes what is computed."""

    every: int = 100  # steps between saves, and the last step; 0: only when the run is asked to stop
    keep_last: int = 2  # the newest so many saves are kept
    keep_every: int = 0  # and the first from each multiple of this on; 0: no others
    keep_best: bool = True  # and, of those with a validation loss, the one with the lowest
    asynchronous: bool = True  # training goes on while the copy in host memory is written; false: it waits
    # An address (s3://bucket/run) that every saved step is copied to, and fetched from where none is here.
    remote: str = ""


class Goal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked of the planner: kept in the run file as the record of intent. None: the planner chooses."""

    cluster: str | None = None
    network: str | None = None  # between nodes; None: the card's usual
    memory_gib: float | None = None  # of one rank, at most: recomputation is chosen so that it suffices
    host_gib: float | None = None  # of host memory for each GPU; None: as the cluster says
    disk_gib: float | None = None  # of a machine's own disks, likewise
    vary: tuple[
        Literal["precision", "optimizer", "batch", "communication"], ...
    ] = ()  # the mathematics the search may change


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run, every choice made."""

    name: str = "run"
    steps: int = 100
    epochs: float = 0.0  # times that the data is gone through, instead of steps, which then follow from the data
    sequence: int = 256
    batch: int = 16  # sequences in one optimizer step, over the whole job
    seed: int = 1
    # sft: the loss of tokens. dpo: chosen answers are to be likelier than rejected ones, beside what the base says.
    objective: Literal["sft", "dpo"] = "sft"
    arch: Arch
    data: Data = Data()
    init: Init = Init()
    adapter: Adapter = Adapter()
    dpo: Dpo = Dpo()
    optim: Optim = Optim()
    eval: Eval = Eval()
    log: Log = Log()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    goal: Goal = Goal()
    plan: Plan

    def __post_init__(self) -> None:
        """Let the architecture know what of it is trained, so that whoever is given it need not be told."""
        compared = self.objective == "dpo"
        is_whole = self.adapter.kind == "none" and not self.optim.freeze and not compared
        tuned = Tuning(adapter=self.adapter, freeze=self.optim.freeze, compared=compared)
        tuning = msgspec.UNSET if is_whole else tuned
        if self.arch.tuning != tuning:
            msgspec.structs.force_setattr(self, "arch", msgspec.structs.replace(self.arch, tuning=tuning))

    @property
    def tokens(self) -> int:
        """Positions in one optimizer step."""
        return self.batch * self.sequence

    @property
    def trains_on(self) -> Literal["assistant", "completion", "all", "last"]:
        """Which answers are trained; of preferences, what follows the prompt that both have."""
        is_open = self.objective == "dpo" and self.data.train_on == "assistant"
        return "completion" if is_open else self.data.train_on

    @property
    def measures_noise(self) -> bool:
        """Whether the gradient noise scale is measured in every step."""
        return self.log.noise_scale or self.optim.adascale

    @property
    def compresses(self) -> bool:
        """Whether replicas keep their gradients apart, and the optimizer exchanges momenta in one bit."""
        return OPTIMIZERS[self.optim.name].compresses


NOT_MATHEMATICS = ("name", "epochs", "log", "eval", "checkpoint", "faults", "goal", "plan")
ADASCALE_OPTIM = ("adascale", "adascale_batch")
ONEBIT_OPTIM = ("freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
OUTER_OPTIM = ("outer_lr", "outer_momentum", "sync_warmup")  # of plan.sync_every
# Keys that were added later: a default value is left out, so that the digest of an earlier run stays what it was.
ADDED_LATER = {
    "arch": (
        *("dropout", "attention_dropout", "norm_position", "norm_offset", "norm_bias"),
        *("attention_bias", "mlp_bias", "moe_bias", "embed_scale", "residual_scale", "logit_scale", "logit_softcap"),
        *("parallel_residual", "attention_scale", "attention_softcap", "qk_norm", "sinks", "window", "full_every"),
        *("kv_rank", "q_rank", "rope_dim", "v_dim", "rope_local_theta", "rope_share", "rope_interleaved"),
        *("no_rope_every", "rope_beta_fast", "rope_beta_slow", "rope_truncate", "rope_attention", "dense_layers"),
        *("router_score", "router_load_bias", "router_load_rate", "router_groups", "router_top_groups"),
        *("router_renormalise", "router_scale", "mtp_layers", "mtp_loss_weight", "rope_short", "rope_long"),
    ),
    "optim": (
        "master_weights",
        "stochastic_rounding",
        "state_dtype",
        "momentum",
        "nesterov",
        *ADASCALE_OPTIM,
        "eps1",
        "eps2",
        "relative_step",
        "freeze",
        *ONEBIT_OPTIM,
        *OUTER_OPTIM,
    ),
    "init": ("optimizer_state",),
    "data": ("columns", "template", "train_on", "truncation_side"),
}

# Of the plan: replicas that sync rarely are others than one, and compute something else.
OUTER_KEYS = ("replicate", "sync_every", "outer", "outer_fragments", "outer_quant")
FP8_KEYS = ("fp8_scaling", "fp8_accumulate", "fp8_grad")  # of the plan: how its matmuls round


def mathematics(run: Run) -> dict[str, Any]:
    """What decides the weights, whatever the plan: what two runs must agree in for one to resume the other."""
    values = _stated(run)
    for name in FP8_KEYS:
        if run.plan.precision == "fp8" and run.plan.uses(name):
            values[name] = getattr(run.plan, name)
    return values | _of_the_plan(run) | {"precision": run.plan.precision}


def _of_the_plan(run: Run) -> dict[str, Any]:
    """What of a plan is part of the mathematics, where it is used."""
    values: dict[str, Any] = {"tf32": True} if run.plan.tf32 else {}
    if run.optim.adascale:  # which measures the gradients of microbatches
        values["microbatch"] = run.plan.microbatch
    if run.plan.activation_quant != "none":
        values["activation_quant"] = run.plan.activation_quant
    if run.compresses:  # which rounds each replica's momentum
        values["replicate"] = run.plan.replicate
    if run.plan.staleness:  # with 0 it is plain training
        values |= {name: getattr(run.plan, name) for name in ("replicate", "staleness")}
    elif run.plan.has_outer_loop:
        values |= {name: getattr(run.plan, name) for name in OUTER_KEYS}
    return values | communication.mathematics(run.plan)


def _stated(run: Run) -> dict[str, Any]:
    """The keys of the mathematics, those that were added later only where they are used."""
    values = {key: value for key, value in msgspec.to_builtins(run).items() if key not in NOT_MATHEMATICS}
    values["arch"].pop("tuning", None)  # the adapter and what is frozen, which have keys of their own
    if run.adapter.kind == "none":
        del values["adapter"]
    if run.objective == "sft":
        del values["objective"], values["dpo"]
    for table, names in ADDED_LATER.items():
        defaults = {field.name: field.default for field in msgspec.structs.fields(getattr(run, table))}
        for name in names:
            if getattr(getattr(run, table), name) == defaults[name]:
                del values[table][name]
    values["data"]["mix"] = [_without_empty(entry, "columns") for entry in values["data"]["mix"]]
    return values


def _without_empty(table: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != name or value}


def digest(run: Run) -> str:
    """A short name for the mathematics of a run."""
    return digests(run)[0]


def digests(run: Run) -> tuple[str, str]:
    """The digest of a run, then the one it had before keys were renamed."""
    values = mathematics(run)
    texts = (msgspec.json.encode(each, order="deterministic") for each in (values, former(values)))
    today, before = (hashlib.sha256(text).hexdigest()[:8] for text in texts)
    return today, before
