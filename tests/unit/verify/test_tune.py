"""The certificate of a fine-tuning run, and the seven faults that it must name: each injected where it would happen."""

import functools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from chats import byte_level, ragged, write_lines

from meshwright.checkpoint import convert as converting
from meshwright.checkpoint import model_folder, peft
from meshwright.checkpoint.convert import convert
from meshwright.checkpoint.model_folder import AdaptedFolder, SeededWeights, save_native
from meshwright.cli.main import main
from meshwright.config import load
from meshwright.data.mask import MaskedSample, Masker, _Text
from meshwright.data.pack import Arrays, BestFitPacking
from meshwright.data.prepare import prepare
from meshwright.spec.arch import Arch
from meshwright.spec.params import buffers, params
from meshwright.spec.tuning import Adapter, Tuning
from meshwright.verify import tune

ARCH = Arch(vocab=336, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, context=256)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LORA = ("adapter.kind=lora", "adapter.rank=4", "adapter.rslora=true")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return made_home(tmp_path_factory.mktemp("tune"), ARCH)


def made_home(made: Path, arch: Arch) -> Path:
    """A Hugging Face folder made on the spot, and conversations."""
    byte_level().save(str(made / "tokenizer.json"))
    drawn = SeededWeights(arch, 3)
    weights = ((param.name, drawn.tensor(param.name)) for param in (*params(arch), *buffers(arch)))
    save_native(made / "native", arch, weights, made / "tokenizer.json")
    convert(made / "native", made / "hf", lambda text: None)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (made / "hf" / "tokenizer_config.json").write_text(json.dumps(described))
    (made / "hf" / "chat_template.jinja").write_text(CHATML)
    (made / "hf" / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 330}')
    (made / "hf" / "LICENSE").write_text("as it likes")
    write_lines(made / "chat.jsonl", ragged(12))
    return made


def certified(home: Path, folder: Path, *words: str) -> dict[str, tune.TuneCheck]:
    """The checks of a run whose data is made anew."""
    own = (f"init.from={home}/hf", f"data.source={home}/chat.jsonl", "data.format=chat")
    run = load.load(None, [*own, "sequence=256", "batch=2", *words], default_ranks=1).run
    corpus = prepare(run, folder / "cache", lambda text: None)
    place = folder / "proof"
    place.mkdir()
    return {check.name: check for check in tune.prove(run, corpus, place, lambda text: None).checks}


def failed(checks: dict[str, tune.TuneCheck]) -> list[str]:
    return [name for name, check in checks.items() if check.verdict == "failed"]


def test_a_sound_run_passes_every_check(home, tmp_path):
    checks = certified(home, tmp_path, *LORA)
    assert {check.verdict for check in checks.values()} == {"passed"}, checks
    assert "12 conversations" in checks["mask"].words
    assert "24 answers end with a trained <|im_end|>" in checks["stop"].words
    for name, allowed in (("packing", 1e-12), ("adapter", 1e-6), ("merge", 1e-5)):
        assert (checks[name].deviation or 0.0) <= allowed == checks[name].tolerance
    assert "5 files about text kept" in checks["export"].words


def test_adapters_of_experts_beside_codes_pass_every_check(tmp_path):
    wide = {"hidden": 64, "head_dim": 16, "ffn": 64, "qk_norm": "head"}
    mixed = {"experts": 4, "top_k": 2, "expert_ffn": 64, "balance_loss": 0.01}  # a loss of whole rows, not of samples
    home = made_home(tmp_path, msgspec.structs.replace(ARCH, **wide, **mixed))
    checks = certified(home, tmp_path, "adapter.kind=qlora", "adapter.rank=2")
    assert {check.verdict for check in checks.values()} == {"passed"}, checks
    # Of each layer four matrices of attention, and of experts the two that transformers has of three.
    assert checks["adapter"].words.startswith("24 keys, none missing and none left over")


def test_what_a_run_has_not_is_said_to_not_apply(home, tmp_path):
    checks = certified(home, tmp_path, "data.pack=documents", "data.template=chatml", "data.train_on=all")
    assert not failed(checks)
    missing = {name for name, check in checks.items() if check.verdict == "does not apply"}
    assert missing == {"stop", "packing", "base", "adapter", "merge"}


def whole_conversation(masker: Masker, chat) -> _Text:
    whole = masker.template.text(chat.messages, chat.tools)
    return _Text(chat, whole, [(0, whole.rindex("<|im_end|>") + len("<|im_end|>"))], frozenset())


def test_a_loss_on_the_whole_conversation_is_named(home, tmp_path, monkeypatch):
    """What happens elsewhere where a template has no generation marks."""
    monkeypatch.setattr(Masker, "_prefixed", whole_conversation)
    checks = certified(home, tmp_path)
    assert "mask" in failed(checks)
    assert "turn 2 is trained from" in checks["mask"].words


def test_a_stop_token_that_is_never_trained_is_named(home, tmp_path, monkeypatch):
    sound = Masker._encoded

    def unstopped(masker: Masker, each: _Text) -> MaskedSample:
        sample = sound(masker, each)
        sample.mask[sample.tokens == masker.special["<|im_end|>"]] = 0
        return sample

    monkeypatch.setattr(Masker, "_encoded", unstopped)
    checks = certified(home, tmp_path)
    assert failed(checks) == ["stop"]
    assert "is trained without a stop token behind it" in checks["stop"].words


def test_boilerplate_of_the_template_that_is_trained_is_named(home, tmp_path, monkeypatch):
    sound = Masker._prompt
    monkeypatch.setattr(Masker, "_prompt", lambda *given: sound(*given).removesuffix("assistant\n"))
    checks = certified(home, tmp_path)
    assert failed(checks) == ["mask"]
    assert "generation begins behind" in checks["mask"].words


def test_packing_that_leaks_is_named(home, tmp_path, monkeypatch):
    sound = BestFitPacking.read

    def leaking(self: BestFitPacking, samples: np.ndarray) -> Arrays:
        found = sound(self, samples)
        return Arrays(found.tokens, found.targets, found.positions, np.zeros_like(found.positions))

    monkeypatch.setattr(BestFitPacking, "read", leaking)
    checks = certified(home, tmp_path)
    assert failed(checks) == ["packing"]


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_an_adapter_that_loads_as_nothing_is_named(home, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    sound = peft.tensors

    def compiled(*given):
        return ((name.replace("layers.0.", "layers.0._orig_mod."), tensor) for name, tensor in sound(*given))

    monkeypatch.setattr(peft, "tensors", compiled)
    checks = certified(home, tmp_path, *LORA)
    assert failed(checks) == ["adapter"]
    monkeypatch.setattr(peft, "has_peft", lambda: False)  # and where nobody has peft
    (again := tmp_path / "again").mkdir()
    checks = certified(home, again, *LORA)
    assert failed(checks) == ["adapter"]
    assert "_orig_mod" in checks["adapter"].words


def test_a_merge_that_differs_is_named(home, tmp_path, monkeypatch):
    sound = AdaptedFolder.tensor

    def unscaled(self: AdaptedFolder, name: str) -> torch.Tensor:
        base = self.base.tensor(name)
        return base + (sound(self, name) - base) / self.note.adapter.scale  # rsLoRA's scale forgotten

    monkeypatch.setattr(AdaptedFolder, "tensor", unscaled)
    monkeypatch.setattr(converting, "_say_merged", lambda *given: None)  # which would refuse it first
    checks = certified(home, tmp_path, *LORA)
    assert "merge" in failed(checks)
    assert "merged = adapter + base" in checks["merge"].words


def test_a_template_that_is_lost_on_export_is_named(home, tmp_path, monkeypatch):
    sound = model_folder.copy_texts

    def forgetful(source: Path, target: Path) -> None:
        sound(source, target)
        (target / "chat_template.jinja").unlink(missing_ok=True)

    monkeypatch.setattr(model_folder, "copy_texts", forgetful)
    checks = certified(home, tmp_path)
    assert failed(checks) == ["export"]
    assert "chat_template.jinja" in checks["export"].words


def test_a_frozen_weight_that_moves_is_named(home, tmp_path, monkeypatch):
    sound = tune.train

    def moving(run, state, mesh):
        yield from sound(run, state, mesh)
        next(weight for weight in state.chunks[0].parameters() if not weight.requires_grad).data.mul_(1.01)

    monkeypatch.setattr(tune, "train", moving)
    checks = certified(home, tmp_path, *LORA)
    assert "base" in failed(checks)
    assert "which is frozen, has changed" in checks["base"].words


def test_the_frozen_copy_that_answers_are_compared_with_is_looked_at(home, tmp_path, monkeypatch):
    answers = [{"prompt": f"What is {number}?", "chosen": "Four.", "rejected": "It is red."} for number in range(4)]
    write_lines(home / "pairs.jsonl", answers)
    words = (f"data.source={home}/pairs.jsonl", "objective=dpo")
    (tmp_path / "sound").mkdir()
    checks = certified(home, tmp_path / "sound", *words)
    assert not failed(checks), checks
    assert "weights of the reference have the same bits after two steps" in checks["base"].words
    sound = tune.train

    def moving(run, state, mesh):
        yield from sound(run, state, mesh)
        next(state.reference[0].parameters()).data.mul_(1.01)

    monkeypatch.setattr(tune, "train", moving)
    checks = certified(home, tmp_path, *words)
    assert failed(checks) == ["base"]
    assert "embed.weight of the reference, which is frozen, is not the first weight" in checks["base"].words


def test_a_run_that_tunes_nothing_is_refused(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Once upon a time")
    assert main(["verify", "--tune", "arch.preset=tiny", f"data.source={tmp_path}/text.txt"]) == 2
    assert "is no fine-tuning run; prove its plan by verify --plan" in capsys.readouterr().err


@functools.cache
def large() -> Arch:
    return load.load(None, ["arch.preset=llama3-8b", *LORA], default_ranks=1).run.arch


def test_a_large_model_is_proved_in_small():
    small = tune.in_small(large(), tune.SMALL)
    assert small.heads // small.kv_heads == large().heads // large().kv_heads
    assert small.vocab == large().vocab
    assert small.adapter.rslora
    assert tune.count(small) < tune.SMALL
    coded = tune.in_small(msgspec.structs.replace(large(), tuning=Tuning(adapter=Adapter(kind="qlora"))), tune.SMALL)
    assert all(param.shape[-1] % 64 == 0 for param in params(coded) if param.held == "nf4")


def test_the_verb_writes_a_certificate_and_answers_programs(home, tmp_path, monkeypatch, capsys):
    words = [f"init.from={home}/hf", f"data.source={home}/chat.jsonl", "data.format=chat", "sequence=256", "batch=2"]
    (tmp_path / "run.toml").write_text('name = "sft"\n')
    monkeypatch.chdir(tmp_path)
    code = main(["verify", "--tune", "run.toml", *words, "--json", "--folder", "out"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    answer = json.loads(printed.out)
    assert [check["name"] for check in answer["checks"]][:3] == ["mask", "stop", "packing"]
    assert json.loads((tmp_path / "out/certificate.json").read_bytes())["checks"] == answer["checks"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["certificate.json"]
    assert "\n4 of 7 checks passed, nothing to look at for base, adapter, merge; certificate: out" in printed.err


def test_a_model_with_a_load_bias_is_proved_as_well(tmp_path, monkeypatch):
    routed = {"router_score": "sigmoid", "router_load_bias": True, "experts": 4, "expert_ffn": 16, "top_k": 2}
    arch = msgspec.structs.replace(
        ARCH, **routed, dense_layers=1, shared_experts=1, qk_norm="head", attention_bias="qkv"
    )
    home = made_home(tmp_path, arch)
    found = certified(home, tmp_path / "proof")
    assert {name for name, check in found.items() if check.verdict == "passed"} == {"mask", "stop", "packing", "export"}
    sound = tune.train

    def moving(run, state, mesh):
        yield from sound(run, state, mesh)
        next(buffer for name, buffer in state.chunks[0].named_buffers() if name.endswith("load_bias")).add_(0.01)

    monkeypatch.setattr(tune, "train", moving)
    beside = certified(home, tmp_path / "beside", *LORA)["base"]
    assert beside.verdict == "failed"
    assert "load_bias, which is frozen, has changed" in beside.words
