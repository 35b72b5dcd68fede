"""A model whose tensors engines stack, derive others from, and hold in two dtypes: right after every sync, whole or as
shards."""
from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config

from mrl.engine.api import GenerateRequest
from mrl.engine.engines import SERVERS
from tests.receiver.senders import Senders
from tests.receiver.toy import Draft
from tests.stream.engines import TestableEngine, engine_python
from tests.stream.tiny import COMMON, PROMPT, make_experiment, make_model

pytestmark = pytest.mark.slow

# MLA with a compressed query, stacked experts in groups, one that is shared, a router with a bias, a dense layer first.
# vLLM's CPU kernel for MLA knows one size, 512 latent and 64 rotated dimensions; SGLang's CPU code for this family only
# these positions, and it wants moe_layer_freq.
CONFIG = DeepseekV3Config(
    **COMMON, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
    num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
    first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32,
    topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1,
    rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64,
                     "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0})


JOINED = {"vllm": (), "sglang": ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")}
"""By engine, ends of the names of tensors that its loader joins before it copies them: they go through the loader."""


def noise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Others of the same shapes; norms around 1. Sampling from it is far from uniform and from certain."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(tensor.shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
            for name, tensor in tensors.items()}


def plan_of(tensors: dict[str, torch.Tensor], shards: set[str]) -> dict:
    """One worker; `shards` whole and direct, others cut in two."""
    draft = Draft(shapes={name: list(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        rest = [(0, size) for size in tensor.shape[1:]]
        if name in shards:
            draft.add("direct", [name], worker=0)
        else:
            half = (tensor.shape[0] + 1) // 2
            draft.add("broadcast", [(name, [(0, half), *rest])])
            draft.add("broadcast", [(name, [(half, tensor.shape[0]), *rest])])
    return draft.wire()


@pytest.fixture
def loop():
    """An event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


class Engine:
    """An engine that is called from another thread."""

    def __init__(self, loop, engine: str, path: Path, run_dir: Path):
        self.loop = loop
        experiment = make_experiment(path, engine_python(engine), rollout={"engine": engine})
        self.server = TestableEngine(experiment, 0, "run", run_dir, load_weights=True)

    def begin(self, method: str, *arguments):
        return asyncio.run_coroutine_threadsafe(getattr(self.server, method)(*arguments), self.loop)

    def call(self, method: str, *arguments):
        return self.begin(method, *arguments).result(700)

    def sample(self):
        return self.call("generate", GenerateRequest(PROMPT, seed=3, max_tokens=12, temperature=1.0))

    def fingerprint(self) -> dict[str, int]:
        """Checksums of everything in the model that may hold weights."""
        (answer,) = self.call("workers", "mrl_fingerprint")
        assert answer["error"] is None
        return answer["sums"]

    def sync(self, senders: Senders, step: int, tensors: dict[str, torch.Tensor]) -> tuple[str, ...]:
        """One verified sync; the tensors that could not be verified."""
        request = senders.request(step, verify=True, link=str(id(senders)), deadline_s=300.0)
        if request.connect:
            assert self.call("prepare", request).not_sharded == {}
        done = self.begin("receive", replace(request, plan={}))
        senders.send(request, tensors)
        result = done.result(300)
        assert result.verified
        return result.unverified


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_whole_and_sharded_syncs_leave_what_loading_from_disk_does(name, tmp_path, loop):
    path = make_model(tmp_path / "model", CONFIG)
    on_disk = load_file(path / "model.safetensors")
    others, engine = noise(on_disk), Engine(loop, name, path, tmp_path)
    engine.call("start")
    try:
        own, answer = engine.fingerprint(), engine.sample()
        joined = {tensor for tensor in on_disk if tensor.endswith(JOINED[name])}
        projections = {tensor for tensor, value in on_disk.items() if value.dim() == 2 and "proj" in tensor} - joined
        for step, shards in ((1, set()), (3, projections)):
            senders = Senders(plan_of(on_disk, shards))
            assert set(engine.sync(senders, step, others)) == joined
            assert engine.sample().log_probs != pytest.approx(answer.log_probs, abs=0.1)
            changed = engine.fingerprint()
            assert changed.keys() == own.keys() and changed != own
            engine.sync(senders, step + 1, on_disk)
            assert engine.fingerprint() == own
            again = engine.sample()
            assert (again.token_ids, again.log_probs) == (answer.token_ids, answer.log_probs)
    finally:
        engine.call("stop")
