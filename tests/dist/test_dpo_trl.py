"""The loss of DPO and its gradients beside TRL's own code, its collator, fused head and loss, on the same pairs."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_dpo import BETA, COPY, DORA, a_run, folder, whole_batch  # noqa: F401 - the fixture
from torch import Tensor
from trials import alone

from meshwright.checkpoint import peft
from meshwright.checkpoint.convert import convert
from meshwright.checkpoint.model_folder import AdaptedFolder, open_folder, save_native
from meshwright.config.run import Run
from meshwright.config.weights import AdapterNote
from meshwright.data.prepare import Corpus
from meshwright.spec.tuning import is_adapter
from meshwright.train import dpo
from meshwright.train.state import State, weights

for name in ("trl", "peft", "transformers", "accelerate"):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
PAIRS = 8
OF_DATA = ("datasets.fingerprint", "datasets", "pandas")
NAMES = (
    "DataFrame",
    "Dataset",
    "DatasetDict",
    "IterableDataset",
    "IterableDatasetDict",
    "concatenate_datasets",
    "Hasher",
)
# Llama's norms are computed in fp32 by transformers, whatever the weights are in; fp64 else.
TOLERANCE = 1e-5


PARTS = {"lora_a": "lora_A", "lora_b": "lora_B", "magnitude": "lora_magnitude_vector"}  # ours, and peft's


@pytest.fixture
def trl_dpo(monkeypatch) -> ModuleType:
    """TRL's module. Its import asks for libraries of data, which the loss has no use for and need not be installed."""
    for module in [each for each in OF_DATA if find_spec(each.partition(".")[0]) is None]:
        empty = ModuleType(module)
        empty.__spec__ = ModuleSpec(module, None)
        for each in NAMES:
            setattr(empty, each, type(each, (), {}))
        monkeypatch.setitem(sys.modules, module, empty)
    from trl.trainer import dpo_trainer

    return dpo_trainer


def pairs_of(corpus: Corpus) -> list[dict[str, list[int]]]:
    """Prompts and answers by tokens, as TRL's collator takes them."""
    (tokens,), found, begin = corpus.sources, list[tuple[list[int], list[int]]](), 0
    assert tokens.mask is not None
    for end in tokens.ends.tolist():
        ids, mask = (part.read(begin, end - begin).astype("int64").tolist() for part in (tokens, tokens.mask))
        first = mask.index(1)
        last = len(mask) - mask[::-1].index(1)
        assert all(mask[first:last]), "one answer"
        found.append((ids[:first], ids[first:last]))
        begin = end
    chosen, rejected = found[0::2], found[1::2]
    assert all(one[0] == other[0] for one, other in zip(chosen, rejected, strict=True))
    return [
        {"prompt_ids": one[0], "chosen_ids": one[1], "rejected_ids": other[1]}
        for one, other in zip(chosen, rejected, strict=True)
    ]


def saved_base(path: Path, name: str, tensors: Iterable[tuple[str, Tensor]], corpus: Corpus) -> Path:
    """Weights as a Hugging Face folder."""
    plain = a_run(path, "plan.replicate=1", *COPY, "objective=sft", "dpo.beta=0.1")
    save_native(path / f"{name}-ours", plain.arch, tensors, corpus.tokenizer)
    convert(path / f"{name}-ours", path / name, lambda text: None)
    return path / name


def opened_by_transformers(path: Path, trl_dpo: ModuleType) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True).double()
    trl_dpo.add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return model


def adapted(path: Path, state: State, run: Run, corpus: Corpus, trl_dpo: ModuleType) -> tuple[Any, dict[str, str]]:
    """The same base and adapter by transformers and peft, with TRL's head; and their names of our weights."""
    whole = dict(weights(state.chunks, run, alone()))
    base = saved_base(path, "hf", [(name, weight) for name, weight in whole.items() if not is_adapter(name)], corpus)
    note = AdapterNote(adapter=run.adapter, base=str(base), seed=run.seed)
    save_native(path / "adapter", run.arch, whole.items(), corpus.tokenizer, note=note)
    opened = open_folder(path / "adapter")
    assert isinstance(opened, AdaptedFolder)
    convert(path / "adapter", path / "peft", lambda text: None)
    both = peft.beside(opened_by_transformers(base, trl_dpo), path / "peft").double()
    for name, weight in both.named_parameters():
        weight.requires_grad_("lora_" in name)
    return both, {
        f"{each.stored.made_of[0].removesuffix('.weight')}.{part}": f"{peft.PREFIX}{each.module}.{word}.default.weight"
        for each in peft.layers(opened)
        for part, word in PARTS.items()
        if part != "magnitude" or run.adapter.kind == "dora"
    }


def copied(path: Path, state: State, corpus: Corpus, trl_dpo: ModuleType) -> tuple[Any, Any, dict[str, str]]:
    """The same model and its frozen copy by transformers, with TRL's head; and their names of our weights."""
    folders = [
        saved_base(path, name, chunk.state_dict().items(), corpus)
        for name, chunk in (("hf", state.chunks[0]), ("reference", state.reference[0]))
    ]
    model, reference = (opened_by_transformers(each, trl_dpo) for each in folders)
    layouts = open_folder(folders[0]).layouts
    return model, reference, {name: theirs.name for name, (theirs, *_) in layouts.items()}


@pytest.mark.parametrize("words", [(), DORA, COPY], ids=["adapter", "magnitudes", "copy"])
def test_loss_and_gradients_are_those_of_trl(folder, tmp_path, trl_dpo, words):  # noqa: F811
    from accelerate import Accelerator

    lines = (folder / "pairs.jsonl").read_text().splitlines()[:PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    run, corpus, state = whole_batch(tmp_path, *words)
    step, batch = dpo.PreferenceStep(run, state, alone()), state.loader.take(0)
    loss = step(batch, torch.ones((), dtype=torch.float64)).item() / PAIRS
    ours = {name: weight.grad for name, weight in state.chunks[0].named_parameters() if weight.requires_grad}
    reference = None
    if state.reference:
        model, reference, names = copied(tmp_path, state, corpus, trl_dpo)
    else:
        model, names = adapted(tmp_path, state, run, corpus, trl_dpo)
    state.loader.close()
    trainer = SimpleNamespace(
        model=model, ref_model=reference, accelerator=Accelerator(cpu=True), beta=BETA, loss_types=["sigmoid"],
        loss_weights=[1.0], f_divergence_type="reverse_kl", ld_alpha=None, use_weighting=False, aux_loss_enabled=False,
        precompute_ref_logps=False, label_smoothing=0.0, _tp_size=1, _total_train_tokens=0,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    inputs = trl_dpo.DataCollatorForPreference(pad_token_id=0)(pairs_of(corpus))
    model.train()
    theirs = trl_dpo.DPOTrainer._compute_loss(trainer, model, inputs, False)
    theirs.backward()
    assert batch.pairs == PAIRS == len(inputs["input_ids"]) // 2
    assert abs(loss - theirs.item()) < TOLERANCE * theirs.item()
    held = dict(model.named_parameters())
    assert names.keys() == ours.keys()
    for name, mine in ours.items():
        grad = held[names[name]].grad
        assert (grad - mine).norm() < TOLERANCE * grad.norm(), name
    margin, ahead = step.told(PAIRS).tolist()
    assert abs(trainer._metrics["train"]["rewards/margins"][0] - margin) < TOLERANCE * abs(margin)
    assert trainer._metrics["train"]["rewards/accuracies"] == [ahead]
