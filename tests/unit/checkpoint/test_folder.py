import json
import os
import shutil
from contextlib import suppress

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from checkpoint.tiny import ARCHS, weights_of
from meshwright.checkpoint import model_folder
from meshwright.checkpoint.model_folder import MOST_PROBLEMS, open_folder, save_native, staged
from meshwright.config.huggingface import config_of
from meshwright.spec.problem import InputError


def huggingface(folder, arch, *, extra=None, **layout):
    """A Hugging Face folder, in any of its layouts."""
    ours = weights_of(arch)
    stored = model_folder.huggingface(arch, **layout)
    tensors = {each.name: model_folder.store(each, ours.__getitem__).clone().contiguous() for each in stored}
    folder.mkdir()
    save_file(tensors | (extra or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(arch)))
    return folder


def assert_holds(folder, arch):
    for name, value in weights_of(arch).items():
        assert torch.equal(open_folder(folder).tensor(name), value)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_our_own_folder_returns_what_was_saved(native, arch):
    folder = open_folder(native(arch))
    assert (folder.kind, folder.arch, folder.dtype, folder.tokenizer) == ("meshwright", arch, torch.float32, None)
    assert_holds(folder.path, arch)


@pytest.mark.parametrize("layout", [{}, {"prefix": ""}], ids=["whole", "bare"])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_a_hugging_face_folder_is_read_by_our_names(tmp_path, arch, layout):
    folder = huggingface(tmp_path / "theirs", arch, **layout)
    assert open_folder(folder).kind == "huggingface"
    assert_holds(folder, arch)


def test_fused_experts_are_read_like_separate_ones(tmp_path):
    assert_holds(huggingface(tmp_path / "theirs", ARCHS["mixtral"], fused=True), ARCHS["mixtral"])


def test_masks_and_frequencies_of_old_files_are_passed_over(tmp_path):
    extra = {"h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8), "h.0.attn.masked_bias": torch.ones(())}
    assert_holds(huggingface(tmp_path / "theirs", ARCHS["gpt2"], prefix="", extra=extra), ARCHS["gpt2"])


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    arch = ARCHS["gpt2"]
    embed = weights_of(arch)["embed.weight"]
    assert_holds(huggingface(tmp_path / "same", arch, extra={"lm_head.weight": embed.clone()}), arch)
    other = open_folder(huggingface(tmp_path / "other", arch, extra={"lm_head.weight": embed + 1}))
    with pytest.raises(InputError, match="tie_word_embeddings"):
        other.tensor("embed.weight")


def test_a_run_is_opened_by_the_model_inside_it(tmp_path, native):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text("")
    with pytest.raises(InputError, match="no weights yet"):
        open_folder(run)
    shutil.move(native(ARCHS["llama"]), run / "model")
    assert open_folder(run).path == run / "model"


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds neither"):
        open_folder(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        open_folder(tmp_path / "nothing")


def test_every_mismatch_is_told_at_once(tmp_path):
    arch = ARCHS["llama"]
    folder = huggingface(tmp_path / "theirs", arch, extra={"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    (folder / "config.json").write_text(json.dumps(config_of(arch) | {"intermediate_size": 40, "num_hidden_layers": 3}))
    with pytest.raises(InputError) as caught:
        open_folder(folder)
    text = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight has shape (48, 32), not (40, 32)" in text
    assert "lacks the tensor model.layers.2.self_attn.q_proj.weight of shape (32, 32)" in text
    assert "holds model.layers.0.self_attn.q_proj.bias" in text


def test_a_thousand_mismatches_are_cut_short(tmp_path):
    folder = huggingface(tmp_path / "theirs", ARCHS["llama"])
    (folder / "config.json").write_text(json.dumps(config_of(ARCHS["llama"]) | {"num_hidden_layers": 9999}))
    with pytest.raises(InputError) as caught:
        open_folder(folder)
    assert len(caught.value.problems) == MOST_PROBLEMS + 1


def test_whole_numbers_are_not_weights(tmp_path):
    folder = huggingface(
        tmp_path / "theirs", ARCHS["llama"], extra={"model.norm.weight": torch.ones(32, dtype=torch.int8)}
    )
    with pytest.raises(InputError, match=r"model\.norm\.weight is not stored as floats"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [({"layers": "two"}, "layers"), ({"layers": 10**8}, "layers"), ({"heads": 0}, "heads"), ({"new": 1}, "new")],
)
def test_a_damaged_arch_file_is_refused(native, change, text):
    folder = native(ARCHS["llama"])
    (folder / "arch.json").write_text(json.dumps(msgspec.to_builtins(ARCHS["llama"]) | change))
    with pytest.raises(InputError, match=text):
        open_folder(folder)


def test_saving_again_replaces_the_whole_folder(tmp_path):
    tokenizer = tmp_path / "mine.json"
    tokenizer.write_text("{}")
    save_native(tmp_path / "model", ARCHS["gpt2"], weights_of(ARCHS["gpt2"]).items(), tokenizer)
    assert open_folder(tmp_path / "model").tokenizer == tmp_path / "model" / "tokenizer.json"
    save_native(tmp_path / "model", ARCHS["llama"], weights_of(ARCHS["llama"]).items(), None)
    assert open_folder(tmp_path / "model").arch == ARCHS["llama"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "model"]
    assert not (tmp_path / "model" / "tokenizer.json").exists()


def test_a_save_that_lacks_a_parameter_leaves_the_earlier_model(tmp_path):
    arch = ARCHS["llama"]
    tensors = weights_of(arch)
    save_native(tmp_path / "model", arch, tensors.items(), None)
    del tensors["norm.weight"]
    with pytest.raises(InputError, match=r"lacks the tensor norm\.weight"):
        save_native(tmp_path / "model", arch, tensors.items(), None)
    assert_holds(tmp_path / "model", arch)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_writer_left_goes_and_what_another_is_writing_stays(tmp_path):
    left, old, other, written = (
        tmp_path / f".{name}"
        for name in ("out.0a373628.partial", "out.0a373629.old", "outer.0a373628.partial", "out.x")
    )
    for folder in (left, old, other, written):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"much")
        os.utime(folder, (0, 0))
    with staged(tmp_path / "out") as stage:
        assert not left.exists()
        assert old.exists()  # all that is left of what was there
        (stage / "file").touch()
        os.utime(stage, (0, 0))
        with suppress(KeyError), staged(tmp_path / "out") as second:
            assert stage.exists()  # it is being written
            os.utime(second, (0, 0))
            raise KeyError
    assert {entry.name for entry in tmp_path.iterdir()} == {"out", old.name, other.name, written.name}
    with staged(tmp_path / "out", replace=True) as stage:
        (stage / "file").touch()
    assert not old.exists()


def test_a_staged_folder_takes_an_empty_place_and_no_other(tmp_path):
    (tmp_path / "empty").mkdir()
    with staged(tmp_path / "empty") as stage:
        (stage / "file").touch()
    assert (tmp_path / "empty" / "file").exists()
    with pytest.raises(InputError, match="not empty"), staged(tmp_path / "empty"):
        pass
    with pytest.raises(InputError, match="cannot be written"), staged(tmp_path / "empty" / "file" / "below"):
        pass
