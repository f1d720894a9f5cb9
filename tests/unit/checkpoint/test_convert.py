import json
import sys

import msgspec
import pytest
import torch

from checkpoint.tiny import ARCHS, weights_of
from meshwright.checkpoint import convert as judge
from meshwright.checkpoint.convert import MismatchError, convert
from meshwright.checkpoint.model_folder import open_folder, save_native
from meshwright.config.presets import preset
from meshwright.models.decoder import Decoder
from meshwright.spec.problem import InputError

# Logits here are below 20 and float32 rounds them by 1e-6; sums in another order add a few roundings.
CLOSE = 1e-5


def quiet(_: str) -> None:
    pass


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


GPT_SIZES = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STOCK = {
    "gpt2": ("GPT2", GPT_SIZES),
    "gpt2 untied, exact gelu, narrow": (
        "GPT2",
        GPT_SIZES | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 40},
    ),
    "llama": ("Llama", SIZES),
    "llama tied": ("Llama", SIZES | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama wide heads": ("Llama", SIZES | {"head_dim": 12, "rope_theta": 500.0}),
    "llama3": ("Llama", SIZES | {"rope_scaling": SCALING | {"original_max_position_embeddings": 16}}),
    "llama linear": ("Llama", SIZES | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("Mistral", SIZES | {"sliding_window": None}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2}),
}


@pytest.fixture
def stock(transformers, tmp_path):
    """A random model of transformers, saved by transformers."""

    def make(kind: str, sizes: dict, **saving):
        torch.manual_seed(3)
        config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=None, eos_token_id=None)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():  # its own start leaves norms at one, biases at zero and logits too small to tell
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / "stock", **saving)
        return tmp_path / "stock", model

    return make


@torch.inference_mode()
def logits_of(model, tokens):
    return model(tokens).logits


@pytest.mark.parametrize(("kind", "sizes"), STOCK.values(), ids=STOCK)
def test_a_model_of_transformers_computes_the_same_here(stock, kind, sizes):
    path, model = stock(kind, sizes)
    folder = open_folder(path)
    tokens = judge.probe_tokens(folder.arch, 64)
    torch.testing.assert_close(judge.logits(folder, tokens), logits_of(model, tokens), rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("kind", "sizes"), STOCK.values(), ids=STOCK)
def test_a_model_of_transformers_comes_in_and_goes_out_again(transformers, stock, tmp_path, kind, sizes):
    path, model = stock(kind, sizes)
    report = convert(path, tmp_path / "ours", quiet)
    assert (report.kind_from, report.kind_to) == ("huggingface", "meshwright")
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert report.checked_with.startswith(f"transformers {transformers.__version__}")
    assert report.largest_difference < min(CLOSE, report.tolerance)
    convert(tmp_path / "ours", tmp_path / "back", quiet)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = judge.probe_tokens(open_folder(path).arch, 64)
    assert torch.equal(logits_of(back, tokens), logits_of(model, tokens))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_a_model_of_ours_is_loaded_by_transformers(transformers, native, tmp_path, arch):
    source = native(arch)
    report = convert(source, tmp_path / "theirs", quiet)
    assert (report.kind_from, report.kind_to) == ("meshwright", "huggingface")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    tokens = judge.probe_tokens(arch, 64)
    ours = judge.logits(open_folder(source), tokens)
    torch.testing.assert_close(logits_of(model, tokens), ours, rtol=0, atol=CLOSE)
    assert open_folder(tmp_path / "theirs").arch == arch


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_shards_are_read_and_written(transformers, native, tmp_path, name):
    source = native(ARCHS[name])
    convert(source, tmp_path / "theirs", quiet, shard_bytes=20_000)
    assert "model.safetensors.index.json" in names_in(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", quiet, shard_bytes=20_000)
    assert "model.safetensors.index.json" in names_in(tmp_path / "ours")
    ours = open_folder(tmp_path / "ours")
    assert all(torch.equal(ours.tensor(name), value) for name, value in weights_of(ARCHS[name]).items())


def test_shards_of_transformers_are_read(stock):
    path, model = stock("Mixtral", STOCK["mixtral"][1], max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    folder = open_folder(path)
    tokens = judge.probe_tokens(folder.arch, 64)
    torch.testing.assert_close(judge.logits(folder, tokens), logits_of(model, tokens), rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_the_dtype_stays_unless_another_is_asked_for(transformers, native, tmp_path, dtype, expected):
    source = native(ARCHS["mixtral"], torch.bfloat16)
    convert(source, tmp_path / "theirs", quiet, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", torch_dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_rounding_that_was_asked_for_is_no_difference(native, tmp_path, name):
    source = native(ARCHS[name])
    report = convert(source, tmp_path / "theirs", quiet, dtype="bfloat16")
    assert report.largest_difference <= report.tolerance
    convert(tmp_path / "theirs", tmp_path / "ours", quiet, dtype="float16")
    assert open_folder(tmp_path / "ours").dtype == torch.float16


def test_options_that_make_no_sense_are_refused_together(native, tmp_path):
    with pytest.raises(InputError) as caught:
        convert(native(ARCHS["llama"]), tmp_path / "theirs", quiet, dtype="int8", check_tokens=0)
    assert [problem.key for problem in caught.value.problems] == ["dtype", "check_tokens"]


@pytest.fixture
def tokenizer(tmp_path):
    """A byte-level tokenizer such as a run trains."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=61, special_tokens=["<|endoftext|>"], show_progress=False)
    made.train_from_iterator(["the planner finds a plan and the trainer obeys it"] * 3, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_trained_tokenizer_travels_and_loads(transformers, native, tokenizer, tmp_path):
    convert(native(ARCHS["llama"], tokenizer=tokenizer), tmp_path / "theirs", quiet)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ids = loaded("the plan")["input_ids"]
    assert loaded.decode(ids) == "the plan"
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", 0)
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["eos_token_id"] == 0


def test_files_about_text_travel_both_ways(stock, tokenizer, tmp_path):
    path, _ = stock("Llama", SIZES)
    (path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (path / "README.md").write_text("not about text")
    convert(path, tmp_path / "ours", quiet)
    assert open_folder(tmp_path / "ours").tokenizer is not None
    convert(tmp_path / "ours", tmp_path / "back", quiet)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (path / name).read_bytes()
    assert "README.md" not in names_in(tmp_path / "back")


def test_a_tokenizer_that_is_none_is_refused(native, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"added_tokens": 3}')
    with pytest.raises(InputError, match="is not a tokenizer"):
        convert(native(ARCHS["llama"], tokenizer=broken), tmp_path / "theirs", quiet)
    assert names_in(tmp_path) == ["broken.json", "native"]


def test_a_target_with_something_in_it_is_refused(native, tmp_path):
    source = native(ARCHS["llama"])
    before = names_in(source)
    with pytest.raises(InputError, match="not empty"):
        convert(source, source, quiet)
    assert names_in(source) == before


def test_what_transformers_has_no_word_for_is_refused_and_nothing_is_left(native, tmp_path):
    arch = msgspec.structs.replace(ARCHS["mixtral"], shared_experts=1)
    with pytest.raises(InputError, match="shared_experts"):
        convert(native(arch), tmp_path / "theirs", quiet)
    assert names_in(tmp_path) == ["native"]


def test_weights_that_do_not_fit_the_dtype_are_an_error_and_nothing_is_left(tmp_path):
    arch = ARCHS["llama"]
    tensors = weights_of(arch)
    tensors["blocks.1.mlp.down.weight"] *= 1e6  # float16 ends at 65,504
    save_native(tmp_path / "native", arch, tensors.items(), None)
    with pytest.raises(MismatchError, match="nothing was left"):
        convert(tmp_path / "native", tmp_path / "theirs", quiet, dtype="float16")
    assert names_in(tmp_path) == ["native"]


def test_what_transformers_cannot_run_is_not_converted(stock, tmp_path):
    path, _ = stock("Llama", SIZES)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float33", "torch_dtype": "float33"}))
    with pytest.raises(MismatchError, match="transformers cannot run"):
        convert(path, tmp_path / "ours", quiet)
    assert names_in(tmp_path) == ["stock"]


def test_without_transformers_the_check_is_ours_alone(monkeypatch, native, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    report = convert(native(ARCHS["llama"]), tmp_path / "theirs", quiet)
    assert report.checked_with == "meshwright in float32 on 64 tokens"
    assert report.largest_difference == 0


def test_progress_is_told(native, tmp_path):
    said = []
    convert(native(ARCHS["llama"]), tmp_path / "theirs", said.append, check_tokens=4)
    told = ("converting", "of 4 tokens", "logits match", f"wrote {tmp_path / 'theirs'}: float32, 2 files")
    assert [word for line in said for word in told if word in line] == list(told)


def test_norms_after_the_sub_layers_are_those_of_gpt_1(transformers):
    torch.manual_seed(3)
    sizes = {**GPT_SIZES, **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)}
    stock = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**sizes)).double()
    for weight in stock.parameters():  # norms and biases too, which begin as ones and zeros
        torch.nn.init.normal_(weight, std=0.3)
    published = msgspec.structs.replace(preset("gpt1-published"), vocab=61, layers=2, hidden=32, heads=4, kv_heads=4)
    ours = Decoder(msgspec.structs.replace(published, head_dim=8, ffn=128, context=64)).double()
    theirs = stock.state_dict()
    names = {"attn_norm": "ln_1", "mlp_norm": "ln_2", "attn.out": "attn.c_proj"}
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    outside = {"embed": "tokens_embed", "positions": "positions_embed"}
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            if not name.startswith("blocks."):
                weight.copy_(theirs[f"transformer.{outside[name.split('.')[0]]}.weight"])
                continue
            _, layer, *inner, kind = name.split(".")
            module = ".".join(inner)
            whole = theirs[f"transformer.h.{layer}.{names.get(module, 'attn.c_attn')}.{kind}"]
            whole = whole.t() if whole.ndim == 2 else whole  # theirs are transposed
            weight.copy_(whole if module in names else whole.chunk(3)["qkv".index(module[-1])])
    tokens = torch.randint(0, 61, (2, 64))
    positions = torch.arange(64).expand(2, -1)
    assert (ours(tokens, positions) - stock(tokens).logits).abs().max() < 1e-9 * stock(tokens).logits.abs().max()
