"""`meshwright eval`: the validation loss of a run, a checkpoint or a Hugging Face folder."""

import argparse
import re
from functools import partial
from typing import TYPE_CHECKING, get_args, get_type_hints

import msgspec

from meshwright.cli import env
from meshwright.cli import options as words
from meshwright.config import load
from meshwright.config.run import Data, Init, Run
from meshwright.config.weights import RUN, is_run
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError, mistake
from meshwright.spec.units import plural

if TYPE_CHECKING:  # torch is imported when the words are known to be right
    import torch

    from meshwright.checkpoint.model_folder import ModelFolder

SEQUENCE = 1024  # of a model that no run here has trained, if nobody says and it has as many positions


def add_eval(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument("model", metavar="MODEL", help="a run (RUN, RUN@STEP), a model folder, or a Hugging Face folder")
    verb.add_argument(
        "--data", metavar="PATH", help="as data.source: text or tokens (default: the run's validation samples)"
    )
    formats = get_args(get_type_hints(Data)["format"])
    said = f"as data.format: {', '.join(formats)} (default: auto)"
    verb.add_argument("--format", choices=formats, metavar="FORMAT", help=said)
    verb.add_argument("--field", help="as data.field: where JSON lines and Parquet have the text")
    verb.add_argument(
        "--sequence", type=words.positions, help=f"tokens of a sample (default: the run's, or {SEQUENCE})"
    )
    words.add_device(verb)


def eval(options: argparse.Namespace) -> int:
    """Print the mean loss, perplexity and the tokens they are of."""
    if options.data is None and (options.format or options.field):
        raise mistake("--format and --field say how --data is read", "add --data PATH, or leave them out")
    try:
        return words.with_weights(options, partial(_evaluate, options))
    except InputError as error:  # whose remedies are those of a run file
        raise InputError(
            [msgspec.structs.replace(one, remedy=_as_flags(one.remedy)) for one in error.problems]
        ) from None


def _as_flags(remedy: str) -> str:
    """A remedy with the flags of this verb in place of keys of a run file."""
    return re.sub(r"data\.(field|format)( = )?", lambda key: f"--{key[1]}{' ' if key[2] else ''}", remedy)


def _evaluate(options: argparse.Namespace, folder: "ModelFolder", device: "torch.device") -> None:
    from meshwright.data.prepare import prepare
    from meshwright.train.sample import evaluation, load_decoder

    run = _run(options, folder)
    corpus = prepare(run, env.cache(), words.say_to(machine=True))
    decoder = load_decoder(folder, device, options.dtype)
    found = evaluation(decoder, run, corpus, device, held=options.data is None)
    record = {"model": options.model, "data": options.data, **msgspec.to_builtins(found)}
    again = "" if found.different == found.samples else f", {found.different:,} of them different"
    lines = [
        f"loss        {found.loss:.4f} nats per token",
        f"perplexity  {found.perplexity:,.2f}",
        f"tokens      {found.tokens:,} ({plural(found.samples, 'sample')} of {found.sequence}{again})",
    ]
    words.show(options, record, lines)


def _run(options: argparse.Namespace, folder: "ModelFolder") -> Run:
    """The run whose samples are to be evaluated: the one that made the weights, or one of other data."""
    from meshwright.data import sources
    from meshwright.data.chat import end_tokens
    from meshwright.train.sample import load_tokenizer

    run = _own_run(options, folder)
    data = run.data
    if folder.tokenizer is not None:
        data = msgspec.structs.replace(data, tokenizer=str(folder.tokenizer))
        if data.end_token is None and (ends := end_tokens(folder.texts, load_tokenizer(folder))):
            data = msgspec.structs.replace(data, end_token=min(ends))
    if options.data is not None:
        read = {"format": options.format or "auto", "field": options.field or data.field}
        data = msgspec.structs.replace(data, source=options.data, mix=(), eval_fraction=0.0, **read)
    if found := sources.problems(data):
        raise InputError(found)
    if data.tokenizer == "train" and not all(sources.listing(one).ready for one in data.sources):
        remedy = "put the tokenizer.json that it was trained with into the folder, or give tokens"
        raise mistake(f"{folder.home} has no tokenizer", remedy)
    if options.sequence and options.sequence > folder.arch.context:
        what = f"--sequence {options.sequence} is more than the model's {folder.arch.context} positions"
        raise mistake(what, f"use at most {folder.arch.context}")
    return msgspec.structs.replace(run, data=data, init=Init(), sequence=options.sequence or run.sequence)


def _own_run(options: argparse.Namespace, folder: "ModelFolder") -> Run:
    if folder.run is not None and is_run(folder.run):
        return load.load(folder.run / RUN).run
    if options.data is None:
        raise mistake(f"{options.model} is not a run, which has validation samples", "name some with --data PATH")
    return Run(arch=folder.arch, sequence=min(SEQUENCE, folder.arch.context), plan=Plan(microbatch=1))
