"""`meshwright data`: what a run trains on, shown sample by sample, or tokenised beforehand by many processes."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.cli import env
from meshwright.cli import options as words
from meshwright.launch.job import Target, name_problems
from meshwright.runtime.files import printable
from meshwright.spec.addresses import has_secret, is_address, without_secret
from meshwright.spec.problem import InputError, mistake
from meshwright.spec.units import plural

if TYPE_CHECKING:  # imported when the words are known to be right
    from tokenizers import Tokenizer

    from meshwright.data.prepare import Corpus

SHOWN = 3  # samples, if none is asked for
PARTS = 16  # of an array job
COLOURED, PLAIN = ("\x1b[32m", "\x1b[0m"), ("⟦", "⟧")  # around trained tokens: on a terminal, in a pipe


class ShownSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as it is trained."""

    sample: int  # its number in the data, from 1
    source: str
    tokens: list[int]
    mask: list[int]  # 1: the token is trained
    text: str
    trained: int
    truncated: int  # tokens that were cut off


class DataSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of a run together."""

    samples: list[ShownSample]
    trained_share: float  # of all tokens
    count: int
    untrained: int  # records without a trained token, which are left out
    truncated: int
    shortest: int  # tokens
    median: int
    longest: int


def add_data(verb: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    verb.add_argument("what", choices=("show", "prepare"))
    verb.add_argument("words", nargs="*", metavar="RUN.toml | key=value", help=words.OVERRIDES)
    verb.add_argument(
        "--sample", type=words.count, metavar="N", help=f"show: only this one (default: the first {SHOWN})"
    )
    verb.add_argument("--workers", type=words.count, metavar="N", help="prepare: processes (default: one a core)")
    verb.add_argument(
        "--part", metavar="K/N", help="prepare: only the K-th of N parts, from 0: one machine's of several"
    )
    verb.add_argument(
        "--store", metavar="ADDRESS", help="prepare: fetch pieces from here (s3://, gs://), and put those made there"
    )
    verb.add_argument(
        "--on", choices=("slurm", "datatrove"), help="prepare: write what has parts made side by side, an array job"
    )
    verb.add_argument("--parts", type=words.count, default=PARTS, help=f"--on: tasks of the array (default: {PARTS})")
    verb.add_argument("--out", type=Path, help="--on: where the files go (default: launch/NAME-data)")
    verb.add_argument("--submit", action="store_true", help="--on: submit the job as well")
    verb.add_argument("--partition", default="", help="--on: where the job runs")
    verb.add_argument("--time", default=Target().time, help=f"--on: the limit of a task (default: {Target().time})")


def _require_read(options: argparse.Namespace) -> None:
    """Nothing is ignored: a flag of the other verb, or of an array job where there is none, is refused."""
    of_show, of_prepare = {"sample": None}, {"workers": None, "part": None, "store": None, "on": None}
    of_array = {"parts": PARTS, "out": None, "submit": False, "partition": "", "time": Target().time}
    shows = options.what == "show"
    idle = dict.fromkeys(of_show if not shows else of_prepare, "prepare" if shows else "show")
    idle |= dict.fromkeys(of_array, "prepare --on") if shows or not options.on else {}
    for name, usual in {**of_show, **of_prepare, **of_array}.items():
        if name in idle and getattr(options, name) != usual:
            raise mistake(f"--{name} is for `data {idle[name]}`", f"leave --{name} out")
    if options.on == "datatrove" and options.partition:
        raise mistake("--partition is for --on slurm", "give the partition to the script: prepare.py slurm PARTITION")


def data(options: argparse.Namespace) -> int:
    """Show what a run trains on, or make it ready."""
    _require_read(options)
    words.require_training()
    return _show(options) if options.what == "show" else _array(options) if options.on else _prepare(options)


def _prepare(options: argparse.Namespace) -> int:
    """Tokenise the pieces of a run's text that are not in the cache yet."""
    from meshwright.cli.train import examined
    from meshwright.data.prepare import prepare, prepare_pieces
    from meshwright.runtime.object_store import require_writable

    say = words.say_to(machine=options.json)
    run = examined(options.words, None).run
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = options.workers or mine
    env.share_cores(workers)
    store = None if options.store is None else require_writable(address_of(options.store))
    report = prepare_pieces(run, env.cache(), part_of(options.part), workers, say, store)
    if options.part is None:
        corpus = prepare(run, env.cache(), say)  # conversations too, and what can only be said of the whole
        chats = sum(each.tokens for each in corpus.chats if each is not None)  # which are not made in pieces
        report = msgspec.structs.replace(report, tokens=report.tokens + chats)
    made = f"{plural(report.made, 'piece')} in {report.seconds:.0f} s, {report.found} ready before"
    speed = f"{plural(report.tokens, 'token')}; {made}"
    speed += f", {report.fetched} fetched from {options.store}" if store is not None else ""
    words.show(options, report, [f"{speed}; in {env.cache()}"])
    return 0


def address_of(said: str) -> str:
    """Where pieces are kept; credentials are not part of it."""
    if not is_address(said):
        raise mistake(f"--store {said} is not an address", "use one such as s3://bucket/tokens")
    if has_secret(said):
        what = f"--store has a password or a signature in it ({without_secret(said)})"
        raise mistake(what, "leave it out: fsspec reads credentials from their own files and variables")
    return said


def part_of(said: str | None) -> tuple[int, int]:
    """The number of a part, and how many there are."""
    number, _, count = (said or "0/1").partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise mistake(f"--part {said} is no part of several", "use K/N, such as 0/16 to 15/16")
    return int(number), int(count)


def _array(options: argparse.Namespace) -> int:
    """Write an array job, each of whose tasks prepares one part."""
    from meshwright.cli.launch import submission_problems, submitted, written
    from meshwright.cli.train import examined
    from meshwright.launch import datatrove, slurm

    if options.store is not None:
        raise mistake("--store cannot be combined with --on", "leave it out: the tasks of an array share one cache")
    if options.part is not None:
        raise mistake("--part cannot be combined with --on", "leave it out: --parts says how many tasks there are")
    found = [*name_problems({"--partition": options.partition}, options.time)]
    found += slurm.partition_problems(options.partition, slurm.sinfo() or []) if options.partition else []
    if found:
        raise InputError(found)
    run = examined(options.words, None).run
    out = (options.out or Path("launch") / f"{run.name}-data").absolute()
    shape = (out, env.cache(), options.parts, options.workers or 1)
    if options.on == "datatrove":
        made = datatrove.array(*shape, options.time)
        if options.submit:
            raise mistake("--submit does not start --on datatrove", "start the script by a Python that has datatrove")
    else:
        made = slurm.array(run.name, *shape, options.partition, options.time)
    if options.submit and (problems := submission_problems("slurm", made)):
        raise InputError(problems)
    files = written(out, run, made)
    answer = submitted(made) if options.submit else ""
    record = {"files": [str(file) for file in files], "command": list(made.command), "submitted": options.submit}
    record["answer"] = answer
    how = "submitted by" if options.submit else "start it by"
    lines = [f"{options.parts} tasks; all of them must see {env.cache()} (XDG_CACHE_HOME)"]
    words.show(options, record, [*lines, *(f"wrote {file}" for file in files), f"{how}: {shlex.join(made.command)}"])
    if answer and not options.json:
        print(answer)
    return 0


def _show(options: argparse.Namespace) -> int:
    """Samples as tokens and mask, and the lengths and the trained share of all."""
    from meshwright.cli.train import examined
    from meshwright.data.prepare import described, prepare, with_epochs

    say = words.say_to(machine=True)
    run = with_epochs(examined(options.words, None).run, env.cache(), say)
    corpus = prepare(run, env.cache(), say)
    summary = _summary([source.source for source in run.data.sources], corpus, options.sample)
    if options.json:
        print(msgspec.json.encode(summary).decode())
        return 0
    marks = COLOURED if sys.stdout.isatty() else PLAIN
    lexicon = _lexicon(corpus)
    for each in summary.samples:
        cut = f", {each.truncated:,} cut off" if each.truncated else ""
        tokens = plural(len(each.tokens), "token")
        print(f"=== sample {each.sample:,} of {each.source}: {tokens}, {each.trained:,} trained{cut}")
        print("".join(_marked(each, lexicon, marks)))
    lengths = f"{summary.shortest:,} to {plural(summary.longest, 'token')}, median {summary.median:,}"
    print(f"=== {plural(summary.count, 'sample')} of {lengths}; {summary.trained_share:.1%} of all tokens are trained")
    for line in described(run, corpus):
        print(line)
    return 0


def _lexicon(corpus: "Corpus") -> "Tokenizer":
    from meshwright.data import tokenize

    if corpus.tokenizer is None:
        what = "the data is ready tokens, and no tokenizer says what they are"
        raise mistake(what, "set data.tokenizer to the one that made them", "data.tokenizer")
    return tokenize.load(corpus.tokenizer)


def _summary(names: list[str], corpus: "Corpus", wanted: int | None) -> DataSummary:
    import numpy as np

    lexicon, shown, before = _lexicon(corpus), list[ShownSample](), 0
    lengths, trained, untrained, truncated = [], 0, 0, 0
    chats = corpus.chats or (None,) * len(names)
    for name, tokens, report in zip(names, corpus.sources, chats, strict=True):
        if not len(tokens.ends):
            what = f"{name} does not say where its documents end, so there are no samples to show"
            raise mistake(what, "set data.end_token, and data.mask_documents = true", "data.end_token")
        sizes = np.diff(tokens.ends, prepend=0)
        numbers = np.arange(len(sizes)) if tokens.samples is None else tokens.samples[:, 0]
        records = int(numbers[-1]) + 1 if report is None else report.records
        if wanted is None:
            chosen = range(min(SHOWN - len(shown), len(sizes)))
        else:
            chosen = np.flatnonzero(numbers == wanted - 1 - before).tolist()
        for number in chosen:
            ids = tokens.read(int(tokens.ends[number] - sizes[number]), int(sizes[number])).tolist()
            mask = [0] + [1] * (len(ids) - 1)
            whole = len(ids)
            if tokens.mask is not None and tokens.samples is not None:
                mask = tokens.mask.read(int(tokens.ends[number] - sizes[number]), len(ids)).tolist()
                whole = int(tokens.samples[number, 2])
            shown.append(
                ShownSample(
                    sample=before + int(numbers[number]) + 1,
                    source=name,
                    tokens=ids,
                    mask=mask,
                    text=lexicon.decode(ids, skip_special_tokens=False),
                    trained=sum(mask),
                    truncated=whole - len(ids),
                )
            )
        lengths.append(sizes)
        before += records
        trained += int(sizes.sum()) - len(sizes) if report is None else report.trained
        untrained += 0 if report is None else report.untrained
        truncated += 0 if report is None else report.truncated
    if wanted is not None and not shown:
        found = f"there are {before:,}" if wanted > before else "it has no trained token, and is left out"
        raise mistake(f"sample {wanted} cannot be shown: {found}", f"use --sample 1 to {before}")
    every = np.concatenate(lengths)
    return DataSummary(
        samples=shown,
        trained_share=trained / int(every.sum()),
        count=len(every),
        untrained=untrained,
        truncated=truncated,
        shortest=int(every.min()),
        median=int(np.median(every)),
        longest=int(every.max()),
    )


def _marked(sample: ShownSample, lexicon: "Tokenizer", marks: tuple[str, str]) -> Iterator[str]:
    """The text with marks around what is trained. Decoded from the start: a token may look otherwise by itself."""
    before = ""
    bounds = [at for at in range(1, len(sample.mask)) if sample.mask[at] != sample.mask[at - 1]]
    for start, end in zip([0, *bounds], [*bounds, len(sample.mask)], strict=True):
        text = lexicon.decode(sample.tokens[:end], skip_special_tokens=False)
        part = printable(text[len(before) :]) if text.startswith(before) else "…"
        yield f"{marks[0]}{part}{marks[1]}" if sample.mask[start] else part
        before = text
