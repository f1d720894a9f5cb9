import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from meshwright.checkpoint.model_folder import INDEX, SINGLE, Reader, write
from meshwright.spec.problem import InputError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(2.0)}


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def sharded(folder):
    write(folder, TENSORS.items(), limit_bytes=24)
    return folder


def test_a_small_model_is_one_file(tmp_path):
    write(tmp_path, TENSORS.items())
    assert files(tmp_path) == [SINGLE]
    reader = Reader(tmp_path)
    assert reader.names == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert reader.shape(name) == tensor.shape
        assert reader.dtype(name) == tensor.dtype
        assert torch.equal(reader.load(name), tensor)


def test_a_large_model_is_shards_and_an_index(tmp_path):
    sharded(tmp_path)
    assert files(tmp_path) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 24 + 8 + 4
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_any_shard_size_holds_the_same_tensors(tmp_path_factory, lengths, limit):
    folder = tmp_path_factory.mktemp("weights")
    tensors = {str(i): torch.full((length,), float(i)) for i, length in enumerate(lengths)}
    write(folder, tensors.items(), limit_bytes=limit)
    reader = Reader(folder)
    assert reader.names == set(tensors)
    assert all(torch.equal(reader.load(name), tensor) for name, tensor in tensors.items())


def test_views_of_one_tensor_are_written_as_themselves(tmp_path):
    stack = torch.arange(24.0).reshape(2, 3, 4)
    write(tmp_path, [("0", stack[0]), ("1", stack[1]), ("turned", stack[0].T)])
    reader = Reader(tmp_path)
    assert torch.equal(reader.load("1"), stack[1])
    assert torch.equal(reader.load("turned"), stack[0].T)


@pytest.mark.parametrize("limit", [10**9, 24])
def test_an_error_leaves_nothing(tmp_path, limit):
    def broken():
        yield from TENSORS.items()
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="gone"):
        write(tmp_path, broken(), limit_bytes=limit)
    assert files(tmp_path) == []


def test_weights_are_never_written_over(tmp_path):
    write(tmp_path, TENSORS.items())
    with pytest.raises(InputError, match="already holds weights"):
        write(tmp_path, TENSORS.items())


def test_a_missing_shard_and_a_cut_shard_are_told_together(tmp_path):
    write(tmp_path, TENSORS.items(), limit_bytes=1)
    first, second, _ = sorted(tmp_path.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(InputError) as caught:
        Reader(tmp_path)
    missing, cut = caught.value.problems
    assert first.name in missing.text
    assert "missing" in missing.text
    assert second.name in cut.text


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path):
    sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model-00001-of-00002\.safetensors lacks the tensor ghost"):
        Reader(tmp_path)


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..",
        "",
        "model.bin",
        "C:x.safetensors",
        ".s\0",
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, file):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(InputError, match="do not trust"):
        Reader(folder)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"weight_map": {"a": 1}}', b"\xff", b"[" * 10**5], ids=range(6)
)
def test_a_broken_index_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(InputError, match=INDEX):
        Reader(tmp_path)


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}x"], ids=range(4))
def test_a_file_that_is_no_safetensors_is_refused(tmp_path, content):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(InputError, match=SINGLE):
        Reader(tmp_path)


def test_a_pickle_is_never_loaded_and_the_way_around_is_given(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(InputError) as caught:
        Reader(tmp_path)
    (problem,) = caught.value.problems
    assert "pytorch_model.bin, a pickle" in problem.text
    assert "save_pretrained" in problem.remedy


def test_an_empty_folder_is_said_to_be_empty(tmp_path):
    with pytest.raises(InputError, match="holds neither"):
        Reader(tmp_path)


def test_links_to_files_elsewhere_are_followed(tmp_path):
    write(tmp_path / "blobs", TENSORS.items())
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / SINGLE).symlink_to(tmp_path / "blobs" / SINGLE)  # as the hub's cache does
    assert Reader(tmp_path / "snapshot").names == set(TENSORS)


def test_whoever_may_read_the_folder_may_read_the_weights(tmp_path):
    tmp_path.chmod(0o750)
    write(tmp_path, TENSORS.items())
    assert (tmp_path / SINGLE).stat().st_mode & 0o777 == 0o640
