"""A continuation drawn from the model, to be looked at."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.config.run import Run
from meshwright.data.loader import Batch
from meshwright.parallel.block_attention import join
from meshwright.parallel.collectives import gather
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline import placement
from meshwright.train.step import evaluating, forward_only


def continuation(chunks: Sequence[nn.Module], run: Run, tokenizer: Path, opening: Tensor, mesh: Mesh) -> str:
    """The prompt, or the opening of a validation sample, and what the model writes after it. All ranks must call it."""
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(tokenizer))
    prompt = words.encode(run.eval.prompt).ids if run.eval.prompt else opening.tolist()
    tokens = torch.tensor([prompt], device=mesh.device)
    generator = torch.Generator().manual_seed(run.seed)
    with evaluating(chunks):
        for _ in range(run.eval.sample_tokens):
            logits = next_logits(chunks, run, tokens[:, -run.sequence :], mesh)
            token = torch.zeros(1, dtype=torch.int64, device=mesh.device)
            if logits is not None:
                token.copy_(draw(logits, run.eval.temperature, generator))
            if mesh.world > 1:
                dist.broadcast(token, author(run, mesh))  # one author, so that all ranks read the same text
            tokens = torch.cat([tokens, token.view(1, 1)], dim=1)
    return words.decode(tokens[0].tolist())


def next_logits(chunks: Sequence[nn.Module], run: Run, window: Tensor, mesh: Mesh) -> Tensor | None:
    """Logits of the token after a window, where the last stage is.

    What follows a position cannot change it, so a window that must be cut into equal slices is filled up behind its
    end. Experts that have a capacity or choose their tokens do see what follows: there the text is another.
    """
    length = window.shape[1]
    filled = F.pad(window, (0, run.sequence - length)) if run.plan.cp * run.plan.tp > 1 else window
    index = torch.arange(filled.shape[1], device=mesh.device).expand_as(filled)
    batch = Batch(tokens=filled, targets=filled, positions=index, documents=None, index=index)
    logits = forward_only(chunks, run, mesh, batch)
    if logits is None:
        return None
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    if run.plan.cp > 1:
        whole = join(gather(whole, 1, mesh.group("cp")).chunk(run.plan.cp, 1), 1)
    return whole[0, length - 1].float().cpu()


def author(run: Run, mesh: Mesh) -> int:
    """The first rank that has logits."""
    return 0 if run.plan.pp == 1 else int(mesh.fine.mesh[placement(run.plan)[-1]].flatten()[0])


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token: the likeliest at temperature 0, or so near to it that no probabilities can be had, else by its own."""
    scaled = logits / temperature if temperature else logits
    if temperature == 0 or not scaled.isfinite().all():
        return logits.argmax(keepdim=True)
    return torch.multinomial(scaled.softmax(-1), 1, generator=generator)
