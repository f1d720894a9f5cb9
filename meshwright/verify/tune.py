"""The certificate of a fine-tuning run: what is trained, what is left alone, and that files hold what was trained.

Every check looks at what training would use or leave, by another way than the code that made it: answers are rendered
again message by message, packed samples are computed one by one, files are read back beside their base. A model that is
too large for a moment on a CPU is proved in small: its own architecture with fewer and narrower layers.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from meshwright.checkpoint import peft
from meshwright.checkpoint.convert import MERGED, MismatchError, convert, logits, probe_tokens, stock_logits
from meshwright.checkpoint.model_folder import AdaptedFolder, ModelFolder, SeededWeights, open_folder, save_native
from meshwright.config import load
from meshwright.config.huggingface import CONFIG, INDEX
from meshwright.config.run import Eval, Optim, Run
from meshwright.config.weights import RUN, TEXT, describe, note_of
from meshwright.data import chat, tokenize
from meshwright.data.chat import ChatTemplate, TemplateError
from meshwright.data.conversation import Conversation, quoted
from meshwright.data.mask import common
from meshwright.data.pack import IGNORE, Arrays, BestFitPacking, packing
from meshwright.data.prepare import Corpus, conversations, ends_of
from meshwright.data.shards import Tokens
from meshwright.data.sources import listing
from meshwright.models.decoder import Decoder
from meshwright.models.layers import token_loss_sum
from meshwright.parallel.mesh import AXES, Mesh
from meshwright.spec.arch import Arch
from meshwright.spec.params import buffers, count, params
from meshwright.spec.plan import Plan
from meshwright.spec.problem import InputError
from meshwright.spec.tuning import Adapter, companion
from meshwright.train.build import build
from meshwright.train.loop import train
from meshwright.train.rank import keep_texts
from meshwright.train.state import State, weights

Say = Callable[[str], None]
SMALL = 20_000_000  # parameters that are trained, written and read in some seconds
SAMPLES = 256  # conversations whose mask is looked at, evenly over the data
ROWS, POSITIONS = 512, 4096  # packed samples that are looked at, and positions of those that are computed
WORDS = 4096  # entries of the vocabulary of the packing check: tokens are taken modulo
PACKED = 1e-12  # float64 sums in another order: some thousand terms of relative error 1e-16
ROUND_TRIP = 1e-6  # fp32 products in the same order on both sides
SEQUENCE = 1024  # tokens of a sample of a model in small
FOREIGN = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")  # files of weights


class TuneCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must be so of a fine-tuning run."""

    name: Literal["mask", "stop", "packing", "base", "adapter", "merge", "export"]
    verdict: Literal["passed", "failed", "does not apply"]
    words: str
    deviation: float | None = None  # where numbers are compared: the largest relative one
    tolerance: float | None = None


class TuneCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    run: Run
    model: str  # on which weights were trained, written and read
    torch: str
    checks: tuple[TuneCheck, ...]

    @property
    def passed(self) -> bool:
        return all(check.verdict != "failed" for check in self.checks)

    @property
    def summary(self) -> str:
        """How many passed, and the names of the others: a run may have little that can be looked at."""
        named = {
            verdict: [check.name for check in self.checks if check.verdict == verdict]
            for verdict in ("passed", "failed", "does not apply")
        }
        passed, failed, idle = named.values()
        found = [f"{', '.join(failed)} failed"] if failed else []
        found.append(f"{len(passed)} of {len(self.checks)} checks passed")
        return ", ".join([*found, *([f"nothing to look at for {', '.join(idle)}"] if idle else [])])


class NotApplicable(Exception):  # noqa: N818  (nothing went wrong)
    """A check has nothing to look at in this run."""


class FaultFound(Exception):  # noqa: N818  (a finding of a check)
    """What a check looks for is not so."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a check has seen."""

    words: str
    deviation: float | None = None
    tolerance: float | None = None

    def held(self) -> "Observation":
        """The same, if it is within its tolerance."""
        if self.deviation is not None and self.tolerance is not None and not self.deviation <= self.tolerance:
            raise FaultFound(f"{self.words}: off by {self.deviation:.1e}, {self.tolerance:.0e} allowed")
        return self


def prove(run: Run, corpus: Corpus, folder: Path, say: Say) -> TuneCertificate:
    """Check everything, with an empty folder to write to. The corpus is what training would read."""
    trained = TunedModel(run, corpus, folder)
    checks: dict[Any, Callable[[], Observation]] = {
        "mask": lambda: mask(run, corpus),
        "stop": lambda: stop(run, corpus),
        "packing": lambda: packed(run, corpus),
        "base": trained.base,
        "adapter": trained.adapter,
        "merge": trained.merge,
        "export": trained.export,
    }
    found = []
    for name, look in checks.items():
        found.append(_judged(name, look))
        say(f"{name:<8} {found[-1].verdict}: {found[-1].words}")
    return TuneCertificate(run=run, model=trained.described, torch=version("torch"), checks=tuple(found))


def _judged(name: Any, look: Callable[[], Observation]) -> TuneCheck:
    try:
        seen = look().held()
    except NotApplicable as reason:
        return TuneCheck(name=name, verdict="does not apply", words=str(reason))
    except (FaultFound, MismatchError, InputError, TemplateError) as fault:
        return TuneCheck(name=name, verdict="failed", words=str(fault))
    return TuneCheck(name=name, verdict="passed", words=seen.words, deviation=seen.deviation, tolerance=seen.tolerance)


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A conversation, and its tokens as training reads them."""

    of: Conversation
    tokens: list[int]
    mask: list[int]  # 1: a target
    whole: bool  # nothing was cut off

    def runs(self) -> list[tuple[int, int]]:
        """The stretches of trained tokens."""
        found, at = [], 0
        for value, group in groupby(self.mask):
            length = len(list(group))
            found += [(at, at + length)] if value else []
            at += length
        return found


def chat_samples(run: Run, corpus: Corpus) -> Iterator[TrainedSample]:
    """Some conversations of every chat source, evenly, with what the packing makes targets of."""
    unpacked = replace(run, data=replace(run.data, pack="documents"))
    for source, tokens in zip(run.data.sources, corpus.sources, strict=True):
        if source.format != "chat" or tokens.samples is None:
            continue
        known = dict(_chosen(unpacked, tokens, corpus.end_token))
        for number, each in enumerate(conversations(listing(source), run)):
            if number in known:
                ids, mask, whole = known[number]
                yield TrainedSample(each, ids, mask, whole)


def _chosen(run: Run, tokens: Tokens, end: int | None) -> Iterator[tuple[int, tuple[list[int], list[int], bool]]]:
    assert tokens.samples is not None
    unit, sizes = packing(tokens, run, end), np.diff(tokens.ends, prepend=0)
    for number in np.unique(np.linspace(0, len(sizes) - 1, min(SAMPLES, len(sizes))).astype(np.int64)).tolist():
        record, _, length = tokens.samples[number].tolist()
        arrays, size = unit.read(np.array([number])), int(sizes[number])
        ids = [*arrays.tokens[0, : size - 1].tolist(), int(tokens.read(int(tokens.ends[number]) - 1, 1)[0])]
        trained = [0, *(arrays.targets[0, : size - 1] != IGNORE).astype(int).tolist()]
        yield record, (ids, trained, length == size)


@dataclass(frozen=True)
class Judge:
    """Says by itself what of a conversation is the model's to write."""

    template: ChatTemplate
    tokenizer: Tokenizer
    train_on: str

    def answers(self, each: Conversation) -> list[int]:
        """The messages that are trained."""
        found = [number for number in each.answers if each.weight(number)]
        if self.train_on == "last":
            return [number for number in found if number == each.answers[-1]]
        return [number for number in found if number >= each.prompt] if self.train_on == "completion" else found

    def plain(self, text: str) -> str:
        """A text as the tokenizer reads it and writes it again, without white space."""
        return self.shown(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def shown(self, tokens: list[int]) -> str:
        return "".join(self.tokenizer.decode(tokens, skip_special_tokens=False).split())

    def fault(self, sample: TrainedSample) -> str:
        """What is wrong with the mask of a sample; "" where nothing is."""
        runs, wanted = sample.runs(), self.answers(sample.of)
        if self.train_on == "all":
            left = sum(not value for value in sample.mask[1:])
            return "" if not left or len(wanted) < len(sample.of.answers) else f"{left} tokens are not trained"
        whole = self.template.text(sample.of.messages, sample.of.tools)
        if sample.whole and len(runs) < len(wanted):
            return f"{len(wanted)} answers are to be trained, and {len(runs)} are"
        trained = "".join(self.shown(sample.tokens[start:end]) for start, end in runs)
        for number in wanted if sample.whole else ():
            line = self._line(sample.of.messages[number])
            if self.plain(line) not in trained:
                return f"the answer {quoted(line)} is not trained"
        if not sample.whole or len(runs) != len(wanted):  # marks that part an answer
            return self._strange(sample, runs)
        for number, (start, end) in zip(wanted, runs, strict=True):
            prompt = self.template.text(sample.of.messages[:number], sample.of.tools, prompt=True)
            before, said = self.shown(sample.tokens[:start]), self.shown(sample.tokens[start:end])
            if not self._begins(before, prompt, whole):
                return (
                    f"turn {number + 1} is trained from {quoted(said)} on, and generation begins behind "
                    f"{quoted(prompt[-60:])}"
                )
        return self._strange(sample, runs)

    def _begins(self, before: str, prompt: str, whole: str) -> bool:
        """Whether generation begins behind a text; of templates that write an answer otherwise than they begin one,
        behind the last mark that both have."""
        if whole.startswith(prompt):
            return before == self.plain(prompt)
        given = self.tokenizer.encode(whole[: common(whole, prompt)], add_special_tokens=False).ids
        added = self.tokenizer.get_added_tokens_decoder()
        last = max(
            (at for at, token in enumerate(given, start=1) if token in added and added[token].special), default=0
        )
        return before.startswith(self.shown(given[:last]))

    def _strange(self, sample: TrainedSample, runs: list[tuple[int, int]]) -> str:
        """Whether what others say is trained."""
        answers = " ".join(self.plain(sample.of.messages[number]["content"]) for number in sample.of.answers)
        trained = " ".join(self.shown(sample.tokens[start:end]) for start, end in runs)
        for message in sample.of.messages:
            said = self.plain(message["content"])
            if message["role"] != "assistant" and len(said) > 8 and said in trained and said not in answers:
                return f"what {message['role']} says is trained: {quoted(message['content'])}"
        return ""

    def _line(self, message: dict[str, Any]) -> str:
        """The last line that somebody says."""
        return next((line.strip() for line in reversed(message["content"].split("\n")) if line.strip()), "")


def mask(run: Run, corpus: Corpus) -> Observation:
    """Answers and nothing else are trained, from where generation begins."""
    judge, looked = _judge(run, corpus), 0
    for sample in chat_samples(run, corpus):
        looked += 1
        if words := judge.fault(sample):
            raise FaultFound(f"{sample.of.place}: {words}")
    return Observation(
        f"{looked} conversations rendered again: what is trained is what data.train_on = {run.trains_on} says"
    )


def stop(run: Run, corpus: Corpus) -> Observation:
    """Every trained answer ends with a token that ends generation."""
    judge, looked, seen = _judge(run, corpus), 0, set[int]()
    if run.data.train_on == "all":
        raise NotApplicable("data.train_on = all trains every token, the stop tokens among them")
    added = judge.tokenizer.get_added_tokens_decoder()
    known = {number for number, token in added.items() if token.special} | ends_of(run, judge.tokenizer)
    for sample in chat_samples(run, corpus):
        for number, (start, end) in enumerate(runs := sample.runs()):
            if not sample.whole and (number == len(runs) - 1 or run.data.truncation_side == "left"):
                continue  # its end may be cut off
            if sample.tokens[end - 1] in known:
                seen.add(sample.tokens[end - 1])
            elif number == len(runs) - 1 or len(runs) == len(judge.answers(sample.of)):
                words = quoted(judge.tokenizer.decode(sample.tokens[start:end], skip_special_tokens=False))
                raise FaultFound(f"{sample.of.place}: the answer {words} is trained without a stop token behind it")
            looked += 1
    names = ", ".join(sorted(str(judge.tokenizer.id_to_token(token)) for token in seen))
    return Observation(f"{looked} answers end with a trained {names}")


def _judge(run: Run, corpus: Corpus) -> Judge:
    if not run.data.is_chat or corpus.tokenizer is None:
        raise NotApplicable("data.format is not chat: every token of a document is trained")
    tokenizer = tokenize.load(corpus.tokenizer)
    return Judge(chat.chat_template(run, tokenizer), tokenizer, run.trains_on)


def packed(run: Run, corpus: Corpus) -> Observation:
    """Samples that share a row have the loss and the gradients that each has alone."""
    if run.data.pack != "best_fit":
        raise NotApplicable(f"data.pack = {run.data.pack} lays no two samples in one that are to be apart")
    if run.arch.capacity or run.arch.router == "expert_choice":
        raise NotApplicable("experts with a capacity, or that choose, see the tokens beside them")
    rows = max((_full_rows(packing(tokens, run, corpus.end_token)) for tokens in corpus.sources), key=len)
    if not rows:
        raise NotApplicable("no two samples share a row")
    arch = replace(in_small(run.arch, SMALL // 10), vocab=min(run.arch.vocab, WORDS), dropout=0.0, tuning=msgspec.UNSET)
    # Losses of routers are of whole rows, fillers included, and not of samples.
    arch = replace(arch, context=max(arch.context, run.sequence), balance_loss=0.0, z_loss=0.0)
    model = Decoder(arch).double().eval()
    drawn = SeededWeights(arch, run.seed)
    model.load_state_dict({param.name: drawn.tensor(param.name) for param in (*params(arch), *buffers(arch))})
    together = [_loss(model, row, None) for row, _, _ in rows]
    sum(together, torch.zeros(())).backward()
    ours = _taken(model)
    alone = [
        _loss(model, _row(each, number), length) for _, each, lengths in rows for number, length in enumerate(lengths)
    ]
    sum(alone, torch.zeros(())).backward()
    theirs = _taken(model)
    one, other = (float(sum(part.item() for part in parts)) for parts in (together, alone))
    scale = max(grad.norm().item() for grad in theirs.values())
    far = max((ours[name] - grad).norm().item() for name, grad in theirs.items()) / scale
    words = f"{len(rows)} rows of {len(alone)} samples beside each sample alone, loss and gradients in fp64"
    return Observation(words, max(abs(one - other) / abs(other), far), PACKED)


def _taken(model: Decoder) -> dict[str, Tensor]:
    """The gradients of a model, which has none afterwards."""
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def _full_rows(source: Any) -> list[tuple[Arrays, Arrays, list[int]]]:
    """Rows with the most samples, within so many positions: packed, and each sample by itself with its length."""
    assert isinstance(source, BestFitPacking)
    order, bins = source.packed
    held = np.diff(bins[: ROWS + 1])
    found, left = [], POSITIONS
    for row in np.argsort(-held, kind="stable").tolist():
        if held[row] < 2 or (found and left < source.documents.sequence):
            break
        units = order[bins[row] : bins[row + 1]]
        found.append(
            (source.read(np.array([row])), source.documents.read(units), source.documents.lengths(units).tolist())
        )
        left -= source.documents.sequence
    return found


def _row(arrays: Arrays, number: int) -> Arrays:
    return Arrays(arrays.tokens[number][None], arrays.targets[number][None], arrays.positions[number][None], None)


def _loss(model: Decoder, row: Arrays, length: int | None) -> Tensor:
    """The sum of token losses of a row, or of what its only sample fills of it."""
    vocab, end = model.arch.vocab, length
    tokens, targets, positions = (torch.tensor(array[:, :end]) for array in (row.tokens, row.targets, row.positions))
    documents = None if row.documents is None else torch.from_numpy(row.documents)
    targets = torch.where(targets == IGNORE, targets, targets % vocab)
    found = model(tokens % vocab, positions, documents)
    assert isinstance(found, Tensor)
    return token_loss_sum(found, targets)


def in_small(arch: Arch, most: int) -> Arch:
    """An architecture with fewer and narrower layers of the same kinds, if it has more parameters than so many."""
    if count(arch) <= most:
        return arch
    kinds = max(2, arch.full_every, arch.no_rope_every, arch.moe_every, 2 * bool(arch.dense_layers))
    kv = min(arch.kv_heads, 2)
    adapter = replace(arch.adapter, rank=min(arch.adapter.rank, 4))
    tuning = arch.tuning if arch.tuning is msgspec.UNSET else replace(arch.tuning, adapter=adapter)
    whole = arch.adapter.held == "nf4"  # scales are of 64 inputs of one row
    return replace(
        arch,
        layers=min(arch.layers, kinds),
        hidden=min(arch.hidden, 64),
        heads=kv * (arch.heads // arch.kv_heads),
        kv_heads=kv,
        head_dim=min(arch.head_dim, 64 if whole else 32) if not arch.is_latent else arch.head_dim,
        ffn=min(arch.ffn, 128 if whole else 96),
        dense_layers=min(arch.dense_layers, 1),
        expert_ffn=min(arch.expert_ffn, 64 if whole else 32),
        kv_rank=min(arch.kv_rank, 64 if whole else 16),
        q_rank=min(arch.q_rank, 64 if whole else 16),
        tuning=tuning,
    )


class TunedModel:
    """The run for two steps on one process, with what it leaves: made when it is first asked for."""

    def __init__(self, run: Run, corpus: Corpus, folder: Path) -> None:
        arch = in_small(run.arch, SMALL)
        self.is_own = arch == run.arch
        self.corpus, self.folder = corpus, folder
        self.origin = run
        small = replace(run.adapter, rank=arch.adapter.rank) if run.adapter.kind != "none" else run.adapter
        sequence = run.sequence if self.is_own else min(run.sequence, SEQUENCE)
        # A rate and a decay at which two steps leave a trace on whatever is trained, or should not be.
        optim = Optim(lr=1e-2, warmup=0, weight_decay=0.1, freeze=run.optim.freeze)
        plan, later = Plan(microbatch=1, grad_accum=2, precision="fp32"), {"eval_fraction": 0.0}
        self.run = replace(
            run,
            arch=arch,
            adapter=small,
            steps=2,
            epochs=0.0,
            batch=2,
            sequence=sequence,
            data=replace(run.data, **later),
            optim=optim,
            eval=Eval(every=0, sample_tokens=0),
            plan=plan,
        )
        self.state: State | None = None
        self.first: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}

    @property
    def described(self) -> str:
        """The model in words."""
        own = "the run's own" if self.is_own else "the run's architecture in small"
        return f"{own}, {count(self.run.arch):,} parameters"

    def trained(self) -> State:
        """Train, once, and leave what a run leaves in its folder."""
        if self.state is not None:
            return self.state
        run, mesh = self._on_base(), alone()
        home = self.folder / "run"
        home.mkdir(parents=True)
        keep_texts(run, self.corpus, home / TEXT)
        state = build(run, self.corpus, mesh)
        self.first = {name: tensor.clone() for name, tensor in weights(state.chunks, run, mesh)}
        for _ in train(run, state, mesh):
            pass
        state.loader.close()
        self.last = dict(weights(state.chunks, run, mesh))
        (home / RUN).write_text(load.write(run))
        note = note_of(msgspec.to_builtins(run), home)
        save_native(home / "model", run.arch, self.last.items(), self.corpus.tokenizer, home / TEXT, note)
        self.state, self.run = state, run
        return state

    def _on_base(self) -> Run:
        """The run on its own base; in small on one that is drawn, with the text files of the run's own."""
        named, base = self.run.init.folder, self.folder / "base"
        if self.is_own and named and describe(named).kind == "huggingface":
            return self.run
        if self.is_own and named:
            convert(named, base, _quiet, merge=isinstance(open_folder(named), AdaptedFolder))
        else:
            arch = replace(self.run.arch, tuning=msgspec.UNSET)
            drawn, every = SeededWeights(arch, self.run.seed), (*params(arch), *buffers(arch))
            texts = open_folder(named).texts if named else None
            tensors = ((param.name, drawn.tensor(param.name)) for param in every)
            save_native(self.folder / "drawn", arch, tensors, self.corpus.tokenizer, texts)
            convert(self.folder / "drawn", base, _quiet)
        return replace(self.run, init=replace(self.run.init, folder=str(base), optimizer_state=False))

    def logits(self) -> tuple[Tensor, Tensor]:
        """Some tokens, and the logits that the model has for them as it was trained."""
        state, tokens = self.trained(), probe_tokens(self.run.arch, 64)
        model = state.chunks[0].eval()
        with torch.no_grad():
            return tokens, model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))

    def base(self) -> Observation:
        """What is frozen keeps every bit, and the rest is trained."""
        if self.run.arch.tuning is msgspec.UNSET:
            raise NotApplicable("all weights are trained: there is no adapter, and optim.freeze is empty")
        state = self.trained()
        copied = {name: weight for chunk in state.reference for name, weight in chunk.named_parameters()}
        if other := [name for name, weight in copied.items() if not torch.equal(weight, self.first[name])]:
            raise FaultFound(f"{other[0]} of the reference, which is frozen, is not the first weight after two steps")
        arch = self.run.arch
        names = {param.name: param.trained for param in params(arch)}
        names |= {param.name: arch.trains(param.name) for param in buffers(arch)}  # what is learned by other rules
        frozen = [name for name, is_trained in names.items() if not is_trained]
        if moved := [name for name in frozen if not torch.equal(self.first[name], self.last[name])]:
            raise FaultFound(f"{moved[0]}, which is frozen, has changed in two steps")
        still = [
            name for name, is_trained in names.items() if is_trained and torch.equal(self.first[name], self.last[name])
        ]
        if len(still) == len(names) - len(frozen):
            raise FaultFound("nothing that is to be trained has changed in two steps")
        whose = f"{len(copied)} weights of the reference" if copied else f"{len(frozen)} frozen weights"
        return Observation(f"{whose} have the same bits after two steps")

    def adapter(self) -> Observation:
        """The adapter as peft has it, read back beside its base, is the one that was trained."""
        if self.run.adapter.kind == "none":
            raise NotApplicable("the run has no adapter")
        tokens, wanted = self.logits()
        target, base = self.folder / "adapter", Path(self.run.init.folder)
        convert(self.folder / "run" / "model", target, _quiet)
        stored, known = load_file(target / peft.WEIGHTS), open_folder(base)
        folder = open_folder(self.folder / "run" / "model")
        assert isinstance(folder, AdaptedFolder)
        layers = peft.layers(folder)
        names = {name.rpartition(".lora_")[0].removeprefix(peft.PREFIX) for name in stored if ".lora_" in name}
        if lost := sorted(f"{name}.weight" for name in names - {layer.module for layer in layers}):
            raise FaultFound(f"{target / peft.WEIGHTS} has an adapter of {lost[0]}, which the base has not")
        kept = {name for layer in layers for name in layer.stored.made_of}  # peft has one of those that are joined
        trained = {param.name for param in params(self.run.arch) if param.trained}
        if lost := sorted(trained - {companion(name, part) for name in kept for part in peft.THEIRS}):
            raise FaultFound(f"{lost[0]} was trained, and {target / peft.WEIGHTS} has no place for it")
        each = 3 if self.run.adapter.kind == "dora" else 2
        if len(stored) != each * len(layers):
            what = f"{len(layers)} matrices have adapters of {each} tensors each"
            raise FaultFound(f"{what}, and {target / peft.WEIGHTS} has {len(stored)}")
        whole = self.run.adapter.held == "bf16"
        if not whole:  # peft has the base of the files, and not what few bits leave of it
            wanted = logits(folder.beside_whole, tokens)
        if peft.has_peft() and known.kind == "huggingface":
            found, whose = stock_logits(base, tokens, target), "peft's own code"
        else:
            found, whose = logits(ReadBack(known.arch, known, stored, layers, self.run.adapter), tokens), "this code"
        same = "the logits as trained" if whole else "the logits of the adapter beside the base of the files"
        words = f"{len(stored)} keys, none missing and none left over, read by {whose}: {same}"
        return Observation(words, _apart(found, wanted), ROUND_TRIP)

    def merge(self) -> Observation:
        """The whole model with the adapter merged into it is the two beside each other."""
        if self.run.adapter.kind == "none":
            raise NotApplicable("the run has no adapter")
        tokens, wanted = self.logits()
        return Observation(
            "merged = adapter + base, by the logits as trained", _apart(self._exported(tokens), wanted), MERGED
        )

    def export(self) -> Observation:
        """What goes back to Hugging Face is the model as trained, with all that its folder said of its text."""
        tokens, wanted = self.logits()
        far = _apart(self._exported(tokens), wanted)
        target = self.folder / "exported"
        kept = self._texts_kept(target)
        if self.run.data.is_chat and self.corpus.tokenizer is not None:
            tokenizer = tokenize.load(self.corpus.tokenizer)
            if chat.template_of(target) != chat.chat_template(self.origin, tokenizer).source:
                raise FaultFound(f"the chat template of {target} is not the one that the run renders with")
            stops = {token for report in self.corpus.chats if report is not None for token in report.stops}
            if lost := stops - chat.end_tokens(target, tokenizer):
                raise FaultFound(f"generation from {target} would not stop at {tokenizer.id_to_token(min(lost))}")
        return Observation(f"{kept} files about text kept as they were; the logits as trained", far, MERGED)

    def _exported(self, tokens: Tensor) -> Tensor:
        target = self.folder / "exported"
        if not target.exists():
            self.trained()
            convert(self.folder / "run" / "model", target, _quiet, merge=self.run.adapter.kind != "none")
        return logits(open_folder(target), tokens)

    def _texts_kept(self, target: Path) -> int:
        """How many files of the base's folder the exported one has, weights and their description apart."""
        if not self.origin.init.folder or describe(self.origin.init.folder).kind != "huggingface":
            return 0
        texts = open_folder(self.origin.init.folder).texts
        files = [file for file in sorted(texts.iterdir()) if file.is_file() and not file.name.startswith(".")]
        wanted = [file for file in files if file.suffix not in FOREIGN and file.name not in (CONFIG, INDEX)]
        for file in wanted:
            there = target / file.name
            if not there.is_file():
                raise FaultFound(f"{file.name} of {texts} is not in what was exported")
            is_ours = file.name == chat.GENERATION or (file.name == chat.TEMPLATE and self.run.data.template)
            if not is_ours and there.read_bytes() != file.read_bytes():
                raise FaultFound(f"{file.name} of {texts} is another in what was exported")
        return len(wanted)


@dataclass(frozen=True, slots=True)
class ReadBack:
    """A base with an adapter's file beside it, as whoever has never seen the run reads them."""

    arch: Arch
    base: ModelFolder
    stored: dict[str, Tensor]
    layers: list[peft.PeftLayer]
    adapter: Adapter

    def tensor(self, name: str) -> Tensor:
        weight = self.base.tensor(name)
        layer = next((each for each in self.layers if name in each.stored.made_of), None)
        if layer is None:
            return weight
        shapes = {param.name: param.shape for param in params(self.arch)}
        return (weight.double() + peft.delta(layer, name, self.stored, self.adapter, shapes)).to(weight.dtype)


def alone() -> Mesh:
    """This process and no other."""
    nobody: Any = None  # one rank has no axes
    at: dict[str, int] = dict.fromkeys(map(str, AXES), 0)
    cpu = torch.device("cpu")
    return Mesh(dense=nobody, expert=nobody, fine=nobody, device=cpu, rank=0, world=1, data_rank=0, place=at)


def _apart(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of logits beside the largest of them."""
    difference = float((found - wanted).abs().max()) / float(wanted.abs().max())
    return math.inf if math.isnan(difference) else difference


def _quiet(text: str) -> None:
    """What parts of a proof would say."""
