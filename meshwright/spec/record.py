"""Records: measured facts as JSON lines, written by the trainer, read by everything else."""

from typing import Literal

import msgspec


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One optimizer step as one rank saw it."""

    step: int
    loss: float  # sum of token losses ÷ valid tokens, over the whole job
    norm: float  # global gradient norm before clipping
    rate: float
    tokens: int  # valid tokens of the step, over the whole job: the divisor of the loss
    seconds: float  # since the previous step ended
    data_seconds: float  # of those, waiting for the loader
    memory_bytes: int  # highest so far on this rank
    flops: float  # the model's, over the whole job
    skipped: bool = False  # the gradient was not finite: weights were left alone
    loss_scale: float = 1.0  # fp16 only
    balance: float | None = None  # mixtures: mean balance loss of the layers, 1 when experts share evenly


class HeldRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="held"):
    """One held-out loss."""

    step: int
    loss: float
    tokens: int
    seconds: float


Record = StepRecord | HeldRecord


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended; the last line of `train --json`."""

    state: Literal["done"] = "done"
    step: int
    first_loss: float
    loss: float
    held_out_loss: float | None
    tokens_per_second: float
    seconds_to_first_loss: float
    seconds: float
    peak_bytes: int
    parameters: int
    ranks: int
    folder: str
    sample: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def line(record: Record) -> bytes:
    """A record as one line of a file."""
    return _encoder.encode(record) + b"\n"


def read_line(text: bytes) -> Record:
    """A line of a file as a record."""
    return _decoder.decode(text)
