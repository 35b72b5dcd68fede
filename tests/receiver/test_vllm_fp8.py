"""vLLM with fp8 weights, on CPUs with AMX: a sync leaves what loading a published checkpoint does."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config

from mrl.reshard import EngineLayout, Layout, SyncOptions, model_spec, plan_sync, read_config
from mrl.reshard.fp8 import quantization_config
from tests.receiver.senders import Senders
from tests.receiver.test_engine_models import Engine, loop  # noqa: F401, a fixture
from tests.stream.engines import TestableEngine, engine_python
from tests.stream.tiny import COMMON, make_experiment, make_model, quantised, weights

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's kernels for fp8 on CPUs need AMX")]

# As in test_engine_models, with sizes of whole blocks; the latents of keys and values end within one.
CONFIG = DeepseekV3Config(
    **COMMON, hidden_size=256, intermediate_size=384, moe_intermediate_size=128, num_hidden_layers=2,
    num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
    first_k_dense_replace=1, q_lora_rank=128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64,
    topk_method="noaux_tc", scoring_func="sigmoid", architectures=["DeepseekV3ForCausalLM"])


class Fp8Engine(Engine):
    """Of weights in fp8: those on disk, or whatever a sync brings."""

    def __init__(self, loop, path: Path, run_dir: Path, load_weights: bool):  # noqa: F811
        self.loop = loop
        experiment = make_experiment(path, engine_python("vllm"), rollout={"quantization": "fp8"})
        experiment = experiment.model_copy(update={"model": experiment.model.model_copy(update={"dtype": "bfloat16"})})
        self.server = TestableEngine(experiment, 0, "run", run_dir, load_weights=load_weights)

    def __enter__(self):
        self.call("start")
        return self

    def __exit__(self, *_):
        self.call("stop")


def versions_of(path: Path) -> list[dict[str, torch.Tensor]]:
    """Two, in fp8 as they are published."""
    return [quantised(path, {name: tensor if name.endswith("bias") else tensor.to(torch.bfloat16)
                             for name, tensor in weights(path, step).items()}) for step in (1, 2)]


def published(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint in blockwise fp8."""
    make_model(path, CONFIG)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization_config(model_spec(read_config(path)))
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def plan_of(path: Path, strategy: str) -> dict:
    options = SyncOptions(200_000, "bfloat16", False, strategy, fp8=True)
    return plan_sync(model_spec(read_config(path)), Layout(), EngineLayout(), options).to_wire(0)


def test_syncs_in_fp8_leave_what_loading_a_published_checkpoint_does(tmp_path, loop):  # noqa: F811
    path = make_model(tmp_path / "model", CONFIG)
    others, tensors = versions_of(path)
    with Fp8Engine(loop, published(tmp_path / "published", tensors), tmp_path, load_weights=True) as engine:
        own, answer = engine.fingerprint(), engine.sample()
    with Fp8Engine(loop, path, tmp_path, load_weights=False) as engine:
        for step, strategy in ((1, "broadcast"), (3, "sharded")):
            senders = Senders(plan_of(path, strategy))
            engine.sync(senders, step, others)
            assert engine.sample().log_probs != pytest.approx(answer.log_probs, abs=0.1)
            engine.sync(senders, step + 1, tensors)
            assert engine.fingerprint() == own
            again = engine.sample()
            assert (again.token_ids, again.log_probs) == (answer.token_ids, answer.log_probs)
