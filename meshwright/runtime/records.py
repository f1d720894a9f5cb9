"""Records: measured facts as JSON lines, written by the trainer, read by everything else."""

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from meshwright.spec.problem import UNDECODABLE


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One optimizer step as one rank saw it."""

    step: int
    loss: float  # sum of token losses ÷ valid tokens, over all ranks that made the update together
    norm: float  # global gradient norm before clipping
    rate: float
    tokens: int  # valid tokens of the step, over the whole job
    seconds: float  # since the previous step, or what came between them, ended
    data_seconds: float  # of those, the device standing still for the loader
    memory_bytes: int  # highest so far on this rank
    flops: float  # the model's, over the whole job, attention in full within documents
    skipped: bool = False  # the gradient was not finite: weights were left alone
    loss_scale: float = 1.0  # fp16 only
    # Replicas that sync rarely: where they met, the mean of all their losses since they last did.
    mean_loss: float | None = None
    staleness: int | None = None  # updates that a parameter server was ahead of the weights; None: there is none
    balance: float | None = None  # MoE: mean balance loss of the layers, 1 when experts share evenly
    # MoE: of any expert of any layer, the most and the fewest choices, over an even share: 1 and 1 at best.
    max_load: float | None = None
    min_load: float | None = None
    reward_margin: float | None = (
        None  # DPO: mean of beta times how much more than the base the chosen answer is preferred
    )
    reward_accuracy: float | None = None  # DPO: the share of pairs where it is
    gradient_variance: float | None = None  # of a token's gradient, over all of them: trace of the covariance
    gradient_square: float | None = None  # of the true gradient's norm, as estimated; both where they are measured
    save_seconds: float = 0.0  # of the step, held up by a checkpoint
    compile_seconds: float = 0.0  # of the step, torch.compile at work
    recovery_seconds: float = 0.0  # of the step, until replicas went on without one that was lost
    began: float = 0.0  # monotonic: when the step before it, or what came between them, ended
    ended: float = 0.0  # when it ended, its save with it, on the device; 0: not known, as of older runs
    flops_causal: float = 0.0  # the same with attention as it is computed; 0: not known, as of older runs
    span: float = 0.0  # mean over positions of the document that each is in; 0: not known
    at: float = 0.0  # the machine's monotonic clock when the record was made, up to a few steps later


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="held"):
    """One validation loss."""

    step: int
    loss: float
    tokens: int
    seconds: float
    began: float = 0.0  # monotonic, as of a step
    ended: float = 0.0
    at: float = 0.0


class TextRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="texts"):
    """What the model wrote after prompts."""

    step: int
    prompts: tuple[str, ...]
    texts: tuple[str, ...]  # behind each
    seconds: float
    began: float = 0.0  # monotonic, as of a step
    ended: float = 0.0
    at: float = 0.0


class ExportRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="export"):
    """Training stood still while the model was written for a command."""

    step: int
    seconds: float
    began: float = 0.0
    ended: float = 0.0
    at: float = 0.0


class CommandRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="command"):
    """What became of a user's command on the model after a step, beside training."""

    step: int
    state: Literal["done", "failed", "skipped", "timeout", "stopped"]
    seconds: float = 0.0
    code: int | None = None  # its exit code, where it has ended by itself
    numbers: dict[str, float] = {}  # that it gave
    text: str = ""  # why it has none, or the last line that it said; and which of its numbers are not finite
    folder: str = ""  # where all that it said and wrote is
    at: float = 0.0


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="attempt"):
    """The ranks stand ready for their first step, at the beginning or after a fault."""

    step: int  # where they begin
    session: str  # which launcher, or job
    number: int  # of the attempt in its session, from 1
    began: float  # monotonic: when the session did
    at: float
    phases: dict[str, float] = {}  # seconds of what came before, in order, up to here


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="event"):
    """Something worth telling: a gradient that was not finite, a spike, a straggler, a passing flip, a failed copy."""

    step: int
    what: Literal["not-finite", "spike", "straggler", "replicas", "matmul", "lost", "back", "upload"]
    text: str
    rank: int | None = None
    at: float = 0.0


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="save"):
    """A checkpoint that is on the disk and was read again."""

    step: int  # the newest one by then
    saved: int  # the step that was saved
    bytes: int
    seconds: float  # from that step's end until it could be resumed from
    bound: Literal["disk", "hashing", "device link"]  # what these seconds went into most
    pause: float = 0.0  # seconds that training was held up for it
    at: float = 0.0


BOUNDS = {"disk": "the disk", "hashing": "hashing on these cores", "device link": "the link from the device"}


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The session is over, and said so itself."""

    step: int
    at: float
    finished: bool = False  # all steps were made; else it was asked to stop
    save_seconds: float = 0.0  # before that, waiting for the last save to be on the disk


Timed = EvalRecord | TextRecord | ExportRecord  # what training stood still for between two steps
Record = StepRecord | Timed | CommandRecord | AttemptRecord | EventRecord | SaveRecord | EndRecord


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended; the last line of `train --json`."""

    state: Literal["done"] = "done"
    step: int
    first_loss: float
    loss: float
    validation_loss: float | None
    tokens_per_second: float
    seconds_to_first_loss: float
    seconds: float
    peak_bytes: int
    mfu: float | None = None  # attention counted in full, of the data sheet's peak; None: the device's is not known
    mfu_causal: float | None = None  # attention counted as it is computed
    tflops: float = 0.0  # 1e12 operations a second of a rank, attention counted as it is computed
    parameters: int
    ranks: int
    folder: str
    sample: str = ""
    attempts: int = 1  # how often ranks were started, over all sessions
    goodput: float = 1.0  # share of the wall time spent in steps that were kept
    noise_scale: float | None = None  # tokens, by the last steps; None: not measured
    noise_scale_sequences: float | None = None  # the batch that it suggests
    badput: dict[str, float] = {}  # the other shares, by what took them; with goodput they add up to 1


def shifted(record: Record, seconds: float) -> Record:
    """A record of another machine, by this one's monotonic clock."""
    known = {name: getattr(record, name, 0.0) for name in ("began", "ended", "at")} if seconds else {}
    return msgspec.structs.replace(record, **{name: at + seconds for name, at in known.items() if at})


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def line(record: Record) -> bytes:
    """A record as one line of a file."""
    return _encoder.encode(record) + b"\n"


def read_line(text: bytes) -> Record:
    """A line of a file as a record. JSON has no word for a number that is not finite: null stands for it."""
    try:
        return _decoder.decode(text)
    except msgspec.ValidationError:
        values = msgspec.json.decode(text)
        lost = {name: math.nan for name in ("loss", "norm") if values.get(name, 0.0) is None}
        return msgspec.convert(values | lost, Record)


def read_lines(texts: Iterable[bytes]) -> tuple[list[Record], int]:
    """Lines as records, and how many are none: a disk that lost power may give back what was never written."""
    found, damaged = list[Record](), 0
    for text in texts:
        try:
            found.append(read_line(text))
        except (*UNDECODABLE, AttributeError, TypeError):  # none of ours
            damaged += 1
    return found, damaged
