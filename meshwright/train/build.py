"""What a run needs in memory before its first step: model, optimizer, loader, loss scale."""

from pathlib import Path

import torch
from torch import nn

from meshwright.checkpoint.folder import open_folder
from meshwright.data.loader import Loader
from meshwright.data.prepare import Corpus
from meshwright.models.decoder import Decoder
from meshwright.models.init import fill, key
from meshwright.models.moe import Mixture
from meshwright.optim.adamw import AdamW
from meshwright.parallel import precision, shadow
from meshwright.parallel.apply import apply
from meshwright.parallel.decoder import DECODER
from meshwright.parallel.mesh import Mesh, local
from meshwright.spec.params import params
from meshwright.spec.run import Run
from meshwright.train.saving import restore as restore  # re-exported: what was built may go on from a save
from meshwright.train.scale import LossScale
from meshwright.train.state import State, region_of


def build(run: Run, corpus: Corpus, mesh: Mesh) -> State:
    """The state before the first step."""
    with torch.device("meta"):
        model = Decoder(run.arch).to(precision.weight_dtype(run.plan))
    chunks = apply(model, run.plan, mesh, DECODER)
    for chunk in chunks:
        chunk.to_empty(device=mesh.device)
        chunk.train()
        initialise(chunk, run)
    shadow.attach(chunks, run.plan)
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    return State(
        chunks=chunks,
        optimizer=AdamW(run.optim, weights, run.plan),
        loader=Loader(corpus, run, mesh.data_rank, mesh.device),
        scale=LossScale(run.plan, mesh.device),
    )


def initialise(chunk: nn.Module, run: Run) -> None:
    """Give this rank's part of every weight its first value: from the seed, or from a folder."""
    folder = open_folder(Path(run.init.folder)) if run.init.folder else None
    table = {param.name: param for param in params(run.arch)}
    for name, module in chunk.named_modules():
        if isinstance(module, Mixture):
            module.key = key(run.seed, f"{name}.draws")
    for name, weight in chunk.named_parameters():
        target, region = local(weight.detach()), region_of(weight)
        if folder is None:
            fill(target, table[name], run.seed, region)
        else:
            target.copy_(folder.tensor(name)[region])
