"""Whether two folders hold the same model: logits on fixed tokens, ours and those of stock transformers."""

import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.checkpoint.folder import ModelFolder
from meshwright.models.decoder import Decoder
from meshwright.spec.arch import Arch

SEED = 20_170_612  # any constant: the same tokens for every check

# Two correct programs sum in different orders. A float32 sum of n terms is off by about √n roundings of 2⁻²⁴, and every
# layer adds its own: √(hidden · layers) · 2⁻²⁴ of the largest logit. Against transformers, on random models from two
# layers of 32 to GPT-2's 12 of 768, the difference was 0 to 0.73 of that. Four times leaves room for trained models,
# whose few large activations round worse, and still catches the wrong kind of GELU.
ROUNDING = 4 * 2.0**-24


class MismatchError(RuntimeError):
    """Two folders do not hold the same model."""


def tokens(arch: Arch, count: int) -> Tensor:
    """Fixed pseudo-random tokens (1, count), no more than the model has positions."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(arch.vocab, (1, min(count, arch.context)), generator=generator)


def tolerance(arch: Arch, logits: Tensor) -> float:
    """The largest difference that float32 rounding explains."""
    return ROUNDING * math.sqrt(arch.hidden * arch.layers) * float(logits.abs().max())


@torch.inference_mode()
def logits(folder: ModelFolder, tokens: Tensor, rounded: torch.dtype | None = None) -> Tensor:
    """Our model's logits in float32, with weights first rounded to a dtype. Holds one block's weights at a time."""
    with torch.device("meta"):
        model = Decoder(folder.arch).eval()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    blocks, model.blocks = dict(model.blocks.items()), nn.ModuleDict()
    last, model.norm = model.norm, None
    _load(model, folder, rounded)  # what is outside the blocks, but for the last norm
    x = model(tokens, positions)
    for name in list(blocks):
        model.blocks = nn.ModuleDict({name: blocks.pop(name)})
        _load(model, folder, rounded)
        x = model(x, positions)
    model.blocks, model.norm = nn.ModuleDict(), last
    _load(model, folder, rounded)
    return model(x, positions)


def _load(model: Decoder, folder: ModelFolder, rounded: torch.dtype | None) -> None:
    """Fill the parameters that are still on the meta device."""
    waiting = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    values = {name: folder.tensor(name).to(rounded).to(torch.float32) for name in waiting}
    model.load_state_dict(values, strict=False, assign=True)


def stock_version() -> str | None:
    """The version of transformers, if it is installed and works."""
    try:
        import transformers
    except ImportError:  # its own missing dependencies included
        return None
    return transformers.__version__


def fits_memory(parameters: int) -> bool:
    """Whether transformers, which holds the whole model, can hold it in float32 here."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1.5 * 4 * parameters < total  # half as much again, while files are read


@torch.inference_mode()
def stock_logits(path: Path, tokens: Tensor) -> Tensor:
    """Logits of a Hugging Face folder by transformers' own code: local files, safetensors, no code from the folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        return model.float().eval()(tokens).logits
    except Exception as error:  # whatever stops it, a model that stock code cannot run is not converted
        raise MismatchError(f"transformers cannot run {path}: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
