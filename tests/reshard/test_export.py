"""Load then export is the identity, for every family, layout, layer spec, dtype and file layout."""
from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mrl.reshard import Layout, hf_tensors, model_spec, read_config
from mrl.reshard.export import export_tensors, save_hf

from .simulate import CASES, VARIANTS, assert_same, load_all, spec_of


def read_all(directory) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


@pytest.mark.parametrize("variant, layout, dtype", [
    *((variant, layout, torch.float32) for variant, layout in CASES),
    *((variant, Layout(tp=2, pp=2), torch.bfloat16) for variant in VARIANTS),
], ids=str)
def test_load_then_export_is_the_identity(variant, layout, dtype, model_dir):
    for te, shard_size in ((False, "1GB"), (True, "20KB")):
        directory = model_dir(variant, dtype, shard_size)
        assert (directory / "model.safetensors.index.json").exists() == (shard_size == "20KB")
        spec = spec_of(variant, read_config(directory))
        shards = load_all(directory, spec, layout, te, dtype)
        exported = list(export_tensors(spec, layout, lambda coord, name: shards[coord][name], te))
        names, expected = [name for name, _ in exported], list(hf_tensors(spec))
        assert sorted(names) == sorted(expected) if spec.moe or layout.vpp > 1 else names == expected
        assert_same(dict(exported), read_all(directory))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_directory_works_in_transformers(variant, model_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    source = model_dir(variant)
    spec = spec_of(variant, read_config(source))
    layout = Layout(tp=2, pp=2, dp=2, ep=2, etp=2) if spec.moe else Layout(tp=2, pp=2)
    shards = load_all(source, spec, layout, te=False, dtype=torch.float32)
    tensors = export_tensors(spec, layout, lambda coord, name: shards[coord][name])
    out = save_hf(tensors, source, tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(hf_tensors(spec))
    assert read_config(out) == read_config(source)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_all(out).values())
    for file in set(index["weight_map"].values()):
        tensors = load_file(out / file).values()
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= 20_000

    tokens = torch.tensor([[1, 2, 130, 4, 5]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(tokens).logits
        actual = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(tokens).logits
    assert torch.equal(actual, expected)


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 4, "dtype": "float32"}')
    return directory


def two() -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.zeros(2, 5, dtype=torch.bfloat16).t())]


def test_side_files_come_along_and_old_weights_do_not(source, tmp_path):
    kept = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
            "tokenizer.model", "chat_template.jinja", "special_tokens_map.json"]
    for name in [*kept, "model.safetensors", "pytorch_model.bin", "optimizer.pt"]:
        (source / name).write_text(name)
    out = save_hf(two(), source, tmp_path / "new" / "out")
    assert sorted(file.name for file in out.iterdir()) == sorted([*kept, "config.json", "model.safetensors"])
    assert all((out / name).read_text() == name for name in kept)
    assert json.loads((out / "config.json").read_text()) == {"hidden_size": 4, "dtype": "bfloat16"}
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("b"), torch.zeros(5, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("max_shard_bytes", [1, 10**9])
def test_a_tensor_exported_twice(source, tmp_path, max_shard_bytes):
    with pytest.raises(ValueError, match="exported twice: a"):
        save_hf([*two(), two()[0]], source, tmp_path / "out", max_shard_bytes)


def test_a_failed_export_leaves_nothing_behind(source, tmp_path):
    def dies():
        yield from two()
        raise RuntimeError("rank lost")

    with pytest.raises(RuntimeError, match="rank lost"):
        save_hf(dies(), source, tmp_path / "out", max_shard_bytes=1)
    with pytest.raises(ValueError, match="no tensors"):
        save_hf([], source, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_an_existing_directory_is_kept(source, tmp_path):
    (tmp_path / "out").mkdir()
    save_hf(two(), source, tmp_path / "out")  # empty: used
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        save_hf(two(), source, tmp_path / "out")


def test_a_source_without_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json not found"):
        save_hf(two(), tmp_path, tmp_path / "out")


def test_a_shard_of_another_shape_is_refused(model_dir):
    spec = model_spec(read_config(model_dir("llama")))
    message = r"word_embeddings.weight on tp 0, pp 0, dp 0 is \(131, 24\), expected \(128, 24\)"
    with pytest.raises(ValueError, match=message):
        list(export_tensors(spec, Layout(tp=2), lambda coord, name: torch.zeros(131, 24)))
