"""Text and losses of a trained model: at the end of its run, under its plan, or loaded whole from a folder."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn

from meshwright.checkpoint.model_folder import AdaptedFolder, ModelFolder
from meshwright.config.run import Run
from meshwright.data import tokenize
from meshwright.data.loader import Batch, Loader
from meshwright.data.pack import packing
from meshwright.data.prepare import Corpus
from meshwright.kernels.cross_entropy import IGNORE
from meshwright.models.decoder import Decoder
from meshwright.models.generate import Sampling, caching, chooser, columns_for, continuations, forward
from meshwright.models.layers import token_loss_sum
from meshwright.parallel import compile
from meshwright.parallel.mesh import Mesh, whole_of
from meshwright.parallel.pipeline import placement, relay
from meshwright.spec.params import buffers
from meshwright.spec.plan import Plan
from meshwright.spec.problem import mistake
from meshwright.train.step import evaluating

PROMPTS = 16  # that are continued together
POSITIONS = 4096  # of one forward of an evaluation, or a single sample: bounds the logits


def closing_sample(chunks: Sequence[nn.Module], run: Run, corpus: Corpus, opening: Tensor, mesh: Mesh) -> str:
    """The prompt, or the opening of a validation sample, and what the model writes after it. All ranks must call it."""
    assert corpus.tokenizer is not None, "without one there is no text"
    words = tokenize.load(corpus.tokenizer)
    tokens = (words.encode(run.eval.prompt).ids if run.eval.prompt else []) or opening.tolist()
    ends = frozenset() if corpus.end_token is None else frozenset({corpus.end_token})
    (text,) = continued(chunks, run, [tokens], ends, mesh)
    return words.decode([*tokens, *text])


def continued(
    chunks: Sequence[nn.Module], run: Run, prompts: Sequence[Sequence[int]], ends: frozenset[int], mesh: Mesh
) -> list[list[int]]:
    """The tokens that the model writes after prompts, under the run's own plan. All ranks must call it.

    Attention by caches needs no other rank's part of a sequence, so under cp every rank computes all of it.
    """
    texts: list[list[int]] = []
    together = 1 if run.arch.capacity else PROMPTS  # padding would take the slots of experts
    with evaluating(chunks), compile.suspended(run.plan):
        for first in range(0, len(prompts), together):
            texts += _continued(chunks, run, prompts[first : first + together], ends, mesh)
    return texts


def _continued(
    chunks: Sequence[nn.Module], run: Run, prompts: Sequence[Sequence[int]], ends: frozenset[int], mesh: Mesh
) -> list[list[int]]:
    # What a plan cuts a sequence into: tp shards it, and routers under cp look at two slices of it.
    width = run.plan.tp * min(run.plan.cp, 2)
    draw = chooser(Sampling(temperature=run.eval.temperature, seed=run.seed), mesh.device, len(prompts))
    author = 0 if run.plan.pp == 1 else int(mesh.fine.mesh[placement(run.plan)[-1]].flatten()[0])

    def compute(tokens: Tensor, positions: Tensor, columns: Tensor | None, last: Tensor) -> Tensor | None:
        kwargs = {"tokens": tokens, "positions": positions, "documents": columns}
        logits = chunks[0](**kwargs) if run.plan.pp == 1 else relay(chunks, run, mesh, kwargs)
        if logits is None:
            return None
        return whole_of(logits)[torch.arange(len(last), device=last.device), last]

    def choose(logits: Tensor | None) -> Tensor:
        chosen = torch.zeros(len(prompts), dtype=torch.int64, device=mesh.device) if logits is None else draw(logits)
        if mesh.world > 1:
            dist.broadcast(chosen, author)  # one author, so that all ranks read the same text
        return chosen

    texts, left = [list[int]() for _ in prompts], run.eval.sample_tokens
    while left > 0 and not all(text and text[-1] in ends for text in texts):
        wholes = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        # A text longer than the sequences that were trained on goes on from its last half of one.
        windows = [one if len(one) < run.sequence else one[-max(run.sequence // 2, 1) :] for one in wholes]
        longest = max(map(len, windows))
        count = min(left, max(run.sequence - longest, 1))
        with caching(chunks, columns_for(run.arch, mesh.device, longest + count + width, width)):
            for tokens in islice(continuations(compute, choose, run.arch, mesh.device, windows, width), count):
                left -= 1
                for text, token in zip(texts, tokens, strict=True):
                    if not text or text[-1] not in ends:
                        text.append(token)
                if all(text[-1] in ends for text in texts):
                    break
    return texts


def load_tokenizer(folder: ModelFolder) -> Tokenizer:
    """The tokenizer that a folder's weights were trained with."""
    remedy = "put the tokenizer.json that it was trained with into the folder"
    if folder.tokenizer is None:
        raise mistake(f"{folder.home} has no tokenizer", remedy)
    tokenizer = tokenize.load(folder.tokenizer)
    if (size := tokenize.entries(tokenizer)) > folder.arch.vocab:
        raise mistake(f"{folder.tokenizer} has {size} entries, and the model knows {folder.arch.vocab}", remedy)
    return tokenizer


def load_decoder(folder: ModelFolder, device: torch.device, dtype_name: str | None) -> Decoder:
    """The model of a folder, whole on a device, in a dtype of torch's (None: as it is stored)."""
    if isinstance(folder, AdaptedFolder):
        folder.require_base()
    dtype = folder.dtype if dtype_name is None else getattr(torch, dtype_name)
    with torch.device("meta"):
        decoder = Decoder(msgspec.structs.replace(folder.arch, dropout=0.0)).eval()  # which is of training alone
    names = [name for name, _ in decoder.named_parameters()]
    weights = {name: folder.tensor(name).to(device=device, dtype=dtype) for name in names}
    # Of load biases the dtype stays: in bf16 they would choose other experts.
    weights |= {param.name: folder.tensor(param.name).to(device) for param in buffers(folder.arch)}
    decoder.load_state_dict(weights, assign=True)
    return decoder


@torch.no_grad()
def written(
    decoder: Decoder, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, ends: frozenset[int]
) -> Iterator[list[list[int]]]:
    """The tokens behind each prompt so far, after every step; a text has `count` of them, or ends with an end token."""
    arch, device = decoder.arch, decoder.projection.device
    texts: list[list[int]] = [[] for _ in prompts]
    together = 1 if arch.capacity else PROMPTS  # padding would take the slots of experts
    for first in range(0, len(prompts), together):
        some, going = prompts[first : first + together], texts[first : first + together]
        choose = chooser(sampling, device, len(some))
        with caching([decoder], columns_for(arch, device, max(map(len, some)) + count)):
            for tokens in islice(continuations(forward(decoder), choose, arch, device, some), count):
                for text, token in zip(going, tokens, strict=True):
                    if not text or text[-1] not in ends:
                        text.append(token)
                yield texts
                if all(text[-1] in ends for text in going):
                    break


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A validation loss."""

    loss: float  # mean, in nats per token
    perplexity: float
    tokens: int  # that were predicted
    samples: int
    different: int  # of these: a run's few validation samples are taken again until its batches are full
    sequence: int


def evaluation(decoder: Decoder, run: Run, corpus: Corpus, device: torch.device, *, held: bool) -> Evaluation:
    """The mean loss over the samples of a run's data, or over those held out that its own validation loss is of."""
    if not held:
        return _mean(decoder, all_batches(run, corpus, device), run)
    size = next(size for size in range(_together(run), 0, -1) if run.batch % size == 0)
    alone = msgspec.structs.replace(run, plan=Plan(microbatch=size, grad_accum=run.batch // size))
    with closing(Loader(corpus, alone, 0, device)) as loader:
        steps = (loader.held(number) for number in range(run.eval.batches))
        found = _mean(decoder, (batch for step in steps for batch in step.microbatches), run)
        return msgspec.structs.replace(found, different=loader.held_samples(run.eval.batches))


@torch.no_grad()
def _mean(decoder: Decoder, batches: Iterable[Batch], run: Run) -> Evaluation:
    total, tokens, samples = torch.zeros((), dtype=torch.float64, device=decoder.projection.device), 0, 0
    for batch in batches:
        logits = decoder(batch.tokens, batch.positions, batch.documents)
        total += token_loss_sum(logits, batch.targets).double()
        tokens += int((batch.targets != IGNORE).sum())
        samples += len(batch.tokens)
    loss = total / tokens
    perplexity = loss.exp().item()
    return Evaluation(
        loss=loss.item(),
        perplexity=perplexity,
        tokens=tokens,
        samples=samples,
        different=samples,
        sequence=run.sequence,
    )


def all_batches(run: Run, corpus: Corpus, device: torch.device) -> Iterator[Batch]:
    """Every sample of a run's data, once and in order."""
    for source in [packing(tokens, run, corpus.end_token) for tokens in corpus.sources]:
        for first in range(0, source.count, _together(run)):
            arrays = source.read(np.arange(first, min(first + _together(run), source.count)))
            numbered = None if arrays.documents is None else torch.from_numpy(arrays.documents).to(device)
            positions = torch.from_numpy(np.ascontiguousarray(arrays.positions)).to(device)
            tokens, targets = (torch.from_numpy(array).to(device) for array in (arrays.tokens, arrays.targets))
            yield Batch(tokens, targets, positions, numbered, index=positions)  # nothing is drawn by it


def _together(run: Run) -> int:
    return max(POSITIONS // run.sequence, 1)
