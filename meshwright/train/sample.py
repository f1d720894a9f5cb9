"""The text at the end of a run, written under its own plan."""

from collections.abc import Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.config.run import Run
from meshwright.data import tokenize
from meshwright.data.prepare import Corpus
from meshwright.models.generate import Sampling, caching, chooser, columns_for, continuations
from meshwright.parallel import compile
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline import placement, relay
from meshwright.train.step import evaluating


def closing_sample(chunks: Sequence[nn.Module], run: Run, corpus: Corpus, opening: Tensor, mesh: Mesh) -> str:
    """The prompt, or the opening of a validation sample, and what the model writes after it. All ranks must call it.

    Attention by caches needs no other rank's part of a sequence, so under cp every rank computes all of it.
    """
    assert corpus.tokenizer is not None, "without one there is no text"
    words = tokenize.load(corpus.tokenizer)
    tokens = words.encode(run.eval.prompt).ids if run.eval.prompt else opening.tolist()
    end = len(tokens) + run.eval.sample_tokens
    # What a plan cuts a sequence into: tp shards it, and routers under cp look at two slices of it.
    width = run.plan.tp * min(run.plan.cp, 2)
    draw = chooser(Sampling(temperature=run.eval.temperature, seed=run.seed), mesh.device, 1)
    author = 0 if run.plan.pp == 1 else int(mesh.fine.mesh[placement(run.plan)[-1]].flatten()[0])

    def compute(tokens: Tensor, positions: Tensor, columns: Tensor | None, last: Tensor) -> Tensor | None:
        kwargs = {"tokens": tokens, "positions": positions, "documents": columns}
        logits = chunks[0](**kwargs) if run.plan.pp == 1 else relay(chunks, run, mesh, kwargs)
        if logits is None:
            return None
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return whole[torch.arange(len(last), device=last.device), last]

    def choose(logits: Tensor | None) -> Tensor:
        chosen = torch.zeros(1, dtype=torch.int64, device=mesh.device) if logits is None else draw(logits)
        if mesh.world > 1:
            dist.broadcast(chosen, author)  # one author, so that all ranks read the same text
        return chosen

    with evaluating(chunks), compile.suspended(run.plan):
        while len(tokens) < end:
            # A text longer than the sequences that were trained on goes on from its last half of one.
            window = tokens if len(tokens) < run.sequence else tokens[-max(run.sequence // 2, 1) :]
            count = min(end - len(tokens), max(run.sequence - len(window), 1))
            with caching(chunks, columns_for(run.arch, mesh.device, len(window) + count + width, width)):
                for (token,) in islice(continuations(compute, choose, run.arch, mesh.device, [window], width), count):
                    tokens.append(token)
                    if token == corpus.end_token:
                        end = len(tokens)
                        break
    return words.decode(tokens)
