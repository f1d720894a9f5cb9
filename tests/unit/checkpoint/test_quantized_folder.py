"""Quantized folders beside transformers' own dequantization, bit for bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.tiny import weights_of
from meshwright.checkpoint.convert import convert
from meshwright.checkpoint.model_folder import SINGLE, open_folder, save_native
from meshwright.checkpoint.quantized_folder import QuantizedReader, dequantized_fp8, dequantized_mxfp4
from meshwright.config.presets import preset
from meshwright.spec.problem import InputError


@pytest.fixture
def stored(tmp_path):
    """A folder of transformers' form, quantized by a function of its tensors."""

    def make(name, method, quantize):
        arch = preset(name)
        save_native(tmp_path / "ours", arch, weights_of(arch, torch.bfloat16).items(), None)
        convert(tmp_path / "ours", tmp_path / "plain", lambda text: None)
        shutil.copytree(tmp_path / "plain", tmp_path / "quantized")
        file, config = tmp_path / "quantized" / "model.safetensors", tmp_path / "quantized" / "config.json"
        save_file(quantize(load_file(file)), file)
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method}))
        return tmp_path / "quantized"

    return make


def test_mxfp4_is_read_as_transformers_dequantizes_it(stored, transformers):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator, wanted = torch.Generator().manual_seed(1), {}

    def pack(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(115, 128, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wanted[name] = convert_moe_packed_tensors(blocks, scales)
            assert torch.equal(dequantized_mxfp4(blocks, scales), wanted[name])
        return tensors

    path = stored("tiny-gpt-oss", {"quant_method": "mxfp4"}, pack)
    folder = open_folder(path)
    down = folder.tensor("blocks.0.mlp.experts.down")
    assert torch.equal(down, wanted["model.layers.0.mlp.experts.down_proj"].mT)
    report = convert(path, path.parent / "native", lambda text: None)
    assert report.dtype == "bfloat16"
    convert(path.parent / "native", path.parent / "back", lambda text: None)
    assert "quantization_config" not in json.loads((path.parent / "back" / "config.json").read_text())
    assert torch.equal(open_folder(path.parent / "back").tensor("blocks.0.mlp.experts.down"), down)


def test_multi_token_prediction_beyond_one_token_is_left_out_aloud(stored, transformers):
    path = stored("tiny-glm4-moe", None, lambda tensors: tensors | {"model.layers.7.eh_proj.weight": torch.zeros(2, 2)})
    config = json.loads((path / "config.json").read_text())
    with pytest.raises(InputError, match="eh_proj"):
        open_folder(path)
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    told = []
    assert open_folder(path).left_out == 1
    convert(path, path.parent / "native", told.append)
    assert any("1 tensors of pictures or of multi-token prediction" in text for text in told)


def test_fp8_is_read_as_transformers_dequantizes_it(stored, transformers):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def narrow(tensors):
        for name in [name for name in tensors if ".mlp." in name and name.endswith("proj.weight")]:
            scale = torch.rand(-(-tensors[name].shape[0] // 128), -(-tensors[name].shape[1] // 128)) + 0.5
            tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
        return tensors

    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = stored("tiny-deepseek-v3", method, narrow)
    held, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    pair = held[name], held[f"{name}_scale_inv"]
    mine = open_folder(path).tensor("blocks.0.mlp.down.weight")
    assert torch.equal(mine, dequantized_fp8(*pair))
    whole = torch.randn(256, 384).to(torch.float8_e4m3fn), torch.rand(2, 3)  # which theirs demands
    assert torch.equal(dequantized_fp8(*whole), Fp8Dequantize(None)._dequantize_one(*whole, torch.bfloat16))


DEEPSEEK = {
    **{"vocab_size": 61, "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"q_lora_rank": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
GPT_OSS = {
    **{"vocab_size": 61, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def as_fp8(tensors):
    for name in [name for name in tensors if name.endswith(("proj.weight", "_mqa.weight"))]:
        scale = 0.1 * torch.rand([-(-size // 128) for size in tensors[name].shape])
        tensors |= {name: torch.randn(tensors[name].shape).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    return tensors


def as_mxfp4(tensors):
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 128, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return tensors


@pytest.mark.parametrize(
    ("name", "keys", "quantize", "method"),
    [
        ("DeepseekV3", DEEPSEEK, as_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("GptOss", GPT_OSS, as_mxfp4, {"quant_method": "mxfp4"}),
    ],
    ids=["fp8", "mxfp4"],
)
def test_a_quantized_folder_is_the_model_that_transformers_loads(name, keys, quantize, method, tmp_path, transformers):
    torch.manual_seed(4)
    kind = getattr(transformers, f"{name}ForCausalLM")
    plain = kind(kind.config_class(**keys, bos_token_id=None, eos_token_id=None)).to(torch.bfloat16)
    plain.save_pretrained(tmp_path / "quantized")
    file, config = (tmp_path / "quantized" / file for file in ("model.safetensors", "config.json"))
    save_file(quantize(load_file(file)), file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method}))
    settings = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}[method["quant_method"]]
    loaded = kind.from_pretrained(
        tmp_path / "quantized", quantization_config=settings(dequantize=True), dtype=torch.bfloat16
    )
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(tmp_path / "theirs")
    mine, theirs = open_folder(tmp_path / "quantized"), open_folder(tmp_path / "theirs")
    assert mine.arch == theirs.arch
    assert all(torch.equal(mine.tensor(name), theirs.tensor(name)) for name in theirs.shapes)


@pytest.mark.parametrize("shape", [(192, 256), (576, 200), (100, 130)])
def test_blocks_that_are_cut_short_keep_their_own_scale(shape):
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand([-(-size // 128) for size in shape])
    wanted = codes.float()
    for row in range(0, shape[0], 128):  # as DeepSeek's own code has them, of which transformers takes whole ones alone
        for column in range(0, shape[1], 128):
            wanted[row : row + 128, column : column + 128] *= scale[row // 128, column // 128]
    assert torch.equal(dequantized_fp8(codes, scale), wanted.bfloat16())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"down_proj_scales": None}, "down_proj_blocks .* does not belong to .*down_proj_scales, which is missing"),
        ({"down_proj_scales": torch.zeros(1, 2, dtype=torch.uint8)}, "does not belong to"),
        ({"down_proj_blocks": torch.zeros(4, 16, dtype=torch.uint8)}, "down_proj_blocks .4, 16. of"),
        ({"norm.weight_scale_inv": torch.zeros(3, 3)}, "norm.weight_scale_inv .* does not belong to .*norm.weight"),
    ],
)
def test_codes_and_scales_that_do_not_belong_together_are_named(tmp_path, changed, told):
    held = {
        "down_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
        "down_proj_scales": torch.zeros(4, 64, 2, dtype=torch.uint8),
        "norm.weight": torch.zeros(64),
    }
    save_file({name: tensor for name, tensor in (held | changed).items() if tensor is not None}, tmp_path / SINGLE)
    with pytest.raises(InputError, match=told):
        QuantizedReader(tmp_path)
