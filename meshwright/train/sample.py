"""A continuation drawn from the model, to be looked at."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel import shard
from meshwright.parallel.mesh import Mesh
from meshwright.spec.run import Run


@torch.no_grad()
def continuation(model: nn.Module, run: Run, tokenizer: Path, opening: Tensor, mesh: Mesh) -> str:
    """The prompt, or the opening of a held-out sample, and what the model writes after it. All ranks must call it."""
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(tokenizer))
    prompt = words.encode(run.held.prompt).ids if run.held.prompt else opening.tolist()
    tokens = torch.tensor([prompt], device=mesh.device)
    generator = torch.Generator().manual_seed(run.seed)
    model.eval()
    for _ in range(run.held.sample_tokens):
        window = tokens[:, -run.sequence :]
        positions = torch.arange(window.shape[1], device=mesh.device).expand_as(window)
        logits = model(window, positions)[0, -1].float().cpu()
        token = draw(logits, run.held.temperature, generator).to(mesh.device)
        if mesh.world > 1:
            dist.broadcast(token, 0)  # one author, so that ranks which share the weights read the same text
        tokens = torch.cat([tokens, token.view(1, 1)], dim=1)
    model.train()
    shard.release(model)
    return words.decode(tokens[0].tolist())


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token: the likeliest at temperature 0, else by its probability."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
