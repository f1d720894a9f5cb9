"""What a plan is sought for: a model, a batch and machines, and what of the plan is not to be chosen."""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Literal

import msgspec

from meshwright.config.rules.tuning import multiplies_codes
from meshwright.cost.flops import document_span
from meshwright.cost.job import Job, MasterWeights, StateDtype
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.stacks import Stack
from meshwright.spec.arch import Arch
from meshwright.spec.optimizers import DESCRIPTIONS, in_state_dtype
from meshwright.spec.plan import Plan, Precision
from meshwright.spec.quantized import FORMATS

Vary = Literal["precision", "optimizer", "batch", "communication"]
# What ranks may send otherwise: rounded gradients, rounded weights (ZeRO++'s qwZ), both, or factors of a usual rank.
COMMUNICATION: tuple[dict[str, Any], ...] = (
    {"grad_reduce": "bf16"},
    {"grad_reduce": "int8"},
    {"gather": "int8"},
    {"grad_reduce": "int8", "gather": "int8"},
    {"powersgd": 4},
)
UnknownHost = Literal[
    "last", "never", "too"
]  # whether plans rest on a host of which nothing is known; last: if need be
TRAINED: tuple[Precision, ...] = ("bf16", "fp8", "fp16", "fp32")  # what a search may choose from, the usual first


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known before a plan is chosen."""

    arch: Arch
    sequence: int
    batch: int  # sequences in one optimizer step
    precision: Precision
    cluster: Cluster
    stack: Stack
    masked: bool = False  # attention is masked at document boundaries
    document_tokens: float | None = None  # mean length of the documents masked; None: nobody knows, or not masked
    master_weights: MasterWeights = "fp32"
    state_dtype: StateDtype = "fp32"
    optimizer: str = "adamw"
    fixed: dict[str, Any] = {}  # fields of the plan that are given, by name
    vary: tuple[Vary, ...] = ()  # numerics to search over as well
    unknown_host: UnknownHost = "last"
    limit_bytes: float = math.inf  # of a GPU's memory that may be used; machines have no more than that

    @property
    def tokens(self) -> int:
        """Positions in one optimizer step."""
        return self.batch * self.sequence

    @property
    def has_host(self) -> bool:
        """Whether there is host memory to count on."""
        return self.unknown_host == "too" or self.cluster.host_bytes > 0

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk to count on."""
        return self.unknown_host == "too" or self.cluster.disk_bytes > 0

    def with_unknown_host(self, how: UnknownHost) -> "Question":
        """The same question with plans on unknown hosts tried last, never or beside the others."""
        return msgspec.structs.replace(self, unknown_host=how)

    def with_fixed(self, fields: Mapping[str, Any]) -> "Question":
        """The same question with more fields given beside the user's own, which come first."""
        return msgspec.structs.replace(self, fixed={**fields, **self.fixed})

    def on(self, machines: Cluster) -> "Question":
        """The same question of other machines, of whose memory no more may be used."""
        memory = min(machines.gpu.memory_bytes, self.limit_bytes)
        gpu = msgspec.structs.replace(machines.gpu, memory_bytes=memory)
        return msgspec.structs.replace(self, cluster=msgspec.structs.replace(machines, gpu=gpu))

    @property
    def updates_whole(self) -> bool:
        """Whether its optimizer updates whole tensors, whose states are fp32, on the device."""
        return DESCRIPTIONS[self.optimizer].whole

    @property
    def freezes(self) -> bool:
        """Whether some weights are frozen, or a copy of them."""
        return self.arch.tuning is not msgspec.UNSET

    @property
    def may_multiply_in_fp8(self) -> bool:
        """Whether its weights may be: those that are trained, or a base that is held so."""
        return not self.freezes or multiplies_codes(self.arch)

    @property
    def may_offload_states(self) -> bool:
        """Whether the states of what is trained may be offloaded: several ranks share them out instead."""
        return self.cluster.gpus == 1 and not self.updates_whole and not self.arch.copies_reference

    @property
    def is_limited(self) -> bool:
        """Whether the GPUs have more memory than may be used."""
        return self.cluster.gpu.memory_bytes == self.limit_bytes

    def job(self, plan: Plan) -> Job:
        """One plan of this question, ready to be priced."""
        return Job(
            arch=self.arch,
            plan=plan,
            sequence=self.sequence,
            cluster=self.cluster,
            stack=self.stack,
            masked=self.masked,
            span=document_span(self.sequence, self.document_tokens) if self.document_tokens else None,
            master_weights=self.master_weights,
            state_dtype=self.state_dtype,
            optimizer=self.optimizer,
        )


def variants(question: Question) -> Iterator[Question]:
    """The question itself, and one for each other batch, precision and kind of states that it lets vary."""
    batches = (question.batch,)
    if "batch" in question.vary:  # within a factor of two: farther, the learning rate would have to be tuned again
        batches = tuple(dict.fromkeys((question.batch, max(question.batch // 2, 1), question.batch * 2)))
    precisions = (question.precision,)
    if "precision" in question.vary:
        able = (
            precision
            for precision in TRAINED
            if question.cluster.gpu.peak(precision) > 0 and (precision != "fp8" or question.may_multiply_in_fp8)
        )
        precisions = tuple(dict.fromkeys((question.precision, *able)))
    for batch in batches:
        for precision in precisions:
            one = msgspec.structs.replace(question, batch=batch, precision=precision)
            for each in _optimizers(one) if "optimizer" in question.vary else (one,):
                yield from _communications(each) if "communication" in question.vary else (each,)


def _communications(question: Question) -> Iterator[Question]:
    """What its ranks send: as it is; weights once more inside a domain (hpZ), which is exact; or rounded."""
    yield question
    domain, gpus = question.cluster.domain, question.cluster.gpus
    neighbours: dict[str, Any] = {"secondary_shard": domain}
    rounded = [] if question.freezes else list(COMMUNICATION)
    forms = [*rounded, *([neighbours] if 1 < domain < gpus and not question.arch.compared else [])]
    if 1 < domain < gpus and rounded:  # ZeRO++, whose gradients are summed inside a domain first
        in_levels = {**COMMUNICATION[3], "grad_reduce_node": domain}
        forms += [in_levels, {**neighbours, **in_levels}]
    for form in forms:
        if not form.keys() & question.fixed.keys():
            yield question.with_fixed(form)


def _optimizers(question: Question) -> Iterator[Question]:
    """The forms of its optimizer: fp32 master weights; bf16 weights alone; states of 16 bits beside those or offloaded.

    And states of 8 or 4 bits, where its rule has them, beside either. Never another optimizer, which would learn by
    other rates: that is for the user to choose.
    """
    yield question
    if question.precision not in ("bf16", "fp8"):
        return
    usual = question.master_weights == "fp32" and question.state_dtype == "fp32"
    if usual and not question.fixed.get("deterministic"):
        dtypes = ("fp32",) if question.updates_whole else ("fp32", "bf16")
        for master_weights, state_dtype in product(("none", "split"), dtypes):
            yield msgspec.structs.replace(question, master_weights=master_weights, state_dtype=state_dtype)
        for master_weights, state_dtype in product(("none", "split", "fp32"), FORMATS):
            if (optimizer := in_state_dtype(question.optimizer, state_dtype)) != question.optimizer:
                form = {"master_weights": master_weights, "state_dtype": state_dtype, "optimizer": optimizer}
                yield msgspec.structs.replace(question, **form)
    if usual and question.may_offload_states:
        yield msgspec.structs.replace(question, state_dtype="bf16")
