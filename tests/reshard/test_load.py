"""Loading a checkpoint directory: dtypes, padding, harmless extras, and every defect named in one error."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.reshard import Coord, Layout, local_params, model_spec, read_config
from mrl.reshard.load import load_hf

from .simulate import empty_params, load_all


@pytest.fixture
def edit(model_dir, tmp_path):
    """edit(variant, change): a copy of a model directory whose tensors went through `change` in place."""
    def make(variant, change) -> Path:
        shutil.copytree(model_dir(variant), tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return tmp_path / "model"

    return make


def load(directory: Path, layout: Layout = Layout(), coord: Coord = Coord(), dtype=torch.float32, mtp: str = "drop"):
    spec = model_spec(read_config(directory), mtp)
    plans = local_params(spec, layout, coord, te=False)
    params = empty_params(plans, dtype)
    load_hf(directory, params, plans, spec)
    return params


def test_values_take_the_dtype_of_the_parameter(model_dir):
    exact = load_file(model_dir("llama") / "model.safetensors")["model.norm.weight"]
    loaded = load(model_dir("llama"), dtype=torch.bfloat16)["decoder.final_layernorm.weight"]
    assert torch.equal(loaded, exact.bfloat16())


def test_vocabulary_padding_is_zero(model_dir):
    loaded = [load(model_dir("llama"), Layout(tp=2), Coord(tp=tp))["output_layer.weight"] for tp in range(2)]
    exact = load_file(model_dir("llama") / "model.safetensors")["lm_head.weight"]
    assert torch.equal(torch.cat(loaded), torch.cat([exact, torch.zeros(256 - 131, 24)]))


def test_tied_stages_hold_equal_copies(model_dir):
    directory = model_dir("qwen3-tied")
    layout = Layout(tp=2, pp=2)
    shards = load_all(directory, model_spec(read_config(directory)), layout, te=False, dtype=torch.float32)
    for tp in range(2):
        original = shards[Coord(tp=tp, pp=0)]["embedding.word_embeddings.weight"]
        assert torch.equal(shards[Coord(tp=tp, pp=1)]["output_layer.weight"], original)


def test_every_defect_in_one_error(edit):
    def break_it(tensors):
        del tensors["lm_head.weight"], tensors["model.layers.3.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(40, 24)
        tensors["model.norm.weight"] = torch.zeros(24, dtype=torch.int32)

    with pytest.raises(ValueError) as error:
        load(edit("llama", break_it))
    lines = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert sorted(lines) == [
        "missing: lm_head.weight",
        "missing: model.layers.3.mlp.up_proj.weight",
        "unknown: model.layers.9.mlp.up_proj.weight",
        "wrong dtype: model.norm.weight is I32, only F64, F32, F16, BF16 can be loaded",
        "wrong shape: model.layers.0.mlp.down_proj.weight is (40, 24), config.json says (24, 40)",
    ]


def test_a_defect_is_seen_by_ranks_that_do_not_hold_it(edit):
    directory = edit("llama", lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match="missing: model.layers.3.mlp.up_proj.weight"):
        load(directory, Layout(pp=2), Coord(pp=0))


def test_nothing_is_written_before_the_check(edit):
    directory = edit("llama", lambda tensors: tensors.pop("lm_head.weight"))
    spec = model_spec(read_config(directory))
    plans = local_params(spec, Layout(), Coord(), te=False)
    params = {plan.name: torch.full(plan.shape, 7.0) for plan in plans}
    with pytest.raises(ValueError, match="lm_head"):
        load_hf(directory, params, plans, spec)
    assert all((param == 7.0).all() for param in params.values())


def test_harmless_extras(edit):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert "output_layer.weight" not in load(edit("qwen3-tied", add))


@pytest.mark.parametrize("coord, layout", [(Coord(), Layout()), (Coord(tp=1, pp=1), Layout(tp=2, pp=2))], ids=str)
def test_a_tied_model_with_another_output_is_refused(edit, coord, layout):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][130, 3] += 1

    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load(edit("qwen3-tied", add), layout, coord)


def test_a_model_that_is_not_the_planned_one(model_dir):
    spec = model_spec(read_config(model_dir("llama")))
    plans = local_params(spec, Layout(), Coord(), te=False)
    params = {plan.name: torch.zeros(plan.shape) for plan in plans}
    params["decoder.extra"] = params.pop("decoder.final_layernorm.weight")
    params["output_layer.weight"] = torch.zeros(131, 24)
    with pytest.raises(ValueError) as error:
        load_hf(model_dir("llama"), params, plans, spec)
    assert "decoder.extra: planned not at all, the model has (24,)" in str(error.value)
    assert "decoder.final_layernorm.weight: planned (24,), the model has none" in str(error.value)
    assert "output_layer.weight: planned (256, 24), the model has (131, 24)" in str(error.value)


def test_a_directory_without_weights(model_dir, tmp_path):
    shutil.copy(model_dir("llama") / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="has no weights: neither model.safetensors nor"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="convert them to safetensors"):
        load(tmp_path)


def test_an_index_with_a_lost_file(model_dir, tmp_path):
    shutil.copytree(model_dir("llama", shard_size="20KB"), tmp_path / "model")
    weight_map = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    lost = sorted(set(weight_map.values()))[1]
    (tmp_path / "model" / lost).unlink()
    with pytest.raises(FileNotFoundError, match=f"names files that are not there: {lost}"):
        load(tmp_path / "model")


def test_a_routers_bias_stays_in_float32(model_dir):
    loaded = load(model_dir("deepseek-v3", torch.bfloat16), dtype=torch.bfloat16)
    assert loaded["decoder.layers.1.mlp.router.weight"].dtype == torch.bfloat16
    exact = load_file(model_dir("deepseek-v3", torch.bfloat16) / "model.safetensors")
    bias = loaded["decoder.layers.1.mlp.router.expert_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, exact["model.layers.1.mlp.gate.e_score_correction_bias"])


def test_prediction_layers_are_dropped_or_kept(model_dir, edit):
    directory = model_dir("deepseek-v3-mtp")
    assert not any(name.startswith("mtp.") for name in load(directory))
    kept = load(directory, mtp="keep")
    assert "mtp.layers.0.transformer_layer.mlp.router.expert_bias" in kept
    with pytest.raises(ValueError, match="missing: model.layers.2.enorm.weight"):
        load(model_dir("deepseek-v3"), mtp="keep")

    def change(tensors):
        tensors["model.layers.4.shared_head.head.weight"][130, 3] += 1

    with pytest.raises(ValueError, match="model.layers.4.shared_head.head.weight differs from lm_head.weight"):
        load(edit("deepseek-v3-mtp", change), mtp="keep")
